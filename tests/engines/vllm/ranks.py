"""Two processes as vLLM's expert parallel ranks, with its own groups and MoE layers, and the output of each layer.

usage: ranks.py data|tensor RANK PORT OUT.json. data: data parallel ranks, each with tokens of its own. tensor: ranks of
a tensor parallel group, with the same tokens. The result at OUT.json: {"layers": {name: facts}, "log": the plugin's
lines}. Each output is compared here with the library's layer of all experts, on one rank, in the routing that vLLM
chose.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ["VLLM_DIST_IDENT"] = f"nvfp4-moe-test-{sys.argv[3]}"  # vLLM's worker names its shared memory so
sys.path.insert(0, str(Path(__file__).parent))

import nvfp4_moe  # noqa: E402
import torch  # noqa: E402
from layers import EXPERTS, HIDDEN, INNER, TOP_K, Log, library, weights  # noqa: E402

WORLD = 2
# Tokens of rank 0 and 1 in one run: equal, more, and none, as sequence parallel ranks may have.
COUNTS = ((5, 5), (9, 2), (1, 32), (3, 0), (0, 4))


def start(kind: str, rank: int, port: int):
    """vLLM's config and groups, as its workers have them."""
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    options: dict = {
        "data": {"data_parallel_size": WORLD, "data_parallel_rank": rank, "data_parallel_master_ip": "127.0.0.1"},
        "tensor": {
            "tensor_parallel_size": WORLD,
            "distributed_executor_backend": "mp",
            "expert_placement_strategy": "round_robin",
        },
    }[kind]
    config = VllmConfig(
        parallel_config=ParallelConfig(enable_expert_parallel=True, **options),
        additional_config={"nvfp4_moe": {"exchange": "host"}},
    )
    config.scheduler_config.max_num_batched_tokens = 32
    config.parallel_config.data_parallel_master_port = port
    config.parallel_config._data_parallel_master_port_list = []
    within = (1, 0) if kind == "data" else (WORLD, rank)
    with set_current_vllm_config(config):
        init_distributed_environment(*within, f"tcp://127.0.0.1:{port}", within[1], "gloo")
        ensure_model_parallel_initialized(within[0], 1)
    return config


class Shared(torch.nn.Module):
    """A shared expert: under tensor parallel a rank's part of the rows."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (0.5 / self.parts)


class Ranked:
    """Returns one of vLLM's MoE layers on this rank, with packed weights, and the same experts on one rank."""

    def __init__(self, config, name: str, shared: Shared | None = None, settings: dict | None = None, **options):
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
        from vllm.model_executor.layers.quantization import get_quantization_config

        self.config = config
        config.additional_config = {"nvfp4_moe": {"exchange": "host"} | (settings or {})}
        with set_current_vllm_config(config):
            self.runner = FusedMoEFactory(
                num_experts=options.pop("experts", EXPERTS),
                top_k=TOP_K,
                hidden_size=HIDDEN,
                intermediate_size=INNER,
                params_dtype=torch.bfloat16,
                renormalize=True,
                quant_config=get_quantization_config("modelopt_fp4")(
                    is_checkpoint_nvfp4_serialized=True, exclude_modules=[]
                ),
                prefix=f"model.layers.{name}.mlp.experts",
                shared_experts=shared,
                **options,
            )
        self.routed = self.runner.routed_experts
        self.method = self.routed.quant_method
        self.load(0)
        self.shared = shared

    def load(self, seed: int) -> None:
        """Weights as vLLM's loader leaves them, then packed."""
        places = self.routed.expert_map
        here = (places >= 0).nonzero().flatten()
        self.here = here[places[here].argsort()]
        for name, tensor in weights(seed).items():
            as_bytes = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
            getattr(self.routed, name).data = as_bytes[self.here].view(tensor.dtype).clone()
        self.method.process_weights_after_loading(self.routed)
        if self.method.fused.over_ranks:
            self.one = library(self.method.fused.layer.config, seed)

    def batch(self, tokens: int, seed: int, dtype=torch.bfloat16):
        """Hidden states and router logits."""
        random = torch.Generator().manual_seed(seed)
        hidden = torch.randn(tokens, HIDDEN, generator=random).to(dtype)
        return hidden, torch.randn(tokens, EXPERTS, generator=random).to(torch.bfloat16)

    def run(self, hidden: torch.Tensor, logits: torch.Tensor):
        """Returns the runner's output, and the routing that vLLM chose, as ids and weights."""
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        kept = []
        own = self.runner.router.select_experts

        def select(*args, **named):
            router_weights, ids = own(*args, **named)
            kept.append((ids, router_weights))
            return router_weights, ids

        self.runner.router.select_experts = select
        try:
            with torch.no_grad(), set_current_vllm_config(self.config):
                with set_forward_context(None, self.config, num_tokens=hidden.shape[0]):
                    out = self.runner(hidden.clone(), logits)
        finally:
            self.runner.router.select_experts = own
        ((ids, router_weights),) = kept
        return out, ids, router_weights

    def apply(self, hidden, ids, router_weights):
        """Calls only the quantization method, which also takes a batch of no tokens."""
        return self.method.apply(self.routed, hidden, router_weights, ids, None, None)

    def facts(self) -> dict:
        from vllm import envs

        marked = json.loads(envs.compile_factors().get("NVFP4_MOE_LAYERS_OVER_RANKS", "{}"))
        return {
            "marked": marked.get(self.method.plan.name),
            "over_ranks": self.method.fused.over_ranks,
            "reduced": self.method.moe_kernel.output_is_reduced(),
            "layer": repr(self.method.fused.layer),
            "parallel": self.method.fused.layer.describe().get("expert_parallel"),
            "here": self.here.tolist(),
        }


