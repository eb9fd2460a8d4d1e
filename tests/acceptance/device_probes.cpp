// Measures properties of a new GPU that an emulator cannot show, and prints one JSON object.
//
// kernels: for every kernel of small layers in both formats, the driver's registers, local and
// shared memory, whether the launch succeeded with them, and how many ctas fit on a multiprocessor.
// accumulation: large + small - large through a W4A4 linear, for small = large / 2^d. If small is
// left, the sum was at least d bits wide.
// scale_bytes: the value of a block scale for each byte. The library refuses bytes from 0x7F on, so
// they are packed without its checks.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstring>

#include "acceptance/seen_kernels.h"
#include "core/float_formats.h"
#include "io/json.h"
#include "moe/layer.h"
#include "moe/registry.h"
#include "support/case_run.h"

namespace nvfp4_moe::internal {
namespace {

Json number(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

Json device_json(const DeviceFacts& facts) {
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    return cudaDeviceGetAttribute(&value, which, facts.index) == cudaSuccess ? value : 0;
  };
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  Json json = Json::object();
  json["name"] = facts.name;
  json["compute_capability"] = facts.compute_capability;
  json["multiprocessors"] = facts.compute_units;
  json["memory_bytes"] = facts.memory_bytes;
  json["shared_bytes_of_a_cta"] = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  json["shared_bytes_of_a_multiprocessor"] = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  json["reserved_shared_bytes_of_a_cta"] = attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  json["registers_of_a_multiprocessor"] = attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
  json["threads_of_a_multiprocessor"] = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  json["l2_bytes"] = attribute(cudaDevAttrL2CacheSize);
  json["driver"] = driver;
  json["runtime"] = runtime;
  return json;
}

// A linear that is packed past moe/'s checks.
class Linear {
 public:
  // codes (rows, cols / 2), scales (rows, cols / 16)
  static Result<std::unique_ptr<Linear>> open(const Backend& backend, const DeviceFacts& facts,
                                              const std::vector<uint8_t>& codes,
                                              const std::vector<uint8_t>& scales, int64_t cols) {
    std::unique_ptr<Linear> made(new Linear(backend));
    LinearWeights& weights = made->weights_;
    weights.cols = cols;
    weights.rows = static_cast<int64_t>(codes.size()) / (cols / 2);
    weights.tensor_scale = 1.0f;
    weights.activation_format = ActivationFormat::kNvfp4;
    weights.device = facts.index;
    weights.facts = facts;
    NVFP4_MOE_ASSIGN(weights.bytes, backend.allocate(backend.linear_bytes(weights.rows, cols),
                                                     facts.index, "weights of a probe"));
    NVFP4_MOE_TRY(backend.linear_pack(
        weights, Nvfp4View::contiguous(codes.data(), scales.data(), 1.0f, weights.rows, cols)));
    return made;
  }

  // x: (cols), the same for all tokens. y of the last token: (rows)
  Result<std::vector<float>> run(const std::vector<float>& x, int64_t tokens) const {
    std::vector<float> all, y(static_cast<size_t>(weights_.rows));
    for (int64_t t = 0; t < tokens; ++t) all.insert(all.end(), x.begin(), x.end());
    const size_t x_bytes = all.size() * sizeof(float), row_bytes = y.size() * sizeof(float);
    const auto allocate = [&](size_t size_bytes) {
      return backend_.allocate(size_bytes, weights_.device, "arrays of a probe");
    };
    NVFP4_MOE_ASSIGN(const Buffer device_x, allocate(x_bytes));
    NVFP4_MOE_ASSIGN(const Buffer device_y, allocate(row_bytes * static_cast<size_t>(tokens)));
    NVFP4_MOE_ASSIGN(const Buffer workspace,
                     allocate(backend_.linear_workspace_bytes(weights_, tokens)));
    NVFP4_MOE_TRY(
        backend_.memory->to_device(weights_.device, device_x.data(), all.data(), x_bytes, nullptr));
    const LinearBatch batch{tokens, device_x.data(), DType::kF32, device_y.data(), DType::kF32};
    NVFP4_MOE_TRY(backend_.linear_run(weights_, batch, workspace.data(), RunContext{}));
    NVFP4_MOE_TRY(backend_.memory->to_host(
        weights_.device, y.data(), device_y.data() + row_bytes * static_cast<size_t>(tokens - 1),
        row_bytes, nullptr));
    return y;
  }

