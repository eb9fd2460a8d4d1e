"""A layer opened, and an expert replaced, from tensors on a GPU: the bytes, the errors and the order of streams.

Needs torch with CUDA, a GPU, and a build with the CUDA backends: skipped by name elsewhere.
"""

from __future__ import annotations

import numpy as np
import nvfp4_moe as nv
import pytest
from gpu import batch as batch_of
from gpu import needs_gpu, on_gpu, torch
from layers import stacked

pytestmark = needs_gpu

EXPERTS, HIDDEN, INTER = 5, 272, 144
CONFIG = nv.MoeConfig(EXPERTS, 2, HIDDEN, INTER, activation_format="bf16")
SHAPES = {"gate": (INTER, HIDDEN), "up": (INTER, HIDDEN), "down": (HIDDEN, INTER)}
Stacks = dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def stacks(seed: int = 0) -> Stacks:
    """NVFP4 weights in host memory, with some codes under a scale of 0."""
    random = np.random.default_rng(seed)
    made = {}
    for name, (rows, cols) in SHAPES.items():
        codes = random.integers(0, 256, (EXPERTS, rows, cols // 2), dtype=np.uint8)
        scales = random.integers(0x40, 0x7F, (EXPERTS, rows, cols // 16), dtype=np.uint8)
        scales[:, 3::29, 1::4] = 0
        tensor_scales = random.uniform(1e-4, 1e-3, EXPERTS).astype(np.float32)
        made[name] = tuple(torch.from_numpy(part) for part in (codes, scales, tensor_scales))
    return made


def opened(weights: Stacks, **options: object) -> nv.MoeLayer:
    return nv.MoeLayer.from_tensors(CONFIG, **weights, device="cuda:0", max_tokens=4, **options)


def assert_holds(layer: nv.MoeLayer, weights: Stacks) -> None:
    for e in range(EXPERTS):
        kept = layer.expert(e)
        for name, (codes, scales, tensor_scale) in weights.items():
            assert np.array_equal(kept[name]["codes"], codes[e].numpy()), (e, name)
            assert np.array_equal(kept[name]["scales"], scales[e].view(torch.uint8).numpy()), (e, name)
            assert kept[name]["tensor_scale"] == tensor_scale[e].item(), (e, name)


def batch() -> tuple[torch.Tensor, ...]:
    return on_gpu(batch_of(4, HIDDEN, EXPERTS, 2))


@pytest.mark.parametrize("backend", ["auto", "cuda"])
def test_the_bytes_are_those_of_host_tensors(backend: str) -> None:
    weights = stacks()
    lent = on_gpu(weights)
    layer = opened(lent, backend=backend)
    assert_holds(layer, weights)
    assert torch.equal(layer.run(*batch()), opened(weights, backend=backend).run(*batch()))
    # Tiles and tensor scales, and no memory that only packing needs.
    assert layer.describe()["packed_bytes"] < 1 << 20
    # Host and GPU tensors may mix, and a layer in host memory takes them too.
    assert_holds(opened({"gate": weights["gate"], "up": lent["up"], "down": lent["down"]}, backend=backend), weights)
    assert_holds(nv.MoeLayer.from_tensors(CONFIG, **lent, max_tokens=4), weights)


def test_rows_may_lie_apart() -> None:
    """gate and up halve one tensor, down is columns at an odd address, scales are float8, tensor scales strided."""
    weights = stacks()
    lent = on_gpu(weights)
    both = [torch.cat([lent["gate"][i], lent["up"][i]], dim=1) for i in (0, 1)]
    lent["gate"] = (both[0][:, :INTER], both[1][:, :INTER].view(torch.float8_e4m3fn), lent["gate"][2])
    lent["up"] = (both[0][:, INTER:], both[1][:, INTER:], lent["up"][2].repeat_interleave(3)[::3])
    wide = [torch.full((EXPERTS, HIDDEN, lent["down"][i].shape[2] + 7), 0xFF, dtype=torch.uint8).cuda() for i in (0, 1)]
    for i in (0, 1):
        wide[i][:, :, 3:-4] = lent["down"][i]
    lent["down"] = (wide[0][:, :, 3:-4], wide[1][:, :, 3:-4], lent["down"][2])
    assert_holds(opened(lent), weights)


def late_in_a_stream(weights: dict, wrong: float) -> tuple[torch.cuda.Stream, dict]:
    """Tensors that hold illegal values until their stream has slept. weights: tensors, or tuples of them."""
    right = on_gpu({name: parts if isinstance(parts, tuple) else (parts,) for name, parts in weights.items()})
    late = {name: tuple(torch.full_like(part, wrong) for part in parts) for name, parts in right.items()}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(300_000_000)
        for name, parts in right.items():
            for to, part in zip(late[name], parts, strict=True):
                to.copy_(part)
    return stream, {name: late[name] if isinstance(parts, tuple) else late[name][0] for name, parts in weights.items()}


def from_floats(weights: dict[str, torch.Tensor]) -> nv.MoeLayer:
    return nv.MoeLayer.from_bf16(CONFIG, **weights, device="cuda:0", max_tokens=4)


def floats(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    made = {name: torch.randn(EXPERTS, *shape, generator=g).to(dtype) for name, shape in SHAPES.items()}
    made["up"][1] = 0
    return made


def held_by(layer: nv.MoeLayer) -> Stacks:
    held = stacked([layer.expert(e) for e in range(EXPERTS)])
    return {name: tuple(torch.from_numpy(part) for part in parts) for name, parts in held.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_floats_on_the_gpu_are_quantized_to_the_hosts_bytes(dtype: torch.dtype) -> None:
    weights = floats(dtype)
    expected, lent = held_by(from_floats(weights)), on_gpu(weights)
    assert_holds(from_floats(lent), expected)
    # Rows with strides, at addresses that are not multiples of 16 bytes; gate and up are halves of one tensor.
    both = torch.cat([lent["gate"], lent["up"]], dim=1)
    wide = torch.zeros(EXPERTS, HIDDEN, INTER + 5, dtype=dtype).cuda()
    wide[:, :, 3:-2] = lent["down"]
    assert_holds(from_floats({"gate": both[:, :INTER], "up": both[:, INTER:], "down": wide[:, :, 3:-2]}), expected)


def test_packing_follows_the_current_stream() -> None:
    for opens, weights, wrong in ((opened, stacks(), 255), (from_floats, floats(), float("nan"))):
        expected = held_by(opens(weights))
        stream, late = late_in_a_stream(weights, wrong)
        with torch.cuda.stream(stream):
            layer = opens(late)
            for parts in late.values():  # the caller's again
                for part in parts if isinstance(parts, tuple) else (parts,):
                    part.fill_(wrong)
        assert_holds(layer, expected)


def test_what_is_refused_is_told_as_on_the_host() -> None:
    illegal, infinite = stacks(), floats()
    illegal["up"][1][3, 77, 5] = 0x80
    illegal["up"][1][3, 99, 0] = 0x7F
    infinite["down"][2, 200, 17] = float("inf")
    for opens, weights, words in (
        (opened, illegal, "got byte 128 at row 77 block 5"),
        (from_floats, infinite, "expert 2 down: (200, 17): expected a finite weight"),
    ):
        with pytest.raises(nv.BadInput) as on_host:
            opens(weights)
        with pytest.raises(nv.BadInput) as on_device:
            opens(on_gpu(weights))
        assert words in str(on_host.value) and str(on_device.value) == str(on_host.value)
    lent = on_gpu(floats())
    with pytest.raises(ValueError, match="down: expected gate, up and down on cpu, or all of them on cuda:0, got"):
        from_floats({**lent, "down": infinite["down"]})
    with pytest.raises(ValueError, match="gate: expected gate, up and down on cpu, got"):
        nv.MoeLayer.from_bf16(CONFIG, **lent, max_tokens=4)


def test_an_expert_is_replaced_from_the_gpu() -> None:
    weights, other = stacks(), stacks(1)
    layer = opened(weights)
    stream, late = late_in_a_stream(other, 255)
    with torch.cuda.stream(stream):
        layer.replace_expert(2, *(tuple(part[4] for part in parts) for parts in late.values()))
    for old, new in zip(weights.values(), other.values(), strict=True):
        for to, part in zip(old, new, strict=True):
            to[2] = part[4]
    assert_holds(layer, weights)
    illegal = on_gpu(other)
    illegal["down"][1][0, 0, 0] = 0xFF
    gate, up, down = (tuple(part[0] for part in parts) for parts in illegal.values())
    with pytest.raises(nv.BadInput, match="down block scale: .* got byte 255 at row 0 block 0"):
        layer.replace_expert(2, gate, up, down)
    text = r"down codes: expected \(272, 72\) uint8 on cuda:0, contiguous, got .* on cpu"
    with pytest.raises(ValueError, match=text):
        layer.replace_expert(2, gate, up, tuple(part.cpu() for part in down))
    assert_holds(layer, weights)
