"""Imported at start-up as a module; its functions are for images and absent."""

from torchvision.transforms._interpolation import InterpolationMode

__all__ = ["InterpolationMode"]
