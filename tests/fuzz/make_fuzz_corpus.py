"""Writes the seeds of the fuzz targets: DIRECTORY/TARGET/, and the dictionary DIRECTORY/json.dict.

Seeds are small and the same on every run:

- safetensors: header texts (the target adds length and data) and one whole file
- gguf: headers, and a small model whole
- config: config.json, or two files with a line "---" between
- plan: plan files of an unfinished quantize
- csf: streams of coded block scales
- c_api and exchange: bytes of a seeded generator, which the target reads as a list of calls
- index: index.json over the target's shards
- cache: files without their padding, after the target's flags
- repro: one call of a layer of two experts, as header text and as a whole file

usage: make_fuzz_corpus.py DIRECTORY
"""

import json
import random
import struct
import sys
from pathlib import Path

DTYPES = "BOOL U8 I8 U16 I16 U32 I32 U64 I64 F64 F32 F16 BF16 F8_E4M3 F8_E5M2 F8_E8M0 F4".split()
BITS = {"BOOL": 8, "F4": 4, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8}


def header(*tensors: tuple[str, str, list[int]], metadata: dict | None = None) -> str:
    out, offset = {}, 0
    if metadata:
        out["__metadata__"] = metadata
    for name, dtype, shape in tensors:
        bits = BITS.get(dtype) or int(dtype[1:])
        for size in shape:
            bits *= size
        out[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + bits // 8]}
        offset += bits // 8
    return json.dumps(out, separators=(",", ":"), ensure_ascii=False)


def gguf_file(pairs: dict[str, tuple[int, bytes]], tensors: list[tuple[str, list[int], int, bytes]]) -> bytes:
    """pairs: key to (type, bytes). tensors: name, dimensions as the file has them, ggml type, data."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    out += b"".join(text(key) + struct.pack("<I", kind) + value for key, (kind, value) in pairs.items())
    data = b""
    for name, dimensions, kind, content in tensors:
        out += text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, len(data))
        data += content + bytes(-len(content) % 32)
    return out + bytes(-len(out) % 32) + data


def gguf_seeds() -> dict[str, bytes]:
    def number(value: int) -> tuple[int, bytes]:
        return 4, struct.pack("<I", value)

    def text(value: str) -> tuple[int, bytes]:
        return 8, struct.pack("<Q", len(value)) + value.encode()

    def model(kind: int, block: bytes, elems: int) -> bytes:
        fields = {"block_count": 1, "embedding_length": 64, "expert_feed_forward_length": 64}
        fields |= {"expert_count": 1, "expert_used_count": 1}
        pairs = {"general.architecture": text("qwen3moe")} | {f"qwen3moe.{k}": number(v) for k, v in fields.items()}
        tensors = []
        for projection in ("gate", "up", "down"):
            stem = f"blk.0.ffn_{projection}_exps."
            tensors.append((stem + "weight", [64, 64, 1], kind, block * (64 * 64 // elems)))
            if kind == 40:
                tensors.append((stem + "scale", [1], 0, struct.pack("<f", 0.5)))
        # The target adds the data that the header names: only the header is a seed's.
        whole = gguf_file(pairs, tensors)
        return whole[: len(whole) - sum(len(data) + -len(data) % 32 for *_, data in tensors)]

    arrays = {
        "numbers": (9, struct.pack("<IQ3i", 5, 3, 1, -1, 7)),
        "floats": (9, struct.pack("<IQ2f", 6, 2, 0.5, 10.0)),
        "words": (9, struct.pack("<IQ", 8, 2) + text("a")[1] + text("")[1]),
        "flag": (7, b"\1"),
        "wide": (10, struct.pack("<Q", 2**63)),
        "double": (12, struct.pack("<d", 1.5)),
        "general.alignment": number(64),
    }
    return {
        "empty": gguf_file({}, []),
        "arrays": gguf_file(arrays, []),
        "tensor": gguf_file({}, [("x", [4], 0, bytes(16)), ("y", [32, 2], 8, bytes(68))]),
        "nvfp4": model(40, b"\x38" * 36, 64),
        "mxfp4": model(39, b"\x78" * 17, 32),
        "floats": model(0, bytes(4), 1),
    }


def safetensors_seeds() -> dict[str, bytes]:
    expert = "model.layers.0.mlp.experts.1.up_proj."
    seeds = {
        "empty": "{}",
        "metadata": header(metadata={"format": "pt", "é": "名"}),
        "one": header(("x", "U8", [4])),
        "scalar": header(("x", "F32", [])),
        "zero_size": header(("x", "BF16", [0, 4]), ("y", "U8", [2])),
        "f4": header(("x", "F4", [2, 6])),
        "modelopt": header(
            (expert + "weight", "U8", [2, 8]),
            (expert + "weight_scale", "F8_E4M3", [2, 1]),
            (expert + "weight_scale_2", "F32", []),
            (expert + "input_scale", "F32", []),
            metadata={"format": "pt"},
        ),
        "every_dtype": header(*((d.lower(), d, [2, 2]) for d in DTYPES)),
        "escapes": '{"a\\u0041\\n\\ud83d\\ude00":{"dtype":"U8","shape":[1,1],"data_offsets":[0,1]}}',
    }
    whole = header(("x", "U8", [3]), ("y", "I16", [2])).encode()
    return {k: v.encode() for k, v in seeds.items()} | {
        "whole_file": struct.pack("<Q", len(whole)) + whole + b"1234567"
    }


def config_seeds() -> dict[str, bytes]:
    def model(model_type: str, **more) -> dict:
        return {"architectures": ["X"], "model_type": model_type, "hidden_size": 64, "num_hidden_layers": 3,
                "num_experts_per_tok": 2, "hidden_act": "silu", **more}  # fmt: skip

    compressed = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"group_0": {
        "format": "nvfp4-pack-quantized", "targets": ["Linear"], "weights": {"num_bits": 4, "type": "float",
        "strategy": "tensor_group", "group_size": 16, "symmetric": True, "dynamic": False},
        "input_activations": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
        "symmetric": True, "dynamic": "local"}}}, "ignore": ["lm_head"]}  # fmt: skip
    weight_only = compressed["config_groups"]["group_0"] | {
        "targets": ["re:^(?!.*experts).*_proj$", "re:.*(?<!shared_)experts\\.\\d{1,3}\\.(?:gate|up)_proj", "lm_head"],
        "input_activations": None}  # fmt: skip
    rotated = {
        "config_groups": {"R": {"type": "hadamard", "apply": [{"location": "input", "targets": ["re:.*o_proj$"]}]}}
    }
    by_target = compressed | {"config_groups": compressed["config_groups"] | {"group_1": weight_only},
                              "ignore": ["re:[^.]*[.]visual\\b.*?"], "transform_config": rotated}  # fmt: skip
    models = {
        "deepseek_v4": model("deepseek_v4", moe_intermediate_size=32, n_routed_experts=8, n_shared_experts=1,
                             swiglu_limit=10.0, quantization_config={"quant_method": "mxfp4"}),
        "qwen3_moe": model("qwen3_moe", moe_intermediate_size=32, num_experts=8, decoder_sparse_step=1,
                           mlp_only_layers=[0], quantization_config=compressed),
        "qwen3_moe_by_target": model("qwen3_moe", moe_intermediate_size=32, num_experts=8, quantization_config=by_target),
        "minimax_m3": model("minimax_m3", intermediate_size=32, num_local_experts=8, swiglu_limit=7.0,
                            swiglu_alpha=1.702),
        "gemma4_text": model("gemma4_text", moe_intermediate_size=32, num_experts=8, enable_moe_block=True,
                             hidden_activation="gelu_pytorch_tanh"),
        "inkling2_text": model("inkling2_text", moe_intermediate_size=32, n_routed_experts=8, mlp_gate_softcap=4.0,
                               mlp_up_softcap=25.0),
        "llama4": {"model_type": "llama4", "architectures": ["L"], "text_config": model(
            "llama4_text", intermediate_size=32, num_local_experts=8, interleave_moe_layer_step=1)},
        "nemotron_h": {
            "architectures": ["X"], "model_type": "nemotron_h", "hidden_size": 64, "num_hidden_layers": 3,
            "hybrid_override_pattern": "ME*", "layers_block_type": ["mamba", "moe", "attention"],
            "num_experts_per_tok": 2, "mlp_hidden_act": "relu2", "moe_intermediate_size": 32, "n_routed_experts": 8,
            "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 48, "moe_latent_size": 48},
    }  # fmt: skip
    seeds = {name: json.dumps(config) for name, config in models.items()}
    hf_quant = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}}  # fmt: skip
    plain = model("qwen3_moe", moe_intermediate_size=32, num_experts=8)
    seeds["two_files"] = json.dumps(plain) + "\n---\n" + json.dumps(hf_quant)
    seeds["python_numbers"] = json.dumps(
        {**models["nemotron_h"], "time_step_limit": [0.0, float("inf")], "x": [float("nan"), -float("inf"), 1e0]}
    )
    return {k: v.encode() for k, v in seeds.items()}


def plan_seeds() -> dict[str, bytes]:
    shard = "model-00001-of-00002.safetensors"
    quality = [1.5, 0.0125, 96, 1, 0, 2]
    plan = {
        "what": "nvfp4-moe quantize, unfinished", "version": "0.1.0", "source": "/models/a",
        "files": [{"name": shard, "size_bytes": 4096, "modified_ns": 1700000000123456789, "sample": "0123456789abcdef" * 2}],
        "config": "f" * 32, "format": "modelopt", "scale_coding": "csf", "layers": [0, 1], "family": "", "gate_up_order": "", "search": "max", "calibration": "",
        "share_gate_up_scale": True,
        "input_scales": [{"layer": 1, "hidden": 0.5, "intermediate": 0.0}], "max_shard_bytes": 5000000000,
        "shards": [{"name": shard, "xxh3_128": "0" * 32}],
        "exceptions": [{"layer": 0, "expert": 3, "gate": 7, "up": 0, "down": 12}],
        "experts": [{"layer": 0, "expert": 3, "gate": quality, "up": quality, "down": quality}],
    }  # fmt: skip
    begun = plan | {"shards": [], "exceptions": [], "experts": [], "input_scales": []}
    wrong = {"negative_size": json.dumps(plan | {"max_shard_bytes": -1})}
    seeds = {"begun": json.dumps(begun), "half_done": json.dumps(plan, indent=1)} | wrong
    return {k: v.encode() for k, v in seeds.items()}


def random_seeds(seed: int, count: int) -> dict[str, bytes]:
    generator = random.Random(seed)
    return {f"calls_{i:02}": generator.randbytes(200 + 100 * (i % 8)) for i in range(count)}


def index_seeds() -> dict[str, bytes]:
    def index(weight_map: dict, **more) -> bytes:
        return json.dumps({**more, "weight_map": weight_map}).encode()

    return {
        "whole": index({"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"}, metadata={"total_size": 16}),
        "misplaced": index({"x": "b.safetensors"}),
        "not_a_number": index({"z": "b.safetensors"}, metadata={"total_size": float("nan")}),
        "missing_shard": index({"x": "c.safetensors"}),
        "outside": index({"x": "../a.safetensors"}),
        "broken_shard": index({"x": "broken.safetensors"}),
        "empty_map": index({}),
    }


def cache_seeds() -> dict[str, bytes]:
    header = b"NVF4PACK" + struct.pack("<II2Q3Q", 2, 88, 0x1234, 0x5678, 3, 8192, 64) + bytes(32)
    body = header + struct.pack("<9f", *(0.5 + i for i in range(9))) + bytes(range(64))
    return {
        "whole": b"\7" + body,
        "whole_from_header": b"\6" + body,
        "no_hashes": b"\0" + body,
        "scale_nan": b"\7" + header + struct.pack("<9f", *([float("nan")] * 9)) + bytes(64),
        "as_it_stands": b"\10" + body,
    }


def repro_seeds() -> dict[str, bytes]:
    config = {"num_experts": 2, "top_k": 1, "hidden_size": 16, "intermediate_size": 16, "activation": "swiglu",
              "swiglu_limit": None, "activation_format": "nvfp4", "activation_scale": "dynamic_token",
              "intermediate_scale": "dynamic_token", "router_weight": "after_down", "row_format": "bf16",
              "batch_invariant": False, "swiglu_alpha": 1.702, "intermediate_fixed": None, "static_headroom": 1.0,
              "max_router_weight": 1.0, "shared_intermediate_size": 0}  # fmt: skip
    tensors = [("tensor_scales", "F32", [2, 3]), ("hidden", "BF16", [2, 16]), ("topk_ids", "I32", [2, 1]),
               ("topk_weights", "F32", [2, 1]), ("output", "BF16", [2, 16])]  # fmt: skip
    data = struct.pack("<6f", *[1.0] * 6) + struct.pack("<H", 0x3F80) * 32 + struct.pack("<2i", 0, 1)
    data += struct.pack("<2f", 1, 0.5) + bytes(64)
    for expert in range(2):
        for projection in ("gate", "up", "down"):
            name = f"expert.{expert}.{projection}."
            tensors += [(name + "codes", "U8", [16, 8]), (name + "block_scales", "F8_E4M3", [16, 1])]
            data += bytes([0x21 + expert] * 128) + bytes([0x38] * 16)
    metadata = {"format": "nvfp4_moe_repro", "version": "1", "library_version": "0.1.0", "backend": "cpu",
                "config": json.dumps(config), "range_first": "0"}  # fmt: skip
    text = header(*tensors, metadata=metadata).encode()
    text += b" " * (-len(text) % 8)
    return {"header": text, "whole_file": struct.pack("<Q", len(text)) + text + data}


def csf_seeds() -> dict[str, bytes]:
    """Codec, tiles - 1, columns - 1, a fixed stream and exceptions."""
    row_codes = bytes(range(0x10, 0x12))
    fixed = (bytes(range(100, 116)) + row_codes * 16) * 2
    exceptions = struct.pack("<3I", 0x7E000003, 0x00000040, 0xFF00007F)
    return {
        "nvfp4": bytes([0, 1, 3]) + fixed + exceptions,
        "mxfp4": bytes([1, 0, 10]) + bytes([127] * 16) + b"\xff\x07" * 16 + struct.pack("<I", 0x80000001),
        "unsorted": bytes([0, 1, 3]) + fixed + exceptions[::-1],
        "high_base": bytes([0, 0, 1]) + bytes([241] * 16) + bytes(16),
    }


WORDS = """dtype shape data_offsets __metadata__ {} [] : , " \\u0000 \\ud83d null true false -0 1e9 0.5
NaN Infinity -Infinity 1e400 -1e-400 1E0 1.00E+00 time_step_limit
9223372036854775807 18446744073709551615 architectures model_type quantization_config quant_method quant_algo modelopt
compressed-tensors NVFP4 group_size config_groups weights input_activations num_bits type float strategy tensor_group
hidden_size intermediate_size moe_intermediate_size num_experts n_routed_experts num_local_experts num_experts_per_tok
num_hidden_layers n_shared_experts first_k_dense_replace swiglu_limit swiglu_alpha hidden_act silu text_config
torch_dtype bfloat16 quantization exclude_modules ignore format nvfp4-pack-quantized mxfp4
mlp_hidden_act relu2 hybrid_override_pattern layers_block_type moe_latent_size
what version source files name size_bytes modified_ns sample config layers layer family gate_up_order search scale_coding exceptions calibration share_gate_up_scale
input_scales hidden intermediate max_shard_bytes shards xxh3_128 experts expert gate up down metadata weight_map
.safetensors ../ nvfp4_moe_repro range_first hidden_scale activation_format dynamic_token""".split()


def main() -> None:
    out = Path(sys.argv[1])
    for target, seeds in {
        "safetensors": safetensors_seeds(),
        "gguf": gguf_seeds(),
        "config": config_seeds(),
        "plan": plan_seeds(),
        "c_api": random_seeds(2688, 24),
        "index": index_seeds(),
        "cache": cache_seeds(),
        "repro": repro_seeds(),
        "exchange": random_seeds(20, 16),
        "csf": csf_seeds(),
    }.items():
        folder = out / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, seed in seeds.items():
            (folder / name).write_bytes(seed)
    words = [*WORDS, *DTYPES]
    lines = ['"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"' for word in words]
    (out / "json.dict").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
