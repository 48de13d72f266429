"""The seam: where the plugin meets SGLang's classes; `cache.py` is the place to start reading.

It may import every room below it. SGLang's names belong here and nowhere else.
"""
