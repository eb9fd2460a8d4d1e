"""Hooks on the methods of one of SGLang's quantization methods, shared by ModelOpt's and MXFP4's experts.

The class is not replaced, because other modules test isinstance against it. Each of its objects belongs to SGLang or,
once create_weights has seen a layer that the library takes, to the adapter. Subclasses are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .._declared import Declared, Refused
from .._settings import Settings
from . import internals
from .experts import Experts, Format
from .refusals import check_server, is_first_rank, layer_name, layer_options, refuse
from .runner import BACKEND, NvFp4MoeQuantInfo, make_runner

_STATE = "nvfp4_moe_state"
Method = Callable[..., Any]


class _Undecided:
    """State of an object whose layer is not known yet.

    own_init completes SGLang's __init__ if the layer is not taken.
    """

    def __init__(self, own_init: Callable[[], Any]):
        self.own_init = own_init


def output_scale(layer: Any) -> float | None:
    """Returns routed_scaling_factor if the router has not multiplied its weights by it, else None."""
    factor = layer.moe_runner_config.routed_scaling_factor
    return None if factor is None or layer.should_fuse_routed_scaling_factor_in_topk else float(factor)


class Hooks:
    """One process's hooks on one class. settings come from the environment."""

    target: str  # the class's path for HookRegistry
    what: str  # names the experts in a message
    form: Format
    names: tuple[str, ...] = ("create_weights", "process_weights_after_loading", "create_moe_runner", "apply")

    def __init__(self, settings: Settings):
        self._settings = settings

    def register(self) -> None:
        for name in ("__init__", *self.names):
            hook = getattr(self, name.strip("_"))
            internals.HookRegistry.register(f"{self.target}.{name}", hook, internals.HookType.AROUND)

    def is_plain(self, method: Any, *inputs: Any, **named: Any) -> bool:
        """Returns whether an object with these arguments of __init__ may belong to the adapter."""
        raise NotImplementedError

    def hold_back(self, own: Callable[[], Any], method: Any, *inputs: Any, **named: Any) -> Callable[[], Any]:
        """Does the part of SGLang's __init__ that is possible now. Returns the rest, for a layer that is not taken."""
        raise NotImplementedError

    def check(self, method: Any, layer: Any) -> None:
        """Raises Refused for reasons that only this format has."""

    def declared(self, method: Any, layer: Any) -> Declared | Refused:
        """Returns the activations that the checkpoint declares for the layer, or Refused for mixed formats."""
        raise NotImplementedError

    def sizes(self, layer: Any, inner: int, extra: Mapping[str, Any]) -> tuple[int, int]:
        """Returns this rank's intermediate size and that of its parameters, given SGLang's `inner`."""
        return inner, inner

    @staticmethod
    def has_taken(method: Any) -> bool:
        """Returns whether an object belongs to the adapter."""
        return isinstance(getattr(method, _STATE, None), Experts)

    def init(self, own: Method, method: Any, *inputs: Any, **named: Any) -> None:
        if not self.is_plain(method, *inputs, **named):
            own(method, *inputs, **named)
            return
        try:
            check_server()
        except Refused as refused:
            refuse(self.what, refused, self._settings)
            own(method, *inputs, **named)
            return
        left = self.hold_back(lambda: own(method, *inputs, **named), method, *inputs, **named)
        setattr(method, _STATE, _Undecided(left))

    def create_weights(self, own: Method, method: Any, layer: Any, *sizes: Any, **named: Any) -> None:
        undecided = getattr(method, _STATE, None)
        if undecided is None:
            own(method, layer, *sizes, **named)
            return
        names = ("num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype", "with_bias")
        values = dict(zip(names, sizes, strict=False)) | named
        extra = {key: value for key, value in values.items() if key not in names[:4]}
        try:
            self.check(method, layer)
            inner, padded = self.sizes(layer, int(values["intermediate_size_per_partition"]), extra)
            known = extra, self.form.mxfp4, self.declared(method, layer)
            options, activations = layer_options(layer, values["hidden_size"], inner, self._settings, *known)
        except Refused as refused:
            refuse(layer_name(layer), refused, self._settings)
            delattr(method, _STATE)
            undecided.own_init()
            own(method, layer, *sizes, **named)
            return
        layer.intermediate_size_per_partition = padded
        layer.params_dtype = values["params_dtype"]
        experts = Experts(layer_name(layer), self.form, options, is_first_rank(layer), activations)
        experts.create(layer, int(values["num_experts"]), int(layer.num_experts), extra, padded)
        setattr(method, _STATE, experts)

    def process_weights_after_loading(self, own: Method, method: Any, layer: Any) -> None:
        experts = getattr(method, _STATE, None)
        if experts is None:
            own(method, layer)
        else:
            experts.pack(layer)

    def create_moe_runner(self, own: Method, method: Any, layer: Any, moe_runner_config: Any) -> None:
        if getattr(method, _STATE, None) is None:
            own(method, layer, moe_runner_config)
            return
        method.moe_runner_config = moe_runner_config
        method._moe_runner_backend = internals.resolve_moe_runner_backend(BACKEND)
        method.runner = make_runner(moe_runner_config)

    def get_moe_quant_info(self, own: Method, method: Any, layer: Any, runner_backend: Any) -> Any:
        experts = getattr(method, _STATE, None)
        if experts is None or runner_backend.value != BACKEND:
            return own(method, layer, runner_backend)
        return NvFp4MoeQuantInfo(experts.ready().layer, output_scale(layer))

    def apply(self, own: Method, method: Any, layer: Any, dispatch_output: Any) -> Any:
        experts = getattr(method, _STATE, None)
        if experts is None:
            return own(method, layer, dispatch_output)
        info = NvFp4MoeQuantInfo(experts.ready().layer, output_scale(layer))
        return method.runner.run(dispatch_output, info)
