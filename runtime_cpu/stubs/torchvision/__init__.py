"""Stand-in for torchvision: its wheel needs CUDA operators that the CPU build of torch lacks.

SGLang and transformers import a few names of it at start-up, and use them for images only. A call
is refused.
"""

__version__ = "0.0.0+stub"
