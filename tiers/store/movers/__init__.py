"""What moves pages between DRAM and disk: writing behind, and reading for the plans of requests.

The spiller and the promoter have threads, which block on the disk and never under the store's lock.
"""
