"""Humming's grouped GEMMs, with the tuning and the glue kernels that vLLM 0.33 uses on SM90.

vLLM uses HummingIndexedExperts for a whole layer and HummingGroupedExperts with expert parallelism. Both are reproduced
here call by call, with vLLM's own functions around the GEMMs, and measured for every shape. Kernels are compiled at run
time; compile_kernels does that beforehand, on many threads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from os import cpu_count

import torch
from humming import dtypes
from humming.config import LayerConfig, WeightScale2Type, WeightScaleType
from humming.forward import humming_forward, may_process_input
from humming.kernel.humming import HummingKernel
from humming.ops.input import _prepare_process_input_op as prepare_process_input
from humming.schema import HummingWeightSchema
from humming.transform import prepare_layer_config, transform_humming_tensors
from humming.tune import get_heuristics_config
from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig, MoEActivation
from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum
from vllm.model_executor.layers.fused_moe.moe_permute_unpermute import (
    MoEPermuteScratch,
    moe_prepare_scatter,
    moe_unpermute,
)
from vllm.model_executor.layers.quantization.utils.humming.activation import get_humming_activation
from vllm.utils.humming import create_humming_locks

from ..shapes import Shape
from ..workload import Matrix, Routing, Weights
from . import expert_map

DEVICE = torch.device("cuda:0")
SILU = get_humming_activation(MoEActivation.SILU, ApplyMoEActivationConfig())
MATRICES = ("w13", "w2")


def tuned_rows() -> list[int]:
    """Returns the row counts of Humming's tuning list on SM90. Making the whole list is slow, one entry is not."""
    counts = [1, 2, 4]
    for rows in range(8, 65536, 8):
        step = 8 if rows <= 1024 else 16 if rows <= 2048 else 32 if rows <= 4096 else 64 if rows <= 16384 else 128
        if rows % step == 0:
            counts.append(rows)
    return counts


ROWS = tuned_rows()


def rows_of_rank(shape: Shape, tokens: int) -> int:
    """Returns the rows that vLLM tunes for: the rank's share of all slots."""
    return math.ceil(tokens * shape.top_k * shape.local_experts / shape.experts)


def layer_configs(shape: Shape) -> dict[str, LayerConfig]:
    schema = HummingWeightSchema(
        b_dtype=dtypes.float4e2m1,
        bs_dtype=dtypes.float8e4m3,
        weight_scale_group_size=16,
        weight_scale_type=WeightScaleType.GROUP,
        weight_scale_2_type=WeightScale2Type.TENSOR,
    )
    sizes = {"w13": (2 * shape.intermediate, shape.hidden), "w2": (shape.hidden, shape.intermediate)}
    return {
        name: prepare_layer_config(
            n,
            k,
            schema,
            None,
            num_experts=shape.local_experts,
            pad_n_to_multiple=256,
            pad_k_to_multiple=128,
            torch_dtype=torch.bfloat16,
            device=0,
        )
        for name, (n, k) in sizes.items()
    }


def tuning(config: LayerConfig, gemm: str, rows: int) -> dict[str, object]:
    """Returns the entry of vLLM's tuning list for that many rows."""
    nearest = next((count for count in ROWS if count >= rows), ROWS[-1])
    return dict(get_heuristics_config(config, shape_m=nearest, gemm_type=gemm, device=0))


def compute_config(gemm: str) -> dict[str, object]:
    return {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": gemm}


def scatters(shape: Shape, tokens: int) -> bool:
    """Returns whether the indexed flow packs a rank's rows between the GEMMs, by vLLM's rule."""
    processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    return shape.local_experts < shape.experts and tokens * shape.top_k > 2 * processors


def compile_jobs(gemm: str, shape: Shape, tokens: Sequence[int]) -> dict[str, Callable[[], object]]:
    """Returns the compile jobs for a shape, each with a unique name."""
    jobs: dict[str, Callable[[], object]] = {}
    for config in layer_configs(shape).values():
        for count in tokens:
            tuned = tuning(config, gemm, rows_of_rank(shape, count))
            tuned.pop("num_sms", None)
            full = json.loads(json.dumps(json.loads(config.to_str()) | compute_config(gemm) | tuned))
            full.pop("sublayer_name", None)
            jobs[json.dumps(full, sort_keys=True)] = partial(HummingKernel, **full)

    def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype, device=DEVICE)

    wide = {"inputs": empty(1, 2 * shape.intermediate), **SILU}
    one, all_slots = (empty(1, count, dtype=torch.int32) for count in (1, shape.top_k))
    inputs = {
        "activation": wide,
        "packed activation": wide | {"layout": "scatter", "scatter_idx": one, "outputs": empty(1, shape.intermediate)},
        "hidden": {
            "inputs": empty(1, shape.hidden),
            "layout": "scatter",
            "scatter_idx": all_slots,
            "outputs": empty(shape.top_k, shape.hidden),
        },
    }
    return jobs | {f"{name} {shape}": partial(prepare_process_input, **given) for name, given in inputs.items()}


