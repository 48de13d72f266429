"""Releases of SGLang besides the installed one, for servers of a test."""
