// Times layers on one GPU with the backend that a layer gets there (sm90 on Hopper) and with cuda,
// in the same run, and compares them with the floor.
//
//   bench_hopper_layers [SHAPE...] [--tokens T,T,...] [--format bf16|nvfp4|fp8] [--sm90-only]
//                       [--batch-invariant] [--configuration N] [--routing ROUTING,ROUTING,...]
//                       [--launch-per-step] [--layers-only] [--sustained SECONDS] [--split TOKENS]
//                       [--json FILE]
//
// --configuration  index of the GEMMs' configuration in the backend's list, instead of the plan's;
//                  without cuda
// --launch-per-step  no run of few tokens is one kernel
// --routing        uniform, zipf:S or hot (routings.h)
// --layers-only    leaves out the graphs of one GEMM
// --split          compares the output with that of the same tokens in smaller batches
// --json           appends the cells to FILE, one JSON object per line
// The shape `rehearsal` is for trying out the bench on a slow device. It and the shapes of uneven
// routing are left out unless they are named.
//
// Prints one line per shape and token count. A step is one run of a layer: ids and hidden in,
// output out. One CUDA graph has 4 to 16 steps, each with its own routing and the next of the
// rotated layers. The figure is the median replay in a burst of about 40 ms, divided by the steps.
// With --sustained the graph is then replayed for that many seconds, so that the power cap limits
// the clock, and the mean of the second half is printed too. gemm1 and gemm2 are graphs of only
// that step. floor = max(bytes / 4.3 TB/s, flops / 790 TFLOP/s), an H200's.
// Long because one program times, checks and reports, and nothing else uses its parts.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/layer_steps.h"
#include "core/float_formats.h"
#include "core/random.h"
#include "moe/backend_selection.h"
#include "moe/registry.h"
#include "random_layer.h"
#include "routings.h"

