// Runs that select experts on a GPU give the same bits as with a selection on the host.
#include <cuda_runtime.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "cases/cases.h"
#include "core/float_formats.h"
#include "core/random.h"
#include "core/router.h"
#include "cuda/device_memory.h"
#include "cuda/graph.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

// A router and its logits, for the tests below.
struct Router {
  RouterConfig config;
  DType dtype = DType::kF32;
  int64_t padding = 0;  // elements between rows, and before the first row
};

void store(float value, DType dtype, std::vector<uint8_t>& bytes, int64_t i) {
  const uint16_t narrow = dtype == DType::kF16 ? fp16_from_float(value) : bf16_from_float(value);
  const void* const from = dtype == DType::kF32 ? static_cast<const void*>(&value) : &narrow;
  const auto size = static_cast<size_t>(bits(dtype) / 8);
  std::memcpy(bytes.data() + static_cast<size_t>(i) * size, from, size);
}

int64_t stride_of(const Router& router) { return router.config.num_experts + router.padding; }

// (T, E) of the router's type, with stride_of elements from row to row, after `padding` elements:
// ties, both zeros, and non-finite values. For a third of the seeds three numbers, so that most are
// ties.
std::vector<uint8_t> logits_of(const Router& router, int64_t tokens, uint64_t seed) {
  const int64_t count = router.padding + tokens * stride_of(router);
  Random random(seed);
  std::vector<uint8_t> bytes(static_cast<size_t>(count * bits(router.dtype) / 8));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t numbers = seed % 3 == 2 ? 3 : 64;
    float value = static_cast<float>(random.below(numbers)) / 8.0f - 4.0f;  // exact in all types
    if (seed % 3 == 0 && random.below(40) == 0) value = std::numeric_limits<float>::quiet_NaN();
    if (seed % 3 == 1 && random.below(40) == 0) value = -std::numeric_limits<float>::infinity();
    if (value == 0.0f && random.below(2) == 0) value = -0.0f;
    store(value, router.dtype, bytes, i);
  }
  return bytes;
}

class SelectionOnADevice : public BackendTest {
 protected:
  // Compares a run of the case that selects by this router with one that is given the host's
  // selection.
  void expect_same_bits(Case spec, const Router& router, bool captured) {
    SCOPED_TRACE(testing::Message()
                 << spec.tokens << " tokens, " << router.config.num_experts << " experts, top "
                 << router.config.top_k << ", " << to_string(router.config.scoring) << ", "
                 << to_string(router.dtype) << ", padding " << router.padding << ", "
                 << to_string(spec.options.activation_format));
    spec.options.num_experts = router.config.num_experts;
    spec.options.top_k = router.config.top_k;
    auto data = must(make_case(spec));
    CaseRun given(backend(), *data), selects(backend(), *data);
    ASSERT_TRUE(given.ok() && selects.ok());
    const int64_t experts = router.config.num_experts;
    std::vector<float> bias(static_cast<size_t>(experts));
    for (size_t e = 0; e < bias.size(); ++e) bias[e] = static_cast<float>(e * 7 % 16) / 16.0f;
    // Numbers of 24 significant bits, zero and negative ones.
    std::vector<float> scale(static_cast<size_t>(experts));
    for (size_t e = 0; e < scale.size(); ++e)
      scale[e] = (static_cast<float>(e * 5 % 13) - 3.0f) / 7.0f;

    // The arrays of the run that selects: ids that name no expert, until the run writes others.
    std::vector<uint8_t> out(data->out_bytes());
    CaseData blank = *data;
    std::memset(blank.topk_ids.data(), 0x7E, blank.topk_ids.size());
    for (float& weight : blank.topk_weights) weight = std::nanf("");
    Batch placed = selects.place(blank.batch(out.data()));
    const OnDevice<uint8_t, 1> device_logits(logits_of(router, spec.tokens, 1));
    const OnDevice<float> device_bias(bias), device_scale(scale);
    SelectExperts call;
    call.config = router.config;
    call.tokens = spec.tokens;
    call.logits_dtype = router.dtype;
    call.logits_stride = stride_of(router);
    call.ids_dtype = spec.ids_dtype;
    SelectExperts on_device = call;
    on_device.logits = device_logits.data() + router.padding * bits(router.dtype) / 8;
    on_device.correction_bias = router.config.correction_bias ? device_bias.data() : nullptr;
    on_device.expert_scale = router.config.expert_scale ? device_scale.data() : nullptr;
    on_device.topk_ids = const_cast<void*>(placed.topk_ids);
    on_device.topk_weights = const_cast<float*>(placed.topk_weights);
    placed.selection = &on_device;

    const OwnStream stream;
    std::optional<Graph> graph;
    if (captured) {
      graph.emplace(stream, [&] { return selects.run_into(placed, serial_executor(), stream); });
      EXPECT_OK(graph->status());
    }
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      const std::vector<uint8_t> logits = logits_of(router, spec.tokens, seed);
      call.logits = logits.data() + router.padding * bits(router.dtype) / 8;
      call.correction_bias = router.config.correction_bias ? bias.data() : nullptr;
      call.expert_scale = router.config.expert_scale ? scale.data() : nullptr;
      call.topk_ids = data->topk_ids.data();
      call.topk_weights = data->topk_weights.data();
      select_experts(call);
      const std::vector<uint8_t> expected = given.run(*data);

      selects.poison();
      ASSERT_CUDA(
          cudaMemcpy(device_logits.data(), logits.data(), logits.size(), cudaMemcpyHostToDevice));
      ASSERT_CUDA(cudaDeviceSynchronize());
      if (captured) {
        graph->launch();
        stream.synchronize();
      } else {
        EXPECT_OK(selects.run_into(placed, serial_executor()));
      }
      selects.fetch(placed, out.data());
      EXPECT_EQ(difference(expected, out, spec.out_dtype, spec.options.hidden_size), "")
          << "seed " << seed;
      EXPECT_EQ(std::memcmp(given.buffers().status, selects.buffers().status, sizeof(RunStatus)),
                0);
      EXPECT_EQ(selects.broken_guard(), -1);
      CaseData written = *data;
      ASSERT_CUDA(cudaMemcpy(written.topk_ids.data(), placed.topk_ids, written.topk_ids.size(),
                             cudaMemcpyDeviceToHost));
      ASSERT_CUDA(cudaMemcpy(written.topk_weights.data(), placed.topk_weights,
                             written.topk_weights.size() * sizeof(float), cudaMemcpyDeviceToHost));
      EXPECT_EQ(written.topk_ids, data->topk_ids) << "seed " << seed;
      EXPECT_EQ(std::memcmp(written.topk_weights.data(), data->topk_weights.data(),
                            written.topk_weights.size() * sizeof(float)),
                0);
    }
  }

  static Case small(int64_t tokens, ActivationFormat format, int64_t experts,
                    int64_t shared_size = 0) {
    Case spec;
    spec.options.hidden_size = 144;
    spec.options.intermediate_size = 48;
    spec.options.shared_intermediate_size = shared_size;
    spec.options.activation_format = format;
    spec.options.num_experts = experts;
    spec.range = {0, experts};
    spec.tokens = tokens;
    spec.out_dtype = DType::kF32;
    return spec;
  }
  static Router softmax(int64_t experts, int64_t top_k, bool renormalize) {
    Router router;
    router.config.num_experts = experts;
    router.config.top_k = top_k;
    router.config.renormalize = renormalize;
    return router;
  }
};

