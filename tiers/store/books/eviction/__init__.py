"""Which page leaves next, and what is looked up for that. Not locked: the table's lock is held.

`dram_order.py` and `disk_order.py` are the orders, and `copy_order.py` is that of records that lie
in DRAM as well. Beside them: which pages lie in DRAM and on disk
(`duplicate_copies.py`), in which segment (`segment_rows.py`), and behind which page
(`page_parents.py`, for a flush).
"""
