// nvfp4-moe in a program of one's own: load a checkpoint's layer, run tokens, see what was done.
//   embed MODEL_DIRECTORY [LAYER]
#include <cstdio>
#include <cstdlib>
#include <nvfp4_moe/nvfp4_moe.hpp>
#include <vector>

int main(int argc, char** argv) try {
  using namespace nvfp4_moe;
  if (argc < 2) return std::fprintf(stderr, "usage: embed MODEL_DIRECTORY [LAYER]\n"), 2;
  const Checkpoint checkpoint(argv[1]);
  const int64_t layer_index = argc > 2 ? std::atoll(argv[2]) : 0;
  const nvfp4_moe_config config = checkpoint.config(layer_index);

  auto options = make<nvfp4_moe_layer_options>();
  options.max_tokens = 4;
  const Layer layer(checkpoint, layer_index, options);
  const Workspace workspace(layer.workspace_bytes(4));

  std::vector<float> hidden(4 * config.hidden_size, 0.5f),
      out(hidden.size());                      // (tokens, hidden_size)
  std::vector<int32_t> ids(4 * config.top_k);  // (tokens, top_k)
  std::vector<float> weights(ids.size(),
                             1.0f / static_cast<float>(config.top_k));  // (tokens, top_k)
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i % config.num_experts);

  auto batch = make<nvfp4_moe_batch>();
  batch.tokens = 4;
  batch.hidden = hidden.data(), batch.hidden_dtype = NVFP4_MOE_DTYPE_F32;
  batch.topk_ids = ids.data(), batch.topk_weights = weights.data();
  batch.out = out.data();
  layer.run(batch, workspace);

  std::printf("nvfp4-moe %s\n%s\n", version().c_str(), layer.describe().c_str());
  for (int token = 0; token < 4; ++token)
    std::printf("token %d: %g\n", token, out[token * config.hidden_size]);
  return layer.status(workspace).nonfinite_tokens == 0 ? 0 : 1;
} catch (const nvfp4_moe::Error& error) {
  return std::fprintf(stderr, "embed: %s\n", error.what()), 1;
}
