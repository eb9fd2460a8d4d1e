"""gelu, gelu_tanh and situ against torch's own in float64, over all finite bfloat16 gates.

A layer of one expert whose matrices hold parts of the identity: gate and up are the two halves of hidden, and the
output is the activation's output, rounded to bfloat16 once.
"""

from __future__ import annotations

import nvfp4_moe as nv
import pytest

torch = pytest.importorskip("torch")

HALF = 16
LIMITS = {"situ_gate_limit": 4.0, "situ_up_limit": 25.0}
FUNCTIONS = {
    "gelu": (torch.nn.functional.gelu, {}),
    "gelu_tanh": (lambda g: torch.nn.functional.gelu(g, approximate="tanh"), {}),
    "situ": (lambda g: 4 * torch.tanh(g / 4) * torch.sigmoid(g), LIMITS),
}
BACKENDS = ("reference", "cpu", "cpu:portable")


def identity(rows: int, cols: int, first: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(1, rows, cols), with a one in row r at column first + r if that is a column."""
    ones = torch.zeros(rows, cols, dtype=torch.uint8)
    for row in range(HALF):
        ones[row, first + row] = 2  # the code of 1.0
    codes = ones[:, ::2] | ones[:, 1::2] << 4
    return codes[None], torch.full((1, rows, cols // 16), 0x38, dtype=torch.uint8), 1.0


def activated(backend: str, activation: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    config = nv.MoeConfig(
        num_experts=1, top_k=1, hidden_size=2 * HALF, intermediate_size=HALF, activation=activation,
        activation_format="bf16", row_format="fp32", **FUNCTIONS[activation][1],
    )  # fmt: skip
    tokens = gate.numel() // HALF
    layer = nv.MoeLayer.from_tensors(
        config,
        gate=identity(HALF, 2 * HALF, 0),
        up=identity(HALF, 2 * HALF, HALF),
        down=identity(2 * HALF, HALF, 0),
        max_tokens=tokens,
        backend=backend,
    )
    hidden = torch.cat([gate.reshape(tokens, HALF), up.reshape(tokens, HALF)], 1).float()
    out = layer.run(hidden, torch.zeros(tokens, 1, dtype=torch.int32), torch.ones(tokens, 1))
    return out[:, :HALF].reshape(-1).double()


AMX_LEAST = 2.0**-116  # a smaller activation may count as 0: AMX multiplies subnormal numbers so (amx.cpp)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_it_is_torch_s_in_float64(activation, backend):
    gate = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()
    gate = gate[gate.abs() < 2.0**100]
    gate = torch.cat([gate, gate.new_zeros(-len(gate) % HALF)])
    for value in (1.0, -0.3125, 40.0, 2.0**-20):
        up = torch.full_like(gate, value)
        of_up = 25 * torch.tanh(up / 25) if activation == "situ" else up
        want = FUNCTIONS[activation][0](gate) * of_up
        # torch adds 1 to erf or tanh, which cancels in the lower tail. Below 2^-126 fp32 has multiples of 2^-149.
        off = want.abs() * 2.0**-22 + 2.0**-149 + (gate * up).abs() * 2.0**-50 * (activation != "situ")
        off += want.abs() * (torch.minimum(gate.abs(), want.abs()) < AMX_LEAST)
        low, high = ((want + by).bfloat16().double() for by in (-off, off))
        got = activated(backend, activation, gate, up)
        assert ((low <= got) & (got <= high)).all(), (activation, value)
        assert (got != 0).sum() > len(gate) // 3
