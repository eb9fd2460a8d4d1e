// NVFP4_MOE_CHECK on a GPU: a wrong value is found in the run whose token has it, correct layers
// pass, and a run never waits for the check.
#include <cuda_runtime.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "cases/cases.h"
#include "core/random.h"
#include "core/router.h"
#include "cuda/check_case.h"
#include "cuda/device_memory.h"
#include "cuda/graph.h"
#include "judge/judge.h"
#include "moe/layer.h"
#include "moe/placed_batch.h"
#include "support/backends.h"
#include "support/case_source.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

// The run, counted from 1, in which the check takes that token of a batch for the first time after
// `run` runs.
int64_t run_that_takes(int64_t token, int64_t run = 0) {
  do ++run;
  while (mix64(static_cast<uint64_t>(run)) % kCheckTokens != static_cast<uint64_t>(token));
  return run;
}

class CudaCheckCases : public CudaCheck {};

TEST_P(CudaCheck, FindsAWrongValueInTheRunThatTakesItsToken) {
  const Backend wrong = wrong_backend(backend());
  for (const MoeOptions& kind : kinds()) {
    CheckedLayer checked(wrong, TinyLayer(kind));
    Caller& caller = checked.caller;
    const int64_t expected = run_that_takes(kWrongToken);
    for (int64_t run = 1; run < expected; ++run) {
      ASSERT_OK(caller.run());
      ASSERT_OK(caller.status());
    }
    ASSERT_OK(caller.run());
    const Status found = caller.status();
    EXPECT_THAT(found, Refused(Code::kCheckFailed, "NVFP4_MOE_CHECK: backend wrong: run " +
                                                       std::to_string(expected) + ": "));
    EXPECT_THAT(found.message(), HasSubstr("at token 3 channel 17: expected "));
    EXPECT_THAT(found.message(), HasSubstr(", got 48.5647"));
    EXPECT_OK(caller.status());  // reported once
    EXPECT_EQ(counts_of(*checked.layer).checked, expected);
    EXPECT_EQ(counts_of(*checked.layer).failed, 1);
  }
}

// Replays take other tokens than the captured run, and their failures arrive the same way.
TEST_P(CudaCheck, FindsItInReplaysOfAGraph) {
  const Backend wrong = wrong_backend(backend());
  CheckedLayer checked(wrong);
  Caller& caller = checked.caller;
  ASSERT_OK(caller.run());
  const Graph graph(caller.stream, [&] { return caller.run(); });
  ASSERT_OK(graph.status());
  ASSERT_OK(caller.status());
  int64_t run = 1;
  for (int found = 0; found < 2; ++found) {
    const int64_t expected = run_that_takes(kWrongToken, run);
    for (++run; run <= expected; ++run) {
      graph.launch();
      const Status status = caller.status();
      if (run == expected) {
        EXPECT_THAT(status, Refused(Code::kCheckFailed, "run " + std::to_string(expected) + ": "));
      } else {
        ASSERT_OK(status);
      }
    }
    --run;
  }
}

// The check stands still, in the log's callback. Runs go on, and the tokens that find no slot are
// dropped.
TEST_P(CudaCheck, ARunNeverWaitsAndTheNextOneFails) {
  constexpr int kRuns = 100;
  wrong_token = -1;
  const Backend wrong = wrong_backend(backend());
  CheckedLayer checked(wrong);
  Caller& caller = checked.caller;
  KeptLog log(true);
  for (int i = 0; i < kRuns; ++i) ASSERT_OK(caller.run());
  caller.stream.synchronize();
  EXPECT_TRUE(log.has_line());
  log.unblock();
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (counts_of(*checked.layer).failed < kSampleSlots &&
         std::chrono::steady_clock::now() < until)
    std::this_thread::yield();
  const CheckCounts counts = counts_of(*checked.layer);
  EXPECT_EQ(counts.failed, kSampleSlots);
  EXPECT_EQ(counts.checked, kSampleSlots);
  EXPECT_EQ(counts.dropped, kRuns - kSampleSlots);
  EXPECT_EQ(logged.size(), size_t{kSampleSlots});

  const std::vector<float> poison(caller.host.out.size(), -5.0f);
  ASSERT_CUDA(cudaMemcpy(caller.placed.batch().out, poison.data(), poison.size() * sizeof(float),
                         cudaMemcpyHostToDevice));
  EXPECT_THAT(caller.run(), Refused(Code::kCheckFailed, "run 1: "));
  caller.stream.synchronize();
  EXPECT_OK(caller.placed.fetch());
  EXPECT_EQ(caller.host.out, poison) << "nothing is enqueued";
}

