// Layers on a GPU: graphs, repeats, large shapes. Capture itself fails on an allocation or any
// synchronization.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "backend/backend.h"
#include "cases/cases.h"
#include "core/random.h"
#include "cuda/device_memory.h"
#include "cuda/graph.h"
#include "moe/layer.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/ragged.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

class CudaDevice : public BackendTest {
 protected:
  static std::string same(const CaseData& data, const std::vector<uint8_t>& expected,
                          const std::vector<uint8_t>& actual) {
    return difference(expected, actual, data.spec.out_dtype, data.spec.options.hidden_size);
  }
  static Case shaped(const char* choice, int64_t experts, int64_t top_k, int64_t hidden,
                     int64_t intermediate, int64_t tokens) {
    Case spec = cases_named(choice).front();
    set_sizes(spec.options, experts, top_k, hidden, intermediate);
    spec.range = {0, experts};
    spec.tokens = tokens;
    spec.routing = Routing::kUniform;
    spec.data = DataKind::kNormal;
    return spec;
  }
  // Captured runs of every `every`-th case.
  void expect_graphs_replay(int every);
};

// Replays with another seed's hidden, ids and router weights; ids of the last tokens are -1.
void CudaDevice::expect_graphs_replay(int every) {
  int graphs = 0;
  for (const Case& spec : case_table()) {
    if (spec.tokens < 9 || spec.tokens > 33 || declines(backend(), *MoeConfig::make(spec.options)))
      continue;
    if (++graphs % every != 0) continue;
    SCOPED_TRACE(spec.name);
    const auto data = must(make_case(spec));
    CaseRun captured(backend(), *data), eager(backend(), *data);
    ASSERT_TRUE(captured.ok() && eager.ok());
    std::vector<uint8_t> out(data->out_bytes());
    const Batch placed = captured.place(data->batch(out.data()));

    const OwnStream stream;
    const auto run = [&] { return captured.run_into(placed, serial_executor(), stream); };
    const Graph graph(stream, run, cudaStreamCaptureModeGlobal);
    ASSERT_OK(graph.status());

    for (uint64_t seed = 0; seed < 4; ++seed) {
      Case other_spec = spec;
      other_spec.seed += 100 * seed;
      auto other = must(make_case(other_spec));
      other->experts = data->experts;
      other->tensor_scales = data->tensor_scales;
      for (int64_t t = spec.tokens - static_cast<int64_t>(3 * seed); t < spec.tokens; ++t)
        for (int64_t k = 0; k < spec.options.top_k; ++k) other->set_id(t, k, -1);
      captured.poison();
      const Batch again = captured.place(other->batch(out.data()));
      ASSERT_EQ(again.hidden, placed.hidden);  // the same memory, other contents
      graph.launch();
      stream.synchronize();
      captured.fetch(again, out.data());
      EXPECT_EQ(captured.broken_guard(), -1);
      EXPECT_EQ(same(*other, eager.run(*other), out), "");
      EXPECT_EQ(std::memcmp(captured.buffers().status, eager.buffers().status, sizeof(RunStatus)),
                0);
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(graphs, 40);
}
TEST_P(CudaDevice, CapturedGraphReplaysWithOtherContents) { expect_graphs_replay(4); }
// For the emulator, on which the other test takes a minute or two.
TEST_P(CudaDevice, AFewCapturedGraphsReplayWithOtherContents) { expect_graphs_replay(20); }

// The walk takes fewer kernels than there are steps: the same bits and counts as the steps one
// after the other.
TEST_P(CudaDevice, TheWalkGivesTheBitsOfItsSteps) {
  for (const Case& spec : case_table()) {
    SCOPED_TRACE(spec.name);
    const auto data = must(make_case(spec));
    if (declines(backend(), data->config)) continue;
    CaseRun walk(backend(), *data), stepwise(backend(), *data);
    ASSERT_TRUE(walk.ok() && stepwise.ok());
    run_against_steps(walk, stepwise, *data);
    if (HasFailure()) return;
  }
}

// A run's first kernels read what the run before has only just written: a kernel that read the
// batch too early would see older values. Runs in pairs, the first's out being the second's hidden,
// without a wait and with one after each.
TEST_P(CudaDevice, ARunReadsWhatTheRunBeforeItWrote) {
  constexpr size_t kBatches = 8, kPairs = 64;
  for (const char* choice : {"w4a16/", "w4a4/", "fp8/", "w4a16_shared/"})
    for (int64_t tokens : {1, 3, 16, 40, 600}) {
      Case spec = shaped(choice, 12, 2, 512, 256, tokens);
      SCOPED_TRACE(spec.name + " " + std::to_string(tokens));
      auto data = must(make_case(spec));
      if (declines(backend(), data->config)) continue;
      data->topk_weights.assign(data->topk_weights.size(), 0.5f);  // none is 0
      CaseRun run(backend(), *data);
      ASSERT_TRUE(run.ok());
      std::vector<uint8_t> out(data->out_bytes());
      Batch first = run.place(data->batch(out.data()));
      const size_t line_bytes = data->hidden.size(), id_bytes = data->topk_ids.size();
      ASSERT_EQ(line_bytes, data->out_bytes());
      std::vector<uint8_t> script;  // hidden and ids of each batch
      for (size_t i = 0; i < kBatches; ++i) {
        spec.seed = i + 1;
        const auto other = must(make_case(spec));
        script.insert(script.end(), other->hidden.begin(), other->hidden.end());
        script.insert(script.end(), other->topk_ids.begin(), other->topk_ids.end());
        script.resize((script.size() + 255) / 256 * 256);
      }
      auto source = must(backend().allocate(script.size(), 0, "script")),
           outs = must(backend().allocate((kPairs + 1) * line_bytes, 0, "outs"));
      ASSERT_CUDA(cudaMemcpy(source->data(), script.data(), script.size(), cudaMemcpyHostToDevice));
      auto* const ids = const_cast<void*>(first.topk_ids);
      Batch second = first;
      first.out = outs->data() + kPairs * line_bytes;
      second.hidden = first.out;
      const auto run_pairs = [&](bool wait) {
        std::vector<uint8_t> results(kPairs * line_bytes);
        for (size_t pair = 0; pair < kPairs; ++pair) {
          const std::byte* const from =
              source->data() + pair % kBatches * (script.size() / kBatches);
          EXPECT_EQ(cudaSuccess, cudaMemcpyAsync(ids, from + line_bytes, id_bytes,
                                                 cudaMemcpyDeviceToDevice, nullptr));
          first.hidden = from;
          second.out = outs->data() + pair * line_bytes;
          for (const Batch* batch : {&first, &second}) {
            EXPECT_OK(run.run_into(*batch, serial_executor()));
            if (wait) {
              EXPECT_EQ(cudaSuccess, cudaDeviceSynchronize());
            }
          }
        }
        EXPECT_EQ(cudaSuccess,
                  cudaMemcpy(results.data(), outs->data(), results.size(), cudaMemcpyDeviceToHost));
        return results;
      };
      const std::vector<uint8_t> expected = run_pairs(true);
      EXPECT_EQ(same(*data, expected, run_pairs(false)), "");
      const std::vector<float> values = to_floats(expected, spec.out_dtype);
      const auto ordinary =
          std::count_if(values.begin(), values.end(), [](float v) { return std::isnormal(v); });
      EXPECT_GT(ordinary, static_cast<std::ptrdiff_t>(values.size() / 2));
      if (HasFailure()) return;
    }
}

TEST_P(CudaDevice, TwoHundredRepeatsGiveTheSameBits) {
  for (const char* choice : {"w4a4/", "w4a16/", "w4a4_shared/", "w4a4_before_down/"}) {
    const auto data = must(make_case(shaped(choice, 16, 4, 256, 128, 150)));
    CaseRun run(backend(), *data);
    ASSERT_TRUE(run.ok());
    const std::vector<uint8_t> first = run.run(*data);
    for (int repeat = 1; repeat < 200; ++repeat) {
      if (repeat % 20 == 0) run.poison();
      ASSERT_EQ(first, run.run(*data)) << choice << " repeat " << repeat;
    }
  }
}

// K of many stages, partial row tiles, small and large tiles of rows; then random shapes.
TEST_P(CudaDevice, ShapesBeyondTheTableAgreeWithTheCpu) {
  std::vector<Case> specs;
  for (const char* choice : {"w4a4/", "w4a16/"})
    for (const int64_t tokens : {1, 7, 65, 300})
      specs.push_back(shaped(choice, 8, 2, 2064, 720, tokens));
  Random random(2024);
  const char* const choices[] = {
      "w4a4/", "w4a16/", "w4a4_clamped/", "w4a4_shared/", "w4a16_before_down/", "w4a4_fp16/"};
  for (int i = 0; i < 24; ++i) {
    const int64_t experts = 1 + random.below(40),
                  top_k = 1 + random.below(std::min<int64_t>(experts, 8));
    Case spec = shaped(choices[random.below(6)], experts, top_k, 16 * (1 + random.below(40)),
                       16 * (1 + random.below(24)), 1 + random.below(200));
    spec.routing = random.below(2) == 0 ? Routing::kZipf : Routing::kPartlyNone;
    specs.push_back(spec);
  }
  // The CPU's layer is tested against the reference, and fast enough for real sizes.
  const auto pool = make_thread_pool();
  for (const Case& spec : specs) {
    const MoeOptions& options = spec.options;
    SCOPED_TRACE(testing::Message() << spec.name << " e" << options.num_experts << " k"
                                    << options.top_k << " h" << options.hidden_size << " i"
                                    << options.intermediate_size << " t" << spec.tokens);
    const auto data = must(make_case(spec));
    CaseRun expected(kCpuBackend, *data), actual(backend(), *data);
    ASSERT_TRUE(expected.ok() && actual.ok());
    EXPECT_EQ(beyond_limits(*data, expected.run(*data, pool.get()), actual.run(*data)), "");
    EXPECT_EQ(actual.broken_guard(), -1);
  }
}

// Compares route, and no other step, with the reference's.
void expect_routed_in_order(const Backend& backend, const Case& spec) {
  const auto data = must(make_case(spec));
  CaseRun expected(kReferenceBackend, *data), actual(backend, *data);
  ASSERT_TRUE(expected.ok() && actual.ok());
  std::vector<uint8_t> out(data->out_bytes());
  const Batch host = data->batch(out.data()), device = actual.place(host);
  ASSERT_OK(kReferenceBackend.steps->route(expected.step(host, serial_executor())));
  ASSERT_OK(backend.steps->route(actual.step(device, serial_executor())));
  actual.fetch(device, out.data());
  const LayerBuffers &e = expected.buffers(), &a = actual.buffers();
  const int64_t experts = spec.range.count, rows = e.routed.row_offsets[experts];
  EXPECT_TRUE(
      std::equal(e.row_of_assignment, e.row_of_assignment + spec.tokens * 8, a.row_of_assignment));
  EXPECT_TRUE(
      std::equal(e.routed.row_offsets, e.routed.row_offsets + experts + 1, a.routed.row_offsets));
  EXPECT_TRUE(std::equal(e.routed.assignment_of_row, e.routed.assignment_of_row + rows,
                         a.routed.assignment_of_row));
  EXPECT_EQ(e.status->bad_expert_ids, a.status->bad_expert_ids);
  EXPECT_EQ(actual.broken_guard(), -1);
}

// Every way of routing: one warp, one block, several, on both sides of their limits; masks of
// experts that do and do not fit in shared memory; ranges of experts.
TEST_P(CudaDevice, ManyChoicesAreRoutedInOrder) {
  struct Experts {
    int64_t count;
    ExpertRange range;
    std::vector<int64_t> tokens;  // few if there are many experts, since each case packs them
  };
  const std::vector<int64_t> every = {4, 5, 33, 65, 255, 256, 257, 513, 4000};
  for (const Experts& experts :
       {Experts{9, {0, 9}, every}, Experts{300, {0, 300}, every},
        Experts{300, {20, 257}, {5, 65, 257, 4000}}, Experts{2100, {7, 2000}, {5, 513}}})
    for (Routing routing :
         {Routing::kUniform, Routing::kZipf, Routing::kBadIds, Routing::kDuplicates})
      for (const int64_t tokens : experts.tokens) {
        Case spec = shaped("w4a16/", experts.count, 8, 16, 16, tokens);
        spec.routing = routing;
        spec.range = experts.range;
        SCOPED_TRACE(std::string(to_string(routing)) + " " + std::to_string(tokens) + " tokens, " +
                     std::to_string(experts.range.count) + " experts");
        expect_routed_in_order(backend(), spec);
        if (HasFailure()) return;
      }
}

INSTANTIATE_TEST_SUITE_P(Backends, CudaDevice, testing::ValuesIn(device_backends()),
                         hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal::test
