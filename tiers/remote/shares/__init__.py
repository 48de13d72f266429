"""Shares of a remote store that tenants have by right."""
