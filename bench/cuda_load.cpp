// How long a layer takes from host memory to its first answer on a GPU: deepseek-v4-flash's 256 experts.
//
//   bench_cuda_load [--device cuda:N] [--repeats N]
//
// JSON on stdout. The weights lie in ordinary memory, every expert's its own, as a loader that read files leaves them.
// "context": what CUDA's first call takes; "open": packing, with all checks; "warmup": the layer's own. Beside them,
// what bounds packing: the rate of plain copies of the same bytes from ordinary and from page-locked memory.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "moe/layer.h"
#include "moe/registry.h"

namespace nvfp4_moe {
namespace {

constexpr int64_t kExperts = 256, kTopK = 6, kHidden = 4096, kIntermediate = 2048, kMaxTokens = 8192;
constexpr int64_t kMatrix = kHidden * kIntermediate;  // elements
constexpr int64_t kCodes = kMatrix / 2, kScales = kMatrix / 16;
constexpr int64_t kExpertBytes = 3 * (kCodes + kScales);

void must(bool good, const std::string& what) {
  if (good) return;
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}
void must(const Status& status) { must(status.ok(), status.message()); }
void must(cudaError_t error) { must(error == cudaSuccess, cudaGetErrorString(error)); }

double seconds(const auto& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// One expert: codes of gate, up and down, then their scales, 0x20 .. 0x5F.
void fill(uint8_t* bytes, uint64_t seed) {
  uint64_t state = seed * 2654435761u + 88172645463325252u;
  for (int64_t i = 0; i < kExpertBytes; i += 8) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    const uint64_t word = i < 3 * kCodes ? state : (state & 0x3F3F3F3F3F3F3F3Full) + 0x2020202020202020ull;
    std::memcpy(bytes + i, &word, 8);
  }
}

LayerSource source_of(const uint8_t* experts) {
  LayerSource source;
  source.expert = [experts](int64_t e) -> Result<LoadedExpert> {
    const uint8_t* const codes = experts + e * kExpertBytes;
    const auto view = [&](int p, int64_t rows, int64_t cols) {
      return Nvfp4View::contiguous(codes + p * kCodes, codes + 3 * kCodes + p * kScales, 1e-4f, rows, cols);
    };
    LoadedExpert loaded;
    loaded.source = {view(0, kIntermediate, kHidden), view(1, kIntermediate, kHidden), view(2, kHidden, kIntermediate)};
    return loaded;
  };
  return source;
}

int run(const std::string& device, int repeats) {
  const std::unique_ptr<uint8_t[]> experts(new uint8_t[kExperts * kExpertBytes]);
  std::vector<std::thread> threads;
  const auto workers = static_cast<int64_t>(std::max(1u, std::thread::hardware_concurrency()));
  for (int64_t t = 0; t < workers; ++t)
    threads.emplace_back([&, t] {
      for (int64_t e = t; e < kExperts; e += workers)
        fill(experts.get() + e * kExpertBytes, static_cast<uint64_t>(e + 1));
    });
  for (std::thread& thread : threads) thread.join();

  const double context_s = seconds([] { must(cudaFree(nullptr)); });
  const auto facts = device_facts(device);
  must(facts.status());
  must(cudaSetDevice(facts->index));
  MoeOptions options;
  options.num_experts = kExperts;
  options.top_k = kTopK;
  options.hidden_size = kHidden;
  options.intermediate_size = kIntermediate;
  options.activation = Activation::kSwigluClamped;
  options.swiglu_limit = 10.0f;
  const auto config = MoeConfig::make(options);
  must(config.status());
  LayerOptions layer_options;
  layer_options.device = device;
  layer_options.limits.max_tokens = kMaxTokens;

  std::printf(
      "{\"device\": \"%s\", \"experts\": %lld, \"hidden\": %lld, \"intermediate\": %lld, \"source_bytes\": %lld, ",
      facts->name.c_str(), static_cast<long long>(kExperts), static_cast<long long>(kHidden),
      static_cast<long long>(kIntermediate), static_cast<long long>(kExperts * kExpertBytes));
  std::printf("\"context_s\": %.3f, \"loads\": [", context_s);
  for (int i = 0; i < repeats; ++i) {
    std::unique_ptr<MoeLayer> layer;
    const double open_s = seconds([&] {
      auto opened = MoeLayer::open(*config, source_of(experts.get()), layer_options);
      must(opened.status());
      layer = *std::move(opened);
    });
    const double warmup_s = seconds([&] {
      auto workspace = layer->backend().allocate(layer->workspace_bytes(), facts->index, "workspace");
      must(workspace.status());
      must(layer->warmup(workspace->data(), layer->workspace_bytes()));
    });
    std::printf("%s{\"backend\": \"%s\", \"open_s\": %.3f, \"warmup_s\": %.3f, \"open_gb_per_s\": %.2f}",
                i == 0 ? "" : ", ", layer->backend().name, open_s, warmup_s,
                static_cast<double>(kExperts * kExpertBytes) * 1e-9 / open_s);
    std::fflush(stdout);
  }

  void* to = nullptr;
  void* locked = nullptr;
  constexpr size_t kCopied = size_t{1} << 30;
  must(cudaMalloc(&to, kCopied));
  must(cudaMallocHost(&locked, kCopied));
  std::memset(locked, 1, kCopied);
  const auto rate = [&](const void* from) {
    const double s = seconds([&] {
      must(cudaMemcpy(to, from, kCopied, cudaMemcpyHostToDevice));
      must(cudaDeviceSynchronize());
    });
    return static_cast<double>(kCopied) * 1e-9 / s;
  };
  std::printf("], \"copy_gb_per_s\": {\"ordinary\": %.2f, \"page_locked\": %.2f}}\n", rate(experts.get()),
              rate(locked));
  cudaFreeHost(locked);
  cudaFree(to);
  return 0;
}

}  // namespace
}  // namespace nvfp4_moe

int main(int argc, char** argv) {
  std::string device = "cuda:0";
  int repeats = 3;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::string(argv[i]) == "--device") device = argv[i + 1];
    if (std::string(argv[i]) == "--repeats") repeats = std::atoi(argv[i + 1]);
  }
  return nvfp4_moe::run(device, repeats);
}
