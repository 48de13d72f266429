"""Benchmarks and the demo: ``python -m bench CASE``. Not part of the wheel."""
