"""Expert parallel ranks over the library's exchange: vLLM's own layers in two processes, and its engine."""

from __future__ import annotations

import copy
import json
import types
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import nvfp4_moe  # noqa: E402
from conftest import clean_environment, free_port  # noqa: E402
from jobs import TOKENS, job, ok, on_gpu  # noqa: E402
from judges import judge_without_routers  # noqa: E402
from nvfp4_moe.vllm import internals, plan, ranks  # noqa: E402
from nvfp4_moe.vllm.ranks import NoExchange  # noqa: E402
from processes import Process  # noqa: E402
from truth import Truth  # noqa: E402

HERE = Path(__file__).parent
SENTENCE = "nvfp4-moe leaves the sums over ranks of layers such as model.layers.*.mlp.experts to vLLM: "


# ---- vLLM's layers, two processes


def two_processes(kind: str, root: Path) -> list[dict]:
    """Returns ranks.py's result of each rank."""
    environment = clean_environment(
        VLLM_BATCH_INVARIANT="1",  # without it bf16 rows on CPUs depend on the number of rows of an expert
        VLLM_HOST_IP="127.0.0.1",
        GLOO_SOCKET_IFNAME="lo",
        NVFP4_MOE_THREADS="1",
        OMP_NUM_THREADS="1",
    )
    port, results = free_port(), []
    ranks = [
        Process(
            HERE / "ranks.py", kind, rank, port, root / f"{rank}.json", env=environment, folder=root, name=str(rank)
        )
        for rank in range(2)
    ]
    try:
        for rank, process in enumerate(ranks):
            process.wait(300)
            if not (root / f"{rank}.json").exists():
                pytest.fail(f"rank {rank} left nothing:\n{process.log[-4000:]}")
            results.append(json.loads((root / f"{rank}.json").read_text()))
    finally:
        for process in ranks:
            process.stop()
    return results


