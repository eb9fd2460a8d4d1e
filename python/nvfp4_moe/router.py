"""Routers: compute logits from hidden, and select each token's experts and weights from logits.

docs/explanation/numerics.md, section 12, defines what is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from . import _core

__all__ = ["RouterConfig", "router_gemm", "select_experts"]


def __dir__() -> list[str]:
    return __all__


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How a model's router selects and weighs experts. The fields are checked when the object is made.

    Attributes:
        num_experts: 1 to 1024.
        top_k: Experts per token, 1 to 32.
        scoring: The score of a logit x: "softmax" over all experts (with renormalize, over the chosen experts only);
            "sigmoid" 1/(1+e^-x); or "sqrt_softplus" sqrt(log(1+e^x)).
        renormalize: Divides the weights by their sum plus renormalize_epsilon.
        renormalize_epsilon: Must be 0 with softmax, and without renormalize.
        routed_scaling_factor: Multiplies every weight after renormalization.
        num_expert_group: The number of equal groups of experts, at most 32.
        topk_group: How many groups are kept; experts of the others are not selected.
        group_score: A group's score: "max", its best expert, or "top2_sum", the sum of its two best.
        correction_bias: Calls pass a bias that is added to the scores for the selection, but not to the weights.
        hash_routing: Calls pass token ids and a table of each token's experts. The scores only weigh these experts.
        expert_scale: Calls pass a factor for each expert, which multiplies its weights after renormalization, as in
            Gemma-4.

    Raises:
        ValueError: Names the field, the legal values and what it got.
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
    expert_scale: bool = False

    def __post_init__(self) -> None:
        _core.check_router_config(self._fields())

    def _fields(self) -> tuple[int, int, str, bool, float, float, int, int, str, bool, bool, bool]:
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
            self.expert_scale,
        )

    @classmethod
    def from_model_config(cls, config: Mapping[str, Any], layer: int | None = None) -> RouterConfig:
        """Reads the router of a model from its config.json.

        Args:
            config: The content of config.json.
            layer: Required if layers have different routers, such as the hash layers of DeepSeek-V4.

        Raises:
            Unsupported: The model type's router is not known, or an option selects one that is not implemented.
            BadInput: A field is missing.
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
            f"config.json model_type: expected a type whose router is known (docs/how-to/python.md lists them), got {outer!r}"
        )


def router_gemm(hidden: Any, weight: Any, *, logits_dtype: str = "bfloat16", out: Any = None) -> Any:
    """Computes a router's logits for a small number of tokens: hidden times the transposed weight.

    Sums are fp32 in an order that depends only on H, so a token's logits have the same bits in every batch, on every
    host and GPU. On a GPU it is one kernel in torch's current stream, which a CUDA graph can capture. It is meant for
    the few tokens of a decode step: it reads the weights again for every 8 tokens.

    Args:
        hidden: bfloat16 (T, H), H a multiple of 8. Rows may have a stride; each is aligned to 16 bytes.
        weight: bfloat16 (num_experts, H), on the same device.
        logits_dtype: "bfloat16" (rounded once) or "float32".
        out: A contiguous array to write, which then determines the dtype. None makes one.

    Returns:
        (T, num_experts) of logits_dtype.

    Raises:
        ValueError: Wrong shapes, dtypes, alignment or devices.
    """
    return _core.router_gemm(hidden, weight, logits_dtype, out)


def select_experts(
    logits: Any,
    config: RouterConfig,
    *,
    correction_bias: Any = None,
    expert_scale: Any = None,
    token_ids: Any = None,
    hash_table: Any = None,
    ids_dtype: str = "int32",
    out: tuple[Any, Any] | None = None,
    bad_ids: Any = None,
) -> tuple[Any, Any]:
    """Selects each token's experts and their weights from router logits.

    On a GPU it is one kernel in torch's current stream, which a CUDA graph can capture. The result has the same bits
    as on the host. A NaN sorts after every number, and the weights of its token are NaN.

    Args:
        logits: (T, num_experts) of float32, float16 or bfloat16. Rows may have a stride.
        config: The router.
        correction_bias: float32 (num_experts,), if config.correction_bias is set.
        expert_scale: float32 (num_experts,), if config.expert_scale is set.
        token_ids: int32 or int64 (T,), if config.hash_routing is set.
        hash_table: int32 or int64 (vocab_size, top_k), if config.hash_routing is set.
        ids_dtype: The dtype of topk_ids, "int32" or "int64".
        out: Contiguous arrays (topk_ids, topk_weights) to write. None makes them.
        bad_ids: int64 (1,). Its value grows by the number of token ids outside the vocabulary and table entries that
            are no expert's id. Their ids become -1 and their weights 0.

    Returns:
        (topk_ids, topk_weights): integers and float32, both (T, top_k). The best expert comes first; of equal scores,
        the lower id.

    Raises:
        ValueError: Wrong shapes, dtypes or devices.
    """
    if not isinstance(config, RouterConfig):
        raise TypeError(f"config: expected a RouterConfig, got {type(config).__name__}")
    return _core.select_experts(
        logits, correction_bias, expert_scale, token_ids, hash_table, ids_dtype, out, bad_ids, config._fields()
    )


# ---- routers by model type


def _model_type(config: Mapping[str, Any]) -> str:
    return str(config.get("model_type", ""))


