"""The store's books: where every page lies, who needs it, and which leaves next. No I/O.

`books.py` puts the parts together. Any thread, under the one lock of `PageTable`; nobody blocks
while holding it.
"""
