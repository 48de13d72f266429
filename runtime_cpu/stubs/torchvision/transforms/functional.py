"""Names of ``torchvision.transforms.functional`` that are imported at start-up."""

from torchvision._refuse import refuse as pil_to_tensor
from torchvision._refuse import refuse as to_pil_image
from torchvision.transforms._interpolation import InterpolationMode

__all__ = ["InterpolationMode", "pil_to_tensor", "to_pil_image"]
