"""What moves pages between DRAM and a store that servers share: asking, fetching, sending.

Asking, fetching and sending have threads of their own, which block on the store, and never under
the page store's lock.
"""
