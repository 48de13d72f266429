"""Records: one page of KV with a header, what proves it whole, and what a page must be.

Every tier imports it; it imports no tier.
"""
