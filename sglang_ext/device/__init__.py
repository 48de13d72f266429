"""The device side of a page: KV pools, layouts, rotations, and the threads and streams of copies.

The seam, `codec`, `remote` and `assembly` import it.
"""
