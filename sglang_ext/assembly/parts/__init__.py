"""What `factory.py` puts together: a file for each part of the cache that takes some deciding."""
