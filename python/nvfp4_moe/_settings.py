"""The user's settings for the engines' adapters, from an engine's configuration or from environment variables."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from . import InvalidArgument

MODES = ("0", "auto", "1")
ACTIVATION_FORMATS = ("bf16", "nvfp4", "fp8", "int8_block")
ROUTERS = ("auto", "own", "engine")
EXCHANGES = ("auto", "engine", "host", "nccl", "peers")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The user's settings for an engine's adapter.

    Attributes:
        mode: "0" turns the adapter off. With "auto" the engine runs the layers that the library cannot take. With "1"
            such a layer is an error.
        activation_format: "auto" is what the checkpoint declares for a layer, or a more precise format. Otherwise the
            format of every layer.
        router: "own" selects experts with this library if it knows the router, "engine" never, "auto" only on GPUs and
            not in SGLang.
        exchange: How the results of expert parallel ranks are added. SGLang's adapter ignores it.
    """

    mode: str = "auto"
    activation_format: str = "auto"
    router: str = "auto"
    exchange: str = "auto"

    @property
    def insists(self) -> bool:
        return self.mode == "1"


def read_settings(given: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Reads the settings from `given`, else from environment variables.

    The keys of `given` (from the engine's configuration) are mode, activations, router and exchange. The variables are
    NVFP4_MOE_MODE, NVFP4_MOE_ACTIVATIONS, NVFP4_MOE_ROUTER and NVFP4_MOE_EXCHANGE.

    Raises:
        ValueError: Names the key or variable, the legal values and what it got; also for an unknown key.
    """
    given, environ = dict(given or {}), os.environ if environ is None else environ
    if "NVFP4_MOE" in environ:  # the name before 0.2; ignoring it would leave on what the user turned off
        raise InvalidArgument(f"NVFP4_MOE: expected NVFP4_MOE_MODE, its new name, got NVFP4_MOE={environ['NVFP4_MOE']}")

    def one_of(key: str, variable: str, legal: tuple[str, ...], default: str) -> str:
        where, value = (key, given.pop(key)) if key in given else (variable, environ.get(variable, default))
        if isinstance(value, bool) or not isinstance(value, (str, int)) or str(value) not in legal:
            raise InvalidArgument(f"{where}: expected one of {', '.join(legal)}, got {value!r}")
        return str(value)

    settings = Settings(
        one_of("mode", "NVFP4_MOE_MODE", MODES, "auto"),
        one_of("activations", "NVFP4_MOE_ACTIVATIONS", ("auto", *ACTIVATION_FORMATS), "auto"),
        one_of("router", "NVFP4_MOE_ROUTER", ROUTERS, "auto"),
        one_of("exchange", "NVFP4_MOE_EXCHANGE", EXCHANGES, "auto"),
    )
    if given:
        raise InvalidArgument(
            f"nvfp4_moe: expected the keys mode, activations, router and exchange, got {', '.join(map(str, given))}"
        )
    return settings