def without_the_other_rank(ranked: Ranked, ids: torch.Tensor) -> torch.Tensor:
    """Returns ids that make the other rank's experts add nothing."""
    return torch.where(torch.isin(ids, ranked.here.to(ids.dtype)), ids, -1)


# ---- ranks with tokens of their own


def data_ranks(config, rank: int, results: dict) -> None:
    for activations in ("bf16", "nvfp4", "fp8", "int8_block"):
        ranked = Ranked(config, f"1{len(results)}", settings={"activations": activations})
        facts = ranked.facts() | {"equal": [], "runner": []}
        for number, counts in enumerate(COUNTS):
            hidden, logits = ranked.batch(counts[rank], 10 * number + rank)
            ids = logits.float().topk(TOP_K).indices.int()
            router_weights = torch.rand(counts[rank], TOP_K, generator=torch.Generator().manual_seed(number))
            out = ranked.apply(hidden, ids, router_weights)
            facts["equal"].append(torch.equal(out, ranked.one.run(hidden, ids, router_weights)))
            if min(counts) > 0:
                out, ids, router_weights = ranked.run(hidden, logits)
                facts["runner"].append(torch.equal(out, ranked.one.run(hidden, ids, router_weights)))
        hidden, logits = ranked.batch(8 + rank, 70 + rank)
        out, ids, router_weights = ranked.run(hidden, logits)
        planted = without_the_other_rank(ranked, ids)
        facts["planted"] = torch.equal(
            ranked.apply(hidden, planted, router_weights), ranked.one.run(hidden, ids, router_weights)
        )
        ranked.load(1)
        out, ids, router_weights = ranked.run(hidden, logits)
        facts["reloaded"] = torch.equal(out, ranked.one.run(hidden, ids, router_weights))
        results[activations] = facts

    with_shared = Ranked(config, "20", Shared(1))
    hidden, logits = with_shared.batch(6 + rank, 77 + rank)
    out, ids, router_weights = with_shared.run(hidden, logits)
    results["shared"] = with_shared.facts() | {
        "equal": torch.equal(out, hidden * 0.5 + with_shared.one.run(hidden, ids, router_weights))
    }


# ---- ranks with the same tokens


