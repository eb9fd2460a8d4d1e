// doctor's report of engines, with a python3 that is present, missing, slow, broken or hostile.
// None of these is a failure.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "cli/run_tool.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// A folder at the front of PATH with a shell script as python3.
class DoctorEngines : public ::testing::Test {
 protected:
  void python_is(const std::string& body) {
    const std::string path = dir_.file("python3");
    std::ofstream(path) << "#!/bin/sh\n" << body << "\n";
    ASSERT_EQ(chmod(path.c_str(), 0700), 0);
  }
  ToolRun doctor(std::vector<std::string> words = {}) {
    words.insert(words.begin(), "doctor");
    return run_tool(words, {{"PATH", dir_.path().string() + ":/usr/bin:/bin"}});
  }
  // Without the system's folders: python3 is the script, or missing if there is no script.
  ToolRun doctor_without_system() { return run_tool({"doctor"}, {{"PATH", dir_.path().string()}}); }

  TempDir dir_;
};

constexpr const char* kReport = R"(echo '{"mode": "auto", "engines": [
  {"name": "vllm", "version": "0.32.0", "fits": true, "misfits": {}, "note": "the adapter fits"},
  {"name": "sglang", "version": null, "fits": null, "misfits": {}, "note": "not installed"}]}')";

TEST_F(DoctorEngines, AreNamedWithTheirVersionAndNote) {
  python_is(kReport);
  const ToolRun run = doctor();
  EXPECT_EQ(run.exit_code, 0) << run.out << run.err;
  EXPECT_THAT(run.out, HasSubstr("engine    vllm          0.32.0       the adapter fits\n"));
  EXPECT_THAT(run.out, HasSubstr("engine    sglang        --           not installed\n"));
  const nlohmann::json json = doctor({"--json", "--quiet"}).json();
  EXPECT_EQ(json["engines"][0]["version"], "0.32.0");
  EXPECT_EQ(json["engines"][0]["fits"], true);
  EXPECT_TRUE(json["engines"][1]["version"].is_null());
}

TEST_F(DoctorEngines, TheQuestionIsTheModuleAskedFromNoFolderOfTheUser) {
  python_is("[ \"$*\" = '-m nvfp4_moe.engines --json' ] && [ \"$(pwd)\" = / ] || exit 3\n" +
            std::string(kReport));
  EXPECT_THAT(doctor().out, HasSubstr("the adapter fits"));
}

TEST_F(DoctorEngines, NobodyToAskIsAFact) {
  python_is("exit 1");
  EXPECT_THAT(doctor().out, HasSubstr("engines   --  python3 on PATH has no nvfp4_moe"));
  python_is("exit 7");
  EXPECT_THAT(doctor().out, HasSubstr("engines   --  python3 ended with 7"));
  python_is("echo Traceback");
  EXPECT_THAT(doctor().out, HasSubstr("engines   --  python3 gave no report: Traceback"));
  python_is("echo '{\"engines\": []}'");
  EXPECT_THAT(doctor().out, HasSubstr("engines   --  python3 gave no report"));
  EXPECT_THAT(doctor_without_system().out, HasSubstr("engines   --  there is no timeout on PATH"));
  ASSERT_EQ(unlink(dir_.file("python3").c_str()), 0);
  const ToolRun run = doctor_without_system();
  EXPECT_THAT(run.out, HasSubstr("engines   --  there is no python3 on PATH"));
  EXPECT_EQ(run.exit_code, 0) << run.out << run.err;
}

TEST_F(DoctorEngines, APythonThatHangsIsGivenUp) {
  // `timeout` in front of the script's own, so that the test need not wait as long as a user would.
  python_is("exec sleep 60");
  std::ofstream(dir_.file("timeout")) << "#!/bin/sh\nshift\nexec /usr/bin/timeout 0.2 \"$@\"\n";
  ASSERT_EQ(chmod(dir_.file("timeout").c_str(), 0700), 0);
  const ToolRun run = doctor();
  EXPECT_THAT(run.out, HasSubstr("engines   --  python3 did not answer in 10 s"));
  EXPECT_EQ(run.exit_code, 0);
}

TEST_F(DoctorEngines, WhatTheReportHoldsReachesNoTerminalAsControl) {
  python_is(
      R"(printf '{"engines": [{"name": "a\\u001b[31m", "version": "\\u0007", "note": "b\\nverdict   fine"}]}')");
  const ToolRun run = doctor();
  EXPECT_THAT(run.out, Not(HasSubstr("\x1b")));
  EXPECT_THAT(run.out, Not(HasSubstr("\nverdict   fine")));
  EXPECT_THAT(run.out, HasSubstr("engine    a\\x1B[31m"));
}

TEST_F(DoctorEngines, AnAnswerWithoutEndIsCut) {
  python_is("yes | head -c 50000000");
  const ToolRun run = doctor();
  EXPECT_THAT(run.out, HasSubstr("engines   --  python3 gave no report: y"));
  EXPECT_EQ(run.exit_code, 0);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
