"""An engine's fused parameters as a layer: the bytes of separate experts, placements, MXFP4, biases, illegal input."""

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
from nvfp4_moe import _fused_parameters as as_read  # noqa: E402
from nvfp4_moe import _settings as settings  # noqa: E402
from nvfp4_moe._declared import Declared, Refused  # noqa: E402
from nvfp4_moe._fused_parameters import FusedParameters  # noqa: E402
from nvfp4_moe._load_log import LoadLog  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("up_first", "activation_format"), [(False, "bf16"), (True, "nvfp4")])
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
    column = given["w13_tensor_scale"][:, :1]
    both = run(opened(given | {"w13_tensor_scale": column.repeat(1, 2)}), *inputs())
    for shared in (column, column[:, 0]):
        assert torch.equal(run(opened(given | {"w13_tensor_scale": shared}), *inputs()), both)
    with pytest.raises(nv.InvalidArgument, match=r"w13_tensor_scale: expected \(6,\) or \(6, 2\), got \(6, 3\)"):
        opened(given | {"w13_tensor_scale": torch.ones(E, 3)})


def test_padding_of_the_intermediate_dimension_is_not_read():
    given, padded = parameters(), parameters()
    for name, dimension, extra in (("w13", 1, 16), ("w13_scale", 1, 16), ("w2", 2, 8), ("w2_scale", 2, 1)):
        halves = given[name].view(torch.uint8).split(INNER if dimension == 1 else H, 1)
        filled = []
        for half in halves:
            shape = list(half.shape)
            shape[dimension] = extra
            filled.append(torch.cat([half, torch.full(shape, 0x7F, dtype=torch.uint8)], dimension))  # NaN as a scale
        padded[name] = torch.cat(filled, 1).view(given[name].dtype)
    assert torch.equal(run(opened(padded, intermediate_size=INNER), *inputs()), run(opened(given), *inputs()))
    with pytest.raises(nv.BadInput, match="scale"):
        opened(padded)
    with pytest.raises(nv.InvalidArgument, match="intermediate_size: expected a multiple of 16 from 16 to 48, got 40"):
        opened(given, intermediate_size=40)


def test_padding_after_a_reload_is_zeroed():
    """A block of w2's scales that is partly filled stays."""
    given, before = FusedParameters(**parameters()), parameters()
    given.zero_padding(24)
    for half, whole in zip(given.w13.split(INNER, 1), before["w13"].split(INNER, 1), strict=True):
        assert torch.equal(half[:, :24], whole[:, :24]) and not half[:, 24:].any()
    scales, whole = given.w2_scale.view(torch.uint8), before["w2_scale"].view(torch.uint8)
    assert torch.equal(scales[:, :, :2], whole[:, :, :2]) and not scales[:, :, 2:].any()


def rank_of(here: list[int]):
    """A rank with these experts, by global id in the rank's order."""
    expert_map = torch.full((E,), -1, dtype=torch.int32)
    expert_map[here] = torch.arange(len(here), dtype=torch.int32)
    return opened(parameters(experts=here), fused.Placement.from_map(expert_map, E, len(here)))


@pytest.mark.parametrize("places", [[[0, 1, 2], [3, 4, 5]], [[0, 2, 4], [1, 3, 5]], [[5, 0], [3, 1, 4, 2]]])
def test_ranks_of_any_placement_add_up_to_the_layer(places):
    hidden, ids, weights = inputs()
    ranks = [rank_of(here) for here in places]
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
    """Illegal ids add nothing under a lookup; fewer local experts than top_k; room for an unused expert."""
    hidden, ids, weights = inputs()
    rank = rank_of([4, 1])
    for bad in (-1, -7, E, E + 100):
        for dtype in (ids.dtype, torch.int32):
            assert not run(rank, hidden, torch.full_like(ids, bad, dtype=dtype), weights).any()
    one = torch.where(ids == 3, ids, -1)
    assert torch.equal(run(rank_of([3]), hidden, ids, weights), run(opened(parameters()), hidden, one, weights))
    none = fused.Placement.from_map(torch.full((E,), -1, dtype=torch.int32), E, 1)
    assert not run(opened(parameters(experts=range(1)), none), hidden, ids, weights).any()
    for expert_map, words in (
        (None, "expected one, since 3 of 6 experts are here"),
        (torch.zeros(5, dtype=torch.int32), r"expected \(6,\), got \(5,\)"),
        (torch.tensor([0, 1, 2, 3, -1, -1]), "local experts below 3, got 3"),
    ):
        with pytest.raises(nv.InvalidArgument, match=words):
            fused.Placement.from_map(expert_map, E, 3)


