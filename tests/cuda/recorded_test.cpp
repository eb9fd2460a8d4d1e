// Compares kernels with recordings of GPUs, mainly on the emulator (support/recording.h).
//
// A fixed list of small inputs. The bits must be equal if the contract or exact sums determine
// them: packed weights; route, quantize, requantize and combine, each with the reference's inputs;
// gemm2 of every configuration. gemm1's sums are exact too, but its SwiGLU is not,
// so every element is one of two neighbours. Whole layers are compared within their limits.

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "backend/cuda/packed_layout.h"
#include "cases/cases.h"
#include "core/float_formats.h"
#include "core/random.h"
#include "cuda/configurations.h"
#include "judge/judge.h"
#include "moe/registry.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/recording.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

class Recorded : public BackendTest {
 protected:
  // The recording. Without one, null, and the test is skipped.
  Recording* recording() {
    Recording* const one = Recording::get();
    if (one == nullptr)
      [] {
        GTEST_SKIP() << "no recording: ./dev gpu makes one (build/recorded_gpu.json) on a GPU";
      }();
    return one;
  }
  std::string name(const Case& spec, const char* array) const {
    return std::string(backend().name) + "/" + spec.name + "/" + array;
  }
};

void append(std::vector<uint8_t>& bytes, const void* from, size_t count) {
  const auto* first = static_cast<const uint8_t*>(from);
  bytes.insert(bytes.end(), first, first + count);
}
template <class T>
std::vector<uint8_t> bytes_of(const T* values, int64_t count) {
  std::vector<uint8_t> bytes;
  append(bytes, values, static_cast<size_t>(count) * sizeof(T));
  return bytes;
}

// Every step-th case of the table, unless it is empty or large.
std::vector<Case> some_cases(size_t step, int64_t most_tokens) {
  std::vector<Case> some;
  const std::vector<Case>& all = case_table();
  for (size_t i = 0; i < all.size(); i += step)
    if (all[i].tokens > 0 && all[i].tokens <= most_tokens) some.push_back(all[i]);
  return some;
}

// A case on a device. Each step starts from the reference's arrays.
class StepsFromReference {
 public:
  StepsFromReference(const Backend& backend, const CaseData& data, int gemm_config = -1)
      : data_(data),
        reference_(kReferenceBackend, data),
        device_(backend, data, -1, gemm_config),
        reference_out_(data.out_bytes()),
        device_out_(data.out_bytes()) {}
  bool ok() const { return reference_.ok() && device_.ok(); }
  const LayerBuffers& expected() const { return reference_.buffers(); }
  const LayerBuffers& actual() const { return device_.buffers(); }
  const std::vector<uint8_t>& out() const { return device_out_; }

  using Step = Status (*LayerSteps::*)(const StepContext&);
  using PartStep = Status (*LayerSteps::*)(const StepContext&, const PartBuffers&);
  void step(Step step) {
    take([&](const LayerSteps& steps, const StepContext& call) { return (steps.*step)(call); });
  }
  void step(PartStep step, PartBuffers LayerBuffers::*part = &LayerBuffers::routed) {
    take([&](const LayerSteps& steps, const StepContext& call) {
      return (steps.*step)(call, call.buffers.*part);
    });
  }

 private:
  template <class Take>
  void take(const Take& take) {
    device_.copy_arrays(reference_);
    const Batch batch = data_.batch(reference_out_.data());
    const Batch placed = device_.place(data_.batch(device_out_.data()));
    EXPECT_OK(take(*reference_.backend().steps, reference_.step(batch, serial_executor())));
    EXPECT_OK(take(*device_.backend().steps, device_.step(placed, serial_executor())));
    device_.fetch(placed, device_out_.data());
    EXPECT_EQ(device_.broken_guard(), -1);
  }
  const CaseData& data_;
  CaseRun reference_, device_;
  std::vector<uint8_t> reference_out_, device_out_;
};

// Rows in the format's layout: the flag, then the data of a finite row.
std::vector<uint8_t> activations(const ActivationBuffers& from, const std::vector<int64_t>& rows,
                                 int64_t k, ActivationFormat format, size_t& row_bytes) {
  std::vector<std::pair<const void*, int64_t>> arrays;  // with bytes per row
  switch (format) {
    case ActivationFormat::kNvfp4:
      arrays = {{from.codes, k / 2}, {from.block_scales, k / 16}, {from.row_scale, 4}};
      break;
    case ActivationFormat::kFp8: arrays = {{from.fp8, k}, {from.row_scale, 4}}; break;
    default: arrays = {{from.bf16, 2 * k}};
  }
  if (rows.empty()) return {};
  row_bytes = 1;
  for (const auto& [first, bytes] : arrays) row_bytes += static_cast<size_t>(bytes);
  std::vector<uint8_t> all;
  for (const int64_t row : rows) {
    const size_t begin = all.size();
    all.push_back(from.nonfinite[row]);
    if (from.nonfinite[row] == 0)
      for (const auto& [first, bytes] : arrays)
        append(all, static_cast<const uint8_t*>(first) + row * bytes, static_cast<size_t>(bytes));
    all.resize(begin + row_bytes);
  }
  return all;
}