class _Fields:
    """The fields of a config.json that a router needs. None has a default, because models of one type differ."""

    def __init__(self, config: Mapping[str, Any], model_type: str) -> None:
        self._config, self._model_type = config, model_type

    def get(self, *names: str) -> Any:
        """Returns the value of the first of several spellings that is present and not null, else None."""
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
        return self.integer("num_experts_per_tok", "num_experts_per_token", "top_k_experts")

    def expect(self, name: str, value: Any) -> None:
        """Raises Unsupported if an option is present with another value than the implemented one."""
        given = self.get(name)
        if given is not None and given != value:
            raise _core.Unsupported(
                f"config.json {name}: expected {value!r} with model_type {self._model_type}, got {given!r}"
            )


_Options = dict[str, Any]


def _softmax(fields: _Fields, layer: int | None) -> _Options:
    return {"scoring": "softmax", "renormalize": True}


def _gemma4(fields: _Fields, layer: int | None) -> _Options:
    # per_expert_scale of the checkpoint's router is an input of calls. The norm and the scale of hidden come before
    # the logits.
    return {"scoring": "softmax", "renormalize": True, "expert_scale": True}


def _softmax_optional(fields: _Fields, layer: int | None) -> _Options:
    return {"scoring": "softmax", "renormalize": fields.flag("norm_topk_prob")}


def _sigmoid(fields: _Fields, layer: int | None) -> _Options:
    return {"scoring": "sigmoid"}


def _deepseek_v2(fields: _Fields, layer: int | None) -> _Options:
    fields.expect("scoring_func", "softmax")
    fields.expect("norm_topk_prob", False)  # if true, implementations differ in how they apply the scaling factor
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
    fields.expect("score_function", "sigmoid")
    fields.expect("moe_router_enable_expert_bias", True)
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


def _deepseek_v41(fields: _Fields, layer: int | None) -> _Options:
    fields.expect("scoring_func", "sqrtsoftplus")
    fields.expect("topk_method", "noaux_tc")
    fields.expect("norm_topk_prob", True)
    return {
        "scoring": "sqrt_softplus",
        "renormalize": True,
        "renormalize_epsilon": 1e-20,
        "routed_scaling_factor": fields.number("routed_scaling_factor"),
        "correction_bias": True,
    }


def _mistral_large4(fields: _Fields, layer: int | None) -> _Options:
    return {
        "scoring": "softmax",
        "renormalize": True,
        "routed_scaling_factor": fields.number("routed_scaling_factor"),
        "num_expert_group": fields.integer("n_group"),
        "topk_group": fields.integer("topk_group"),
        "group_score": "top2_sum",
    }


def _flint(fields: _Fields, layer: int | None) -> _Options:
    return {"scoring": "sigmoid", "renormalize": fields.flag("norm_topk_prob")}


def _minimax_m2(fields: _Fields, layer: int | None) -> _Options:
    fields.expect("scoring_func", "sigmoid")
    fields.expect("use_routing_bias", True)
    return {"scoring": "sigmoid", "renormalize": True, "correction_bias": True}


def _minimax_m3(fields: _Fields, layer: int | None) -> _Options:
    # The model scales the sum of the experts' rows. Scaling each weight gives the same.
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
    "kimi_k3": _noaux_tc,
    "gemma4": _gemma4,
    "gemma4_text": _gemma4,
    "diffusion_gemma": _gemma4,
    "diffusion_gemma_text": _gemma4,
    "glm4_moe": _noaux_tc,
    "glm4_moe_lite": _noaux_tc,
    "glm4v_moe": _noaux_tc,
    "glm4v_moe_text": _noaux_tc,
    "glm_moe_dsa": _noaux_tc,
    "glm5_next": _noaux_tc,
    "glm5_next_text": _noaux_tc,
    "nemotron_h": _noaux_tc,
    "bailing_hybrid": _noaux_tc,
    "beam": _noaux_tc,  # scales the sum of the experts' rows, which is the same
    "dots3_note": _noaux_tc,
    "dots3_note_text": _noaux_tc,
    "hy_v4_vl": _noaux_tc,
    "hy_v4_vl_text": _noaux_tc,
    "sarvam_mla": _noaux_tc,
    "sarvam_moe": _noaux_tc,
    "unlimited_ocr": _deepseek_v2,
    "unlimited_ocr_text": _deepseek_v2,
    "mistral_large4": _mistral_large4,
    "mistral_large4_text": _mistral_large4,
    "lara_mini": _softmax_optional,
    "flint": _flint,
    "deepseek_v4": _deepseek_v4,
    "deepseek_v41": _deepseek_v41,
    "deepseek_v41_text": _deepseek_v41,
    "minimax_m2": _minimax_m2,
    "minimax_m3": _minimax_m3,
    "minimax_m3_vl": _minimax_m3,
    "minimax_m3_vl_text": _minimax_m3,
}
_UNKNOWN = "its router is not known here; make a RouterConfig from its fields instead"
_MUSE_SPARK = (
    "its router's logits are multiplied by output_multiplier first; pass such logits with scoring sigmoid, "
    "correction_bias, renormalize, renormalize_epsilon 1e-15 and its routed_scaling_factor"
)
_DECLINED = {
    **dict.fromkeys(("motif", "Motif", "qwen3_6_moe", "qwen3_6_moe_text"), _UNKNOWN),
    "kolibri1": "its bias is added to the logits for the selection, and not to the scores, which is not implemented",
    "muse_spark": _MUSE_SPARK,
    "muse_spark_text": _MUSE_SPARK,
}
