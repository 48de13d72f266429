"""`hier-kv warm`: has a running server compute and store documents before anybody asks for them."""
