"""Runs an unmodified SGLang on a machine without a GPU. Not part of the product or its wheel."""
