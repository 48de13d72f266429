"""The case `truncation`: what reuse over a cut costs in quality, and what it saves."""
