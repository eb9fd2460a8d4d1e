#!/usr/bin/env python3
"""Tiny MoE checkpoints written by the real producers, from a transformers model with random weights.

    make_checkpoint_vectors.py [OUT]     OUT defaults to tests/vectors

  OUT/modelopt_qwen3_moe             nvidia-modelopt: mtq.quantize with its NVFP4 config and a calibration loop, then
                                     its export_hf_checkpoint, which splits transformers' fused experts itself
  OUT/compressed_tensors_qwen3_moe   compressed-tensors: apply_quantization_config with its NVFP4 scheme, scales from
                                     its generate_gparam and calculate_qparams, then ModelCompressor.compress_model,
                                     save_pretrained and update_config. It quantizes only nn.Linear, so its caller
                                     must split fused experts: LinearExperts below, as llm-compressor does
  OUT/checkpoints.json               the versions that wrote them

The tests run these functions again and compare, if the same versions are installed.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import io
import json
import logging
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

SEED = 7
PACKAGES = ("torch", "transformers", "nvidia-modelopt", "compressed-tensors", "safetensors")


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name).split("+")[0] for name in PACKAGES}


@contextlib.contextmanager
def quiet():
    """The producers print progress and warnings, which do not matter here."""
    logging.disable(logging.WARNING)
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def tiny_config(family: str):
    import transformers

    common = {
        "vocab_size": 32,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    if family == "qwen3_moe":
        return transformers.Qwen3MoeConfig(
            **common, head_dim=16, num_experts=4, moe_intermediate_size=48, intermediate_size=48, norm_topk_prob=True
        )
    if family == "mixtral":
        return transformers.MixtralConfig(**common, head_dim=16, num_local_experts=4, intermediate_size=48)
    if family == "deepseek_v3":
        return transformers.DeepseekV3Config(
            **common,
            n_routed_experts=4,
            n_shared_experts=1,
            moe_intermediate_size=48,
            intermediate_size=96,
            first_k_dense_replace=1,
            n_group=2,
            topk_group=1,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=16,
        )
    raise ValueError(f"family {family}: expected qwen3_moe, mixtral or deepseek_v3")


def make_original(directory: Path, family: str) -> None:
    """A bfloat16 checkpoint with random weights of a realistic spread, under the official tensor names."""
    import torch
    import transformers

    with quiet():
        torch.manual_seed(SEED)
        model = transformers.AutoModelForCausalLM.from_config(tiny_config(family))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.05)
                    parameter.mul_(torch.exp2(torch.randn(*parameter.shape[:-1], 1)))
        model.to(torch.bfloat16).save_pretrained(directory)


def load(directory: Path):
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()


def calibrate(model) -> None:
    import torch

    generator = torch.Generator().manual_seed(SEED)
    for _ in range(4):
        with torch.no_grad():
            model(torch.randint(0, 32, (4, 16), generator=generator))


def export_modelopt(original: Path, out: Path) -> None:
    with quiet():
        import modelopt.torch.quantization as mtq
        import torch
        from modelopt.torch.export import export_hf_checkpoint

        model = mtq.quantize(load(original), copy.deepcopy(mtq.NVFP4_DEFAULT_CFG), calibrate)
        with torch.no_grad():
            export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=str(out))


def linear_experts(fused, names):
    """Returns transformers' fused experts (gate_up_proj (E, 2I, H), down_proj (E, H, I)) as a list of three nn.Linear
    each, with the same call. The names are those of gate, up and down in the family's checkpoints."""
    import torch
    from torch import nn

    class Expert(nn.Module):
        def __init__(self, gate, up, down, act):
            super().__init__()
            self.act = act
            for name, weight in zip(names, (gate, up, down), strict=True):
                linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
                linear.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
                setattr(self, name, linear)

        def forward(self, x):
            gate, up, down = (getattr(self, name) for name in names)
            return down(self.act(gate(x)) * up(x))

    class LinearExperts(nn.ModuleList):
        def forward(self, hidden, top_k_index, top_k_weights):
            out = torch.zeros_like(hidden)
            for e, expert in enumerate(self):
                token, choice = torch.where(top_k_index == e)
                if token.numel():
                    weight = top_k_weights[token, choice, None].to(hidden.dtype)
                    out.index_add_(0, token, expert(hidden[token]) * weight)
            return out

    half = fused.gate_up_proj.shape[1] // 2
    return LinearExperts(
        Expert(gate_up[:half], gate_up[half:], down, fused.act_fn)
        for gate_up, down in zip(fused.gate_up_proj, fused.down_proj, strict=True)
    )


def export_compressed_tensors(original: Path, out: Path) -> None:
    with quiet():
        import torch
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
        from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

        model = load(original)
        mixtral = model.config.model_type == "mixtral"
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        for layer in model.model.layers:
            if hasattr(layer.mlp, "experts"):
                layer.mlp.experts = linear_experts(layer.mlp.experts, names)

        amax: dict[str, torch.Tensor] = {}
        hooks = []
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):

                def observe(_, args, name=name):
                    amax[name] = torch.maximum(amax.get(name, torch.zeros(())), args[0].abs().max().float())

                hooks.append(module.register_forward_pre_hook(observe))
        calibrate(model)
        for hook in hooks:
            hook.remove()

        scheme = preset_name_to_scheme("NVFP4", ["Linear"])
        config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head", "re:.*mlp.gate$"])
        apply_quantization_config(model, config, show_progress=False)
        for name, module in model.named_modules():
            if getattr(module, "quantization_scheme", None) is None:
                continue
            weight = module.weight.detach()
            blocks = weight.unflatten(-1, (-1, 16))
            low, high = blocks.amin(-1), blocks.amax(-1)
            global_scale = generate_gparam(low.min().float(), high.max().float())
            scale, _ = calculate_qparams(low, high, scheme.weights, global_scale=global_scale)
            module.weight_global_scale.data = global_scale
            module.weight_scale.data = scale
            module.input_global_scale.data = generate_gparam(-amax[name], amax[name])
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(out)
        compressor.update_config(str(out))


EXPORTERS = {"modelopt": export_modelopt, "compressed_tensors": export_compressed_tensors}


def make(out: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        original = Path(scratch) / "original"
        make_original(original, "qwen3_moe")
        for producer, export in EXPORTERS.items():
            directory = out / f"{producer}_qwen3_moe"
            shutil.rmtree(directory, ignore_errors=True)
            export(original, directory)
            for file in directory.iterdir():  # only the files that the tests read
                os.chmod(file, 0o644)
                if file.name not in ("config.json", "hf_quant_config.json", "model.safetensors"):
                    file.unlink()
    (out / "checkpoints.json").write_text(json.dumps({"seed": SEED, "versions": versions()}, indent=1) + "\n")


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else root / "tests" / "vectors")
