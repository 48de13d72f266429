"""Stand-in for the package checkpoint-engine, which refuses to run without CUDA or an NPU."""
