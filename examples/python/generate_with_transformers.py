#!/usr/bin/env python3
"""Generates text from an NVFP4 checkpoint with transformers, its experts and NVFP4 linears run by nvfp4_moe.

    generate_with_transformers.py MODEL                        a directory or a hub id, on the GPU if there is one
    generate_with_transformers.py MODEL --activation-format bf16 --prompt "The capital of France is"
    generate_with_transformers.py MODEL --quantize             a float model, quantized after it was loaded

Prints the text, and what runs where. Needs nvfp4_moe, torch and transformers.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch
from nvfp4_moe.transformers import Nvfp4Experts, Nvfp4LinearModule, Nvfp4MoeConfig, enable
from transformers import AutoModelForCausalLM, AutoTokenizer


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", help="model directory or hub id")
    parser.add_argument("--prompt", default="A mixture of experts is")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens")
    parser.add_argument("--activation-format", choices=("nvfp4", "bf16"), help="default: as the checkpoint declares")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quantize", action="store_true", help="MODEL is in floats: quantize its experts in memory")
    chosen = parser.parse_args(argv)
    if not Path(chosen.model).exists() and (chosen.model.count("/") > 1 or chosen.model.startswith((".", "/"))):
        parser.error(
            f"model: expected a directory or a hub id such as OWNER/NAME, got {chosen.model}, which does not exist"
        )
    return chosen


def load(chosen: argparse.Namespace) -> torch.nn.Module:
    options = {"activation_format": chosen.activation_format} if chosen.activation_format else {}
    if chosen.quantize:
        model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.bfloat16)
        print(enable(model, **options))
        return model.to(chosen.device)
    config = Nvfp4MoeConfig(**options)
    return AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.bfloat16, quantization_config=config).to(
        chosen.device
    )


def main(argv: list[str] | None = None) -> None:
    chosen = arguments(argv)
    model, tokenizer = load(chosen), AutoTokenizer.from_pretrained(chosen.model)
    packed = Counter(type(module).__name__ for module in model.modules())
    experts = next(module for module in model.modules() if isinstance(module, Nvfp4Experts))
    print(f"{packed[Nvfp4Experts.__name__]} layers of experts, {packed[Nvfp4LinearModule.__name__]} linears in NVFP4")
    print(experts.packed)
    inputs = tokenizer(chosen.prompt, return_tensors="pt").to(chosen.device)
    made = model.generate(**inputs, max_new_tokens=chosen.tokens, do_sample=False)
    print(tokenizer.decode(made[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
