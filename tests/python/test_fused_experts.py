"""An engine's fused parameters as a layer: the bytes of separate experts, placements, MXFP4, illegal input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

import nvfp4_moe as nv  # noqa: E402
from fused_layers import INNER, E, H, K, inputs, layers, opened, parameters, run  # noqa: E402
from nvfp4_moe import _fused_experts as fused  # noqa: E402
from nvfp4_moe._fused_parameters import FusedParameters  # noqa: E402
from nvfp4_moe._load_log import LoadLog  # noqa: E402
from nvfp4_moe._mxfp4 import cast_mxfp4  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("up_first", [False, True])
@pytest.mark.parametrize("activation_format", fused.ACTIVATION_FORMATS)
def test_fused_parameters_make_the_layer_of_the_experts_apart(up_first, activation_format):
    expected = layers.layer(activation_format=activation_format).run(*inputs())
    assert expected.abs().max() > 0
    given = parameters(up_first=up_first)
    experts = opened(given, activation_format=activation_format)
    for tensor in given.values():  # the caller may write to it again: the layer keeps no reference
        if isinstance(tensor, torch.Tensor):
            tensor.view(torch.uint8).zero_()
    assert torch.equal(run(experts, *inputs()), expected)


def test_one_scale_for_gate_and_up_is_taken_for_both():
    given = parameters()
    given["w13_tensor_scale"] = given["w13_tensor_scale"][:, :1]
    both = given | {"w13_tensor_scale": given["w13_tensor_scale"].repeat(1, 2)}
    assert torch.equal(run(opened(given), *inputs()), run(opened(both), *inputs()))
    flat = given | {"w13_tensor_scale": given["w13_tensor_scale"][:, 0]}
    assert torch.equal(run(opened(flat), *inputs()), run(opened(both), *inputs()))
    with pytest.raises(nv.InvalidArgument, match=r"w13_tensor_scale: expected \(6,\) or \(6, 2\), got \(6, 3\)"):
        opened(given | {"w13_tensor_scale": torch.ones(E, 3)})


def test_padding_of_the_intermediate_dimension_is_not_read():
    given = parameters()
    padded = dict(given)
    extra = 16
    for name in ("w13", "w13_scale"):
        raw = given[name].view(torch.uint8)
        fill = torch.full((E, extra, raw.shape[2]), 0x7F, dtype=torch.uint8)  # NaN as a scale
        halves = [torch.cat([half, fill], 1) for half in raw.split(INNER, 1)]
        padded[name] = torch.cat(halves, 1).view(given[name].dtype)
    for name, columns in (("w2", extra // 2), ("w2_scale", extra // 16)):
        raw = given[name].view(torch.uint8)
        fill = torch.full((E, H, columns), 0x7F, dtype=torch.uint8)
        padded[name] = torch.cat([raw, fill], 2).view(given[name].dtype)
    experts = opened(padded, intermediate_size=INNER)
    assert torch.equal(run(experts, *inputs()), run(opened(given), *inputs()))
    with pytest.raises(nv.BadInput, match="scale"):
        opened(padded)
    with pytest.raises(nv.InvalidArgument, match="intermediate_size: expected a multiple of 16 from 16 to 48, got 40"):
        opened(given, intermediate_size=40)


def ranks_of(places: list[list[int]]) -> list:
    """A rank's experts by global id, in the rank's order."""
    ranks = []
    for here in places:
        expert_map = torch.full((E,), -1, dtype=torch.int32)
        expert_map[here] = torch.arange(len(here), dtype=torch.int32)
        ranks.append(opened(parameters(experts=here), fused.Placement.from_map(expert_map, E, len(here))))
    return ranks


@pytest.mark.parametrize("places", [[[0, 1, 2], [3, 4, 5]], [[0, 2, 4], [1, 3, 5]], [[5, 0], [3, 1, 4, 2]]])
def test_ranks_of_any_placement_add_up_to_the_layer(places):
    hidden, ids, weights = inputs()
    ranks = ranks_of(places)
    in_a_row = all(here == list(range(here[0], here[0] + len(here))) for here in places)
    assert all((rank.placement.lookup is None) == in_a_row for rank in ranks)
    # One assignment at a time, so that a sum has one term and rounds nothing.
    whole = opened(parameters())
    for k in range(K):
        one = torch.full_like(ids, -1)
        one[:, k] = ids[:, k]
        parts = [run(rank, hidden, one, weights) for rank in ranks]
        assert torch.equal(sum(parts), run(whole, hidden, one, weights))


def test_ranks_with_few_experts_or_none():
    """Ids of no expert add nothing under a lookup; fewer local experts than top_k; room for an unused expert."""
    hidden, ids, weights = inputs()
    (rank,) = ranks_of([[4, 1]])
    for bad in (-1, -7, E, E + 100):
        for dtype in (ids.dtype, torch.int32):
            assert not run(rank, hidden, torch.full_like(ids, bad, dtype=dtype), weights).any()
    (rank,) = ranks_of([[3]])
    one = torch.where(ids == 3, ids, -1)
    assert torch.equal(run(rank, hidden, ids, weights), run(opened(parameters()), hidden, one, weights))
    placement = fused.Placement.from_map(torch.full((E,), -1, dtype=torch.int32), E, 1)
    assert not run(opened(parameters(experts=range(1)), placement), hidden, ids, weights).any()


def test_a_map_that_is_none_is_refused():
    for expert_map, words in (
        (None, "expected one, since 3 of 6 experts are here"),
        (torch.zeros(5, dtype=torch.int32), r"expected \(6,\), got \(5,\)"),
        (torch.arange(6), "local experts below 3, got 5"),
    ):
        with pytest.raises(nv.InvalidArgument, match=words):
            fused.Placement.from_map(expert_map, E, 3)


def test_a_limit_makes_a_plain_swiglu_a_clamped_one():
    experts = opened(parameters(), swiglu_limit=0.05)
    assert experts.layer.config.activation == "swiglu_clamped" and experts.layer.config.swiglu_limit == 0.05
    assert not torch.equal(run(experts, *inputs()), run(opened(parameters()), *inputs()))


def test_a_checkpoint_s_illegal_scale_is_an_error_and_a_dummy_s_is_made_legal():
    given = parameters()
    given["w13_scale"].view(torch.uint8)[2, 5, 1] = 0x7F
    given["w2_tensor_scale"] = -given["w2_tensor_scale"]
    with pytest.raises(nv.BadInput):
        opened(given)
    for name in ("w13_scale", "w2_scale", "w13_tensor_scale", "w2_tensor_scale"):
        fused.make_legal(given[name])
    assert torch.isfinite(run(opened(given), *inputs())).all()


def test_dummy_scales_are_legal_whatever_they_were():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    fused.make_legal(every)
    values = every.float()
    assert torch.isfinite(values).all() and (values > 0).all()
    floats = torch.tensor([0.0, -0.0, -3.0, float("nan"), float("-inf"), 2.0])
    fused.make_legal(floats)
    assert floats.tolist() == [1, 1, 3, 1, 1, 2]
    powers = torch.arange(256, dtype=torch.uint8)
    fused.make_legal(powers)
    assert powers[:255].tolist() == list(range(255)) and powers[255] == 127


def test_reciprocals_are_those_of_a_checkpoint():
    values = torch.tensor([3.0, 448.0, 1e-3, 7777.7], dtype=torch.float32)
    expected = (1.0 / values.numpy().astype(np.float64)).astype(np.float32)
    assert np.array_equal(fused.reciprocal(values).numpy(), expected)


def test_new_weights_go_into_the_layer_that_is_there():
    experts = opened(parameters(seed=0))
    handle, before = experts.layer.handle, run(experts, *inputs())
    replaced = fused.replace_fused(experts, FusedParameters(**parameters(seed=1)))
    assert replaced.layer is experts.layer and replaced.layer.handle == handle
    assert torch.equal(run(replaced, *inputs()), run(opened(parameters(seed=1)), *inputs()))
    assert not torch.equal(run(replaced, *inputs()), before)
    fused.replace_fused(experts, FusedParameters(**parameters(seed=0, up_first=True)))
    assert torch.equal(run(experts, *inputs()), before)
    with pytest.raises(nv.InvalidArgument, match="experts: expected 6, as they were, got 2"):
        fused.replace_fused(experts, FusedParameters(**parameters(experts=range(2))))
    bad = parameters(seed=1)
    bad["w13_tensor_scale"][4, 1] = float("nan")
    with pytest.raises(nv.BadInput):
        fused.replace_fused(experts, FusedParameters(**bad))


# ---- MXFP4, against the library's own cast of a checkpoint


def mxfp4_matrix(random, rows: int, cols: int, spread: int, top: int):
    """(codes, E8M0 scales) with exponents over that range, including zero blocks and stray scales over zeros."""
    codes = random.integers(0, 256, (rows, cols // 2), dtype=np.uint8)
    scales = (top - random.integers(0, spread + 1, (rows, cols // 32))).astype(np.uint8)
    zeros = random.random((rows, cols // 32)) < 0.1
    codes.reshape(rows, cols // 32, 16)[zeros] = 0x08  # -0 in the low nibble
    scales[zeros] = np.where(random.random(zeros.sum()) < 0.5, 254, scales[zeros])
    halves = random.random((rows, cols // 16)) < 0.05  # one 16-block of a pair
    codes.reshape(rows, cols // 16, 8)[halves] = 0
    return codes, scales


def write_mxfp4(directory: Path, experts: list[dict], inner: int, hidden: int) -> None:
    directory.mkdir()
    config = {
        "model_type": "deepseek_v4", "num_hidden_layers": 1, "hidden_size": hidden, "moe_intermediate_size": inner,
        "n_routed_experts": len(experts), "num_experts_per_tok": 2, "n_shared_experts": 0, "hidden_act": "silu",
        "swiglu_limit": 10.0, "routed_scaling_factor": 1.0, "num_hash_layers": 0,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {}
    for number, expert in enumerate(experts):
        for name, (codes, scales) in expert.items():
            tensors[f"layers.0.ffn.experts.{number}.{name}.weight"] = codes
            tensors[f"layers.0.ffn.experts.{number}.{name}.scale"] = scales
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(("spread", "top"), [(9, 127), (17, 130), (18, 127), (30, 127), (60, 90), (9, 10)])
def test_the_cast_from_mxfp4_has_the_library_s_bytes(tmp_path, spread, top, count):
    random = np.random.default_rng(spread)
    inner, hidden, number = 64, 96, 3
    sizes = {
        "w1": (inner, hidden, spread, top),
        "w3": (inner, hidden, spread, top - 1),
        "w2": (hidden, inner, spread, top),
    }
    experts = [{name: mxfp4_matrix(random, *size) for name, size in sizes.items()} for _ in range(number)]
    write_mxfp4(tmp_path / "model", experts, inner, hidden)
    checkpoint = nv.Checkpoint(str(tmp_path / "model"))
    total = 0
    for name, part in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
        codes, scales = (torch.from_numpy(np.stack([expert[name][at] for expert in experts])) for at in (0, 1))
        before = codes.clone()
        cast_codes, cast_scales, tensor_scale, rounded = cast_mxfp4(codes, scales)
        assert torch.equal(codes, before)
        total += rounded
        for expert in range(number):
            expected = checkpoint.expert(0, expert)[part]
            assert np.array_equal(cast_codes[expert].numpy(), expected["codes"]), (part, expert)
            assert np.array_equal(cast_scales[expert].numpy(), expected["scales"]), (part, expert)
            assert tensor_scale[expert] == expected["tensor_scale"]
    assert (total > 0) == (spread > 17)
    count("16-blocks rounded by the cast from MXFP4", total, number * 3 * inner * hidden // 16)


def test_fused_mxfp4_parameters_make_the_checkpoint_s_layer(tmp_path):
    random = np.random.default_rng(3)
    inner, hidden, number = 64, 64, 4
    experts = [{name: mxfp4_matrix(random, 64, 64, 8, 122) for name in ("w1", "w3", "w2")} for _ in range(number)]
    write_mxfp4(tmp_path / "model", experts, inner, hidden)
    expected = nv.MoeLayer.from_checkpoint(
        str(tmp_path / "model"), 0, activation_format="bf16", router_weight="after_down", max_tokens=32
    )

    def stack(part, *names):
        return torch.from_numpy(np.stack([np.concatenate([e[name][part] for name in names]) for e in experts]))

    given = {"w13_tensor_scale": None, "w2_tensor_scale": None, "mxfp4": True}
    given |= {"w13": stack(0, "w1", "w3"), "w13_scale": stack(1, "w1", "w3"), "w2": stack(0, "w2")}
    given |= {"w2_scale": stack(1, "w2")}
    options = {"placement": fused.Placement(number), "top_k": 2, "max_tokens": 32}
    ours = fused.open_fused(FusedParameters(**given), swiglu_limit=10.0, activation_format="bf16", **options)
    hidden_states = torch.randn(7, hidden, generator=torch.manual_seed(0)).bfloat16()
    batch = hidden_states, torch.randint(0, number, (7, 2)), torch.rand(7, 2)
    assert torch.equal(run(ours, *batch), expected.run(*batch))
    nan = given["w2_scale"].clone()
    nan[1, 2, 0] = 0xFF
    with pytest.raises(nv.InvalidArgument, match="local expert 1: expected bytes below 0xFF, got NaN"):
        fused.open_fused(FusedParameters(**given | {"w2_scale": nan}), **options)
    with pytest.raises(nv.Unsupported, match="whole blocks of 32"):
        FusedParameters(**given, intermediate_size=48).stacks()


# ---- settings, refusals, log lines of a load


def test_settings_come_from_the_engine_s_configuration_then_the_environment():
    assert fused.read_settings({}, {}) == fused.Settings("auto", "auto", "auto", "auto")
    environ = {"NVFP4_MOE_MODE": "1", "NVFP4_MOE_ACTIVATIONS": "nvfp4"}
    assert fused.read_settings(None, environ) == fused.Settings("1", "nvfp4")
    assert fused.read_settings({}, environ).insists
    assert fused.read_settings({"mode": 0, "activations": "bf16"}, environ) == fused.Settings("0", "bf16")
    environ = {"NVFP4_MOE_EXCHANGE": "peers"}
    assert fused.read_settings({}, environ).exchange == "peers"
    assert fused.read_settings({"exchange": "engine"}, environ).exchange == "engine"


@pytest.mark.parametrize(
    ("given", "environ", "message"),
    [
        ({}, {"NVFP4_MOE_MODE": "yes"}, "NVFP4_MOE_MODE: expected one of 0, auto, 1, got 'yes'"),
        ({}, {"NVFP4_MOE": "0"}, "NVFP4_MOE: expected NVFP4_MOE_MODE, its new name, got NVFP4_MOE=0"),
        ({}, {"NVFP4_MOE_ACTIVATIONS": ""}, "ACTIVATIONS: expected one of auto, bf16, nvfp4, fp8, int8_block, got ''"),
        ({"router": "vllm"}, {}, "router: expected one of auto, own, engine, got 'vllm'"),
        ({}, {"NVFP4_MOE_EXCHANGE": "gloo"}, "EXCHANGE: expected one of auto, engine, host, nccl, peers, got 'gloo'"),
        ({"mode": True}, {}, "mode: expected one of 0, auto, 1, got True"),
        ({"activations": "w4a4"}, {}, "activations: expected one of auto, bf16, nvfp4, fp8, int8_block, got 'w4a4'"),
        ({"activation": "bf16"}, {}, "expected the keys mode, activations, router and exchange, got activation"),
    ],
)
def test_settings_that_mean_nothing_are_named(given, environ, message):
    with pytest.raises(nv.InvalidArgument, match=message):
        fused.read_settings(given, environ)


def test_why_a_layer_or_a_slice_is_refused(monkeypatch):
    sizes = {"num_experts": E, "top_k": K, "hidden_size": H, "intermediate_size": INNER}
    assert fused.why_refused(sizes, "cpu", fused.Settings()) is None
    for name, value in (("intermediate_size", 40), ("top_k", 9)):
        assert name in fused.why_refused(sizes | {name: value}, "cpu", fused.Settings())
    assert fused.why_refused(sizes, "cuda:99", fused.Settings())
    assert fused.why_slice_refused(56, 2, 16, "--option") == (
        "intermediate_size: a rank's slice is 56 of 112, expected a multiple of 16; use expert parallel (--option), which "
        "does not slice experts, or fewer tensor parallel ranks"
    )
    assert fused.why_slice_refused(64, 2, 16, "") is None
    assert fused.why_slice_refused(56, 1, 16, "") is None, "no rank would help"
    # The kernels of LEFT_TO_ENGINES are used only if the user insists.
    monkeypatch.setattr(fused, "explain", lambda options, device: [{"chosen": True, "backend": device}])
    auto, one = ([fused.why_refused(sizes, g, fused.Settings(m)) for g in fused.LEFT_TO_ENGINES] for m in ("auto", "1"))
    assert "the plain kernels" in auto[0] and all("no GPU of its kind" in why for why in auto[1:]) and not any(one)


def test_what_a_load_tells():
    now, lines = [0.0], []
    log = LoadLog(lines.append, every=4, clock=lambda: now[0])
    experts = opened(parameters())
    for _ in range(9):
        log.plan()

    def load():
        lines.clear()
        for layer in range(9):
            log.packed(f"layers.{layer}", experts, 0.5)
            now[0] += 40.0 if layer == 5 else 1.0
        return [line.partition(" layers")[0] for line in lines[1:]]

    assert load() == ["packed 4 of 9", "packed 7 of 9", "packed 8 of 9", "packed 9 of 9"]
    assert lines[0].startswith("layers.0: <MoeLayer 64x48")
    assert lines[-1].endswith(f"{9 * experts.packed_bytes:,} bytes, 4.5 s")
    first = list(lines)
    assert load() and lines == first  # a reload starts the count again
    log.plan()  # of another model
    log.packed("other", experts, 0.5)
    assert lines[-1].startswith("other: <MoeLayer")


def test_a_load_says_once_why_activations_have_their_format():
    lines = []
    log = LoadLog(lines.append)
    experts = opened(parameters())
    whys = ["bf16, because nothing is declared", "bf16, because nothing is declared", "fp8, because it is declared"]
    for _ in whys:
        log.plan()
    for _ in range(2):  # and again after a reload
        lines.clear()
        for number, why in enumerate(whys):
            log.packed(f"layers.{number}", experts, 0.5, why)
        assert [line for line in lines if line.startswith("activations: ")] == [
            "activations: bf16, because nothing is declared",
            "activations: fp8, because it is declared, in layers such as layers.2",
        ]
