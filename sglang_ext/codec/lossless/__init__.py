"""The codec `lossless`: its container, what its encoder chooses, its tables and its loops."""
