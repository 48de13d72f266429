"""Which page leaves next, of DRAM and of the disk. Not locked: the table's lock is held."""