@pytest.fixture(scope="module")
def data_ranks(tmp_path_factory):
    return two_processes("data", tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def tensor_ranks(tmp_path_factory):
    return two_processes("tensor", tmp_path_factory.mktemp("tensor"))


@pytest.mark.parametrize("activations", ["bf16", "nvfp4", "fp8", "int8_block"])
def test_ranks_with_tokens_of_their_own_have_the_bits_of_one(data_ranks, activations):
    """The same number of tokens on each rank, more on one, none on one; through the method and vLLM's runner."""
    for rank, result in enumerate(data_ranks):
        facts = result["layers"][activations]
        assert facts["over_ranks"] and facts["reduced"], "vLLM adds nothing up"
        assert facts["parallel"]["combine"] == facts["marked"] == "all_to_all" and facts["parallel"]["rank"] == rank
        assert facts["here"] == list(range(4 * rank, 4 * rank + 4)), "half of the experts"
        assert facts["equal"] == [True] * 5 and facts["runner"] == [True] * 3
        assert facts["planted"] is False, "without the other rank's experts out is another"
        assert facts["reloaded"], "new weights on both ranks, in the layers that are there"


def test_shared_experts_are_added_by_vllm(data_ranks):
    for result in data_ranks:
        assert result["layers"]["shared"]["over_ranks"] and result["layers"]["shared"]["equal"]


def test_a_rank_that_is_killed_ends_the_others_run_by_name(data_ranks):
    left, gone = (result["layers"].get("killed") for result in data_ranks)
    assert gone is None
    assert left["error"].startswith("IoError: exchange: ") and "no word from rank 1" in left["error"]
    assert left["seconds"] < 60


@pytest.mark.parametrize("placement", ["linear", "round_robin"])
def test_ranks_with_the_same_tokens_are_within_the_bound_of_one_more_sum(tensor_ranks, placement):
    """docs/explanation/expert-parallel.md, section 2: at most (2 n + world - 1) 2^-24 of the products' magnitudes."""
    for rank, result in enumerate(tensor_ranks):
        facts = result["layers"][placement]
        here = list(range(4 * rank, 4 * rank + 4)) if placement == "linear" else list(range(rank, 8, 2))
        assert facts["here"] == here and facts["parallel"]["combine"] == facts["marked"] == "all_reduce"
        assert facts["over_ranks"] and facts["reduced"], "vLLM adds nothing up"
        assert facts["over"] == [0, 0, 0] and facts["same"] == [True] * 3
        assert min(facts["planted"][1:]) > 0, "without some experts out is beyond the bound"


def test_what_vllm_has_to_add_up_stays_its_own_with_the_reason(tensor_ranks):
    for result in tensor_ranks:
        layers, log = result["layers"], result["log"]
        for name in ("shared", "reduced by the model", "runner of the model", "auto", "engine"):
            assert not layers[name]["over_ranks"] and not layers[name]["reduced"], name
            assert layers[name]["marked"] is None, name
        assert layers["shared"]["off"] < 2.0**-7, "bf16 rows of two ranks, and their sum"
        reasons = [line.removeprefix(SENTENCE) for line in log if line.startswith(SENTENCE)]
        assert [reason.split()[0] for reason in reasons] == ["shared", "the", "a", "NVFP4_MOE_EXCHANGE=auto"]
        assert "cannot exchange the rows of model.layers.80.mlp.experts: shared experts" in layers["insisted"]["error"]


# ---- which layers


def moe(device: str = "cpu", experts: int = 8, **parallel):
    sizes = {"ep_size": 2, "dp_size": 2, "sp_size": 1, "pcp_size": 1, "use_ep": True} | parallel
    return types.SimpleNamespace(num_experts=experts, device=device, moe_parallel_config=types.SimpleNamespace(**sizes))


@pytest.fixture
def fitting(monkeypatch):
    monkeypatch.setattr(internals, "fitting", frozenset(internals.OPTIONAL))


def planned(moe, asked: str = "auto", insists: bool = False, **config):
    current = types.SimpleNamespace(parallel_config=types.SimpleNamespace(**config))
    return ranks.plan_ranks(moe, current, asked, insists, 100)


def test_how_ranks_exchange_follows_from_who_has_which_tokens(fitting):
    assert planned(moe(use_ep=False)) is None and planned(moe(ep_size=1)) is None
    assert planned(moe(), "engine") is None
    own = planned(moe())
    assert (own.combine, own.link, own.max_tokens, own.timeout) == ("all_to_all", "host", 100, 600.0)
    split = planned(moe(ep_size=4, sp_size=2), cpu_distributed_timeout_seconds=7)
    assert (split.combine, split.max_tokens, split.timeout) == ("all_to_all", 50, 7.0)
    same = planned(moe(dp_size=1), "host", insists=True)
    assert (same.combine, same.link, same.insists) == ("all_reduce", "host", True)
    for link in ("peers", "nccl"):
        assert planned(moe("cuda:0"), link, distributed_timeout_seconds=9).timeout == 9.0


KEPT = [
    (moe("cuda:0"), "auto", {}, "NVFP4_MOE_EXCHANGE=auto leaves GPUs to it"),
    (moe(dp_size=1), "auto", {}, "NVFP4_MOE_EXCHANGE=auto leaves ranks with the same tokens to it"),
    (moe(), "peers", {}, "NVFP4_MOE_EXCHANGE=peers on cpu: expected host"),
    (moe("cuda:0"), "host", {}, "NVFP4_MOE_EXCHANGE=host on cuda: expected peers or nccl"),
    (moe(ep_size=4), "host", {}, "some of the ranks have the same tokens"),
    (moe(pcp_size=2), "host", {}, "prefill context parallel"),
    (moe(experts=7), "host", {}, "7 experts on 2 ranks: expected as many on each"),
    (moe(), "host", {"use_ubatching": True}, "microbatches"),
    (moe(), "host", {"enable_elastic_ep": True}, "elastic expert parallel"),
]


@pytest.mark.parametrize(("moe", "asked", "config", "why"), KEPT, ids=[why.split(":")[0] for *_, why in KEPT])
def test_what_stays_vllm_s_says_why(fitting, moe, asked, config, why):
    with pytest.raises(NoExchange) as kept:
        planned(moe, asked, **config)
    assert why in str(kept.value)


def test_a_release_whose_members_differ_exchanges_by_itself(monkeypatch):
    monkeypatch.setattr(internals, "fitting", frozenset())
    with pytest.raises(NoExchange, match="this release's members"):
        planned(moe())


class Linked:
    """An exchange whose GPUs cannot be connected. Counts the attempts."""

    rank, world, tried = 0, 2, 0

    def use_peers(self, device: str) -> None:
        Linked.tried += 1
        raise nvfp4_moe.Unsupported("peers: expected all ranks on one host, got rank 1 on another than rank 0's")

    def use_nccl(self, device: str) -> None:
        raise nvfp4_moe.IoError("exchange: expected rank 1, got none: it has left")


def test_gpus_that_cannot_be_connected_are_left_to_vllm_and_a_missing_rank_is_an_error(fitting, monkeypatch):
    monkeypatch.setattr(ranks, "torch_exchange", lambda group, timeout: Linked())
    group_type = type("Group", (), {"cpu_group": None})  # a class can be referred to weakly
    made = group_type()
    for _ in range(2):
        with pytest.raises(ranks.NoExchange, match="expected all ranks on one host"):
            ranks._connected(made, planned(moe("cuda:0"), "peers"), "cuda:0")
    assert Linked.tried == 1, "asked once, not by every layer"
    with pytest.raises(nvfp4_moe.IoError, match="it has left"):
        ranks._connected(group_type(), planned(moe("cuda:0"), "nccl"), "cuda:0")


def test_an_exchange_is_kept_for_its_link_and_timeout_alone(fitting, monkeypatch):
    """For two engines in a process, or for layers with other options than those before them."""
    group = type("Group", (), {"cpu_group": None})()
    one = nvfp4_moe.ThreadGroup(1)
    monkeypatch.setattr(ranks, "torch_exchange", lambda group, timeout: one.join(0))
    first = ranks._connected(group, planned(moe(), "host"), "cpu")
    assert ranks._connected(group, planned(moe(), "host"), "cpu") is first
    words = "goes over host with a timeout of 600 s, and this layer asks for host with a timeout of 7 s"
    with pytest.raises(ranks.NoExchange, match=words):
        ranks._connected(group, planned(moe(), "host", cpu_distributed_timeout_seconds=7), "cpu")
    with pytest.raises(ranks.NoExchange, match="asks for peers with a timeout of 600 s"):
        ranks._connected(group, planned(moe("cuda:0"), "peers"), "cuda:0")
    assert ranks._connected(group, planned(moe(), "host"), "cpu") is first

    refused = type("Group", (), {"cpu_group": None})()
    monkeypatch.setattr(ranks, "torch_exchange", lambda group, timeout: Linked())
    with pytest.raises(ranks.NoExchange, match="expected all ranks on one host"):
        ranks._connected(refused, planned(moe("cuda:0"), "peers"), "cuda:0")
    with pytest.raises(nvfp4_moe.IoError, match="it has left"):  # another link has its own message
        ranks._connected(refused, planned(moe("cuda:0"), "nccl"), "cuda:0")


# ---- the engine

# Formats whose rows do not depend on the number of other rows of an expert. bf16 needs VLLM_BATCH_INVARIANT for that,
# for which vLLM's engine needs Triton on a CPU.
EXACT = {"activations": "nvfp4"}


cpus_only = pytest.mark.skipif(on_gpu(), reason="over the host's exchange, which is for CPUs")


@pytest.fixture(scope="session")
def one_rank(made, serve):
    modelopt = made[0]["modelopt"]
    jobs = [job(how, modelopt, EXACT, options={"enforce_eager": how == "eager"}) for how in ("eager", "compiled")]
    jobs.append(job("twin", made[0]["twin"], routers=True))
    return serve(jobs, {"VLLM_CPU_OMP_THREADS_BIND": "0"})


@pytest.fixture(scope="session")
def judge(made, one_rank):
    truth = Truth(made[0]["twin"])
    return lambda run, what: judge_without_routers(truth, ok(one_rank["twin"])["runs"][0], run, what)


@cpus_only
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_data_parallel_ranks_say_what_one_rank_says(made, one_rank, serve_data_parallel, how):
    """Rank 1 asks for fewer tokens, and takes part with dummy tokens while rank 0 continues. vLLM itself has no data
    parallel MoE on CPUs: without the exchange its gather raises NotImplementedError."""
    given = job(how, made[0]["modelopt"], EXACT, options={"enforce_eager": how == "eager"})
    (expected,) = ok(one_rank[how])["runs"]
    for rank, result in enumerate(serve_data_parallel([given, given | {"tokens": 3}])):
        (run,) = ok(result)["runs"]
        assert all(
            f"experts {4 * rank}..{4 * rank + 3} of 8" in layer and "nvfp4" in layer for layer in result["layers"]
        )
        assert [len(said["tokens"]) for said in run] == [TOKENS if rank == 0 else 3] * len(expected)
        for said, whole in zip(run, expected, strict=True):
            assert said["tokens"] == whole["tokens"][: len(said["tokens"])]
            assert said["logprobs"] == whole["logprobs"][: len(said["logprobs"])], "bit for bit"


@cpus_only
def test_sequence_parallel_ranks_are_as_near_to_the_truth(made, judge, serve_data_parallel):
    """Two data parallel ranks of two tensor parallel ranks each, which have parts of its tokens in a MoE layer."""
    given = job("split", made[0]["modelopt"], options={"tensor_parallel_size": 2, "distributed_executor_backend": "mp"})
    first, _ = serve_data_parallel([given, given | {"tokens": 3}], {"VLLM_CPU_OMP_THREADS_BIND": "0|1|0|1"})
    judge(ok(first)["runs"][0], "split")


@pytest.fixture(scope="session")
def summed(made, serve):
    """Two tensor parallel ranks in compiled engines that share a cache of graphs: with rows that vLLM adds up, and with
    rows that it must not."""
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enforce_eager": False}
    jobs = []
    for exchange in ("engine", "host"):
        environment = {"NVFP4_MOE_EXCHANGE": exchange, "NVFP4_MOE_MODE": "1"}
        jobs.append(job(exchange, made[0]["modelopt"], options=options, environment=environment))
    return serve(jobs, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"})


@cpus_only
@pytest.mark.parametrize("exchange", ["engine", "host"])
def test_tensor_parallel_ranks_add_up_as_near_to_the_truth(summed, judge, exchange):
    (run,) = ok(summed[exchange])["runs"]
    judge(run, exchange)


def test_compiled_graphs_are_told_apart(fitting, monkeypatch):
    """vLLM keys cached graphs by hashes of its environment and of a config. If a model compiles an inner one
    (with_hf_config), that config is a copy of the engine's, made before the layers exist and with a dict of its own."""
    from vllm.compilation.caching import aot_compile_hash_factors
    from vllm.config import VllmConfig

    monkeypatch.setattr(ranks, "_combine_of", {})
    config = VllmConfig(additional_config={"nvfp4_moe": {"exchange": "host"}})
    copied = copy.copy(config)
    copied.additional_config = dict(config.additional_config)

    def keys():
        return tuple(str(aot_compile_hash_factors(of)) for of in (config, copied))

    planned(moe(), "host")
    seen = [keys()]
    for name, combine in (("0", "all_to_all"), ("1", "all_to_all"), ("1", "all_reduce")):
        ranks.note_combine(f"model.layers.{name}.mlp.experts", combine)
        seen.append(keys())
    assert all(len(set(of_config)) == 4 for of_config in zip(*seen, strict=True)), "by each config alone"
    ranks.note_combine("model.layers.1.mlp.experts", "all_to_all")
    assert keys() == seen[2], "the same layers, whatever was said before"
    for name in "01":
        ranks.note_combine(f"model.layers.{name}.mlp.experts", None)
    assert keys() == seen[0]


def test_a_layer_that_is_planned_anew_is_none_over_ranks(fitting, monkeypatch):
    """For a second engine in one process, whose layers have the names of the first's."""
    monkeypatch.setattr(ranks, "_combine_of", {})
    monkeypatch.setattr(plan, "settings", lambda: types.SimpleNamespace(mode="0"))
    ranks.note_combine("model.layers.0.mlp.experts", "all_reduce")
    assert plan.plan_of(None, "model.layers.0.mlp.experts") is None
    assert ranks._combine_of == {}


def test_a_release_that_hashes_otherwise_exchanges_by_itself(fitting, monkeypatch):
    import vllm.envs

    monkeypatch.setattr(vllm.envs, "compile_factors", lambda: {"VLLM_PP_LAYER_PARTITION": None})
    with pytest.raises(NoExchange, match="keeps compiled graphs by other names"):
        planned(moe(), "host")
