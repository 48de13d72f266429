"""A device whose streams, events and kernels are simulated, to find accesses out of order."""
