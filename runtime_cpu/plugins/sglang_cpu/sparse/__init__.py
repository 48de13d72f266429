"""Sparse attention over an index (DeepSeek V3.2, GLM-5) in plain torch, behind SGLang's classes."""
