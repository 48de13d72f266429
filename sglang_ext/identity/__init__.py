"""Identity: whose KV a page is, by model, weights, adapter and tenant.

Every room above `settings` may import it.
"""
