"""The seam: where the plugin meets SGLang's classes; `cache.py` is the place to start reading.

Scheduler's thread, but for `hooks/front.py` and what it calls, which run in the front process. What
may take long is queued for a thread of the room that does it.

It may import every room below it. SGLang's names belong here and nowhere else.
"""
