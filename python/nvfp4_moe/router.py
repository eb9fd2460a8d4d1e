"""Routers: hidden to logits, and these to the experts of each token and their weights (docs/explanation/numerics.md, section 12)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from . import _core


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How a model's router chooses. Checked when it is made; ValueError names the field, what is legal and what came.

    num_experts: 1 to 1024. top_k: experts per token, 1 to 32.
    scoring, of a logit x: "softmax" over all experts, with renormalize over the chosen ones alone; "sigmoid"
      1/(1+e^-x); "sqrt_softplus" sqrt(log(1+e^x)).
    renormalize: weights are divided by their sum plus renormalize_epsilon, which is 0 with softmax. routed_scaling_factor:
      multiplies every weight after that.
    num_expert_group, topk_group: num_expert_group equal groups of experts, at most 32; the best topk_group of them are kept.
    group_score: "max", the best expert of the group; "top2_sum", the two best together.
    correction_bias: the call brings a bias that is added to the scores for the selection, and not to the weights.
    hash_routing: the call brings token ids and a table of each token's experts; the scores only weigh them.
    """

    num_experts: int
    top_k: int
    scoring: str = "softmax"
    renormalize: bool = False
    renormalize_epsilon: float = 0.0
    routed_scaling_factor: float = 1.0
    num_expert_group: int = 1
    topk_group: int = 1
    group_score: str = "max"
    correction_bias: bool = False
    hash_routing: bool = False

    def __post_init__(self) -> None:
        _core.check_router_config(self._fields())

    def _fields(self) -> tuple[int, int, str, bool, float, float, int, int, str, bool, bool]:
        return (
            self.num_experts,
            self.top_k,
            self.scoring,
            self.renormalize,
            self.renormalize_epsilon,
            self.routed_scaling_factor,
            self.num_expert_group,
            self.topk_group,
            self.group_score,
            self.correction_bias,
            self.hash_routing,
        )

    @classmethod
    def from_model_config(cls, config: Mapping[str, Any], layer: int | None = None) -> RouterConfig:
        """The router of a model, from its config.json as a dict.

        layer: needed if layers have different routers (the hash layers of DeepSeek-V4). Raises Unsupported for a model
        type whose router is not known, or an option of one that is not computed; BadInput if a field is missing.
        """
        outer = _model_type(config)
        language: Mapping[str, Any] = config
        for key in ("text_config", "language_config", "llm_config"):
            if isinstance(config.get(key), Mapping):
                language = config[key]
                break
        for model_type in (_model_type(language), outer):
            if model_type in _DECLINED:
                raise _core.Unsupported(f"config.json model_type {model_type}: {_DECLINED[model_type]}")
            if model_type in _ROUTERS:
                fields = _Fields(language, model_type)
                return cls(num_experts=fields.experts(), top_k=fields.top_k(), **_ROUTERS[model_type](fields, layer))
        raise _core.Unsupported(
            f"config.json model_type {outer!r}: expected one of {', '.join(_ROUTERS)}, whose routers are known"
        )


def router_gemm(hidden: Any, weight: Any, *, logits_dtype: str = "bfloat16", out: Any = None) -> Any:
    """A router's logits (T, num_experts) of few tokens: hidden (T, H) times the transposed weight (num_experts, H).

    Both bfloat16 and on one device, H a multiple of 8, rows aligned to 16 bytes; rows of hidden may lie apart. logits_dtype:
    "bfloat16", rounded once, or "float32". out: the array to write, contiguous, whose type rules; else it is made.

    Sums are fp32, in an order that depends on H alone: a token's logits have the same bits in every batch, on every host and
    GPU. Tensors on a GPU stay there: one kernel in torch's current stream that a CUDA graph can hold. It is made for the
    few tokens of a decode step, and reads the weights again for every 8 of them. Raises ValueError on shapes, dtypes,
    addresses and devices.
    """
    return _core.router_gemm(hidden, weight, logits_dtype, out)