def test_a_checkpoint_s_illegal_scale_is_an_error_and_a_dummy_s_is_made_legal():
    given = parameters()
    given["w13_scale"].view(torch.uint8)[2, 5, 1] = 0x7F
    with pytest.raises(nv.BadInput):
        opened(given)
    every = torch.arange(256, dtype=torch.uint8)
    floats = torch.tensor([0.0, -0.0, -3.0, float("nan"), float("-inf"), 2.0])
    fp8, powers = every.clone().view(torch.float8_e4m3fn), every.clone()
    for dummy in (given["w13_scale"], fp8, floats, powers):
        as_read.make_legal(dummy)
    assert torch.isfinite(run(opened(given), *inputs())).all()
    assert torch.isfinite(fp8.float()).all() and (fp8.float() > 0).all()
    assert floats.tolist() == [1, 1, 3, 1, 1, 2]
    assert powers.tolist() == [*range(255), 127]
    as_read.mark_missing(powers)  # E8M0 of a checkpoint without this scale
    assert (powers == 0xFF).all()


def test_reciprocals_are_those_of_a_checkpoint():
    values = torch.tensor([3.0, 448.0, 1e-3, 7777.7], dtype=torch.float32)
    expected = (1.0 / values.numpy().astype(np.float64)).astype(np.float32)
    assert np.array_equal(as_read.reciprocal(values).numpy(), expected)


def test_an_engine_s_layer_is_read_by_the_names_of_its_form():
    given, expected, layer = parameters(), parameters(), torch.nn.Module()
    for matrix in ("w13", "w2"):
        of_all = 1.0 / given[f"{matrix}_tensor_scale"]
        expected[f"{matrix}_tensor_scale"] = as_read.reciprocal(of_all)
        held = {"packed": given[matrix], "weight_scale": given[f"{matrix}_scale"], "scale_of_all": of_all}
        for name, tensor in held.items():
            layer.register_parameter(f"{matrix}_{name}", torch.nn.Parameter(tensor, requires_grad=False))
    form, options = as_read.Form("packed", "scale_of_all", reciprocal=True), {"activation": "swiglu", "top_k": K}
    read = FusedParameters.of_layer(layer, form, options)
    experts = fused.open_fused(read, placement=fused.Placement(E), max_tokens=32, activation_format="bf16", **options)
    assert torch.equal(run(experts, *inputs()), run(opened(expected), *inputs()))
    layer.w13_scale_of_all.data[1], layer.w2_scale_of_all.data[1] = -2.0, 0.0
    dummy = FusedParameters.of_layer(layer, form, options)
    dummy.make_scales_legal()  # after the reciprocals, which may be infinite
    assert dummy.w13_tensor_scale[1].tolist() == [0.5, 0.5] and dummy.w2_tensor_scale[1] == 1
    as_read.empty_parameters(layer.parameters())
    assert {tuple(tensor.shape) for tensor in layer.parameters()} == {(E, 0, 0), (E, 0), (0,)}


