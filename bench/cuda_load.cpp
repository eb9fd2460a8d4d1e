// Times how long a layer takes to load on a GPU, up to its first result: deepseek-v4-flash's 256
// experts.
//
//   bench_cuda_load [--device cuda:N] [--repeats N] [--commit SHA]
//
// Prints JSON. Each repeat loads the same weights, different for every expert, from three places:
// "pageable" memory, as after reading files; "pinned" (page-locked) memory; and "cuda", the GPU
// itself. "context" is the time of CUDA's first call, "open" of packing with all checks, "warmup"
// of the layer's warm-up. "best_open_s" has the smallest open time of each place;
// "cuda_over_pinned" is their quotient, which should be at most 1. The rate of plain copies of the
// same bytes, which bounds packing from the host, is printed too.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "moe/layer.h"
#include "moe/registry.h"

namespace nvfp4_moe::internal {
namespace {

constexpr int64_t kExperts = 256, kTopK = 6, kHidden = 4096, kIntermediate = 2048,
                  kMaxTokens = 8192;
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

// Fills one expert: codes of gate, up and down, then their scales, 0x20 .. 0x5F.
void fill(uint8_t* bytes, uint64_t seed) {
  uint64_t state = seed * 2654435761u + 88172645463325252u;
  for (int64_t i = 0; i < kExpertBytes; i += 8) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    const uint64_t word =
        i < 3 * kCodes ? state : (state & 0x3F3F3F3F3F3F3F3Full) + 0x2020202020202020ull;
    std::memcpy(bytes + i, &word, 8);
  }
}

LayerSource source_of(const uint8_t* experts, bool on_device) {
  LayerSource source;
  source.expert = [experts, on_device](int64_t e) -> Result<LoadedExpert> {
    const uint8_t* const codes = experts + e * kExpertBytes;
    const auto view = [&](int p, int64_t rows, int64_t cols) {
      return Nvfp4View::contiguous(codes + p * kCodes, codes + 3 * kCodes + p * kScales, 1e-4f,
                                   rows, cols);
    };
    LoadedExpert loaded;
    loaded.source = {view(0, kIntermediate, kHidden), view(1, kIntermediate, kHidden),
                     view(2, kHidden, kIntermediate), on_device};
    return loaded;
  };
  return source;
}

struct Place {
  const char* name;
  const uint8_t* experts;  // (kExperts, kExpertBytes)
  bool on_device;
  double best_open_s = INFINITY;
};

struct Options {
  std::string device = "cuda:0";
  int repeats = 3;
  std::string commit = "unknown";
  std::string command;
};

int run(const Options& given) {
  constexpr auto kBytes = static_cast<size_t>(kExperts * kExpertBytes);
  const std::unique_ptr<uint8_t[]> pageable(new uint8_t[kBytes]);
  std::vector<std::thread> threads;
  const auto workers = static_cast<int64_t>(std::max(1u, std::thread::hardware_concurrency()));
  for (int64_t t = 0; t < workers; ++t)
    threads.emplace_back([&, t] {
      for (int64_t e = t; e < kExperts; e += workers)
        fill(pageable.get() + e * kExpertBytes, static_cast<uint64_t>(e + 1));
    });
  for (std::thread& thread : threads) thread.join();

  const auto facts = device_facts(given.device);
  must(facts.status());
  must(cudaSetDevice(facts->index));
  const double context_s = seconds([] { must(cudaFree(nullptr)); });
  void* pinned = nullptr;
  void* on_device = nullptr;
  must(cudaMallocHost(&pinned, kBytes));
  must(cudaMalloc(&on_device, kBytes));
  std::memcpy(pinned, pageable.get(), kBytes);
  must(cudaMemcpy(on_device, pinned, kBytes, cudaMemcpyHostToDevice));
  Place places[] = {{"pageable", pageable.get(), false},
                    {"pinned", static_cast<const uint8_t*>(pinned), false},
                    {"cuda", static_cast<const uint8_t*>(on_device), true}};

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
  layer_options.device = given.device;
  layer_options.limits.max_tokens = kMaxTokens;

  std::printf("{\"device\": \"%s\", \"commit\": \"%s\", \"command\": \"%s\", \"experts\": %lld, ",
              facts->name.c_str(), given.commit.c_str(), given.command.c_str(),
              static_cast<long long>(kExperts));
  std::printf(
      "\"hidden\": %lld, \"intermediate\": %lld, \"source_bytes\": %lld, \"context_s\": %.3f, "
      "\"loads\": [",
      static_cast<long long>(kHidden), static_cast<long long>(kIntermediate),
      static_cast<long long>(kBytes), context_s);
  const char* separator = "";
  for (int i = 0; i < given.repeats; ++i)
    for (Place& place : places) {
      std::unique_ptr<MoeLayer> layer;
      const double open_s = seconds([&] {
        auto opened =
            MoeLayer::open(*config, source_of(place.experts, place.on_device), layer_options);
        must(opened.status());
        layer = *std::move(opened);
      });
      place.best_open_s = std::min(place.best_open_s, open_s);
      const double warmup_s = seconds([&] {
        auto workspace =
            layer->backend().allocate(layer->workspace_bytes(), facts->index, "workspace");
        must(workspace.status());
        must(layer->warmup(workspace->data(), layer->workspace_bytes()));
      });
      std::printf(
          "%s{\"from\": \"%s\", \"backend\": \"%s\", \"open_s\": %.4f, \"warmup_s\": %.3f, "
          "\"open_gb_per_s\": %.2f}",
          separator, place.name, layer->backend().name, open_s, warmup_s,
          static_cast<double>(kBytes) * 1e-9 / open_s);
      std::fflush(stdout);
      separator = ", ";
    }
  std::printf("], \"best_open_s\": {");
  for (const Place& place : places)
    std::printf("%s\"%s\": %.4f", &place == places ? "" : ", ", place.name, place.best_open_s);
  std::printf("}, \"cuda_over_pinned\": %.3f, ", places[2].best_open_s / places[1].best_open_s);

  constexpr size_t kCopied = size_t{1} << 30;
  const auto rate = [&](const void* from) {
    const double s = seconds([&] {
      must(cudaMemcpy(on_device, from, kCopied, cudaMemcpyHostToDevice));
      must(cudaDeviceSynchronize());
    });
    return static_cast<double>(kCopied) * 1e-9 / s;
  };
  std::printf("\"copy_gb_per_s\": {\"pageable\": %.2f, \"pinned\": %.2f}}\n", rate(pageable.get()),
              rate(pinned));
  cudaFreeHost(pinned);
  cudaFree(on_device);
  return 0;
}

}  // namespace
}  // namespace nvfp4_moe::internal

int main(int argc, char** argv) {
  nvfp4_moe::internal::Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::string(argv[i]) == "--device") options.device = argv[i + 1];
    if (std::string(argv[i]) == "--repeats") options.repeats = std::atoi(argv[i + 1]);
    if (std::string(argv[i]) == "--commit") options.commit = argv[i + 1];
  }
  options.command = "bench_cuda_load";
  for (int i = 1; i < argc; ++i) options.command += std::string(" ") + argv[i];
  return nvfp4_moe::internal::run(options);
}
