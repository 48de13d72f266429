"""Imported at start-up as the home of ``functional``."""

from torchvision.transforms.v2 import functional

__all__ = ["functional"]
