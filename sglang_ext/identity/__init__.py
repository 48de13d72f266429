"""Identity: whose KV a page is, by model, weights, adapter and tenant.

Scheduler's thread only. It blocks for as long as a digest of the weights takes, between requests.

The seam, `hints`, `truncation` and `assembly` import it.
"""
