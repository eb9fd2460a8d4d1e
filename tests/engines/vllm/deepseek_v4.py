"""A tiny DeepSeek-V4 for vLLM: FP8 linears, and the same experts as MXFP4 or as NVFP4.

vLLM's own kernel takes MXFP4 experts on a CPU, so the stock engine is the twin. The checkpoint's other tensors have
names and layouts of their own, which do not matter here: a loader fills those parameters by name from a seed, and
passes the experts to the model's load_weights under a checkpoint's names.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "common"))
from models import mxfp4_floats  # noqa: E402

# On CPUs vLLM 0.32 routes by hash only for the published models' 256 experts and 6 experts per token.
LAYERS, EXPERTS, TOP_K, HIDDEN, INNER, VOCABULARY, HASH_LAYERS = 2, 256, 6, 128, 64, 384, 1

CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "dtype": "bfloat16",
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64,
    "q_lora_rank": 128, "o_lora_rank": 128, "o_groups": 2, "sliding_window": 64,
    "compress_ratios": [1] * LAYERS, "compress_rope_theta": 160000.0, "index_head_dim": 128,
    "index_n_heads": 4, "index_topk": 64, "hc_mult": 2, "hc_eps": 1e-6, "hc_sinkhorn_iters": 4,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "swiglu_limit": 10.0, "moe_intermediate_size": INNER,
    "n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": TOP_K,
    "num_hash_layers": HASH_LAYERS, "norm_topk_prob": True, "topk_method": "noaux_tc",
    "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0,
    "max_position_embeddings": 512, "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "deepseek_yarn", "factor": 1.0, "original_max_position_embeddings": 512,
        "beta_fast": 32, "beta_slow": 1,
    },
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
QUANTIZATION = {
    "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128], "ignored_layers": [],
}  # fmt: skip


# Kept in bfloat16: on a CPU vLLM 0.32 multiplies FP8 blocks, and MXFP4 experts, only with AMX.
PLAIN = [
    f"model.layers.{layer}.{name}"
    for layer in range(LAYERS)
    for name in (
        *(f"attn.{projection}" for projection in ("wq_a", "wkv", "wq_b", "wo_a", "wo_b")),
        *(f"ffn.shared_experts.{projection}" for projection in ("w1", "w3", "down_proj")),
    )
]


def make(root: Path) -> dict[str, Path]:
    """Writes {form: directory} of configs. The loader below makes the weights; load_format names it."""
    written = {}
    experts = [f"model.layers.{layer}.ffn.experts" for layer in range(LAYERS)]
    forms: dict[str, dict] = {
        "mxfp4": {},
        "nvfp4": {"moe_quant_algo": "NVFP4"},
        "twin": {"ignored_layers": PLAIN + experts},
    }
    for form, more in forms.items():
        written[form] = root / form
        written[form].mkdir(parents=True)
        config = CONFIG | {"quantization_config": QUANTIZATION | {"ignored_layers": PLAIN} | more}
        (written[form] / "config.json").write_text(json.dumps(config, indent=1))
    return written


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "little"))


def expert(layer: int, number: int, projection: str) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP4: codes uint8 (rows, K/2), E8M0 scales uint8 (rows, K/32), in a range that NVFP4 can represent."""
    rows, columns = (HIDDEN, INNER) if projection == "w2" else (INNER, HIDDEN)
    random = _generator(f"{layer}.{number}.{projection}")
    codes = torch.randint(0, 256, (rows, columns // 2), generator=random, dtype=torch.uint8)
    return codes, torch.randint(119, 125, (rows, columns // 32), generator=random, dtype=torch.uint8)


def expert_tensors(form: str):
    """Yields (name, tensor) as in a checkpoint."""
    from nvfp4_moe._mxfp4 import cast_mxfp4

    for layer in range(LAYERS):
        for number in range(EXPERTS):
            for projection in ("w1", "w2", "w3"):
                name = f"layers.{layer}.ffn.experts.{number}.{projection}"
                codes, scales = expert(layer, number, projection)
                if form == "twin":
                    yield f"{name}.weight", mxfp4_floats(codes, scales).bfloat16()  # exact
                    continue
                if form == "mxfp4":
                    yield f"{name}.weight", codes
                    yield f"{name}.scale", scales.view(torch.float8_e8m0fnu)
                    continue
                cast, block_scales, tensor_scale, rounded = cast_mxfp4(codes[None], scales[None])
                assert rounded == 0
                yield f"{name}.weight", cast[0]
                yield f"{name}.weight_scale", block_scales[0].view(torch.float8_e4m3fn)
                yield f"{name}.weight_scale_2", tensor_scale[0]
                # No input_scale: vLLM 0.32's V4 for CPUs expects it under a name that no method has.


def fill(name: str, parameter: torch.Tensor) -> None:
    """Makes a parameter outside the experts, from its name, of a size that keeps activations near one."""
    random = _generator(name)
    if parameter.dtype == torch.float8_e8m0fnu:
        parameter.view(torch.uint8).fill_(120)
    elif parameter.dtype in (torch.int32, torch.int64):
        columns = torch.rand((*parameter.shape[:-1], EXPERTS), generator=random).argsort(-1)
        parameter.copy_(columns[..., : parameter.shape[-1]].to(parameter.dtype))
    elif "scale_inv" in name:
        parameter.fill_(2.0**-7)
    elif name.endswith("norm.weight"):
        parameter.fill_(1.0)
    elif "attn_sink" in name:
        parameter.fill_(0.0)
    else:
        spread = {torch.float8_e4m3fn: 4.0}.get(parameter.dtype, 0.2 if "embed" in name or "head" in name else 0.1)
        parameter.copy_((torch.randn(parameter.shape, generator=random) * spread).to(parameter.dtype))


def register_loader() -> None:
    """The load format "tiny_deepseek_v4"."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader("tiny_deepseek_v4")
    class Loader(BaseModelLoader):
        def download_model(self, model_config) -> None:
            pass

        def load_weights(self, model, model_config) -> None:
            for name, parameter in model.named_parameters():
                if ".experts." not in name:
                    fill(name, parameter.data)
            said = model_config.hf_config.quantization_config
            is_plain = any(name.endswith("experts") for name in said["ignored_layers"])
            form = "twin" if is_plain else "nvfp4" if said.get("moe_quant_algo") else "mxfp4"
            loaded = model.load_weights(expert_tensors(form))
            assert len(loaded) >= 2 * LAYERS, loaded


def run_layers(directory: str, off: bool) -> dict:
    """Builds and loads the model as vLLM does, and returns what each layer's MoE block computes for seeded inputs.

    The whole model is not run: vLLM 0.32's V4 attention gets its batch metadata from a Triton kernel, and PyPI has no
    Triton for CPUs.
    """
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.model_loader import get_model

    arguments = EngineArgs(
        model=directory,
        skip_tokenizer_init=True,
        enforce_eager=True,
        load_format="tiny_deepseek_v4",
        max_model_len=128,
        max_num_batched_tokens=128,
        additional_config={"nvfp4_moe": {"mode": "0"}} if off else {},
    )
    config = arguments.create_engine_config()
    register_loader()
    # Stubs, as in vLLM's worker and runner for CPUs: the model makes events, the loader empties a cache.
    torch.cuda.Event = lambda *args, **named: None
    torch.accelerator.empty_cache = lambda: None
    result: dict = {"out": [], "shared": [], "ids": [], "layers": []}
    with set_current_vllm_config(config):
        prepare_process()
        model = get_model(vllm_config=config)
    hidden = torch.randn(24, HIDDEN, generator=_generator("hidden")).bfloat16()
    tokens = torch.randint(0, VOCABULARY, (24,), generator=_generator("tokens"))
    for layer in model.model.layers:
        runner = layer.ffn.experts

        def select(*args, _own=runner.router.select_experts, **named):
            weights, ids = _own(*args, **named)
            result["ids"].append(ids.tolist())
            return weights, ids

        runner.router.select_experts = select
        with torch.no_grad(), set_current_vllm_config(config), set_forward_context(None, config, num_tokens=24):
            result["out"].append(layer.ffn(hidden, tokens).float().tolist())
            result["shared"].append(layer.ffn.shared_experts(hidden).float().tolist())
        method = runner.routed_experts.quant_method
        result["layers"].append([type(method).__name__, repr(getattr(getattr(method, "fused", None), "layer", None))])
    return result


def prepare_process() -> None:
    """Sets up the ranks of one process once, as a worker does."""
    import tempfile

    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.distributed.parallel_state import model_parallel_is_initialized

    if model_parallel_is_initialized():
        return
    rendezvous = f"file://{tempfile.mkdtemp()}/ranks"
    init_distributed_environment(world_size=1, rank=0, distributed_init_method=rendezvous, local_rank=0, backend="gloo")
    ensure_model_parallel_initialized(1, 1)


def main() -> None:
    """usage: deepseek_v4.py ROOT OUT.json, after make(ROOT)"""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    results = {form: run_layers(str(Path(sys.argv[1]) / form), form == "twin") for form in ("twin", "mxfp4", "nvfp4")}
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
