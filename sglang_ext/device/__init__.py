"""The device side of a page: KV pools, layouts, rotations, and the threads and streams of copies.

Threads: the scheduler's only queues; `save_thread.py`, `load_thread.py` and those of a port may
block on the device.

The seam, `truncation`, `ranks`, `admission`, `remote`, `codec` and `assembly` import it.
"""
