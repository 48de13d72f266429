"""Names of ``torchvision.transforms`` that are imported at start-up."""

from torchvision.transforms import functional
from torchvision.transforms._interpolation import InterpolationMode

__all__ = ["InterpolationMode", "functional"]
