"""transformers' own MoE blocks as the oracle of layers that enable() packed on the model's device, a CPU or a GPU.

The blocks are gpt-oss's (biases, gate and up in alternate columns) and Nemotron-3's (relu2 without a gate, latent
projections around the experts). The block computes in float64, on the CPU, with the weights that the layer holds and
the roundings of activations that the contract names, at the router's decisions of the model that ran. The remaining
difference must be within what section 8 of docs/explanation/numerics.md allows two correct kernels. Each element of
Nemotron's experts must also be in the contract's interval (moe_reference.py). Skipped by name if there is no GPU.
"""

from __future__ import annotations

import copy
import dataclasses
import math

import moe_reference as oracle
import pytest
from gpu import needs_gpu, torch

pytest.importorskip("transformers")

import model_judge as judge  # noqa: E402
import nvfp4_moe.transformers as adapter  # noqa: E402
import tiny_models as tiny  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

FORMATS = ("bf16", "nvfp4", "fp8")
# (B, S) tokens: few, and enough for several tiles of an expert.
BATCHES = {"few": (1, 3), "many": (4, 24)}
NEMOTRON = {
    "nano": ("nemotron_h", dict(hidden_size=256, moe_intermediate_size=192)),
    "super": ("nemotron_h_latent", dict(hidden_size=320, moe_intermediate_size=192, moe_latent_size=256)),
}


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=needs_gpu)])
def device(request) -> str:
    return request.param


def is_hopper(device: str) -> bool:
    return device != "cpu" and torch.cuda.get_device_capability() == (9, 0)


def run(model: nn.Module, batch: tuple[int, int]) -> None:
    ids = torch.arange(3, 3 + math.prod(batch)).reshape(batch) * 7 % 150 + 3
    model(ids.to(model.device), use_cache=False)


def on_host(call: judge.Call) -> judge.Call:
    return judge.Call(tuple(tensor.cpu() for tensor in call.inputs), call.output.cpu())


def packed_of(model: nn.Module, name: str, device: str, activation_format: str):
    layer = model.get_submodule(name).packed
    assert layer.device == device and layer.config.activation_format == activation_format
    if is_hopper(device):
        assert layer.describe()["backend"] == "sm90"
    return layer


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("activation_format", FORMATS)
def test_gpt_oss(device, activation_format, batch):
    model, twin = tiny.gpt_oss().to(device), tiny.gpt_oss()
    done = adapter.enable(model, activation_format=activation_format, row_format="fp32")
    assert [layer.activation for layer in done.layers] == ["swiglu_oai"] * 2
    calls, _ = judge.record(model, lambda m: run(m, BATCHES[batch]))
    for name, call in calls.items():
        layer = packed_of(model, name, device, activation_format)
        assert layer.config.expert_biases
        experts = judge.contract_experts(layer, twin.get_submodule(name))
        hidden, ids, weights = on_host(call).inputs
        inputs, limit = (hidden.double(), ids, weights.double()), judge.layer_limit(layer.config, len(hidden))
        assert judge.relative_l2(call.output.cpu(), experts(*inputs)) < limit
        for bias in (experts.gate_up_proj_bias, experts.down_proj_bias):
            bias.zero_()
            assert judge.relative_l2(call.output.cpu(), experts(*inputs)) > 2 * limit


class Decided(nn.Module):
    """Replaces a block's router: returns the decisions of the model's router."""

    def __init__(self, ids: torch.Tensor, weights: torch.Tensor) -> None:
        super().__init__()
        self.ids, self.weights = ids, weights

    def forward(self, _: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        return None, self.weights.double(), self.ids


def nemotron_weights(layer) -> oracle.Weights:
    held = [layer.expert(e) for e in range(layer.expert_count)]

    def stack(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        codes, scales = (
            torch.stack([torch.as_tensor(one[name][part]) for one in held]) for part in ("codes", "scales")
        )
        return codes, scales, torch.tensor([one[name]["tensor_scale"] for one in held], dtype=torch.float32)

    return oracle.Weights(stack("up"), stack("up"), stack("down"))


def accuracy_of(device: str, activation_format: str) -> oracle.Accuracy:
    """CONTRACT, but for Hopper's FP8 tensor cores with 13 bits (docs/explanation/numerics.md, section 7)."""
    if not (is_hopper(device) and activation_format == "fp8"):
        return oracle.CONTRACT
    return dataclasses.replace(
        oracle.CONTRACT, gemm=lambda k, _: min(1.0, 34 * math.ceil(k / 32) * 2.0**-13) + 2.0**-20
    )


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("activation_format", FORMATS)
@pytest.mark.parametrize("kind", NEMOTRON)
def test_nemotron(device, kind, activation_format, batch):
    name, sizes = NEMOTRON[kind]
    twin = tiny.fresh(name, torch.float32, **sizes)
    model = copy.deepcopy(twin).to(device)
    done = adapter.enable(model, activation_format=activation_format, row_format="fp32")
    assert [layer.activation for layer in done.layers] == ["relu2"] * 2
    blocks: dict[str, judge.Call] = {}
    for layer in done.layers:
        path = layer.name.removesuffix(".experts")
        model.get_submodule(path).register_forward_hook(
            lambda _, inputs, output, path=path: blocks.update({path: judge.Call((inputs[0].clone(),), output.clone())})
        )
    calls, _ = judge.record(model, lambda m: run(m, BATCHES[batch]))
    for path, block in blocks.items():
        layer, call = packed_of(model, path + ".experts", device, activation_format), on_host(calls[path + ".experts"])
        hidden, ids, weights = call.inputs
        limit = judge.layer_limit(layer.config, len(hidden))
        assert layer.config.hidden_size == hidden.shape[1] == sizes.get("moe_latent_size", sizes["hidden_size"])
        # Only the experts, on their recorded inputs.
        experts = judge.contract_experts(layer, twin.get_submodule(path).experts)
        want = experts(hidden.double(), ids, weights.double())
        assert judge.relative_l2(call.output, want) < limit
        outside = judge.experts_outside(
            model.get_submodule(path).experts, call, nemotron_weights(layer), accuracy_of(device, activation_format)
        )
        assert not outside.any()
        # The whole block around them: projections, and the shared expert, whose norm adds to that of the routed
        # experts.
        whole = copy.deepcopy(twin.get_submodule(path)).double().requires_grad_(False)
        whole.experts, whole.gate = experts, Decided(ids, weights)
        got = on_host(block)
        assert judge.relative_l2(got.output, whole(got.inputs[0].double())) < limit
        # relu instead of its square, and one expert's matrices instead of another's, are far beyond.
        squared = experts.__dict__.pop("act_fn")
        experts.act_fn = nn.ReLU()
        assert judge.relative_l2(call.output, experts(hidden.double(), ids, weights.double())) > 2 * limit
        experts.__dict__["act_fn"] = squared
        experts.up_proj.data = experts.up_proj.data.roll(1, 0)
        assert judge.relative_l2(call.output, experts(hidden.double(), ids, weights.double())) > 2 * limit