def compile_kernels(gemm: str, shapes: Sequence[Shape], tokens: Sequence[int]) -> None:
    jobs: dict[str, Callable[[], object]] = {}
    for shape in shapes:
        jobs |= compile_jobs(gemm, shape, tokens)

    def compile_one(job: Callable[[], object]) -> None:
        with torch.cuda.device(DEVICE):
            job()

    with ThreadPoolExecutor(max(1, (cpu_count() or 2) - 2)) as pool:
        for done in [pool.submit(compile_one, job) for job in jobs.values()]:
            done.result()


def packed(config: LayerConfig, matrix: Matrix) -> dict[str, torch.Tensor]:
    tensors = {
        "weight": matrix.codes.view(torch.int32),
        "weight_scale": matrix.scales.view(torch.float8_e4m3fn),
        "weight_scale_2": matrix.tensor_scale,
    }
    return transform_humming_tensors(config, tensors)


class Humming:
    def __init__(self, variant: str, shape: Shape, weights: Sequence[Weights], most: int):
        self.shape, self.gemm = shape, variant
        self.configs = layer_configs(shape)
        self.weights = [
            {name: packed(self.configs[name], matrix) for name, matrix in zip(MATRICES, each, strict=True)}
            for each in weights
        ]
        self.map = expert_map(shape, DEVICE)
        self.locks = create_humming_locks(DEVICE)
        self.compute = json.dumps(compute_config(self.gemm))
        self.scratch = MoEPermuteScratch(shape.experts, shape.local_experts, DEVICE)

    def prepare(self, tokens: int) -> None:
        shape, rows = self.shape, tokens * self.shape.top_k
        self.rows = rows_of_rank(shape, tokens)
        self.scatters = scatters(shape, tokens)
        self.tuned = {name: tuning(config, self.gemm, self.rows) for name, config in self.configs.items()}

        def buffer(columns: int) -> torch.Tensor:
            return torch.empty(rows, columns, dtype=torch.bfloat16, device=DEVICE)

        self.gathered = buffer(shape.hidden) if self.gemm != "indexed" else None
        self.gate_up, self.hidden, self.down = (
            buffer(2 * shape.intermediate),
            buffer(shape.intermediate),
            buffer(shape.hidden),
        )

    def multiply(self, name: str, number: int, inputs: torch.Tensor, outputs: torch.Tensor, **routed: object) -> None:
        humming_forward(
            self.configs[name],
            inputs=inputs,
            outputs=outputs,
            locks=self.locks,
            compute_config=self.compute,
            tuning_config=json.dumps(self.tuned[name]),
            valid_shape_m=self.rows,
            **self.weights[number][name],
            **routed,
        )

    def run(self, number: int, x: torch.Tensor, routing: Routing, out: torch.Tensor) -> None:
        (self._indexed if self.gemm == "indexed" else self._grouped)(number, x, routing, out)

    def _indexed(self, number: int, x: torch.Tensor, routing: Routing, out: torch.Tensor) -> None:
        ids = routing.global_ids

        def align(name: str, scatter: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
            block = self.tuned[name]["block_shape"][0]
            sorted_ids, expert_ids, padded, *rest = moe_align_block_size(
                ids, block, self.shape.experts, self.map, ignore_invalid_experts=True, return_scatter_idx=scatter
            )
            order = {"sorted_ids": sorted_ids, "expert_ids": expert_ids, "num_tokens_padded": padded}
            return order, rest[0] if rest else None

        first, slots = align("w13", self.scatters)
        same = self.tuned["w13"]["block_shape"][0] == self.tuned["w2"]["block_shape"][0]
        second = first if same else align("w2", False)[0]
        self.multiply("w13", number, x, self.gate_up, top_k=self.shape.top_k, **first)
        layout = "normal" if slots is None else "scatter"
        may_process_input(
            self.configs["w2"], inputs=self.gate_up, outputs=self.hidden, layout=layout, scatter_idx=slots, **SILU
        )
        self.multiply("w2", number, self.hidden, self.down, top_k=1, **second)
        moe_fused_mul_sum(self.down.view(*ids.shape, -1), routing.weights, out, ids, self.map)

    def _grouped(self, number: int, x: torch.Tensor, routing: Routing, out: torch.Tensor) -> None:
        ids = routing.global_ids
        offsets, inverse = moe_prepare_scatter(ids, self.map, self.scratch)
        valid = offsets[-1:]
        may_process_input(
            self.configs["w13"],
            inputs=x,
            outputs=self.gathered,
            layout="scatter",
            scatter_idx=inverse,
            num_valid_tokens=valid,
        )
        self.multiply("w13", number, self.gathered, self.gate_up, expert_layout=offsets)
        may_process_input(self.configs["w2"], inputs=self.gate_up, outputs=self.hidden, num_valid_tokens=valid, **SILU)
        self.multiply("w2", number, self.hidden, self.down, expert_layout=offsets)
        rows = self.down.view(*ids.shape, -1)
        moe_unpermute(out, rows, routing.weights, inverse.flatten(), offsets)


open_layer = Humming
