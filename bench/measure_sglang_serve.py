#!/usr/bin/env python3
"""Measures an SGLang server with one MoE backend after the other on one GPU, and compares their tokens.

    python bench/measure_sglang_serve.py speed MODEL OUT.json --commit SHA
    python bench/measure_sglang_serve.py tokens MODEL TWIN OUT.json --commit SHA

bench/measure_vllm_serve.py describes both commands, the files and the exit status. Differences:

- The client is SGLang's `python -m sglang.bench_serving`, with prompts of random token ids.
- The backends are nvfp4_moe and marlin, which SGLang uses for NVFP4 on Hopper.
- The KV cache is given in tokens (--max-total-tokens), computed from --kv-cache-gib.
- The modes of `tokens` are graphs and eager.

Without FlashAttention 3 and flashinfer installed, add `-- --attention-backend triton --sampling-backend pytorch`. With
`--incremental-streaming-output` a server does not send the whole text again with each token.
"""

from __future__ import annotations

import sys

import measure_vllm_serve
from sglang_server import Server

if __name__ == "__main__":
    sys.exit(measure_vllm_serve.main(Server))
