"""Draft models of speculative decoding for the bundled model, made of it."""
