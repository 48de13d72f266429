"""The store's books: where every page lies, who needs it, and which leaves next. No I/O.

Any thread, under the one lock of `PageTable`; nobody blocks while holding it.
"""