namespace nvfp4_moe::internal {
namespace {

struct LayerShape {
  const char* name;
  int64_t local_experts, experts, top_k, hidden, intermediate;
  int layers;     // in rotation, so that none stays in L2
  bool if_named;  // only run if named
};
// The shapes before the last one are special: many experts with top-8 on one rank of eight, and a K
// that is not a multiple of a k-block on one rank of four.
constexpr LayerShape kShapes[] = {{"v4pro_ep8", 48, 384, 6, 7168, 3072, 1, false},
                                  {"v4flash", 256, 256, 6, 4096, 2048, 1, false},
                                  {"qwen30b", 128, 128, 8, 2048, 768, 4, false},
                                  {"mixtral", 8, 8, 2, 4096, 14336, 2, false},
                                  {"qwen_next", 512, 512, 10, 2048, 512, 2, true},
                                  {"v41flash_ep8", 48, 384, 6, 5120, 2304, 1, true},
                                  {"k3_ep8", 112, 896, 16, 3584, 3072, 1, true},
                                  {"kimi_ep8", 48, 384, 8, 7168, 2048, 1, true},
                                  {"gptoss_ep4", 32, 128, 4, 2880, 2880, 1, true},
                                  {"rehearsal", 4, 8, 2, 512, 256, 1, true}};

struct DeviceArray {
  explicit DeviceArray(size_t size_bytes) {
    must(cudaMalloc(&data, std::max<size_t>(size_bytes, 1)));
  }
  ~DeviceArray() { cudaFree(data); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  void* data = nullptr;
};

// Microseconds of a step of a graph: the median of a burst, and the mean under sustained load.
struct StepTime {
  double burst = 0, sustained = 0;
};
StepTime time_graph(int steps, const std::function<void(int, cudaStream_t)>& enqueue,
                    double sustained_seconds = 0) {
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
  // Milliseconds of `count` consecutive replays.
  const auto replays = [&](int count) {
    must(cudaEventRecord(begin, stream));
    for (int i = 0; i < count; ++i) must(cudaGraphLaunch(replay, stream));
    must(cudaEventRecord(end, stream));
    must(cudaEventSynchronize(end));
    float ms = 0;
    must(cudaEventElapsedTime(&ms, begin, end));
    return ms;
  };
  // An idle GPU takes milliseconds to raise its clock, longer than the graph of a small batch.
  for (float warm = 0; warm < 20;) warm += replays(1);
  std::vector<float> times;
  float total = 0;
  for (int i = 0; i < 40 && (i < 4 || total < 40); ++i) {
    const float ms = replays(1);
    times.push_back(ms);
    total += ms;
  }
  std::sort(times.begin(), times.end());
  StepTime result{times[times.size() / 2] * 1e3 / steps, 0};
  if (sustained_seconds > 0) {
    // at least 20 ms
    const int at_once = std::max(1, static_cast<int>(20 / times[times.size() / 2]));
    double all = 0, late = 0;
    int late_replays = 0;
    while (all < sustained_seconds * 1e3) {
      const double ms = replays(at_once);
      if (all >= sustained_seconds * 5e2) late += ms, late_replays += at_once;
      all += ms;
    }
    if (late_replays > 0) result.sustained = late * 1e3 / late_replays / steps;
  }
  must(cudaEventDestroy(begin));
  must(cudaEventDestroy(end));
  must(cudaGraphExecDestroy(replay));
  must(cudaGraphDestroy(graph));
  must(cudaStreamDestroy(stream));
  return result;
}

struct Times {
  StepTime layer;
  double gemm1, gemm2;
};

// Options of the command line, except shapes and tokens.
struct Request {
  MoeOptions options;
  bool sm90_only = false;
  int gemm_config = -1;
  bool one_launch = true;
  std::vector<Routing> routings = {Routing{}};
  bool layers_only = false;
  double sustained_seconds = 0;
  int64_t split_tokens = 0;
  FILE* json = nullptr;
};

Times time_backend(const Backend& backend, const std::vector<PackedWeights>& layers, Batch batch,
                   int steps, const int32_t* ids, int64_t ids_of_step, const Request& request) {
  const PackedWeights& first = layers.front();
  auto facts = device_facts("cuda:0");
  must(facts.status());
  Limits limits{batch.tokens};
  limits.gemm_config = request.gemm_config;
  limits.one_launch = request.one_launch;
  auto plan = backend.plan(first.config, first.range, {}, limits, *facts);
  must(plan.status());
  const DeviceArray memory(plan->workspace.total_bytes);
  auto* const workspace = reinterpret_cast<std::byte*>(memory.data);
  const auto layer_of = [&](int step) -> const PackedWeights& {
    return layers[static_cast<size_t>(step) % layers.size()];
  };
  Times times{};
  times.layer = time_graph(
      steps,
      [&](int step, cudaStream_t stream) {
        Batch own = batch;
        own.topk_ids = ids + step * ids_of_step;
        must(backend.run(layer_of(step), *plan, own, workspace, RunContext{nullptr, stream}));
      },
      request.sustained_seconds);
  if (request.layers_only) return times;
  Arena arena(workspace);
  const LayerBuffers buffers = layer_buffers(first.config, first.range, batch.tokens, arena);
  const auto run_plan = backend.steps->plan(first, *plan, batch);
  const auto at = [&](int step, cudaStream_t stream) {
    return StepContext{layer_of(step), batch,  buffers,       serial_executor(),
                       arena,          stream, run_plan.get()};
  };
  // A run may not have written the quantized hidden to memory, but the graph of gemm1 reads it.
  must(backend.steps->quantize(at(0, nullptr)));
  must(cudaDeviceSynchronize());
  times.gemm1 = time_graph(steps, [&](int step, cudaStream_t stream) {
                  must(backend.steps->gemm1_swiglu(at(step, stream), buffers.routed));
                }).burst;
  times.gemm2 = time_graph(steps, [&](int step, cudaStream_t stream) {
                  must(backend.steps->gemm2(at(step, stream), buffers.routed));
                }).burst;
  return times;
}

// The difference between a batch's output and that of the same tokens in batches of split_tokens:
// relative L2, and the number of elements with different bits.
struct SplitDifference {
  double relative_l2 = 0;
  int64_t elements = 0;
};
SplitDifference compare_with_split(const Backend& backend, const PackedWeights& weights,
                                   const Batch& batch, int64_t split_tokens) {
  const int64_t top_k = weights.config->top_k, hidden = weights.config->hidden_size;
  const auto facts = device_facts("cuda:0");
  must(facts.status());
  const auto plan = backend.plan(weights.config, weights.range, {}, {batch.tokens}, *facts);
  must(plan.status());
  const DeviceArray workspace(plan->workspace.total_bytes);
  const auto count = static_cast<size_t>(batch.tokens * hidden);
  std::vector<uint16_t> outputs[2];
  for (const int64_t tokens : {batch.tokens, split_tokens}) {
    for (int64_t first = 0; first < batch.tokens; first += tokens) {
      Batch part = batch;
      part.tokens = std::min(tokens, batch.tokens - first);
      part.hidden = static_cast<const uint16_t*>(batch.hidden) + first * hidden;
      part.topk_ids = static_cast<const int32_t*>(batch.topk_ids) + first * top_k;
      part.topk_weights = batch.topk_weights + first * top_k;
      part.out = static_cast<uint16_t*>(batch.out) + first * hidden;
      must(
          backend.run(weights, *plan, part, static_cast<std::byte*>(workspace.data), RunContext{}));
    }
    std::vector<uint16_t>& out = outputs[outputs[0].empty() ? 0 : 1];
    out.resize(count);
    must(cudaMemcpy(out.data(), batch.out, count * 2, cudaMemcpyDeviceToHost));
    must(cudaMemset(batch.out, 0xFF, count * 2));  // NaN
  }
  SplitDifference difference;
  double error = 0, norm = 0;
  for (size_t i = 0; i < count; ++i) {
    const double whole = bf16_to_float(outputs[0][i]), split = bf16_to_float(outputs[1][i]);
    difference.elements += outputs[0][i] != outputs[1][i];
    error += (whole - split) * (whole - split), norm += split * split;
  }
  difference.relative_l2 = std::sqrt(error / norm);
  return difference;
}

void bench_routing(const LayerShape& shape, const Routing& of,
                   const std::vector<int64_t>& tokens_list, const Request& request,
                   const Backend& backend, bool beside_cuda,
                   const std::vector<PackedWeights>& layers) {
  const RoutingDraw routing(of, {shape.local_experts, shape.experts, shape.top_k});
  if (of.kind != Routing::Kind::kUniform || of.spread) std::printf("routing %s\n", of.text.c_str());
  for (int64_t tokens : tokens_list) {
    const int steps = tokens <= 64 ? 16 : tokens <= 512 ? 8 : 4;
    Random random(static_cast<uint64_t>(tokens));
    std::vector<int32_t> ids;
    LocalCounts mean, last;
    for (int step = 0; step < steps; ++step) {
      do {
        ids.resize(static_cast<size_t>(step * tokens * shape.top_k));
        last = routing.draw(random, tokens, ids);
      } while (last.rows == 0);
      mean.rows += last.rows, mean.experts_hit += last.experts_hit, mean.tokens += last.tokens;
      mean.most_rows += last.most_rows;
    }
    const double h = static_cast<double>(shape.hidden), n = static_cast<double>(shape.intermediate);
    const double rows = static_cast<double>(mean.rows) / steps,
                 hit = static_cast<double>(mean.experts_hit) / steps,
                 with_rows = static_cast<double>(mean.tokens) / steps;
    const double bytes = hit * 3 * h * n * 0.5625 + with_rows * h * 4 + rows * n * 4;
    const double floor = std::max(bytes / 4.3e6, 6 * rows * h * n / 790e6);
    const DeviceArray ids_array(ids.size() * 4), weights(ids.size() * 4);
    must(cudaMemcpy(ids_array.data, ids.data(), ids.size() * 4, cudaMemcpyHostToDevice));
    const std::vector<float> router(ids.size(), 0.25f);
    must(cudaMemcpy(weights.data, router.data(), ids.size() * 4, cudaMemcpyHostToDevice));
    // bf16 of both signs between 1/4 and 4.
    const auto count = static_cast<size_t>(tokens * shape.hidden);
    const std::vector<uint8_t> bits =
        random_bytes(random, count * 2, 0x81FF81FF81FF81FFull, 0x3E803E803E803E80ull);
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
    const Times own = time_backend(backend, layers, batch, steps, device_ids, ids_of_step, request);
    // The GEMM graphs use the last routing.
    const double last_bytes = static_cast<double>(last.experts_hit) * h * n * 0.5625;
    const double last_flops = 2 * static_cast<double>(last.rows) * h * n;
    std::printf("%-9s %5ld %6.1f rows | floor %8.1f | %s %8.1f (%.2fx)", shape.name,
                static_cast<long>(tokens), rows / hit, floor, backend.name, own.layer.burst,
                own.layer.burst / floor);
    if (!request.layers_only)
      std::printf(" | g1 %8.1f %.2f TB/s %4.0f TF | g2 %8.1f %.2f TB/s %4.0f TF", own.gemm1,
                  2 * last_bytes / own.gemm1 / 1e6, 2 * last_flops / own.gemm1 / 1e6, own.gemm2,
                  last_bytes / own.gemm2 / 1e6, last_flops / own.gemm2 / 1e6);
    if (request.sustained_seconds > 0) std::printf(" | sustained %8.1f", own.layer.sustained);
    if (beside_cuda) {
      Request burst = request;
      burst.sustained_seconds = 0;
      const double plain =
          time_backend(kCudaBackend, layers, batch, steps, device_ids, ids_of_step, burst)
              .layer.burst;
      std::printf(" | cuda %8.1f: %.2fx", plain, plain / own.layer.burst);
    }
    SplitDifference split;
    if (request.split_tokens > 0) {
      split = compare_with_split(backend, layers.front(), batch, request.split_tokens);
      std::printf(" | in batches of %ld: relative L2 %.2e, %ld elements differ",
                  static_cast<long>(request.split_tokens), split.relative_l2,
                  static_cast<long>(split.elements));
    }
    std::printf("\n");
    std::fflush(stdout);
    if (request.json == nullptr) continue;
    std::fprintf(
        request.json,
        "{\"shape\": \"%s\", \"T\": %ld, \"format\": \"%s\", \"backend\": \"%s\", \"routing\": "
        "\"%s\", "
        "\"batch_invariant\": %s, \"one_launch\": %s, \"configuration\": %d, \"rows\": %.1f, "
        "\"experts_hit\": %.1f, "
        "\"most_rows\": %.1f, \"floor_us\": %.2f, \"us\": %.2f, \"gemm1_us\": %.2f, \"gemm2_us\": "
        "%.2f, "
        "\"sustained_us\": %.2f, \"sustained_s\": %g, \"split_tokens\": %ld, "
        "\"split_relative_l2\": %.3e, "
        "\"split_elements\": %ld}\n",
        shape.name, static_cast<long>(tokens), to_string(request.options.activation_format),
        backend.name, of.text.c_str(), request.options.batch_invariant ? "true" : "false",
        request.one_launch ? "true" : "false", request.gemm_config, rows, hit,
        static_cast<double>(mean.most_rows) / steps, floor, own.layer.burst, own.gemm1, own.gemm2,
        own.layer.sustained, request.sustained_seconds, static_cast<long>(request.split_tokens),
        split.relative_l2, static_cast<long>(split.elements));
    std::fflush(request.json);
  }
}

void bench_shape(const LayerShape& shape, const std::vector<int64_t>& tokens_list,
                 const Request& request) {
  MoeOptions options = request.options;
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
  // Both backends must read the same layout; sm120 has a different one for nvfp4.
  const bool beside_cuda = !request.sm90_only && request.gemm_config < 0 &&
                           *backend != &kCudaBackend && facts->compute_capability / 10 < 10;
  std::vector<PackedWeights> layers;
  for (int i = 0; i < shape.layers; ++i)
    layers.push_back(make_layer(**backend, *config, range, 7 + static_cast<uint64_t>(i)));
  for (const Routing& routing : request.routings)
    bench_routing(shape, routing, tokens_list, request, **backend, beside_cuda, layers);
}

// The value of an option; exits if it is missing.
const char* value_of(int argc, char** argv, int& i) {
  if (i + 1 < argc) return argv[++i];
  std::fprintf(stderr, "%s: expected a value\n", argv[i]);
  std::exit(2);
}
[[noreturn]] void refuse(const std::string& what, const char* known) {
  std::fprintf(stderr, "%s (known: %s)\n", what.c_str(), known);
  std::exit(2);
}

}  // namespace
}  // namespace nvfp4_moe::internal

int main(int argc, char** argv) {
  using namespace nvfp4_moe::internal;
  std::vector<int64_t> tokens = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192};
  std::vector<std::string> names;
  Request request;
  request.options.activation_format = ActivationFormat::kBf16;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--tokens") {
      tokens.clear();
      for (char* at = const_cast<char*>(value_of(argc, argv, i)); *at != '\0';) {
        tokens.push_back(std::strtol(at, &at, 10));
        if (*at == ',') ++at;
      }
    } else if (argument == "--format") {
      const std::string format = value_of(argc, argv, i);
      if (format != "bf16" && format != "nvfp4" && format != "fp8")
        refuse("format " + format, "bf16, nvfp4, fp8");
      request.options.activation_format = format == "nvfp4" ? ActivationFormat::kNvfp4
                                          : format == "fp8" ? ActivationFormat::kFp8
                                                            : ActivationFormat::kBf16;
    } else if (argument == "--batch-invariant") {
      request.options.batch_invariant = true;
    } else if (argument == "--sm90-only") {
      request.sm90_only = true;
    } else if (argument == "--launch-per-step") {
      request.one_launch = false;
    } else if (argument == "--configuration") {
      request.gemm_config = std::atoi(value_of(argc, argv, i));
    } else if (argument == "--routing") {
      request.routings.clear();
      std::stringstream list(value_of(argc, argv, i));
      for (std::string text; std::getline(list, text, ',');)
        if (!Routing::parse(text, request.routings.emplace_back()))
          refuse("routing " + text, "uniform, zipf:S with S from 0 to 4, hot; each with +spread");
    } else if (argument == "--layers-only") {
      request.layers_only = true;
    } else if (argument == "--sustained") {
      request.sustained_seconds = std::atof(value_of(argc, argv, i));
    } else if (argument == "--split") {
      request.split_tokens = std::atol(value_of(argc, argv, i));
    } else if (argument == "--json") {
      const char* const path = value_of(argc, argv, i);
      request.json = std::fopen(path, "a");
      if (request.json == nullptr) refuse(std::string("cannot write ") + path, "a file's path");
    } else {
      const auto is_named = [&](const LayerShape& shape) { return argument == shape.name; };
      if (std::none_of(std::begin(kShapes), std::end(kShapes), is_named)) {
        std::string known;
        for (const LayerShape& shape : kShapes)
          known += std::string(known.empty() ? "" : ", ") + shape.name;
        refuse("shape " + argument, known.c_str());
      }
      names.push_back(argument);
    }
  }
  const auto facts = device_facts("cuda:0");
  must(facts.status());
  const std::string configuration =
      request.gemm_config < 0 ? "" : ", configuration " + std::to_string(request.gemm_config);
  std::printf("%s, %s%s%s, us\n", facts->name.c_str(), to_string(request.options.activation_format),
              request.options.batch_invariant ? ", batch invariant" : "",
              (configuration + (request.one_launch ? "" : ", a launch per step")).c_str());
  for (const LayerShape& shape : kShapes)
    if (names.empty() ? !shape.if_named
                      : std::find(names.begin(), names.end(), shape.name) != names.end())
      bench_shape(shape, tokens, request);
  if (request.json != nullptr) std::fclose(request.json);
  return 0;
}