def products(one: nvfp4_moe.MoeLayer, hidden, ids, router_weights) -> torch.Tensor:
    """Returns (tokens, hidden_size): the sum of the products' magnitudes. Rounding errors are fractions of it."""
    total = torch.zeros(hidden.shape)
    for k in range(ids.shape[1]):
        alone = torch.full_like(ids, -1)
        alone[:, k] = ids[:, k]
        total += one.run(hidden, alone, router_weights).abs()
    return total


def tensor_ranks(config, rank: int, results: dict) -> None:
    from vllm.distributed import get_ep_group

    for name, options in {
        "linear": {},
        "round_robin": {"use_grouped_topk": True, "num_expert_group": 2, "topk_group": 1},
    }.items():
        ranked = Ranked(config, f"3{len(results)}", **options)
        facts = ranked.facts() | {"over": [], "same": [], "planted": []}
        for number, tokens in enumerate((1, 7, 32)):
            # float32 rows, so that the output is not rounded more than the sums.
            hidden, logits = ranked.batch(tokens, number, torch.float32)
            out, ids, router_weights = ranked.run(hidden, logits)
            expected = ranked.one.run(hidden, ids, router_weights)
            bound = (2 * TOP_K + WORLD - 1) * 2.0**-24 * products(ranked.one, hidden, ids, router_weights)
            facts["over"].append(int(((out - expected).abs() > bound).sum()))
            others = [torch.empty_like(out) for _ in range(WORLD)]
            torch.distributed.all_gather(others, out, group=get_ep_group().cpu_group)
            facts["same"].append(all(torch.equal(other, out) for other in others))
            lost = ranked.apply(hidden, torch.where(ids < EXPERTS // 2, ids, -1), router_weights)
            facts["planted"].append(int(((lost - expected).abs() > bound).sum()))
        results[name] = facts

    results["nothing"] = {"shape": list(ranked.apply(hidden[:0], ids[:0], router_weights[:0]).shape)}
    with_shared = Ranked(config, "40", Shared(WORLD))
    hidden, logits = with_shared.batch(6, 5)
    out, ids, router_weights = with_shared.run(hidden, logits)
    expected = hidden * 0.5 + library(ranked.method.fused.layer.config, 0).run(hidden, ids, router_weights)
    results["shared"] = with_shared.facts() | {"off": float((out - expected).float().norm() / expected.float().norm())}
    own_runner = type("OwnRunner", (type(ranked.runner),), {})
    results |= {
        "reduced by the model": Ranked(config, "50", reduce_results=False).facts(),
        "runner of the model": Ranked(config, "55", runner_cls=own_runner).facts(),
        "auto": Ranked(config, "60", settings={"exchange": "auto"}).facts(),
        "engine": Ranked(config, "70", settings={"exchange": "engine"}).facts(),
    }
    try:
        Ranked(config, "80", Shared(WORLD), settings={"mode": "1"})
    except NotImplementedError as error:
        results["insisted"] = {"error": str(error)}


def killed(ranked: Ranked, rank: int, results: dict) -> None:
    """Rank 1 exits while rank 0 runs a layer."""
    hidden, logits = ranked.batch(4, 1)
    ids = logits.float().topk(TOP_K).indices.int()
    ranked.apply(hidden, ids, torch.ones(4, TOP_K))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        ranked.apply(hidden, ids, torch.ones(4, TOP_K))
    except Exception as error:
        results["killed"] = {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - started}


def main() -> None:
    kind, rank, port, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    import nvfp4_moe.vllm as plugin

    plugin.register()
    config = start(kind, rank, port)
    from nvfp4_moe.vllm import internals

    log = Log()
    internals.logger = lambda: log
    results: dict = {}
    (data_ranks if kind == "data" else tensor_ranks)(config, rank, results)

    def write() -> None:
        Path(out).write_text(json.dumps({"layers": results, "log": log.lines}))

    last = Ranked(config, "90") if kind == "data" else None
    write()
    if last is not None:
        killed(last, rank, results)
        write()
    sys.stdout.flush()
    os._exit(0)  # vLLM's groups wait for each other at a regular exit, but one rank is gone


if __name__ == "__main__":
    main()
