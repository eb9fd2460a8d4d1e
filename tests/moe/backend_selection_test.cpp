// The backend of "auto" depends on self-checks: fallback with one warning, and reports of it.
#include "moe/backend_selection.h"

#include <nlohmann/json.hpp>

#include "judge/judge.h"
#include "moe/linear.h"
#include "moe/self_checks.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;
using Reuse = KeptChecks::Reuse;
using Verdict = CheckOutcome::Verdict;

class BackendSelectionTest : public KeptChecksTest {};

TEST_F(BackendSelectionTest, AFailureFallsBackWithOneWarning) {
  const Warnings warnings;
  KeptChecks checks(process(failed_check()));
  for (int layer = 0; layer < 60; ++layer) {
    const auto selected = must(selector(checks).choose_checked(config_, device_, "auto"));
    EXPECT_EQ(selected->backend, &kReferenceBackend);
  }
  EXPECT_EQ(runs_, 1);
  ASSERT_EQ(warnings.lines().size(), 1u);
  for (const std::string& words :
       {"the self-check of " + scope_.name() + " on ", device_.name + " (cpu:0)",
        std::string("failed: tile_128x64: row 3 column 17: expected 12, got 13; reference is used "
                    "instead; `nvfp4-moe doctor --self-check`"),
        std::string("NVFP4_MOE_SELF_CHECK=off uses untried without a check")})
    EXPECT_THAT(warnings.lines()[0], HasSubstr(words));
  EXPECT_THAT(warnings.lines()[0], testing::Not(HasSubstr("restart")));

  KeptChecks next(process());
  EXPECT_EQ(must(selector(next).choose_checked(config_, device_, "auto"))->backend,
            &kReferenceBackend);
  EXPECT_EQ(runs_, 1);
  EXPECT_EQ(warnings.lines().size(), 2u);
}

TEST_F(BackendSelectionTest, ALayerAndExplainNameTheFailure) {
  KeptChecks checks(process(failed_check()));
  const auto selected = must(selector(checks).choose_checked(config_, device_, "auto"));
  const auto layer = open_tiny(tiny_, tiny_layer_options(), selected->backend);
  EXPECT_TRUE(nlohmann::json::parse(layer->describe_json())["self_check"].is_null());
  layer->set_self_check(selected->check);
  EXPECT_EQ(nlohmann::json::parse(layer->describe_json())["self_check"],
            nlohmann::json({{"scope", scope_.name()},
                            {"state", "failed"},
                            {"kernel", "tile_128x64"},
                            {"difference", "row 3 column 17: expected 12, got 13"}}));
  const auto reports = selector(checks).explain(config_, device_, "auto");
  ASSERT_EQ(reports.size(), 2u);
  EXPECT_FALSE(reports[0].chosen);
  EXPECT_TRUE(reports[0].supported);
  EXPECT_EQ(reports[0].reason,
            "supports this layer; its self-check on this device failed: tile_128x64: row 3 column "
            "17: expected 12, got 13");
  EXPECT_TRUE(reports[1].chosen);
  // If no other backend takes the layer, the error has the reason.
  const std::array<const Backend*, 1> only = {&kUntried};
  EXPECT_THAT(BackendSelector(only, uses(checks), SelfCheckMode::kAuto)
                  .choose_checked(config_, device_, "auto"),
              Refused(Code::kUnsupported, "its self-check on this device failed: tile_128x64"));
}

TEST_F(BackendSelectionTest, ALinearOfAutoTakesNoBackendWhoseCheckFailed) {
  std::mt19937 random(1);
  const Matrix weight = Matrix::random(16, 32, 0.25f, random);
  const auto open = [&](const BackendSelector& selector) {
    return NvfpLinear::open(weight.view(), {.max_tokens = 1, .executor = &serial_executor()}, {},
                            selector);
  };
  for (const Verdict verdict : {Verdict::kFailed, Verdict::kTimedOut}) {
    const Warnings warnings;
    KeptChecks checks(process(failed_check(verdict)));
    for (int linear = 0; linear < 3; ++linear) {
      const auto opened = must(open(selector(checks)));
      EXPECT_EQ(&(*opened)->backend(), &kReferenceBackend);
      EXPECT_THAT((*opened)->describe_json(), HasSubstr("reference is used instead"));
    }
    EXPECT_EQ(warnings.lines().size(), 1u);
    const std::array<const Backend*, 1> only = {&kUntried};
    EXPECT_THAT(open(BackendSelector(only, uses(checks), SelfCheckMode::kAuto)),
                Refused(Code::kUnsupported, "its self-check on this device "));
    EXPECT_EQ(&(*must(open(selector(checks, SelfCheckMode::kOff))))->backend(), &kUntried);
    std::filesystem::remove_all(folder_);
  }
  EXPECT_EQ(runs_, 2);
  KeptChecks passed(process());
  EXPECT_EQ(&(*must(open(selector(passed))))->backend(), &kUntried);
}