TEST_P(Recorded, PackedWeights) {
  Recording* const kept = recording();
  if (kept == nullptr) return;
  for (const Case& spec : some_cases(23, 17)) {
    const auto data = must(make_case(spec));
    if (declines(backend(), data->config)) continue;
    CaseRun run(backend(), *data);
    ASSERT_TRUE(run.ok());
    const Buffer& packed = run.weights().bytes;
    // Only the tiles: before them are tensor scales, and alignment padding that is never written.
    const auto tiles =
        static_cast<size_t>(cuda::PackedLayout(data->config, spec.range).routed.offset);
    std::vector<uint8_t> bytes(backend().packed_bytes(data->config, spec.range) - tiles);
    ASSERT_OK(
        backend().memory->to_host(0, bytes.data(), packed.data() + tiles, bytes.size(), nullptr));
    EXPECT_EQ(kept->bits(name(spec, "packed"), bytes, 1), "");
  }
}

TEST_P(Recorded, StepsWhoseBitsAreFixed) {
  Recording* const kept = recording();
  if (kept == nullptr) return;
  for (const Case& spec : some_cases(9, 33)) {
    SCOPED_TRACE(spec.name);
    const auto data = must(make_case(spec));
    if (declines(backend(), data->config)) continue;
    StepsFromReference pair(backend(), *data);
    ASSERT_TRUE(pair.ok());
    const MoeOptions& options = spec.options;
    const ActivationFormat format = options.activation_format;
    const LayerBuffers &expected = pair.expected(), &actual = pair.actual();
    const PartBuffers& part = actual.routed;
    const auto keep = [&](const char* array, const std::vector<uint8_t>& bytes, size_t row_bytes) {
      EXPECT_EQ(kept->bits(name(spec, array), bytes, row_bytes), "");
    };
    const auto keep_status = [&](const char* array) {
      keep(array, bytes_of(actual.status, 1), sizeof(RunStatus));
    };
    size_t row_bytes = 1;

    pair.step(&LayerSteps::route);
    const int64_t rows = expected.routed.row_offsets[spec.range.count];
    keep("row_of_assignment", bytes_of(actual.row_of_assignment, spec.tokens * options.top_k), 4);
    keep("row_offsets", bytes_of(part.row_offsets, spec.range.count + 1), 8);
    keep("assignment_of_row", bytes_of(part.assignment_of_row, rows), 4);
    keep_status("status after route");

    pair.step(&LayerSteps::quantize);
    std::vector<int64_t> tokens, all_rows;  // tokens with at least one row
    for (int64_t row = 0; row < rows; ++row) {
      all_rows.push_back(row);
      const int64_t token = token_of_row(expected.routed, row, options.top_k);
      if (std::find(tokens.begin(), tokens.end(), token) == tokens.end()) tokens.push_back(token);
    }
    const auto hidden = activations(part.hidden, tokens, options.hidden_size, format, row_bytes);
    keep("hidden", hidden, row_bytes);
    keep_status("status after quantize");

    // The device's gemm1 output is not used: the next step starts from the reference's.
    pair.step(&LayerSteps::gemm1_swiglu);
    pair.step(&LayerSteps::requantize);
    const auto intermediate =
        activations(part.intermediate, all_rows, options.intermediate_size, format, row_bytes);
    keep("intermediate", intermediate, row_bytes);
    keep_status("status after requantize");

    pair.step(&LayerSteps::gemm2);
    if (expected.shared.experts > 0) {
      pair.step(&LayerSteps::gemm1_swiglu, &LayerBuffers::shared);
      pair.step(&LayerSteps::requantize, &LayerBuffers::shared);
      pair.step(&LayerSteps::gemm2, &LayerBuffers::shared);
    }
    pair.step(&LayerSteps::combine);
    keep("out", pair.out(), pair.out().size() / static_cast<size_t>(spec.tokens));
    keep_status("status after combine");
  }
}

