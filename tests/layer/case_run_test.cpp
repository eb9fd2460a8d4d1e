// The runs that tests make of a backend say in words that a machine does not run it, instead of ending the process.
#include "support/case_run.h"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "backend/backend.h"
#include "cases/cases.h"
#include "core/executor.h"
#include "support/support.h"

namespace nvfp4_moe::internal {
namespace {

// A backend of another machine: whatever of it runs fails the test.
Backend elsewhere() {
  Backend backend = kReferenceBackend;
  backend.name = "cpu:elsewhere";
  backend.supports = [](const MoeConfig&, const DeviceFacts&) { return unsupported("expected another CPU"); };
  backend.pack_expert = [](PackedWeights&, int64_t, const ExpertSource&) {
    ADD_FAILURE() << "packed";
    return Status();
  };
  backend.run = [](const PackedWeights&, const Plan&, const Batch&, std::byte*, const RunContext&) {
    ADD_FAILURE() << "ran";
    return Status();
  };
  return backend;
}

TEST(CaseRunElsewhere, FailsInWordsAndRunsNothing) {
  static const Backend backend = elsewhere();
  static const CaseData data = *make_case(case_table().front());
  EXPECT_NONFATAL_FAILURE(test::CaseRun(backend, data), "cpu:elsewhere does not run on this machine");
  static test::CaseRun* made = nullptr;
  EXPECT_NONFATAL_FAILURE(made = new test::CaseRun(backend, data), "expected another CPU");
  const std::unique_ptr<test::CaseRun> run(made);
  ASSERT_FALSE(run->ok());
  EXPECT_NONFATAL_FAILURE(made->run(data), "a run of cpu:elsewhere");
  EXPECT_NONFATAL_FAILURE(made->run_steps(data), "cpu:elsewhere: no run to take steps of");
  std::vector<uint8_t> out(data.out_bytes());
  EXPECT_EQ(run->run_into(data.batch(out.data()), serial_executor()).code(), Code::kUnsupported);
}

}  // namespace
}  // namespace nvfp4_moe::internal
