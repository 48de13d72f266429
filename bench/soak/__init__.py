"""Long mixed traffic on one server after another, and whether anything grows that should not.

`python -m bench.soak`. `world.py` has the folders, the two models and the server's flags;
`traffic.py` what clients do in a round; `probes.py` compares answers with plain SGLang's;
`gauges.py` reads memory, files, threads and disk; `life.py` is one server from start to end;
`trend.py` tells growth from noise; `report.py` is the verdict and the table.
"""