def select_experts(
    logits: Any,
    config: RouterConfig,
    *,
    correction_bias: Any = None,
    token_ids: Any = None,
    hash_table: Any = None,
    ids_dtype: str = "int32",
    out: tuple[Any, Any] | None = None,
    bad_ids: Any = None,
) -> tuple[Any, Any]:
    """Router logits (T, num_experts) of float32, float16 or bfloat16 to (topk_ids, topk_weights), both (T, top_k).

    topk_ids: int32 or int64 (ids_dtype), best expert first; of equal scores the lower id comes first. topk_weights:
    float32. correction_bias: float32 (num_experts), with config.correction_bias. token_ids int32 or int64 (T,) and
    hash_table int32 or int64 (vocab_size, top_k): with config.hash_routing. out: the two arrays to write, contiguous;
    else they are made, of logits' framework. bad_ids: int64 (1,), to which token ids outside the vocabulary and table
    entries that name no expert are added; their ids are -1 and their weights 0.

    A NaN orders after every number, and the weights of its token are NaN. Rows of logits may lie apart. Tensors on a GPU
    stay there: one kernel in torch's current stream, with the host's bits, that a CUDA graph can hold. Raises ValueError
    on shapes, dtypes and devices.
    """
    if not isinstance(config, RouterConfig):
        raise TypeError(f"config: expected a RouterConfig, got {type(config).__name__}")
    return _core.select_experts(
        logits, correction_bias, token_ids, hash_table, ids_dtype, out, bad_ids, config._fields()
    )


# ---- the routers of model types


def _model_type(config: Mapping[str, Any]) -> str:
    return str(config.get("model_type", ""))


class _Fields:
    """The fields of a config.json that a router needs: none has a default here, since models of one type differ."""

    def __init__(self, config: Mapping[str, Any], model_type: str) -> None:
        self._config, self._model_type = config, model_type

    def get(self, *names: str) -> Any:
        """The first of several spellings that is there and not null; None if none is."""
        return next((self._config[name] for name in names if self._config.get(name) is not None), None)

    def _need(self, kind: type, *names: str) -> Any:
        value = self.get(*names)
        if value is None:
            raise _core.BadInput(f"config.json {names[0]}: missing, and the router of {self._model_type} needs it")
        numeric = kind is float and isinstance(value, int) and not isinstance(value, bool)
        if numeric or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
            return kind(value)
        raise _core.BadInput(f"config.json {names[0]}: expected {kind.__name__}, got {value!r}")

    def integer(self, *names: str) -> int:
        return int(self._need(int, *names))

    def flag(self, *names: str) -> bool:
        return bool(self._need(bool, *names))

    def number(self, *names: str) -> float:
        return float(self._need(float, *names))

    def experts(self) -> int:
        return self.integer("n_routed_experts", "num_experts", "num_local_experts")

    def top_k(self) -> int:
        return self.integer("num_experts_per_tok", "num_experts_per_token")

    def expect(self, name: str, value: Any) -> None:
        """Declines an option that says another router than the one that is computed; it may be left out."""
        given = self.get(name)
        if given is not None and given != value:
            raise _core.Unsupported(
                f"config.json {name}: expected {value!r} with model_type {self._model_type}, got {given!r}"
            )


_Options = dict[str, Any]


def _softmax(fields: _Fields, layer: int | None) -> _Options:
    return {"scoring": "softmax", "renormalize": True}


def _softmax_optional(fields: _Fields, layer: int | None) -> _Options:
    return {"scoring": "softmax", "renormalize": fields.flag("norm_topk_prob")}


def _sigmoid(fields: _Fields, layer: int | None) -> _Options:
    return {"scoring": "sigmoid"}


def _deepseek_v2(fields: _Fields, layer: int | None) -> _Options:
    fields.expect("scoring_func", "softmax")
    fields.expect("norm_topk_prob", False)  # implementations differ in what the scaling factor does then
    method = fields.get("topk_method")
    options: _Options = {"scoring": "softmax", "routed_scaling_factor": fields.number("routed_scaling_factor")}
    if method == "greedy":
        return options
    if method != "group_limited_greedy":
        raise _core.Unsupported(f"config.json topk_method: expected greedy or group_limited_greedy, got {method!r}")
    return options | {"num_expert_group": fields.integer("n_group"), "topk_group": fields.integer("topk_group")}


