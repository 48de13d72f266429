"""What tests and benchmarks stand on: real servers and stores, texts, models, bad networks.

It imports no benchmark. Not part of the wheel.
"""
