// synthesize_checkpoint: makes a small model directory with the shape, names and config of a real
// one, from a seed.
//
// The demo, the measurements and the tests use it if there is no real checkpoint. It has expert
// weights in bf16, sharded with an index, and also router, norms, attention, shared experts and
// embeddings (so that there are other tensors to copy). config.json has the family's own field
// names. Weights have row and column scales that differ by a factor of several, and heavy tails, as
// real ones do and Gaussian noise does not. The same options give the same bytes on every machine:
// integer hashing and IEEE + - * only, no libm.
#pragma once

#include <cstdint>
#include <string>

#include "core/dtype.h"
#include "core/executor.h"
#include "core/progress.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

struct SynthesizeOptions {
  // "deepseek_v4": layers.L.ffn.experts.E.{w1,w3,w2}.weight, swiglu_limit 10, one shared expert,
  // hash layers. "qwen3_moe": model.layers.L.mlp.experts.E.{gate,up,down}_proj.weight, no clamp, no
  // shared expert. "nemotron_h": backbone.layers.L.mixer.experts.E.{up,down}_proj.weight, relu2,
  // one shared expert of twice the size; a Mamba layer before each MoE layer.
  std::string family = "deepseek_v4";
  int64_t layers = 3;
  int64_t num_experts = 16;
  int64_t top_k = 6;
  int64_t hidden_size = 1024;       // multiple of 16
  int64_t intermediate_size = 512;  // multiple of 16
  // nemotron_h: the routed experts' hidden size after a projection; 0: no projection
  int64_t latent_size = 0;
  int64_t vocab_size = 2048;
  DType dtype = DType::kBf16;  // of the experts' weights: kBf16, kF16 or kF32
  uint64_t seed = 1;
  uint64_t max_shard_bytes = 64ull << 20;
  Executor* executor = nullptr;  // null: serial
  ProgressFn progress = {};

  // About `total_bytes` of bf16 experts, for measurements: hidden 2048, intermediate 1024, 40
  // experts per layer, as many layers as needed (8 for 4 GB), shards of 1 GB.
  static SynthesizeOptions of_size(uint64_t total_bytes);
};

struct SynthesizeResult {
  int64_t shards = 0;
  int64_t tensors = 0;
  uint64_t bytes = 0;         // of all tensors
  uint64_t expert_bytes = 0;  // of the routed experts
  double seconds = 0;
};

// Writes OUT, which it creates. kInvalidArgument if OUT already has *.safetensors. An unfinished
// OUT has no config.json.
Result<SynthesizeResult> synthesize_checkpoint(const std::string& out,
                                               const SynthesizeOptions& options = {});

}  // namespace nvfp4_moe::internal
