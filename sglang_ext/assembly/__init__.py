"""Assembly: checks the machine and builds the cache with its tiers from the settings.

It may import every room; only the plugin's entry points and the scheduler's hooks import it.
"""
