"""Expert parallel through the library's exchange (docs/how-to/expert-parallel.md) instead of vLLM's gathers and sums.

If ranks have different tokens (data parallel attention, sequence parallel MoE), vLLM would gather the rows of all ranks
and scatter bf16 sums back. A layer over an exchange sends a token's activations, in the layer's format, to the ranks of
its experts, and the result has the bits of one rank. If all ranks have the same tokens (tensor parallel attention),
vLLM would add bf16 rows. The exchange adds fp32 rows in rank order.

Both need every rank of vLLM's expert parallel group in each run, in the same order. So do vLLM's own collectives: ranks
without requests take part with dummy tokens, and ranks that replay CUDA graphs replay graphs with the same number of
tokens.
"""

from __future__ import annotations

import dataclasses
import json
import weakref
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from .. import Cancelled, Error, Exchange, IoError, torch_exchange
from .._fused_experts import OverRanks
from . import internals

_FUSED = "vllm.model_executor.layers.fused_moe"
_no_exchange: Any = internals.find_or_none(f"{_FUSED}.prepare_finalize:MoEPrepareAndFinalizeNoDPEPModular") or object

# How long ranks wait for the slowest one in a run unless vLLM has a limit; torch's default for NCCL.
_TIMEOUT_SECONDS = 600.0


class NoExchange(Exception):
    """The reason why vLLM adds a layer's rows, in one sentence."""


@dataclasses.dataclass(frozen=True)
class RanksPlan:
    """How a layer uses the exchange.

    Attributes:
        combine: As in MoeLayer.from_tensors.
        link: host, nccl or peers.
        max_tokens: The most tokens of one rank.
        timeout: Seconds.
        insists: Falling back to vLLM is an error.
        runners: vLLM's layers by name.
    """

    combine: str
    link: str
    max_tokens: int
    timeout: float
    insists: bool
    runners: Mapping[str, Any]


# ---- decided from vLLM's config


