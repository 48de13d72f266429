"""Facts about the device that kernels are chosen by."""


def is_arch_support_pdl() -> bool:
    """Whether a launch may begin before the one in front of it has ended."""
    return False
