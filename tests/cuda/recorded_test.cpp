// Compares kernels with recordings of GPUs, mainly on the emulator (support/recording.h).
//
// A fixed list of small inputs. The bits must be equal if the contract or exact sums determine
// them: packed weights; route, quantize, requantize and combine, each with the reference's inputs;
// gemm2 of every configuration; select_experts. gemm1's sums are exact too, but its SwiGLU is not,
// so every element is one of two neighbours. Whole layers are compared within their limits.

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "backend/cuda/packed_layout.h"
#include "backend/cuda/plain/config.h"
#include "backend/sm120/config.h"
#include "backend/sm90/config.h"
#include "cases/cases.h"
#include "core/float_formats.h"
#include "core/random.h"
#include "judge/judge.h"
#include "moe/registry.h"
#include "moe/router.h"
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

  void step(const std::function<void(const LayerSteps&, const StepContext&)>& take) {
    device_.copy_arrays(reference_);
    const Batch batch = data_.batch(reference_out_.data());
    const Batch placed = device_.place(data_.batch(device_out_.data()));
    take(*reference_.backend().steps, reference_.step(batch, serial_executor()));
    take(*device_.backend().steps, device_.step(placed, serial_executor()));
    device_.fetch(placed, device_out_.data());
    EXPECT_EQ(device_.broken_guard(), -1);
  }

 private:
  const CaseData& data_;
  CaseRun reference_, device_;
  std::vector<uint8_t> reference_out_, device_out_;
};

