"""Benchmarks and the demo: ``python -m bench CASE``. Not part of the wheel."""

import os

# Figures are per core. It counts only before numpy is first imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
