"""A stub: any name can be imported as an empty class, from torchvision and from its modules."""

import sys
import types

__version__ = "0.28.0"


class _StandIn(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for _name in (
    "io",
    "ops",
    "ops.boxes",
    "transforms",
    "transforms.functional",
    "transforms.v2",
    "transforms.v2.functional",
):
    _module = sys.modules[f"{__name__}.{_name}"] = _StandIn(f"{__name__}.{_name}")
    _parent, _, _child = _module.__name__.rpartition(".")
    setattr(sys.modules[_parent], _child, _module)

# The modes that other modules name at import.
_modes = ("NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")
sys.modules[f"{__name__}.transforms"].InterpolationMode = type(
    "InterpolationMode", (), dict.fromkeys(_modes, "stand-in")
)
