"""The enumeration that image processors name in their defaults."""

from enum import Enum


class InterpolationMode(Enum):
    """Same names and values as torchvision's."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
