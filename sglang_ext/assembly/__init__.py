"""Assembly: checks the machine and builds the cache with its tiers from the settings.

It may import every room; only the two entry points import it.
"""
