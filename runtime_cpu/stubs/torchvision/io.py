"""Names of ``torchvision.io`` that are imported at start-up."""

from enum import Enum

from torchvision._refuse import refuse as decode_image

__all__ = ["ImageReadMode", "decode_image"]


class ImageReadMode(Enum):
    """Only named in default arguments."""

    UNCHANGED = 0
    GRAY = 1
    GRAY_ALPHA = 2
    RGB = 3
    RGB_ALPHA = 4
