"""The store's books: where every page lies, who needs it, and which leaves next. No I/O."""