// Many runs in two streams that take turns, with experts replaced in between. When a replacement is
// noted and read does not depend on the format, so only the first one has many rounds. The others
// show that their experts are replaced whole.
TEST_P(CudaCheck, PassesCorrectRunsWhileExpertsAreReplaced) {
  int rounds = 20;
  for (const MoeOptions& kind : kinds()) {
    SCOPED_TRACE(to_string(kind.activation_format));
    const TinyLayer tiny(kind, 7), other(kind, 8);
    const auto layer = open(backend(), tiny);
    Caller first(*layer, TinyBatch(kind, kCheckTokens, 3)),
        second(*layer, TinyBatch(kind, kCheckTokens, 4));
    const auto source = [&](int64_t expert, bool changed) {
      const TinyLayer& of = changed ? other : tiny;
      return expert == kSharedExpert ? of.shared[0].source()
                                     : of.experts[static_cast<size_t>(expert)].source();
    };
    int64_t runs = 0;
    for (int round = 0; round < rounds; ++round) {
      // In half of the rounds the check may still have to read an expert that is replaced.
      const bool waits = round % 2 == 0;
      if (waits) ASSERT_OK(first.status());  // tokens of the round before
      const int64_t dropped = counts_of(*layer).dropped;
      for (int i = 0; i < 2; ++i)
        for (Caller* const caller : {&first, &second}) {
          ASSERT_OK(caller->run());
          ++runs;
        }
      first.stream.synchronize();
      second.stream.synchronize();
      if (waits) {
        ASSERT_OK(first.status());
        ASSERT_OK(second.status());
        EXPECT_EQ(counts_of(*layer).dropped, dropped) << "round " << round;
      }
      const int64_t expert = round % 5 == 4 ? kSharedExpert : round % 4;
      const ExpertSource changed = source(expert, round % 7 < 4);
      ASSERT_OK(round % 3 == 0 ? layer->replace_expert(expert, changed)
                               : layer->replace_expert_on_stream(expert, changed, first.stream));
      first.stream.synchronize();
    }
    ASSERT_OK(first.status());
    const CheckCounts counts = counts_of(*layer);
    EXPECT_EQ(counts.failed, 0);
    EXPECT_EQ(counts.checked + counts.dropped, runs);
    rounds = 6;
  }
}

// Runs of two threads ask for the same slots at once.
TEST_P(CudaCheck, CountsEachRunOfTwoThreads) {
  constexpr int kRuns = 100;
  const TinyLayer tiny;
  const auto layer = open(backend(), tiny);
  Caller first(*layer, TinyBatch(tiny.options, kCheckTokens, 3)),
      second(*layer, TinyBatch(tiny.options, kCheckTokens, 4));
  const auto run_all = [](Caller& caller) {
    for (int i = 0; i < kRuns; ++i) EXPECT_OK(caller.run());
    EXPECT_OK(caller.status());
  };
  std::thread other([&] { run_all(second); });
  run_all(first);
  other.join();
  // All others may have been dropped. By now the first tokens are checked, so this one has a slot.
  EXPECT_OK(first.run());
  EXPECT_OK(first.status());
  const CheckCounts counts = counts_of(*layer);
  EXPECT_EQ(counts.checked + counts.dropped, 2 * kRuns + 1);
  EXPECT_GT(counts.checked, kSampleSlots);
  EXPECT_EQ(counts.failed, 0);
}

