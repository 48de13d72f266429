"""Requests with images: whose pages may be named, and the hashes of those pages."""
