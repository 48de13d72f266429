"""The case `tiers`: copies, disk and index against the machine's own limits; remote stores."""
