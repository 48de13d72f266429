"""Identity: whose KV a page is, by model, weights, adapter and tenant.

The seam, `truncation` and `assembly` import it.
"""
