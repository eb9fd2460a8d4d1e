// The operands that quantize and requantize write for FP8 tensor cores (fp8_operand.h). Runs no
// GEMM.
#include "backend/cuda/fp8_operand.h"

#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/plain/architecture.h"
#include "backend/cuda/run_plan.h"
#include "backend/cuda/scratch.h"
#include "backend/cuda/steps/steps.h"
#include "backend/sm90/gather.h"
#include "backend/sm90/steps.h"
#include "cases/cases.h"
#include "moe/layer.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/support.h"

namespace nvfp4_moe::internal::cuda {
namespace {

// The offset of element k in its row.
int64_t fp8_offset(int64_t k) {
  return fp8_vec8_offset(k / 8) + k % 8 / 4 * kFp8SecondWord + k % 4;
}

TEST(Fp8Operand, OrderOfBytes) {
  for (int h = 0; h < 3; ++h)
    for (int s = 0; s < 2; ++s)
      for (int half = 0; half < 2; ++half)
        for (int q = 0; q < 4; ++q)
          for (int j = 0; j < 4; ++j)
            EXPECT_EQ(fp8_offset(64 * h + 16 * q + 8 * s + 4 * half + j),
                      64 * h + 32 * s + 16 * half + 4 * q + j);
  for (const int64_t k : {16, 48, 64, 80, 7168}) {
    std::set<int64_t> offsets;
    for (int64_t i = 0; i < fp8_row_bytes(k); ++i) offsets.insert(fp8_offset(i));
    EXPECT_EQ(*offsets.begin(), 0);
    EXPECT_EQ(*offsets.rbegin(), fp8_row_bytes(k) - 1);
    EXPECT_EQ(offsets.size(), static_cast<size_t>(fp8_row_bytes(k)));
    EXPECT_EQ(fp8_row_bytes(k) % 64, 0);
  }
}

// The plain GEMMs' configurations, and one with rows loaded by TMA, for an architecture that
// multiplies E4M3.
constexpr std::array<GemmConfig, 1> kTmaConfigs = {{{"tma", 64, true, true, false, 0}}};
int only(const MoeConfig&, const ExpertRange&, int64_t) { return 0; }
int only_shared(int64_t) { return 0; }
bool never(const MoeConfig&, int64_t) { return false; }
GemmTable e4m3_gemms(bool tma_rows) {
  GemmTable gemms = plain::architecture("e4m3").gemms;
  if (tma_rows) gemms = {"e4m3", kTmaConfigs, only, only_shared, never, 0};
  gemms.operands = {.fp8 = Operand::kE4m3};
  return gemms;
}

// A device's arrays, and the reference's for the same case.
class Fp8OperandRows : public testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = test::why_not_here(kCudaBackend);
    if (!reason.empty()) GTEST_SKIP() << "cuda: " << reason;
  }

  struct Runs {
    explicit Runs(const CaseData& data)
        : data(data),
          reference(kReferenceBackend, data),
          device(kCudaBackend, data),
          out(data.out_bytes()) {
      reference.run_steps(data);
      device.copy_arrays(reference);
      batch = device.place(data.batch(out.data()));
    }
    // body(step) under a plan of the whole run, or of single steps.
    template <class Body>
    void take(bool tma_rows, bool single_steps, const Body& body) {
      const auto facts = test::must(device_facts("cuda:0"));
      RunPlan plan = make_run_plan(e4m3_gemms(tma_rows), data.config, data.spec.range, *facts,
                                   RunFacts::of(batch, single_steps));
      EXPECT_EQ(plan.operand, Operand::kE4m3);
      StepContext step = device.step(batch, serial_executor());
      step.plan = &plan;
      body(step, plan);
      device.fetch(batch, out.data());
    }
    static std::vector<uint8_t> bytes(const void* from, int64_t count) {
      std::vector<uint8_t> to(static_cast<size_t>(count));
      EXPECT_OK(kCudaBackend.memory->to_host(0, to.data(), from, to.size(), nullptr));
      return to;
    }

    const CaseData& data;
    test::CaseRun reference, device;
    std::vector<uint8_t> out;
    Batch batch;
  };

