"""What moves pages between DRAM and disk: writing behind, and fetching ahead for the queue.

The spiller and the promoter have threads, which block on the disk and never under the store's lock.
"""