def plan_ranks(moe: Any, config: Any, asked: str, insists: bool, max_tokens: int) -> RanksPlan | None:
    """Plans the exchange of a layer, or returns None if there is nothing to exchange or the user chose vLLM.

    asked is NVFP4_MOE_EXCHANGE; max_tokens is one rank's, without sequence parallel. Raises NoExchange if the exchange
    was requested (or "auto") but only vLLM can do it.
    """
    parallel = moe.moe_parallel_config
    if asked == "engine" or not getattr(parallel, "use_ep", False) or parallel.ep_size == 1:
        return None
    if "exchange" not in internals.fitting:
        raise NoExchange("this release's members for it are not those that are known")
    combine = _combine(parallel)
    link = _link(asked, torch.device(moe.device).type, combine)
    _check_deployment(moe, getattr(config, "parallel_config", None))
    if parallel.sp_size > 1:
        max_tokens = -(-max_tokens // int(parallel.sp_size))
    _register_factor()
    runners = getattr(getattr(config, "compilation_config", None), "static_forward_context", {})
    insists = insists and asked != "auto"
    return RanksPlan(combine, link, max_tokens, _timeout(config, link), insists, runners)


def _combine(parallel: Any) -> str:
    if parallel.pcp_size > 1:
        raise NoExchange("prefill context parallel")
    if parallel.sp_size > 1 or parallel.dp_size == parallel.ep_size:
        return "all_to_all"
    if parallel.dp_size == 1:
        return "all_reduce"
    raise NoExchange("some of the ranks have the same tokens, without sequence parallel MoE")


def _link(asked: str, device: str, combine: str) -> str:
    if asked == "auto":
        if device != "cpu":
            raise NoExchange("NVFP4_MOE_EXCHANGE=auto leaves GPUs to it")
        if combine == "all_reduce":
            raise NoExchange("NVFP4_MOE_EXCHANGE=auto leaves ranks with the same tokens to it")
        return "host"
    if (asked == "host") != (device == "cpu"):
        raise NoExchange(
            f"NVFP4_MOE_EXCHANGE={asked} on {device}: expected {'host' if device == 'cpu' else 'peers or nccl'}"
        )
    return asked


def _check_deployment(moe: Any, parallel_config: Any) -> None:
    parallel = moe.moe_parallel_config
    if moe.num_experts % parallel.ep_size != 0:
        raise NoExchange(f"{moe.num_experts} experts on {parallel.ep_size} ranks: expected as many on each")
    if getattr(parallel_config, "use_ubatching", False):
        raise NoExchange("microbatches, whose layers run side by side")
    if getattr(parallel_config, "enable_elastic_ep", False):
        raise NoExchange("elastic expert parallel")


def _timeout(config: Any, link: str) -> float:
    name = "cpu_distributed_timeout_seconds" if link == "host" else "distributed_timeout_seconds"
    return float(getattr(getattr(config, "parallel_config", None), name, None) or _TIMEOUT_SECONDS)


# ---- after the model is loaded


def over_ranks(layer: Any, plan: RanksPlan, device: str) -> OverRanks:
    """Returns the exchange of vLLM's expert parallel group, and which experts its ranks hold. Collective.

    Raises NoExchange, on all ranks, and IoError if a rank is missing.
    """
    _check_model(layer, plan)
    group = internals.find("vllm.distributed.parallel_state:get_ep_group")()
    exchange = _connected(group, plan, device)
    moe = layer.moe_config
    expected = moe.moe_parallel_config.ep_rank, moe.moe_parallel_config.ep_size
    if (exchange.rank, exchange.world) != expected:
        raise RuntimeError(
            f"nvfp4-moe: expected rank {expected[0]} of {expected[1]} in vLLM's group of expert parallel ranks, got "
            f"{exchange.rank} of {exchange.world}"
        )
    # Over NCCL a graph needs a capacity. That of all tokens drops none, and messages are no longer than a run needs.
    capacity = plan.max_tokens if plan.link == "nccl" and plan.combine == "all_to_all" else 0
    return OverRanks(exchange, plan.combine, capacity, plan.max_tokens, _slots(layer.expert_map, group))


def runner_of(layer: Any, runners: Mapping[str, Any]) -> Any:
    """Returns vLLM's layer around a RoutedExperts layer, or None. runners: vLLM's layers by name."""
    return next((runner for runner in runners.values() if getattr(runner, "routed_experts", None) is layer), None)


def _check_model(layer: Any, plan: RanksPlan) -> None:
    if getattr(layer.moe_config, "skip_final_all_reduce", False):
        raise NoExchange("the model adds up the ranks' rows itself")
    if plan.combine == "all_reduce":
        runner = runner_of(layer, plan.runners)
        if runner is None or type(runner) is not internals.find(f"{_FUSED}.runner.moe_runner:MoERunner"):
            raise NoExchange("a runner of the model's own, which may add up the rows itself")
        # vLLM adds their rows to the routed rows and sums both over the ranks together.
        if runner.shared_experts is not None:
            raise NoExchange("shared experts, whose rows it sums over the ranks together with these")


@dataclasses.dataclass(frozen=True)
class _Connected:
    """The exchange for a plan's link and timeout. found: the exchange, or the reason for its absence."""

    link: str
    timeout: float
    found: Exchange | str

    def __str__(self) -> str:
        return f"{self.link} with a timeout of {self.timeout:g} s"


# Keyed by vLLM's group, which lives as long as its engine.
_exchanges: weakref.WeakKeyDictionary[Any, _Connected] = weakref.WeakKeyDictionary()


def _connected(group: Any, plan: RanksPlan, device: str) -> Exchange:
    kept = _exchanges.get(group)
    same = kept is not None and (kept.link, kept.timeout) == (plan.link, plan.timeout)
    if kept is None or (isinstance(kept.found, str) and not same):
        kept = _exchanges[group] = _Connected(plan.link, plan.timeout, _connect(group, plan, device))
        if isinstance(kept.found, Exchange):
            internals.logger().info(
                "nvfp4-moe: rank %d of %d exchanges over %s", kept.found.rank, kept.found.world, plan.link
            )
    elif not same:
        asked = _Connected(plan.link, plan.timeout, "")
        raise NoExchange(f"the exchange of these ranks goes over {kept}, and this layer asks for {asked}")
    if isinstance(kept.found, str):
        raise NoExchange(kept.found)
    return kept.found


def _connect(group: Any, plan: RanksPlan, device: str) -> Exchange | str:
    exchange = torch_exchange(group.cpu_group, timeout=plan.timeout)
    try:
        if plan.link == "peers":
            exchange.use_peers(device)
        elif plan.link == "nccl":
            exchange.use_nccl(device)
    except (IoError, Cancelled):
        raise  # a rank is gone
    except Error as refused:  # raised on all ranks; names the rank that failed
        return str(refused)
    return exchange


def _slots(expert_map: Any, group: Any) -> tuple[int, ...]:
    """Returns the global ids of all ranks' experts, rank by rank, each in the order of the rank's parameters."""
    places = expert_map.detach().to("cpu", torch.int64).flatten()
    here = (places >= 0).nonzero().flatten()
    mine = here[places[here].argsort()].tolist()
    of_ranks: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(of_ranks, mine, group=group.cpu_group)
    return tuple(expert for experts in of_ranks for expert in experts)


# ---- keeping compiled graphs apart

# vLLM keeps compiled graphs on disk, keyed by hashes. A graph that adds the ranks' rows is wrong for a layer that has
# already added them, and vice versa. Models compile parts under copies of the engine's config that are made along with
# the layers, so a change to a config reaches only some of the hashes. A variable known to vllm.envs reaches all of
# them.
_FACTOR = "NVFP4_MOE_LAYERS_OVER_RANKS"
_combine_of: dict[str, str] = {}  # layers of this process whose rows need no sum -> how they combine


def _factor() -> str:
    return json.dumps(_combine_of, sort_keys=True)


def _register_factor() -> None:
    """Makes vLLM include _factor() in its hashes. Raises NoExchange if it does not."""
    getters = internals.find("vllm.envs:environment_variables")
    if isinstance(getters, MutableMapping):
        getters[_FACTOR] = _factor
    if internals.find("vllm.envs:compile_factors")().get(_FACTOR) != _factor():
        raise NoExchange("this release keeps compiled graphs by other names than those that are known")


def note_combine(name: str, combine: str | None) -> None:
    """Records how a layer's run exchanges; None means that vLLM adds its rows.

    Graphs compiled from now on are kept apart from graphs over layers that combine in another way.
    """
    if combine is None:
        _combine_of.pop(name, None)
    else:
        _combine_of[name] = combine


class PrepareAndFinalizeOverRanks(_no_exchange):  # type: ignore[misc]
    """Tells vLLM that the layer's rows already include those of all ranks, if its own run exchanges."""

    def output_is_reduced(self) -> bool:
        return True

    def supports_deferred_moe_finalize(self) -> bool:
        return False
