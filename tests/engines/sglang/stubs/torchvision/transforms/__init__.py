"""A stand-in: any name can be imported as an empty class."""

from . import functional

__all__ = ["InterpolationMode", "functional"]


class InterpolationMode:
    """The modes that are named while modules are imported."""

    NEAREST = NEAREST_EXACT = BILINEAR = BICUBIC = BOX = HAMMING = LANCZOS = "stand-in"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
