"""The gate of a router: the linear layers that get the library's method from the plugin's configs, and results."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

EXPERTS, HIDDEN = 8, 64


@pytest.fixture(scope="module")
def quant_config(vllm_config):
    import nvfp4_moe.vllm as plugin
    from vllm.model_executor.layers.quantization import get_quantization_config

    plugin.register()
    kept = {"kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["*.gate", "lm_head", "*.other"]}
    return get_quantization_config("modelopt_fp4").from_config({"quantization": {"quant_algo": "NVFP4"} | kept})


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch):
    """The method is chosen if there is a GPU. Each tensor's own device decides how it is computed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def linear(quant_config, name: str, kind: str = "ReplicatedLinear"):
    from vllm.model_executor.layers import linear as layers

    options = {"bias": False, "quant_config": quant_config, "params_dtype": torch.bfloat16}
    return getattr(layers, kind)(HIDDEN, EXPERTS, **options, prefix=f"model.0.mlp.{name}")


def is_own(layer) -> bool:
    return type(layer.quant_method).__name__ == "NvFp4MoeGateMethod"


def test_gates_that_vllm_leaves_unquantized_are_the_librarys(quant_config):
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    gate = linear(quant_config, "gate")
    assert is_own(gate) and isinstance(gate.quant_method, UnquantizedLinearMethod)
    assert not is_own(linear(quant_config, "other"))
    assert not is_own(linear(quant_config, "gate", "ColumnParallelLinear"))
    assert not is_own(linear(None, "gate"))


@pytest.mark.parametrize("why", ["cpu", "engine", "off", "batch_invariant", "unfit"])
def test_gates_stay_vllms(quant_config, monkeypatch, why):
    from nvfp4_moe.vllm import internals

    {
        "cpu": lambda: monkeypatch.setattr(torch.cuda, "is_available", lambda: False),
        "engine": lambda: monkeypatch.setenv("NVFP4_MOE_ROUTER", "engine"),
        "off": lambda: monkeypatch.setenv("NVFP4_MOE_MODE", "0"),
        "batch_invariant": lambda: monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1"),
        "unfit": lambda: monkeypatch.setattr(internals, "fitting", frozenset({"router"})),
    }[why]()
    assert not is_own(linear(quant_config, "gate"))


def test_what_is_not_a_few_tokens_of_bf16_on_a_gpu_is_vllms(quant_config):
    from nvfp4_moe.vllm.gate import takes

    weight = torch.zeros(EXPERTS, HIDDEN, dtype=torch.bfloat16)
    assert not takes(torch.zeros(1, HIDDEN, dtype=torch.bfloat16), weight, None), "a CPU's"

    class OnGpu(torch.Tensor):
        is_cuda = True

    def x(tokens: int, dtype: torch.dtype = torch.bfloat16, width: int = HIDDEN):
        return torch.zeros(tokens, width, dtype=dtype).as_subclass(OnGpu)

    assert takes(x(1), weight, None) and takes(x(8), weight, None)
    assert not takes(x(0), weight, None)
    assert not takes(x(9), weight, None)
    assert not takes(x(1, torch.float16), weight, None)
    assert not takes(x(1), weight.float(), None)
    assert not takes(x(1), weight, torch.zeros(EXPERTS))
    assert not takes(x(1, width=2 * HIDDEN)[:, ::2], weight, None)
    assert not takes(x(2, width=60), weight, None)
    many = weight.expand(200, EXPERTS, HIDDEN).reshape(-1, HIDDEN)
    assert not takes(x(1), many, None), "more experts than the library takes"


def test_a_gate_computes_what_vllms_does_within_its_rounding(quant_config, monkeypatch):
    """On this host: the method is made to take it, so that the call goes the whole way through the layer."""
    from nvfp4_moe.vllm import gate as gates

    layer = linear(quant_config, "gate")
    g = torch.Generator().manual_seed(4)
    layer.weight.data.copy_(torch.randn(EXPERTS, HIDDEN, generator=g))
    x = torch.randn(3, HIDDEN, generator=g).bfloat16()
    stock = torch.nn.functional.linear(x, layer.weight.data)
    calls = []
    monkeypatch.setattr(gates, "takes", lambda *arguments: calls.append(arguments) or True)
    logits, _ = layer(x)
    assert len(calls) == 1
    exact = x.double() @ layer.weight.data.double().T
    magnitude = x.double().abs() @ layer.weight.data.double().abs().T
    # Ten additions in fp32 (docs/explanation/numerics.md, section 12) and one rounding to bf16, half a step of 2^-8.
    bound = 1.01 * 10 * 2.0**-24 * magnitude + 2.0**-8 * exact.abs()
    assert ((logits.double() - exact).abs() <= bound).all()
    assert ((logits.double() - stock.double()).abs() <= 2 * bound + HIDDEN * 2.0**-24 * magnitude).all()
