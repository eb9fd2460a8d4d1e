"""A stand-in: any name can be imported as an empty class."""

from . import io, ops, transforms

__version__ = "0.28.0"
__all__ = ["io", "ops", "transforms"]