 private:
  explicit Linear(const Backend& backend) : backend_(backend) {}
  const Backend& backend_;
  LinearWeights weights_;
};

constexpr int64_t kCols = 768;  // three k-blocks of 256
constexpr int kMostBits = 34;
constexpr uint8_t kCodes[] = {
    2, 3};  // 1 and 1.5: small, and small that is three quarters of a last place

// E4M3 of 2^exponent, -9 to 8.
uint8_t scale_of(int exponent) { return e4m3_from_float(std::ldexp(1.0f, exponent)); }

struct Places {
  const char* what;
  int64_t large, small, minus_large;  // columns, in three blocks of 16
};
// An instruction of FP4 tensor cores adds 64 columns.
constexpr Places kPlaces[] = {{"within 64 columns: large, small, -large", 0, 16, 32},
                              {"within 64 columns: small, large, -large", 32, 0, 16},
                              {"256 columns apart: large, small, -large", 0, 256, 512},
                              {"256 columns apart: small, large, -large", 256, 0, 512}};

// One row of weights per d: 2^10 x 4 at large, code x 2^(10 - d) x 4 at small, -2^10 x 4 at
// minus_large. For d = 2 to 19 only the weights vary, with scales of 2^8 to 2^-9. For larger d, x
// is 2^-16 times as large at small.
Result<Json> accumulation_json(const Backend& backend, const DeviceFacts& facts,
                               const Places& places, uint8_t code, int64_t tokens) {
  Json kept = Json::array();
  for (const int part : {0, 16}) {
    const int first = part == 0 ? 2 : 20, last = part == 0 ? 19 : kMostBits;
    std::vector<uint8_t> codes, scales;
    for (int d = first; d <= last; ++d) {
      std::vector<uint8_t> row(kCols / 2, 0), row_scales(kCols / 16, scale_of(0));
      const auto put = [&](int64_t col, uint8_t value, int exponent) {
        row[static_cast<size_t>(col / 2)] = value;  // columns of Places are even: the low nibble
        row_scales[static_cast<size_t>(col / 16)] = scale_of(exponent);
      };
      put(places.large, 6, 8);  // 4 x 2^8
      put(places.small, code, 10 - d + part);
      put(places.minus_large, 6 | 8, 8);
      codes.insert(codes.end(), row.begin(), row.end());
      scales.insert(scales.end(), row_scales.begin(), row_scales.end());
    }
    std::vector<float> x(kCols, 0.0f);
    for (const int64_t col : {places.large, places.small, places.minus_large}) {
      const int exponent = col == places.small ? -part : 0;
      x[static_cast<size_t>(col)] = std::ldexp(4.0f, exponent);
      // makes the block's scale a power of two; times 0
      x[static_cast<size_t>(col) + 1] = std::ldexp(6.0f, exponent);
    }
    NVFP4_MOE_ASSIGN(const auto linear, Linear::open(backend, facts, codes, scales, kCols));
    NVFP4_MOE_ASSIGN(const std::vector<float> y, linear->run(x, tokens));
    for (int d = first; d <= last; ++d) {
      const double small = 4.0 * e2m1_to_float(code) * std::ldexp(1.0, 10 - d);
      kept.push_back(number(y[static_cast<size_t>(d - first)] / small));
    }
  }
  Json json = Json::object();
  json["places"] = places.what;
  json["small_over_power_of_two"] = double{e2m1_to_float(code)};
  json["tokens"] = tokens;
  json["of_small_left_for_d_from_2"] = kept;  // 1: exact; 0: lost; else rounded
  return json;
}

// One row of weights a byte: the scale of one code 1, times x = 6.
Result<Json> scale_bytes_json(const Backend& backend, const DeviceFacts& facts) {
  const std::vector<uint8_t> bytes = {0x01, 0x08, 0x38, 0x7E, 0x7F, 0x80,
                                      0x81, 0xB8, 0xC0, 0xFE, 0xFF};
  std::vector<uint8_t> codes(bytes.size() * kCols / 2, 0),
      scales(bytes.size() * kCols / 16, scale_of(0));
  for (size_t row = 0; row < bytes.size(); ++row) {
    codes[row * kCols / 2] = 2;
    scales[row * kCols / 16] = bytes[row];
  }
  std::vector<float> x(kCols, 0.0f);
  x[0] = 6.0f;
  NVFP4_MOE_ASSIGN(const auto linear, Linear::open(backend, facts, codes, scales, kCols));
  NVFP4_MOE_ASSIGN(const std::vector<float> y, linear->run(x, 1));
  Json json = Json::array();
  for (size_t row = 0; row < bytes.size(); ++row) {
    char name[8];
    std::snprintf(name, sizeof name, "0x%02X", bytes[row]);
    Json one = Json::object();
    one["byte"] = name;
    one["counts_for"] = number(y[row] / 6.0);
    json.push_back(one);
  }
  return json;
}

// Layers with several token counts, so that every configuration that these row counts per expert
// select is launched once.
Result<Json> layers_json(const DeviceFacts& facts) {
  Json layers = Json::array();
  for (const ActivationFormat format : {ActivationFormat::kNvfp4, ActivationFormat::kBf16})
    for (const int64_t tokens :
         {int64_t{1}, int64_t{12}, int64_t{30}, int64_t{120}, int64_t{300}}) {
      Case spec;
      spec.name = "probe";
      spec.options.num_experts = 4;
      spec.options.top_k = 2;
      spec.options.hidden_size = 512;
      spec.options.intermediate_size = 272;
      spec.options.activation_format = format;
      spec.range = {0, 4};
      spec.tokens = tokens;
      NVFP4_MOE_ASSIGN(const CaseData data, make_case(spec));
      NVFP4_MOE_ASSIGN(const Backend* const backend, choose_backend(data.config, facts, "auto"));
      test::CaseRun run(*backend, data);
      if (!run.ok())
        return Status(Code::kInternal,
                      std::string(backend->name) + ": a small layer cannot be opened");
      run.run(data);
      Json one = Json::object();
      one["activation_format"] = to_string(format);
      one["tokens"] = tokens;
      one["backend"] = backend->name;
      Json steps = Json::array();
      for (const StepPlan& step :
           describe_run(*backend, data.config, spec.range, run.plan(), tokens))
        steps.push_back(step.step + ": " + step.kernel);
      one["steps"] = steps;
      layers.push_back(one);
    }
  return layers;
}

Json kernels_json() {
  Json kernels = Json::array();
  for (const acceptance::SeenKernel& seen : acceptance::seen_kernels()) {
    Json one = Json::object();
    one["name"] = seen.name;
    one["threads"] = seen.threads;
    one["launch"] = seen.launch;
    one["registers"] = seen.registers;
    one["local_bytes"] = seen.local_bytes;
    one["static_shared_bytes"] = seen.static_shared_bytes;
    one["dynamic_shared_bytes"] = seen.dynamic_shared_bytes;
    one["ctas_per_multiprocessor"] = seen.ctas_per_multiprocessor;
    one["binary_version"] = seen.binary_version;
    one["ptx_version"] = seen.ptx_version;
    kernels.push_back(one);
  }
  return kernels;
}

Status probe(bool quick, Json& report) {
  NVFP4_MOE_ASSIGN(const DeviceFacts facts, device_facts("cuda:0"));
  report["device"] = device_json(facts);
  NVFP4_MOE_ASSIGN(report["layers"], layers_json(facts));
  MoeOptions options;
  options.num_experts = options.top_k = 1;
  options.hidden_size = options.intermediate_size = 16;
  NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(options));
  NVFP4_MOE_ASSIGN(const Backend* const backend, choose_backend(config, facts, "auto"));
  report["backend"] = backend->name;
  Json sums = Json::array();
  for (const Places& places : kPlaces)
    for (const uint8_t code : kCodes)
      for (const int64_t tokens :
           quick ? std::vector<int64_t>{1} : std::vector<int64_t>{1, 24, 200}) {
        NVFP4_MOE_ASSIGN(const Json one, accumulation_json(*backend, facts, places, code, tokens));
        sums.push_back(one);
      }
  report["accumulation"] = sums;
  // Elsewhere block scales are not the tensor core's.
  if (facts.compute_capability >= 100) {
    NVFP4_MOE_ASSIGN(report["scale_bytes"], scale_bytes_json(*backend, facts));
  }
  return {};
}

}  // namespace
}  // namespace nvfp4_moe::internal

// device_probes [--quick]: on the first device. After a failure it prints the results so far, with
// the failure.
int main(int argc, char** argv) {
  using namespace nvfp4_moe::internal;
  Json report = Json::object();
  const Status status = probe(argc > 1 && std::strcmp(argv[1], "--quick") == 0, report);
  report["failure"] = status.ok() ? Json() : Json(status.message());
  report["kernels"] = kernels_json();
  std::printf("%s\n", report.dump(1).c_str());
  return status.ok() ? 0 : 1;
}
