"""The case `gpu`: what copies between DRAM and a CUDA device cost, against bare copies."""