  // Compares row `row` of an operand with the codes of a row of the reference.
  static void expect_row(const std::vector<uint8_t>& operand, int64_t row,
                         const ActivationBuffers& expected, int64_t source, int64_t k) {
    const int64_t row_bytes = fp8_row_bytes(k);
    for (int64_t i = 0; i < row_bytes; ++i) {
      const bool zero = i >= k || expected.nonfinite[source] != 0;
      ASSERT_EQ(operand[static_cast<size_t>(row * row_bytes + fp8_offset(i))],
                zero ? 0 : expected.fp8[source * k + i])
          << "row " << row << " element " << i << " of " << k;
    }
  }
  static CaseData case_of(DType dtype, int64_t hidden, int64_t tokens, DataKind kind) {
    Case spec = cases_named("fp8/").front();
    set_sizes(spec.options, 6, 3, hidden, 80);
    spec.range = {1, 4};
    spec.tokens = tokens;
    spec.data = kind;
    spec.hidden_dtype = dtype;
    return *make_case(spec);
  }
  static bool has_row(const Runs& runs, int64_t token) {
    const int32_t* const rows = runs.reference.buffers().row_of_assignment + token * 3;
    return std::any_of(rows, rows + 3, [](int32_t row) { return row >= 0; });
  }
};

TEST_F(Fp8OperandRows, OfTokensAndOfRows) {
  for (const DataKind kind : {DataKind::kNormal, DataKind::kNan})
    for (const DType dtype : {DType::kBf16, DType::kF16, DType::kF32})
      for (const int64_t hidden : {32, 208}) {
        SCOPED_TRACE(std::string(to_string(kind)) + " " + to_string(dtype) + " " +
                     std::to_string(hidden));
        const CaseData data = case_of(dtype, hidden, 9, kind);
        for (const bool fused : {false, true}) {
          Runs runs(data);
          runs.take(false, !fused, [&](const StepContext& step, const RunPlan& plan) {
            ASSERT_EQ(plan.fused_route_quantize, fused);
            ASSERT_OK(fused ? route_and_quantize(step, nullptr) : quantize(step));
            const auto operand =
                Runs::bytes(hidden_rows(step, step.buffers.routed), 9 * fp8_row_bytes(hidden));
            for (int64_t t = 0; t < 9; ++t)
              if (has_row(runs, t))
                expect_row(operand, t, runs.reference.buffers().routed.hidden, t, hidden);
            ASSERT_OK(requantize(step, step.buffers.routed));
            const PartBuffers& part = runs.reference.buffers().routed;
            const int64_t rows = part.row_offsets[part.experts];
            const auto of_rows =
                Runs::bytes(intermediate_rows(step, step.buffers.routed), rows * fp8_row_bytes(80));
            for (int64_t row = 0; row < rows; ++row)
              expect_row(of_rows, row, part.intermediate, row, 80);
          });
        }
      }
}

// A token's codes are copied to each of its rows, with a CTA or a warp per token.
TEST_F(Fp8OperandRows, IntoExpertOrder) {
  for (const int64_t hidden : {48, 320})
    for (const QuantizeKernel kernel : {QuantizeKernel::kVec8Cta, QuantizeKernel::kVec8Warp}) {
      SCOPED_TRACE(std::to_string(hidden) +
                   (kernel == QuantizeKernel::kVec8Cta ? " cta" : " warp"));
      const CaseData data = case_of(DType::kBf16, hidden, 700, DataKind::kNan);
      Runs runs(data);
      runs.take(true, false, [&](const StepContext& step, RunPlan& plan) {
        ASSERT_TRUE(plan.hidden.into_rows);
        ASSERT_EQ(plan.hidden.kernel, QuantizeKernel::kVec8Cta);
        if (kernel == QuantizeKernel::kVec8Warp) plan.hidden = {kernel, 256, 88, true};
        ASSERT_OK(sm90::quantize_into_rows(step));
        const PartBuffers& part = runs.reference.buffers().routed;
        const int64_t rows = part.row_offsets[part.experts];
        const auto operand =
            Runs::bytes(sm90::gathered(step.buffers.routed), rows * fp8_row_bytes(hidden));
        for (int64_t row = 0; row < rows; ++row)
          expect_row(operand, row, part.hidden, part.assignment_of_row[row] / 3, hidden);
      });
    }
}

}  // namespace
}  // namespace nvfp4_moe::internal::cuda
