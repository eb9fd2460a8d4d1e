"""Everything that the adapter imports from SGLang, in one file. Importing it imports SGLang.

SGLang does not promise to keep any of these interfaces. required.py lists what the adapter relies on, and register()
checks that before it imports this file.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang.srt.arg_groups.overrides import resolution_result
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoeWeightScaleSupported
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore, MoeQuantInfo
from sglang.srt.layers.moe.moe_runner.runner import MoeRunner, register_moe_runner_core
from sglang.srt.layers.moe.token_dispatcher import standard
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.topk import TopK, TopKOutputChecker
from sglang.srt.layers.moe.utils import get_moe_a2a_backend, get_moe_runner_backend, resolve_moe_runner_backend
from sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_scheme import (
    CompressedTensorsMoEScheme,
)
from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4FusedMoEMethod
from sglang.srt.layers.quantization.mxfp4 import Mxfp4MoEMethod
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel, get_server_args
from sglang.srt.server_args import MOE_RUNNER_BACKEND_CHOICES, add_moe_runner_backend_choices

__all__ = [
    "MOE_RUNNER_BACKEND_CHOICES",
    "CompressedTensorsMoEScheme",
    "DispatchMoeRunnerCore",
    "FusedMoeWeightScaleSupported",
    "HookRegistry",
    "HookType",
    "ModelOptNvFp4FusedMoEMethod",
    "MoeQuantInfo",
    "MoeRunner",
    "Mxfp4MoEMethod",
    "StandardCombineInput",
    "TopKOutputChecker",
    "add_moe_runner_backend_choices",
    "backend_is_sglangs_default",
    "config_groups",
    "get_moe_a2a_backend",
    "get_moe_runner_backend",
    "hidden_activation",
    "is_first_rank_of_layers",
    "register_moe_runner_core",
    "resolve_moe_runner_backend",
    "server_argument",
]


def backend_is_sglangs_default() -> bool:
    """Returns whether SGLang, not the user, chose --moe-runner-backend for the model (gpt-oss, Nemotron-H).

    In releases whose routers and dispatchers follow each layer's runner instead of the option, that backend is only a
    default.
    """
    raw = getattr(get_server_args(), "_raw_input", None) or {}
    follows_layers = hasattr(TopK, "bind_runner_backend") and hasattr(standard, "_keeps_global_expert_ids")
    return follows_layers and raw.get("moe_runner_backend") == "auto"


@functools.cache
def _read_config(model: str, revision: str | None) -> Mapping[str, Any]:
    """Reads a model's config.json, in a directory or in the hub's cache. Without one returns {}."""
    from transformers.utils.hub import cached_file

    try:
        path = cached_file(model, "config.json", revision=revision, local_files_only=True)
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError, TypeError):
        return {}
    return found if isinstance(found, Mapping) else {}


def _model_config() -> Mapping[str, Any]:
    """Reads the served model's config.json. Without one returns {}."""
    model = server_argument("model_path")
    return _read_config(model, server_argument("revision")) if isinstance(model, str) else {}


def config_groups() -> Any:
    """Reads config_groups, next to ModelOpt's quant_algo, or returns None. SGLang's config drops them."""
    found = _model_config().get("quantization_config")
    return found.get("config_groups") if isinstance(found, Mapping) else None


def hidden_activation() -> Any:
    """Reads hidden_activation of Gemma-4's config.json, or returns None. SGLang's layer of experts drops it."""
    config = _model_config()
    text = config.get("text_config", config)
    return text.get("hidden_activation") if isinstance(text, Mapping) else None


def server_argument(name: str, default: Any = None) -> Any:
    """Returns a server argument as SGLang resolved it, or the default if this release does not have it."""
    return resolution_result(get_server_args(), name, default)


def is_first_rank_of_layers() -> bool:
    """Returns whether this process logs for the ranks that run the same layers."""
    parallel = get_parallel()
    return int(parallel.moe_ep_rank) == 0 and int(parallel.moe_tp_rank) == 0