// Values that are exact in every format: E2M1 codes times 1 or 2. Each block has a 6 of these, so
// that quantize finds the same codes.
std::vector<uint16_t> exact_values(int64_t count) {
  Random random(static_cast<uint64_t>(count));
  std::vector<uint16_t> values;
  for (int64_t i = 0, power = 1; i < count; ++i) {
    if (i % 16 == 0) power = 1 + random.below(2);
    const double value =
        i % 16 == 3 ? 6.0 : double{e2m1_to_float(static_cast<uint8_t>(random.below(16)))};
    values.push_back(bf16_from_double(value * static_cast<double>(power)));
  }
  return values;
}

// A layer with sums that are exact in fp32 in every order: weights are any codes with block scales
// 1 or 2. sum |p| is at most 12 x 12 x 1040 in steps of 1/4, below 2^20.
CaseData exact_case(ActivationFormat format) {
  Case spec = sized_case(4, 2, 1040, 720, 36);
  spec.name = std::string("exact_") + to_string(format);
  spec.options.activation_format = format;
  spec.options.row_format = RowFormat::kFp32;
  spec.out_dtype = DType::kF32;
  CaseData data = std::move(*make_case(spec));
  Random random(29);
  for (size_t e = 0; e < data.experts.size(); ++e) {
    for (Nvfp4Buffers* matrix :
         {&data.experts[e].gate, &data.experts[e].up, &data.experts[e].down}) {
      for (uint8_t& code : matrix->codes) code = static_cast<uint8_t>(random.below(256));
      for (uint8_t& scale : matrix->block_scales)
        scale = static_cast<uint8_t>(0x38 + 8 * random.below(2));
    }
    data.tensor_scales[e] = {0x1p-8f, 0x1p-9f, 0x1p-7f};
  }
  const std::vector<uint16_t> hidden = exact_values(spec.tokens * spec.options.hidden_size);
  data.hidden = bytes_of(hidden.data(), static_cast<int64_t>(hidden.size()));
  return data;
}

TEST_P(Recorded, ExactGemmsOfEveryConfiguration) {
  Recording* const kept = recording();
  if (kept == nullptr) return;
  for (const ActivationFormat format : {ActivationFormat::kNvfp4, ActivationFormat::kBf16}) {
    const CaseData data = exact_case(format);
    if (declines(backend(), data.config)) continue;
    const int64_t hidden = data.spec.options.hidden_size,
                  channels = data.spec.options.intermediate_size;
    for (int config = 0; config < configurations_of(backend(), format); ++config) {
      StepsFromReference pair(backend(), data, config);
      ASSERT_TRUE(pair.ok());
      const std::string place = "configuration " + std::to_string(config);
      SCOPED_TRACE(data.spec.name + " " + place);
      pair.step(&LayerSteps::route);
      const LayerBuffers &expected = pair.expected(), &actual = pair.actual();
      const int64_t rows = expected.routed.row_offsets[data.spec.range.count];
      pair.step(&LayerSteps::quantize);
      pair.step(&LayerSteps::gemm1_swiglu);
      const auto bf16 = [&](const LayerBuffers& buffers) {
        const uint16_t* const first = buffers.routed.intermediate.bf16;
        return std::vector<uint16_t>(first, first + rows * channels);
      };
      EXPECT_EQ(kept->roundings(name(data.spec, (place + "/gemm1").c_str()), bf16(expected),
                                bf16(actual)),
                "");

      const std::vector<uint16_t> values = exact_values(rows * channels);
      std::copy(values.begin(), values.end(), expected.routed.intermediate.bf16);
      pair.step(&LayerSteps::requantize);
      pair.step(&LayerSteps::gemm2);
      const auto* sums = static_cast<const float*>(actual.routed.rows_out);
      EXPECT_EQ(std::memcmp(expected.routed.rows_out, sums, static_cast<size_t>(rows * hidden) * 4),
                0);
      EXPECT_EQ(kept->bits(name(data.spec, (place + "/gemm2").c_str()),
                           bytes_of(sums, rows * hidden), static_cast<size_t>(hidden) * 4),
                "");
    }
  }
  RecordProperty("gemm1 elements rounded otherwise than recorded",
                 static_cast<int>(kept->rounded_otherwise()));
}

TEST_P(Recorded, Layers) {
  Recording* const kept = recording();
  if (kept == nullptr) return;
  for (const Case& spec : some_cases(5, 2)) {
    const auto data = must(make_case(spec));
    if (declines(backend(), data->config)) continue;
    CaseRun run(backend(), *data);
    ASSERT_TRUE(run.ok());
    EXPECT_EQ(kept->values(name(spec, "layer"), to_floats(run.run(*data), spec.out_dtype),
                           spec.options.hidden_size, layer_limits(data->config, spec.tokens)),
              "");
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Recorded, testing::ValuesIn(device_backends()),
                         hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal::test