// Few and small enough for compute-sanitizer.
TEST_P(SelectionOnADevice, AFewTokens) {
  expect_same_bits(small(1, ActivationFormat::kNvfp4, 16), softmax(16, 2, false), false);
  expect_same_bits(small(3, ActivationFormat::kBf16, 8, 32), softmax(8, 2, true), false);
  expect_same_bits(small(0, ActivationFormat::kBf16, 16), softmax(16, 2, true), false);
}

// Types, strides and alignments of logits, experts of one rank, ids of 64 bits, hidden in other
// types.
TEST_P(SelectionOnADevice, OfEveryKindOfArray) {
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16})
    for (const int64_t padding : {0, 8, 3}) {
      Router router = softmax(136, 8, true);
      router.dtype = dtype;
      router.padding = padding;
      Case spec = small(2, ActivationFormat::kBf16, 136);
      spec.range = {40, 50};
      spec.ids_dtype = padding == 8 ? DType::kI64 : DType::kI32;
      spec.hidden_dtype = dtype;
      expect_same_bits(spec, router, false);
    }
}

// Few and many tokens and experts, a bias, groups, weights before and after the experts.
TEST_P(SelectionOnADevice, OfEveryKindOfRouter) {
  for (const int64_t tokens : {1, 4, 5})
    expect_same_bits(small(tokens, ActivationFormat::kBf16, 128), softmax(128, 8, true), false);
  expect_same_bits(small(3, ActivationFormat::kNvfp4, 40, 32), softmax(40, 6, false), false);
  expect_same_bits(small(33, ActivationFormat::kNvfp4, 16), softmax(16, 4, false), false);
  expect_same_bits(small(2, ActivationFormat::kBf16, 264), softmax(264, 8, true), false);
  for (const Scoring scoring : {Scoring::kSigmoid, Scoring::kSqrtSoftplus}) {
    Router biased = softmax(32, 4, true);
    biased.config.scoring = scoring;
    biased.config.correction_bias = true;
    expect_same_bits(small(2, ActivationFormat::kBf16, 32), biased, false);
  }
  Router grouped = softmax(32, 4, true);
  grouped.config.num_expert_group = 4;
  grouped.config.topk_group = 2;
  expect_same_bits(small(2, ActivationFormat::kBf16, 32), grouped, false);
  Router of_pairs = softmax(40, 6, true);
  of_pairs.config.scoring = Scoring::kSigmoid;
  of_pairs.config.correction_bias = true;
  of_pairs.config.num_expert_group = 5;
  of_pairs.config.topk_group = 2;
  of_pairs.config.group_score = GroupScore::kTop2Sum;
  expect_same_bits(small(3, ActivationFormat::kBf16, 40), of_pairs, false);
  // so many experts that a thread scores several
  expect_same_bits(small(2, ActivationFormat::kBf16, 600), softmax(600, 10, false), false);
  for (const bool biased : {false, true}) {  // weights by logits that are kept, and read again
    Router scaled = softmax(128, 8, true);
    scaled.config.expert_scale = true;
    scaled.config.correction_bias = biased;
    scaled.config.routed_scaling_factor = 1.7f;
    expect_same_bits(small(3, ActivationFormat::kBf16, 128), scaled, false);
  }
  Case weighted = small(2, ActivationFormat::kBf16, 16);
  weighted.options.router_weight = RouterWeight::kOnInput;
  expect_same_bits(weighted, softmax(16, 1, false), false);
  weighted.options.router_weight = RouterWeight::kBeforeDown;
  expect_same_bits(weighted, softmax(16, 2, true), false);
}

TEST_P(SelectionOnADevice, InAGraphThatIsReplayed) {
  for (const int64_t tokens : {1, 3, 12})
    expect_same_bits(small(tokens, ActivationFormat::kBf16, 128), softmax(128, 8, true), true);
}

INSTANTIATE_TEST_SUITE_P(Backends, SelectionOnADevice, testing::ValuesIn(device_backends()),
                         hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal::test