def test_new_weights_go_into_the_layer_that_is_there():
    experts = opened(parameters(seed=0))
    handle, before = experts.layer.handle, run(experts, *inputs())
    replaced = fused.replace_fused(experts, FusedParameters(**parameters(seed=1)))
    assert replaced.layer is experts.layer and replaced.layer.handle == handle
    assert torch.equal(run(replaced, *inputs()), run(opened(parameters(seed=1)), *inputs()))
    fused.replace_fused(experts, FusedParameters(**parameters(seed=0, up_first=True)))
    assert torch.equal(run(experts, *inputs()), before)
    with pytest.raises(nv.InvalidArgument, match="experts: expected 6, as they were, got 2"):
        fused.replace_fused(experts, FusedParameters(**parameters(experts=range(2))))
    bad = parameters(seed=1)
    bad["w13_tensor_scale"][4, 1] = float("nan")
    with pytest.raises(nv.BadInput, match="expert 4"):
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
def test_fused_mxfp4_parameters_make_the_checkpoint_s_layer(tmp_path, spread, top, count):
    random = np.random.default_rng(spread)
    size, number = 64, 4
    tops = {"w1": top, "w3": top - 1, "w2": top}
    experts = [{n: mxfp4_matrix(random, size, size, spread, t) for n, t in tops.items()} for _ in range(number)]
    write_mxfp4(tmp_path / "model", experts, size, size)
    options = {"activation_format": "bf16", "max_tokens": 32}
    expected = nv.MoeLayer.from_checkpoint(tmp_path / "model", 0, router_weight="after_down", **options)

    def stack(part, *names):
        return torch.from_numpy(np.stack([np.concatenate([e[name][part] for name in names]) for e in experts]))

    given = {"w13_tensor_scale": None, "w2_tensor_scale": None, "mxfp4": True}
    given |= {"w13": stack(0, "w1", "w3"), "w13_scale": stack(1, "w1", "w3")}
    given |= {"w2": stack(0, "w2"), "w2_scale": stack(1, "w2")}
    options |= {"placement": fused.Placement(number), "top_k": 2, "swiglu_limit": 10.0}
    before = given["w13"].clone()
    ours = fused.open_fused(FusedParameters(**given), **options)
    assert torch.equal(given["w13"], before)
    for expert, name in ((expert, name) for expert in range(number) for name in ("gate", "up", "down")):
        mine, theirs = ours.layer.expert(expert)[name], expected.expert(expert)[name]
        assert np.array_equal(mine["codes"], theirs["codes"]) and np.array_equal(mine["scales"], theirs["scales"])
        assert mine["tensor_scale"] == theirs["tensor_scale"]
    assert ours.layer.config == expected.config
    assert (ours.mxfp4_rounded > 0) == (spread > 17)
    count("16-blocks rounded by the cast from MXFP4", ours.mxfp4_rounded, number * 3 * size * size // 16)
    given["w2_scale"][1, 2, 0] = 0xFF
    with pytest.raises(nv.InvalidArgument, match="local expert 1: expected bytes below 0xFF, got NaN"):
        fused.open_fused(FusedParameters(**given), **options)
    with pytest.raises(nv.Unsupported, match="whole blocks of 32"):
        FusedParameters(**given, intermediate_size=48).stacks()


# ---- biases, interleaved gate and up, no gate

OAI = {"activation": "swiglu_oai", "swiglu_limit": 7.0}


def biases(seed: int = 3) -> dict:
    """w13_bias (E, 2I) in the order [gate; up] and w2_bias (E, H), in bfloat16 as engines keep them."""
    random = torch.Generator().manual_seed(seed)
    sizes = {"w13_bias": 2 * INNER, "w2_bias": H}
    return {name: torch.randn(E, size, generator=random).bfloat16() for name, size in sizes.items()}


def in_turn(tensor):
    """Interleaves rows [gate; up] as gate's and up's alternately."""
    return torch.stack(tensor.chunk(2, 1), 2).flatten(1, 2)


def apart(top_k: int = K, **options):
    """The same experts with separate matrices and biases."""
    stacks = {name: tuple(map(torch.from_numpy, stack)) for name, stack in layers.weights(0).items()}
    config = nv.MoeConfig(E, top_k, H, INNER, activation_format="bf16", **options)
    gated = config.activation != "relu2"
    if not gated:
        del stacks["gate"]
    parts = None
    if config.expert_biases:
        w13, w2 = biases().values()
        parts = (w13[:, :INNER] if gated else None, w13[:, INNER:], w2)
    return nv.MoeLayer.from_tensors(config, **stacks, biases=parts, max_tokens=32)


@pytest.mark.parametrize("order", ["halves", "up first", "in turn"])
def test_biases_go_with_their_rows(order):
    given, added = parameters(up_first=order == "up first"), biases()
    if order == "up first":
        added["w13_bias"] = torch.cat([added["w13_bias"][:, INNER:], added["w13_bias"][:, :INNER]], 1)
    if order == "in turn":
        for name in ("w13", "w13_scale"):
            given[name] = in_turn(given[name].view(torch.uint8))
        added["w13_bias"], given["interleaved"] = in_turn(added["w13_bias"]), True
    experts = opened(given | added, expert_biases=True, **OAI)
    batch, expected = inputs(), apart(expert_biases=True, **OAI)
    assert torch.equal(run(experts, *batch), expected.run(*batch))
    fused.replace_fused(experts, FusedParameters(**parameters(seed=1) | biases(4)))
    fused.replace_fused(experts, FusedParameters(**given, **added))
    assert torch.equal(run(experts, *batch), expected.run(*batch)), "back at the first weights and biases"


def test_experts_without_a_gate_have_one_matrix_in_w13():
    given = parameters()
    given |= {name: given[name].view(torch.uint8)[:, INNER:] for name in ("w13", "w13_scale")}
    relu2 = {"activation": "relu2", "gated": False}
    with pytest.raises(nv.InvalidArgument, match="w13_tensor_scale"):
        opened(given, **relu2)
    batch, expected = inputs(), apart(activation="relu2")
    for scale in (given["w13_tensor_scale"][:, 1], given["w13_tensor_scale"][:, 1:]):
        assert torch.equal(run(opened(given | {"w13_tensor_scale": scale}, **relu2), *batch), expected.run(*batch))
    given |= {"w13_tensor_scale": scale, "w13_bias": biases()["w13_bias"][:, INNER:], "w2_bias": biases()["w2_bias"]}
    experts = opened(given, expert_biases=True, **relu2)
    expected = apart(activation="relu2", expert_biases=True)
    assert torch.equal(run(experts, *batch), expected.run(*batch))
    fused.replace_fused(experts, FusedParameters(**given, gated=False))
    assert torch.equal(run(experts, *batch), expected.run(*batch))


def test_biases_of_slices_count_once_if_one_rank_has_down_s():
    """Two slices, with down biases only on the first rank: their sum is the whole layer's output."""
    given, batch = parameters() | biases(), inputs()
    # One expert per token, so that a rank's result is one rounded row.
    batch = (batch[0], batch[1][:, :1].contiguous(), torch.ones(len(batch[0]), 1))
    total = torch.zeros(len(batch[0]), H)
    options = dict(expert_biases=True, row_format="fp32", **OAI)
    for first, last in ((0, 16), (16, INNER)):
        rows = torch.cat([torch.arange(first, last), torch.arange(first, last) + INNER])
        part = given | {
            "w13": given["w13"][:, rows],
            "w13_scale": given["w13_scale"].view(torch.uint8)[:, rows],
            "w13_bias": given["w13_bias"][:, rows],
            "w2": given["w2"][:, :, first // 2 : last // 2],
            "w2_scale": given["w2_scale"].view(torch.uint8)[:, :, first // 16 : last // 16],
            "w2_bias": given["w2_bias"] * (first == 0),
        }
        total += run(opened(part, top_k=1, **options), *batch).float()
    expected = apart(top_k=1, **options).run(*batch).float()
    # Three roundings to bfloat16, of each rank's result and of the whole one's, each half an ulp of its value.
    down = given["w2_bias"].float()
    assert ((total - expected).abs() <= 2.0**-8 * (expected.abs() + total.abs() + down.abs().max())).all()


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({"w2_bias": None}, {"expert_biases": True}, "expected both or neither"),
        ({"w2_bias": torch.zeros(E, H + 1)}, {"expert_biases": True}, "w13_bias, w2_bias: expected"),
        ({"w13_bias": torch.full((E, 2 * INNER), float("nan"))}, {"expert_biases": True}, "bias"),
        ({}, {}, "biases"),
        ({"w13_bias": None, "w2_bias": None}, {"expert_biases": True}, "biases"),
    ],
)
def test_biases_that_are_wrong_are_an_error(change, options, words):
    with pytest.raises(nv.Error, match=words):
        opened(parameters() | biases() | change, **options, **OAI)


# ---- refusals, log lines of a load


def test_why_a_layer_or_a_slice_is_refused(monkeypatch):
    sizes = {"num_experts": E, "top_k": K, "hidden_size": H, "intermediate_size": INNER}
    assert fused.why_refused(sizes, "cpu", settings.Settings()) is None
    assert "top_k" in fused.why_refused(sizes | {"top_k": 9}, "cpu", settings.Settings())
    assert fused.why_refused(sizes, "cuda:99", settings.Settings())
    assert "a rank's slice is 56 of 112, expected a multiple of 16; use expert parallel (--option)" in (
        fused.why_slice_refused(56, 2, 16, "--option")
    )
    assert fused.why_slice_refused(64, 2, 16, "") is None
    assert fused.why_slice_refused(56, 1, 16, "") is None, "with one rank there is no slice"
    declared, cpu = Declared("bf16", "w"), torch.device("cpu")
    options, said = fused.with_activations(sizes, cpu, settings.Settings(activation_format="nvfp4"), declared)
    assert options == sizes | {"activation_format": "nvfp4"} and said.startswith("nvfp4, because it was asked for")
    for other, device, words in ((sizes | {"top_k": 9}, cpu, "top_k"), (sizes, torch.device("meta"), "got meta")):
        with pytest.raises(Refused, match=words):
            fused.with_activations(other, device, settings.Settings(), declared)
    # The kernels of LEFT_TO_ENGINES are used only if the user insists.
    monkeypatch.setattr(fused, "explain", lambda options, device: [{"chosen": True, "backend": device}])
    auto, one = (
        [fused.why_refused(sizes, g, settings.Settings(m)) for g in fused.LEFT_TO_ENGINES] for m in ("auto", "1")
    )
    assert "the plain kernels" in auto[0] and all("no GPU of its kind" in why for why in auto[1:]) and not any(one)


def test_the_log_of_a_load():
    """Progress every few layers or 30 s, the last layer, and once why activations have their format."""
    now, lines = [0.0], []
    log = LoadLog(lines.append, every=4, clock=lambda: now[0])
    experts = opened(parameters())
    for _ in range(9):
        log.plan()

    def load():
        lines.clear()
        for layer in range(9):
            why = "fp8, because it is declared" if layer == 2 else "bf16, because nothing is declared"
            log.packed(f"layers.{layer}", experts, 0.5, why)
            now[0] += 40.0 if layer == 5 else 1.0
        return [line.partition(" layers")[0] for line in lines if line.startswith("packed ")]

    assert load() == ["packed 4 of 9", "packed 7 of 9", "packed 8 of 9", "packed 9 of 9"]
    assert lines[1].startswith("layers.0: <MoeLayer 64x48")
    assert f"{9 * experts.packed_bytes:,} bytes, 4.5 s" in "".join(lines)
    assert [line for line in lines if line.startswith("activations: ")] == [
        "activations: bf16, because nothing is declared",
        "activations: fp8, because it is declared, in layers such as layers.2",
    ]
    first = list(lines)
    assert load() and lines == first  # a reload starts the count again
