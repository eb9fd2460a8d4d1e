// Layers on one GPU: the backend that a layer gets there (on Hopper sm90) and cuda in the same run, beside the floor.
//
//   bench_hopper_layers [SHAPE...] [--tokens T,T,...] [--format bf16|nvfp4] [--batch-invariant] [--no-cuda]
//                       [--configuration N]
//
// --configuration: the GEMMs' by its place in the backend's list, whatever the plan would take; without cuda beside it.
// The shape `rehearsal` is for trying the bench itself where nothing is fast, and is left out unless it is named.
//
// One line a shape and token count. A step is one run of a layer: ids and hidden in, output out; 4 to 16 steps, each
// with a routing of its own and the next of the rotated layers, are one CUDA graph; the figure is the median replay
// over the steps. gemm1 and gemm2 are graphs of that step alone. floor = max(bytes / 4.3 TB/s, flops / 790 TFLOP/s), an
// H200's.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/packed_layout.h"
#include "backend/layer_steps.h"
#include "core/random.h"
#include "moe/layer.h"
#include "moe/registry.h"

namespace nvfp4_moe {
namespace {

void must(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}
void must(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

struct LayerShape {
  const char* name;
  int64_t local_experts, experts, top_k, hidden, intermediate;
  int layers;  // in rotation, so that none stays in L2
};
constexpr LayerShape kShapes[] = {{"v4pro_ep8", 48, 384, 6, 7168, 3072, 1},
                                  {"v4flash", 256, 256, 6, 4096, 2048, 1},
                                  {"qwen30b", 128, 128, 8, 2048, 768, 4},
                                  {"mixtral", 8, 8, 2, 4096, 14336, 2},
                                  {"rehearsal", 4, 8, 2, 512, 256, 1}};

std::vector<uint8_t> random_bytes(Random& random, size_t count, uint64_t mask, uint64_t offset) {
  std::vector<uint8_t> bytes((count + 7) / 8 * 8);
  uint64_t state = static_cast<uint64_t>(random.below(1 << 30)) * 2654435761u + 88172645463325252u;
  for (size_t i = 0; i < bytes.size(); i += 8) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    const uint64_t word = (state & mask) + offset;
    std::memcpy(bytes.data() + i, &word, 8);
  }
  bytes.resize(count);
  return bytes;
}

Nvfp4Buffers random_matrix(Random& random, int64_t rows, int64_t cols) {
  // Scales 0x20..0x5F: from 2^-3 to 120.
  return {random_bytes(random, static_cast<size_t>(rows * cols / 2), ~0ull, 0),
          random_bytes(random, static_cast<size_t>(rows * cols / 16), 0x3F3F3F3F3F3F3F3Full, 0x2020202020202020ull)};
}

// One expert of random weights, copied to all others on the device.
PackedWeights make_layer(const Backend& backend, const MoeConfig& config, const ExpertRange& range, uint64_t seed) {
  PackedWeights weights{config, range, {}, {}, {}};
  weights.tensor_scales.assign(static_cast<size_t>(range.count) + 1, {1e-3f, 1e-3f, 1e-3f});
  weights.zero_scale_codes.resize(static_cast<size_t>(range.count) + 1);
  auto bytes = backend.allocate(backend.packed_bytes(config, range), 0, "packed weights");
  must(bytes.status());
  weights.bytes = std::move(*bytes);
  Random random(seed);
  const int64_t h = config->hidden_size, n = config->intermediate_size;
  const Nvfp4Buffers gate = random_matrix(random, n, h), up = random_matrix(random, n, h),
                     down = random_matrix(random, h, n);
  const auto view = [](const Nvfp4Buffers& matrix, int64_t rows, int64_t cols) {
    Nvfp4View result{};
    result.codes = matrix.codes.data();
    result.block_scales = matrix.block_scales.data();
    result.rows = rows;
    result.cols = cols;
    result.codes_stride = cols / 2;
    result.scales_stride = cols / 16;
    result.tensor_scale = 1.0f / (30.0f * std::sqrt(static_cast<float>(cols)));
    return result;
  };
  const ExpertSource source{view(gate, n, h), view(up, n, h), view(down, h, n)};
  must(backend.pack_expert(weights, 0, source));
  const cuda::PackedLayout layout(config, range);
  std::byte* const base = weights.bytes.data();
  const auto size = static_cast<size_t>(layout.routed.expert_stride);
  for (int64_t e = 1; e < range.count; ++e)
    must(cudaMemcpy(base + layout.expert_offset(e), base + layout.expert_offset(0), size, cudaMemcpyDeviceToDevice));
  // Tensor scales begin the bytes, three of an expert.
  for (int64_t e = 1; e <= range.count; ++e)
    must(cudaMemcpy(base + static_cast<size_t>(e) * sizeof(TensorScales), base, sizeof(TensorScales),
                    cudaMemcpyDeviceToDevice));
  return weights;
}

struct DeviceArray {
  explicit DeviceArray(size_t size_bytes) { must(cudaMalloc(&data, std::max<size_t>(size_bytes, 1))); }
  ~DeviceArray() { cudaFree(data); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  void* data = nullptr;
};

// Median microseconds of a step of a graph.
double time_graph(int steps, const std::function<void(int, cudaStream_t)>& enqueue) {
  cudaStream_t stream;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int step = 0; step < steps; ++step) enqueue(step, stream);
  must(cudaStreamEndCapture(stream, &graph));
  must(cudaGraphInstantiate(&replay, graph, 0));
  cudaEvent_t begin, end;
  must(cudaEventCreate(&begin));
  must(cudaEventCreate(&end));
  std::vector<float> times;
  float total = 0;
  for (int i = 0; i < 40 && (i < 5 || total < 40); ++i) {
    must(cudaEventRecord(begin, stream));
    must(cudaGraphLaunch(replay, stream));
    must(cudaEventRecord(end, stream));
    must(cudaEventSynchronize(end));
    float ms = 0;
    must(cudaEventElapsedTime(&ms, begin, end));
    if (i == 0) continue;  // warm-up
    times.push_back(ms);
    total += ms;
  }
  must(cudaEventDestroy(begin));
  must(cudaEventDestroy(end));
  must(cudaGraphExecDestroy(replay));
  must(cudaGraphDestroy(graph));
  must(cudaStreamDestroy(stream));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2] * 1e3 / steps;
}

struct Routing {
  int64_t slots = 0, hit = 0, tokens = 0;  // local ones
};
Routing draw(Random& random, const LayerShape& shape, int64_t tokens, std::vector<int32_t>& ids) {
  Routing routing;
  std::set<int32_t> experts;
  for (int64_t t = 0; t < tokens; ++t) {
    std::vector<int32_t> chosen;
    bool local = false;
    while (static_cast<int64_t>(chosen.size()) < shape.top_k) {
      const auto id = static_cast<int32_t>(random.below(shape.experts));
      if (std::find(chosen.begin(), chosen.end(), id) == chosen.end()) chosen.push_back(id);
    }
    for (int32_t id : chosen) {
      ids.push_back(id);
      if (id >= shape.local_experts) continue;
      experts.insert(id);
      ++routing.slots;
      local = true;
    }
    routing.tokens += local;
  }
  routing.hit = static_cast<int64_t>(experts.size());
  return routing;
}

struct Times {
  double layer, gemm1, gemm2;
};

Times time_backend(const Backend& backend, const std::vector<PackedWeights>& layers, Batch batch, int steps,
                   const int32_t* ids, int64_t ids_of_step, int gemm_config) {
  const PackedWeights& first = layers.front();
  auto facts = device_facts("cuda:0");
  must(facts.status());
  auto plan = backend.plan(first.config, first.range, {}, {batch.tokens, 0, gemm_config}, *facts);
  must(plan.status());
  const DeviceArray memory(plan->workspace.total_bytes);
  auto* const workspace = reinterpret_cast<std::byte*>(memory.data);
  const auto layer_of = [&](int step) -> const PackedWeights& {
    return layers[static_cast<size_t>(step) % layers.size()];
  };
  Times times{};
  times.layer = time_graph(steps, [&](int step, cudaStream_t stream) {
    Batch own = batch;
    own.topk_ids = ids + step * ids_of_step;
    must(backend.run(layer_of(step), *plan, own, workspace, RunContext{nullptr, stream}));
  });
  Arena arena(workspace);
  const LayerBuffers buffers = layer_buffers(first.config, first.range, batch.tokens, arena);
  const auto run_plan = backend.steps->plan(first, *plan, batch);
  const auto at = [&](int step, cudaStream_t stream) {
    return StepContext{layer_of(step), batch, buffers, serial_executor(), arena, stream, run_plan.get()};
  };
  // A run may have gone another way than by hidden in memory, which gemm1 alone starts from.
  must(backend.steps->quantize(at(0, nullptr)));
  must(cudaDeviceSynchronize());
  times.gemm1 = time_graph(steps, [&](int step, cudaStream_t stream) {
    must(backend.steps->gemm1_swiglu(at(step, stream), buffers.routed));
  });
  times.gemm2 = time_graph(
      steps, [&](int step, cudaStream_t stream) { must(backend.steps->gemm2(at(step, stream), buffers.routed)); });
  return times;
}

void bench_shape(const LayerShape& shape, const std::vector<int64_t>& tokens_list, MoeOptions options, bool with_cuda,
                 int gemm_config) {
  options.num_experts = shape.experts;
  options.top_k = shape.top_k;
  options.hidden_size = shape.hidden;
  options.intermediate_size = shape.intermediate;
  const auto config = MoeConfig::make(options);
  must(config.status());
  const ExpertRange range{0, shape.local_experts};
  const auto facts = device_facts("cuda:0");
  must(facts.status());
  const auto backend = choose_backend(*config, *facts, "auto");
  must(backend.status());
  // Both read one layout where they have the same; sm120's of nvfp4 is its own.
  const bool beside_cuda =
      with_cuda && gemm_config < 0 && *backend != &kCudaBackend && facts->compute_capability / 10 < 10;
  std::vector<PackedWeights> layers;
  for (int i = 0; i < shape.layers; ++i)
    layers.push_back(make_layer(**backend, *config, range, 7 + static_cast<uint64_t>(i)));
  for (int64_t tokens : tokens_list) {
    const int steps = tokens <= 64 ? 16 : tokens <= 512 ? 8 : 4;
    Random random(static_cast<uint64_t>(tokens));
    std::vector<int32_t> ids;
    Routing mean, last;
    for (int step = 0; step < steps; ++step) {
      do {
        ids.resize(static_cast<size_t>(step * tokens * shape.top_k));
        last = draw(random, shape, tokens, ids);
      } while (last.slots == 0);
      mean.slots += last.slots, mean.hit += last.hit, mean.tokens += last.tokens;
    }
    const double h = static_cast<double>(shape.hidden), n = static_cast<double>(shape.intermediate);
    const auto floor_us = [&](double slots, double hit, double with_rows) {
      const double bytes = hit * 3 * h * n * 0.5625 + with_rows * h * 4 + slots * n * 4;
      return std::max(bytes / 4.3e6, 6 * slots * h * n / 790e6);
    };
    const double floor = floor_us(static_cast<double>(mean.slots) / steps, static_cast<double>(mean.hit) / steps,
                                  static_cast<double>(mean.tokens) / steps);
    const DeviceArray ids_array(ids.size() * 4), weights(ids.size() * 4);
    must(cudaMemcpy(ids_array.data, ids.data(), ids.size() * 4, cudaMemcpyHostToDevice));
    const std::vector<float> router(ids.size(), 0.25f);
    must(cudaMemcpy(weights.data, router.data(), ids.size() * 4, cudaMemcpyHostToDevice));
    // bf16 of either sign between 1/4 and 4.
    const auto count = static_cast<size_t>(tokens * shape.hidden);
    const std::vector<uint8_t> bits = random_bytes(random, count * 2, 0x81FF81FF81FF81FFull, 0x3E803E803E803E80ull);
    const DeviceArray hidden(count * 2), out(count * 2);
    must(cudaMemcpy(hidden.data, bits.data(), count * 2, cudaMemcpyHostToDevice));
    Batch batch;
    batch.tokens = tokens;
    batch.hidden = hidden.data;
    batch.topk_weights = static_cast<const float*>(weights.data);
    batch.out = out.data;
    const auto* const device_ids = static_cast<const int32_t*>(ids_array.data);
    batch.topk_ids = device_ids;
    const int64_t ids_of_step = tokens * shape.top_k;
    const Times own = time_backend(**backend, layers, batch, steps, device_ids, ids_of_step, gemm_config);
    const double rows = static_cast<double>(mean.slots) / static_cast<double>(mean.hit);
    // The GEMM graphs use the last routing.
    const double last_bytes = static_cast<double>(last.hit) * h * n * 0.5625;
    const double last_flops = 2 * static_cast<double>(last.slots) * h * n;
    std::printf(
        "%-9s %5ld %6.1f rows | floor %8.1f | %s %8.1f (%.2fx) | g1 %8.1f %.2f TB/s %4.0f TF | g2 %8.1f %.2f TB/s "
        "%4.0f TF",
        shape.name, static_cast<long>(tokens), rows, floor, (*backend)->name, own.layer, own.layer / floor, own.gemm1,
        2 * last_bytes / own.gemm1 / 1e6, 2 * last_flops / own.gemm1 / 1e6, own.gemm2, last_bytes / own.gemm2 / 1e6,
        last_flops / own.gemm2 / 1e6);
    if (beside_cuda) {
      const Times plain = time_backend(kCudaBackend, layers, batch, steps, device_ids, ids_of_step, gemm_config);
      std::printf(" | cuda %8.1f: %.2fx", plain.layer, plain.layer / own.layer);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace nvfp4_moe

int main(int argc, char** argv) {
  using namespace nvfp4_moe;
  std::vector<int64_t> tokens = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192};
  std::vector<std::string> names;
  MoeOptions options;
  options.activation_format = ActivationFormat::kBf16;
  bool with_cuda = true;
  int gemm_config = -1;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--tokens" && i + 1 < argc) {
      tokens.clear();
      for (char* at = argv[++i]; *at != '\0';) {
        tokens.push_back(std::strtol(at, &at, 10));
        if (*at == ',') ++at;
      }
    } else if (argument == "--format" && i + 1 < argc) {
      const bool nvfp4 = std::string(argv[++i]) == "nvfp4";
      options.activation_format = nvfp4 ? ActivationFormat::kNvfp4 : ActivationFormat::kBf16;
    } else if (argument == "--batch-invariant") {
      options.batch_invariant = true;
    } else if (argument == "--no-cuda") {
      with_cuda = false;
    } else if (argument == "--configuration" && i + 1 < argc) {
      gemm_config = std::atoi(argv[++i]);
    } else {
      names.push_back(argument);
    }
  }
  const auto facts = device_facts("cuda:0");
  must(facts.status());
  const std::string configuration = gemm_config < 0 ? "" : ", configuration " + std::to_string(gemm_config);
  std::printf("%s, %s%s%s, us\n", facts->name.c_str(), to_string(options.activation_format),
              options.batch_invariant ? ", batch invariant" : "", configuration.c_str());
  for (const LayerShape& shape : kShapes)
    if (names.empty() ? shape.name != std::string("rehearsal")
                      : std::find(names.begin(), names.end(), shape.name) != names.end())
      bench_shape(shape, tokens, options, with_cuda, gemm_config);
  return 0;
}
