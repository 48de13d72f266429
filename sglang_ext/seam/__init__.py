"""The seam: where the plugin meets SGLang's classes; `cache.py` is the place to start reading.

Scheduler's thread, but for `hooks/front.py` and what it calls, which run in the front process. What
may take long is queued for a thread of the package that does it.

It may import every package below it (`tests/unit/test_arrows.py`). Only this one imports SGLang or
hooks it. Others read SGLang's objects that they are given (`device/pools.py` tells KV pools by the
names of their classes, `assembly/` reads what a cache is built with); `contract/symbols.py` lists
those names, too.
"""
