"""CacheGen's codec as its paper describes it and as its code does it: baselines to compare with."""
