"""Small hybrid models with random weights, in the format of transformers."""