def _noaux_tc(fields: _Fields, layer: int | None) -> _Options:
    fields.expect("topk_method", "noaux_tc")
    fields.expect("scoring_func", "sigmoid")
    fields.expect("moe_router_activation_func", "sigmoid")
    renormalize = fields.flag("norm_topk_prob", "moe_renormalize")
    return {
        "scoring": "sigmoid",
        "renormalize": renormalize,
        "renormalize_epsilon": 1e-20 if renormalize else 0.0,
        "routed_scaling_factor": fields.number("routed_scaling_factor"),
        "num_expert_group": fields.integer("n_group", "num_expert_group"),
        "topk_group": fields.integer("topk_group"),
        "group_score": "top2_sum",
        "correction_bias": True,
    }


def _deepseek_v4(fields: _Fields, layer: int | None) -> _Options:
    fields.expect("scoring_func", "sqrtsoftplus")
    fields.expect("norm_topk_prob", True)
    types, count = fields.get("mlp_layer_types"), fields.get("num_hash_layers")
    if types is None and count is None:
        raise _core.BadInput("config.json num_hash_layers: missing, and the router of deepseek_v4 needs it")
    hashes = any(kind == "hash_moe" for kind in types) if types is not None else count > 0
    if hashes and layer is None:
        raise _core.InvalidArgument("layer: expected one, since this model has hash layers and others, got None")
    if types is not None and layer is not None and not 0 <= layer < len(types):
        raise _core.InvalidArgument(f"layer: expected 0 to {len(types) - 1}, got {layer}")
    is_hash = hashes and (types[layer] == "hash_moe" if types is not None else layer < count)
    return {
        "scoring": "sqrt_softplus",
        "renormalize": True,
        "renormalize_epsilon": 1e-20,
        "routed_scaling_factor": fields.number("routed_scaling_factor"),
        "correction_bias": not is_hash,
        "hash_routing": is_hash,
    }


def _minimax_m2(fields: _Fields, layer: int | None) -> _Options:
    fields.expect("scoring_func", "sigmoid")
    fields.expect("use_routing_bias", True)
    return {"scoring": "sigmoid", "renormalize": True, "correction_bias": True}


def _minimax_m3(fields: _Fields, layer: int | None) -> _Options:
    # The model multiplies the sum of the experts' rows; a weight of each is the same number.
    return _minimax_m2(fields, layer) | {"routed_scaling_factor": fields.number("routed_scaling_factor")}


_ROUTERS: dict[str, Callable[[_Fields, int | None], _Options]] = {
    "mixtral": _softmax,
    "gpt_oss": _softmax,
    "qwen2_moe": _softmax_optional,
    "qwen3_moe": _softmax_optional,
    "qwen3_next": _softmax_optional,
    "qwen3_5_moe": _softmax,
    "qwen3_5_moe_text": _softmax,
    "qwen3_vl_moe": _softmax,
    "qwen3_vl_moe_text": _softmax,
    "llama4": _sigmoid,
    "llama4_text": _sigmoid,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _noaux_tc,
    "deepseek_v32": _noaux_tc,
    "kimi_k2": _noaux_tc,
    "kimi_k25": _noaux_tc,
    "kimi_linear": _noaux_tc,
    "glm4_moe": _noaux_tc,
    "glm4_moe_lite": _noaux_tc,
    "glm4v_moe": _noaux_tc,
    "glm4v_moe_text": _noaux_tc,
    "glm_moe_dsa": _noaux_tc,
    "nemotron_h": _noaux_tc,
    "deepseek_v4": _deepseek_v4,
    "minimax_m2": _minimax_m2,
    "minimax_m3": _minimax_m3,
    "minimax_m3_vl": _minimax_m3,
    "minimax_m3_vl_text": _minimax_m3,
}
_UNKNOWN = "its router is not known here; a RouterConfig with its fields says what it computes"
_DECLINED = dict.fromkeys(
    ("kimi_k3", "motif", "Motif", "glm5_next", "glm5_next_text", "qwen3_6_moe", "qwen3_6_moe_text"), _UNKNOWN
)