TEST_F(BackendSelectionTest, AKernelThatHangsAsksForARestartInItsOwnProcess) {
  const Warnings warnings;
  KeptChecks checks(process(failed_check(Verdict::kTimedOut))), next(process());
  for (KeptChecks* process : {&checks, &next})
    EXPECT_EQ(must(selector(*process).choose_checked(config_, device_, "auto"))->backend,
              &kReferenceBackend);
  EXPECT_EQ(runs_, 1);
  ASSERT_EQ(warnings.lines().size(), 2u);
  constexpr const char* kRestart = "still occupies the device: restart this process";
  EXPECT_THAT(warnings.lines()[0], AllOf(HasSubstr("timed out: tile_128x64"), HasSubstr(kRestart)));
  EXPECT_THAT(warnings.lines()[1], testing::Not(HasSubstr(kRestart)));
}

TEST_F(BackendSelectionTest, PlansAndForcedBackendsRunNoCheck) {
  const Warnings warnings;
  KeptChecks checks(process(failed_check()));
  const auto reports = selector(checks).explain(config_, device_, "auto");
  EXPECT_TRUE(reports[0].chosen);
  EXPECT_THAT(reports[0].reason,
              HasSubstr("; not checked yet: checked when the first layer opens"));
  EXPECT_EQ(must(selector(checks).choose(config_, device_, "auto"))->backend, &kUntried);
  EXPECT_EQ(must(selector(checks).choose_checked(config_, device_, "untried"))->check,
            std::nullopt);
  EXPECT_EQ(runs_, 0);
  EXPECT_TRUE(warnings.lines().empty());
  EXPECT_FALSE(std::filesystem::exists(folder_));

  checks.check(scope_, device_, Reuse::kKept);
  for (int layer = 0; layer < 2; ++layer)
    EXPECT_EQ(must(selector(checks).choose_checked(config_, device_, "untried"))->backend,
              &kUntried);
  ASSERT_EQ(warnings.lines().size(), 1u);
  EXPECT_THAT(warnings.lines()[0], HasSubstr("untried is used, because it is forced by name"));
  EXPECT_EQ(must(selector(checks).choose(config_, device_, "auto"))->backend, &kReferenceBackend);
}

TEST_F(BackendSelectionTest, OffTrustsAndAlwaysChecksInEachProcess) {
  KeptChecks checks(process(failed_check()));
  checks.check(scope_, device_, Reuse::kKept);
  const auto off =
      must(selector(checks, SelfCheckMode::kOff).choose_checked(config_, device_, "auto"));
  EXPECT_EQ(off->backend, &kUntried);
  EXPECT_STREQ(off->check->state(), "off");
  EXPECT_THAT(selector(checks, SelfCheckMode::kOff).explain(config_, device_, "auto")[0].reason,
              HasSubstr("not checked, by NVFP4_MOE_SELF_CHECK=off"));
  EXPECT_EQ(runs_, 1);

  KeptChecks always(process());
  EXPECT_FALSE(always.check(scope_, device_, Reuse::kKept).ran_here);
  for (int layer = 0; layer < 3; ++layer) {
    const auto selected =
        must(selector(always, SelfCheckMode::kAlways).choose_checked(config_, device_, "auto"));
    EXPECT_EQ(selected->backend, &kUntried);
    EXPECT_STREQ(selected->check->state(), "passed");
  }
  EXPECT_EQ(runs_, 2);
}

TEST_F(BackendSelectionTest, WithoutABackendThatNeedsOneNoCheckIsAskedFor) {
  const std::array<const Backend*, 1> host = {&kReferenceBackend};
  const BackendSelector selector(
      host, []() -> KeptChecks& { throw std::logic_error("asked"); }, SelfCheckMode::kAlways);
  const auto selected = must(selector.choose_checked(config_, device_, "auto"));
  EXPECT_EQ(selected->backend, &kReferenceBackend);
  EXPECT_EQ(selected->check, std::nullopt);
}

TEST_F(BackendSelectionTest, ATriedBackendIsCheckedOnRequestOnly) {
  const auto choose = [&](KeptChecks& checks, SelfCheckMode mode) {
    return must(
        BackendSelector(kTriedFirst, uses(checks), mode).choose_checked(config_, device_, "auto"));
  };
  KeptChecks checks(process(failed_check()));
  const auto untouched = choose(checks, SelfCheckMode::kAuto);
  EXPECT_EQ(untouched->backend, &kTried);
  EXPECT_EQ(untouched->check, std::nullopt);
  EXPECT_EQ(runs_, 0);
  EXPECT_EQ(choose(checks, SelfCheckMode::kAlways)->backend, &kReferenceBackend);
  EXPECT_EQ(runs_, 1);
  // The failure counts once it is known.
  KeptChecks next(process());
  EXPECT_EQ(choose(next, SelfCheckMode::kAuto)->backend, &kReferenceBackend);
  EXPECT_EQ(choose(next, SelfCheckMode::kOff)->backend, &kTried);
  EXPECT_EQ(runs_, 1);
}

}  // namespace
}  // namespace nvfp4_moe::internal