// Two experts are the same but for 2^-21 of a scale, and their weights cancel. The rounding of a
// row is a tenth of the output, and a token by itself must not fail for it.
TEST_P(CudaCheck, PassesTokensWhoseRowsCancel) {
  MoeOptions kind = tiny_options();
  kind.activation_format = ActivationFormat::kBf16;
  kind.row_format = RowFormat::kFp32;
  TinyLayer tiny(kind);
  tiny.experts[1] = tiny.experts[0];
  tiny.experts[1].down.tensor_scale *= 1.0f + 0x1p-21f;
  TinyBatch batch(kind, kCheckTokens), expected(kind, kCheckTokens);
  for (size_t i = 0; i < batch.ids.size(); ++i) {
    batch.ids[i] = expected.ids[i] = static_cast<int32_t>(i % 2);
    batch.weights[i] = expected.weights[i] = i % 2 == 0 ? 0.5f : -0.5f;
  }
  const auto layer = open(backend(), tiny);
  Caller caller(*layer, batch);
  for (int run = 0; run < 12; ++run) {
    ASSERT_OK(caller.run());
    ASSERT_OK(caller.status());
  }
  EXPECT_OK(caller.placed.fetch());
  run_tiny(*open_tiny(tiny, tiny_layer_options(), &kReferenceBackend), expected);
  EXPECT_NE(broken_limit(compare(expected.out.data(), caller.host.out.data(), kCheckTokens, 64),
                         layer_limits(tiny.config())),
            "");
}

// Every kind of case: ids of no expert and of others' experts, types of arrays, shared weights,
// non-finite and saturating data.
TEST_P(CudaCheckCases, Pass) {
  int64_t taken = 0, number = 0;
  for (const Case& spec : case_table()) {
    if (number++ % 12 != 0 || spec.tokens == 0 || spec.tokens > 40) continue;
    SCOPED_TRACE(spec.name);
    const auto data = must(make_case(spec));
    if (declines(backend(), data->config)) continue;
    LayerOptions of_case = options(spec.tokens);
    of_case.range = spec.range;
    const auto layer = must(MoeLayer::open_on(backend(), data->config, source_of(*data), of_case));
    std::vector<uint8_t> out(data->out_bytes());
    const auto placed = must(PlacedBatch::place(**layer, data->batch(out.data())));
    const auto workspace = must(backend().allocate((*layer)->workspace_bytes(), 0, "workspace"));
    for (int run = 0; run < 4; ++run) {
      ASSERT_OK((*layer)->run(placed->batch(), workspace->data(), workspace->size_bytes()));
      ASSERT_OK((*layer)->status(workspace->data(), workspace->size_bytes()));
    }
    EXPECT_EQ(counts_of(**layer).checked, 4);
    ++taken;
  }
  EXPECT_GT(taken, 5);
}

// The ids and weights are those that the run itself selects.
TEST_P(CudaCheck, ReadsTheExpertsThatARunSelects) {
  CheckedLayer checked(backend());
  Caller& caller = checked.caller;
  const MoeOptions sizes = tiny_options();
  std::vector<float> logits(static_cast<size_t>(kCheckTokens * sizes.num_experts));
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i * 7 % 11) / 4.0f;
  const OnDevice<float> device_logits(logits);
  SelectExperts call;
  call.config.num_experts = sizes.num_experts;
  call.config.top_k = sizes.top_k;
  call.tokens = kCheckTokens;
  call.logits = device_logits.data();
  call.logits_dtype = DType::kF32;
  call.logits_stride = sizes.num_experts;
  Batch batch = caller.placed.batch();
  call.topk_ids = const_cast<void*>(batch.topk_ids);
  call.topk_weights = const_cast<float*>(batch.topk_weights);
  call.ids_dtype = batch.ids_dtype;
  batch.selection = &call;
  for (int run = 0; run < 12; ++run) {
    // Other ids until the run has written its own.
    ASSERT_CUDA(cudaMemset(call.topk_ids, 0, kCheckTokens * sizes.top_k * sizeof(int32_t)));
    ASSERT_OK(caller.run(batch));
    ASSERT_OK(caller.status());
  }
  EXPECT_EQ(counts_of(*checked.layer).checked, 12);
}

TEST_P(CudaCheck, DumpsAreOfHosts) {
  const TempDir directory;
  const ScopedEnv dump("NVFP4_MOE_DUMP", directory.path().string());
  const TinyLayer tiny;
  EXPECT_THAT(MoeLayer::open_on(backend(), tiny.config(), tiny.source(), options()),
              Refused(Code::kUnsupported, "on a device only NVFP4_MOE_CHECK works"));
}

INSTANTIATE_TEST_SUITE_P(Backends, CudaCheck, testing::ValuesIn(device_backends()),
                         hardware_test_name<Backend>);
INSTANTIATE_TEST_SUITE_P(Backends, CudaCheckCases, testing::ValuesIn(device_backends()),
                         hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal::test