// Rows in the format's layout: the flag, then the data of a finite row.
std::vector<uint8_t> activations(const ActivationBuffers& from, const std::vector<int64_t>& rows,
                                 int64_t k, ActivationFormat format, size_t& row_bytes) {
  std::vector<uint8_t> all;
  const size_t elements = static_cast<size_t>(k);
  for (const int64_t row : rows) {
    std::vector<uint8_t> bytes = {from.nonfinite[row]};
    const bool finite = from.nonfinite[row] == 0;
    switch (format) {
      case ActivationFormat::kNvfp4: row_bytes = 1 + elements / 2 + elements / 16 + 4; break;
      case ActivationFormat::kBf16: row_bytes = 1 + 2 * elements; break;
      case ActivationFormat::kInt8Block: row_bytes = 1 + elements + elements / 4; break;
      case ActivationFormat::kFp8: row_bytes = 1 + elements + 4; break;
    }
    if (finite) {
      switch (format) {
        case ActivationFormat::kNvfp4:
          append(bytes, from.codes + row * (k / 2), elements / 2);
          append(bytes, from.block_scales + row * (k / 16), elements / 16);
          append(bytes, from.row_scale + row, 4);
          break;
        case ActivationFormat::kBf16: append(bytes, from.bf16 + row * k, 2 * elements); break;
        case ActivationFormat::kInt8Block:
          append(bytes, from.int8_codes + row * k, elements);
          append(bytes, from.int8_scales + row * (k / 16), elements / 4);
          break;
        case ActivationFormat::kFp8:
          append(bytes, from.fp8 + row * k, elements);
          append(bytes, from.row_scale + row, 4);
          break;
      }
    }
    bytes.resize(row_bytes);
    append(all, bytes.data(), bytes.size());
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
    const auto keep = [&](const char* array, const std::vector<uint8_t>& bytes, size_t row_bytes) {
      EXPECT_EQ(kept->bits(name(spec, array), bytes, row_bytes), "");
    };
    const auto keep_status = [&](const char* array) {
      keep(array, bytes_of(pair.actual().status, 1), sizeof(RunStatus));
    };
    const MoeOptions& options = spec.options;
    const int64_t assignments = spec.tokens * options.top_k;

    pair.step([](const LayerSteps& s, const StepContext& c) { EXPECT_OK(s.route(c)); });
    const LayerBuffers &expected = pair.expected(), &actual = pair.actual();
    const int64_t rows = expected.routed.row_offsets[spec.range.count];
    keep("row_of_assignment", bytes_of(actual.row_of_assignment, assignments), 4);
    keep("row_offsets", bytes_of(actual.routed.row_offsets, spec.range.count + 1), 8);
    keep("assignment_of_row", bytes_of(actual.routed.assignment_of_row, rows), 4);
    keep_status("status after route");

    pair.step([](const LayerSteps& s, const StepContext& c) { EXPECT_OK(s.quantize(c)); });
    std::vector<int64_t> tokens, all_rows;  // tokens with at least one row
    for (int64_t row = 0; row < rows; ++row) {
      all_rows.push_back(row);
      const int64_t token = expected.routed.assignment_of_row[row] / options.top_k;
      if (std::find(tokens.begin(), tokens.end(), token) == tokens.end()) tokens.push_back(token);
    }
    size_t row_bytes = 1;
    const std::vector<uint8_t> hidden = activations(
        actual.routed.hidden, tokens, options.hidden_size, options.activation_format, row_bytes);
    keep("hidden", hidden, row_bytes);
    keep_status("status after quantize");

    // The device's gemm1 output is not used: the next step starts from the reference's.
    pair.step([](const LayerSteps& s, const StepContext& c) {
      EXPECT_OK(s.gemm1_swiglu(c, c.buffers.routed));
    });
    pair.step([](const LayerSteps& s, const StepContext& c) {
      EXPECT_OK(s.requantize(c, c.buffers.routed));
    });
    const std::vector<uint8_t> intermediate =
        activations(actual.routed.intermediate, all_rows, options.intermediate_size,
                    options.activation_format, row_bytes);
    keep("intermediate", intermediate, row_bytes);
    keep_status("status after requantize");

    pair.step(
        [](const LayerSteps& s, const StepContext& c) { EXPECT_OK(s.gemm2(c, c.buffers.routed)); });
    if (expected.shared.experts > 0) {
      pair.step([](const LayerSteps& s, const StepContext& c) {
        EXPECT_OK(s.gemm1_swiglu(c, c.buffers.shared));
      });
      pair.step([](const LayerSteps& s, const StepContext& c) {
        EXPECT_OK(s.requantize(c, c.buffers.shared));
      });
      pair.step([](const LayerSteps& s, const StepContext& c) {
        EXPECT_OK(s.gemm2(c, c.buffers.shared));
      });
    }
    pair.step([](const LayerSteps& s, const StepContext& c) { EXPECT_OK(s.combine(c)); });
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
int configurations_of(const Backend& backend, ActivationFormat format) {
  const int plain = static_cast<int>(cuda::plain::kConfigs.size());
  if (&backend == &kSm90Backend) return static_cast<int>(sm90::kBf16Configs);
  if (&backend == &kSm120Backend && format == ActivationFormat::kNvfp4)
    return static_cast<int>(sm120::kGemmConfigs.size());
  return plain;
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
      pair.step([](const LayerSteps& s, const StepContext& c) { EXPECT_OK(s.route(c)); });
      const LayerBuffers &expected = pair.expected(), &actual = pair.actual();
      const int64_t rows = expected.routed.row_offsets[data.spec.range.count];
      pair.step([](const LayerSteps& s, const StepContext& c) { EXPECT_OK(s.quantize(c)); });
      pair.step([](const LayerSteps& s, const StepContext& c) {
        EXPECT_OK(s.gemm1_swiglu(c, c.buffers.routed));
      });
      const auto bf16 = [&](const LayerBuffers& buffers) {
        const uint16_t* const first = buffers.routed.intermediate.bf16;
        return std::vector<uint16_t>(first, first + rows * channels);
      };
      EXPECT_EQ(kept->roundings(name(data.spec, (place + "/gemm1").c_str()), bf16(expected),
                                bf16(actual)),
                "");

      const std::vector<uint16_t> values = exact_values(rows * channels);
      std::copy(values.begin(), values.end(), expected.routed.intermediate.bf16);
      pair.step([](const LayerSteps& s, const StepContext& c) {
        EXPECT_OK(s.requantize(c, c.buffers.routed));
      });
      pair.step([](const LayerSteps& s, const StepContext& c) {
        EXPECT_OK(s.gemm2(c, c.buffers.routed));
      });
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

TEST_P(Recorded, SelectedExperts) {
  Recording* const kept = recording();
  if (kept == nullptr) return;
  constexpr int64_t kTokens = 33, kExperts = 64, kTopK = 6;
  Random random(3);
  std::vector<float> logits;
  for (int64_t i = 0; i < kTokens * kExperts; ++i)
    logits.push_back(static_cast<float>(random.normal()));
  const auto on_device = [&](const void* from, size_t count) {
    Buffer memory = std::move(*backend().allocate(count, 0, "a router's arrays"));
    if (from != nullptr)
      EXPECT_OK(backend().memory->to_device(0, memory.data(), from, count, nullptr));
    return memory;
  };
  const Buffer device_logits = on_device(logits.data(), logits.size() * 4);
  const Buffer ids = on_device(nullptr, kTokens * kTopK * 4),
               weights = on_device(nullptr, kTokens * kTopK * 4);
  for (const Scoring scoring : {Scoring::kSoftmax, Scoring::kSigmoid, Scoring::kSqrtSoftplus})
    for (const int64_t groups : {1, 8}) {
      SelectExperts call;
      call.config.num_experts = kExperts;
      call.config.top_k = kTopK;
      call.config.num_expert_group = groups;
      call.config.topk_group = groups == 1 ? 1 : 3;
      call.config.scoring = scoring;
      call.config.renormalize = groups == 8;
      call.tokens = kTokens;
      call.logits = device_logits.data();
      call.logits_dtype = DType::kF32;
      call.logits_stride = kExperts;
      call.topk_ids = ids.data();
      call.topk_weights = reinterpret_cast<float*>(weights.data());
      ASSERT_OK(router::device_select_experts(0, call, nullptr));
      std::vector<uint8_t> bytes(2 * kTokens * kTopK * 4);
      ASSERT_OK(backend().memory->to_host(0, bytes.data(), ids.data(), bytes.size() / 2, nullptr));
      ASSERT_OK(backend().memory->to_host(0, bytes.data() + bytes.size() / 2, weights.data(),
                                          bytes.size() / 2, nullptr));
      const std::string array =
          std::string("select_experts/") + to_string(scoring) + "/" + std::to_string(groups);
      EXPECT_EQ(kept->bits(array, bytes, kTopK * 4), "");
    }
}

INSTANTIATE_TEST_SUITE_P(Backends, Recorded, testing::ValuesIn(device_backends()),
                         hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal::test
