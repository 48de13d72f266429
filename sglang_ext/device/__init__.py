"""The device side of a page: KV pools, layouts, rotations, and the threads and streams of copies.

Threads: the scheduler's only queues. `save_thread.py` and the thread of a port may wait for the
device; `load_thread.py` queues only, but for a CPU, where it copies itself.

The seam, `truncation`, `ranks`, `admission`, `coded_remote`, `codec` and `assembly` import it.
"""
