"""Engines of the remote tier: a shared folder, Redis and Valkey, Mooncake.

The registry of `tiers/remote` imports them by URL scheme, when a scheme is asked for.
"""
