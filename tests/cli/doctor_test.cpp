// doctor's report of engines, with a python3 that is present, missing, slow, broken or hostile.
// None of these is a failure.
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "cli/run_tool.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

using testing::Not;

// A folder at the front of PATH with a shell script as python3, or without one.
class DoctorEngines : public testing::Test {
 protected:
  void script(const std::string& name, const std::string& body) {
    const std::string path = dir_.file(name);
    std::ofstream(path) << "#!/bin/sh\n" << body << "\n";
    ASSERT_EQ(chmod(path.c_str(), 0700), 0);
  }
  ToolRun doctor(const std::string& more_path = ":/usr/bin:/bin") {
    ToolRun run = run_tool({"doctor"}, {{"PATH", dir_.path().string() + more_path}});
    EXPECT_EQ(run.exit_code, 0) << run.out << run.err;
    return run;
  }
  TempDir dir_;
};

// The module is asked from no folder of the user.
TEST_F(DoctorEngines, AreNamedWithTheirVersionAndNote) {
  script("python3", R"sh([ "$*" = '-m nvfp4_moe.engines --json' ] && [ "$(pwd)" = / ] || exit 3
    echo '{"mode": "auto", "engines": [
  {"name": "vllm", "version": "0.32.0", "fits": true, "misfits": {}, "note": "the adapter fits"},
  {"name": "sglang", "version": null, "fits": null, "misfits": {}, "note": "not installed"}]}')sh");
  const std::string out = doctor().out;
  EXPECT_THAT(out, HasSubstr("engine    vllm          0.32.0       the adapter fits\n"));
  EXPECT_THAT(out, HasSubstr("engine    sglang        --           not installed\n"));
  const std::string path = dir_.path().string() + ":/usr/bin:/bin";
  const nlohmann::json json = json_of({"doctor", "--quiet"}, {{"PATH", path}});
  EXPECT_EQ(json["engines"][0]["version"], "0.32.0");
  EXPECT_EQ(json["engines"][0]["fits"], true);
  EXPECT_TRUE(json["engines"][1]["version"].is_null());
}

TEST_F(DoctorEngines, NobodyToAskIsAFact) {
  for (const auto& [body, text] : std::vector<std::pair<std::string, std::string>>{
           {"exit 1", "python3 on PATH has no nvfp4_moe"},
           {"exit 7", "python3 ended with 7"},
           {"echo Traceback", "python3 gave no report: Traceback"},
           {"echo '{\"engines\": []}'", "python3 gave no report"},
           {"yes | head -c 50000000", "python3 gave no report: y"}}) {
    script("python3", body);
    EXPECT_THAT(doctor().out, HasSubstr("engines   --  " + text));
  }
  EXPECT_THAT(doctor("").out, HasSubstr("engines   --  there is no timeout on PATH"));
  std::filesystem::remove(dir_.file("python3"));
  EXPECT_THAT(doctor("").out, HasSubstr("engines   --  there is no python3 on PATH"));
}

TEST_F(DoctorEngines, APythonThatHangsIsGivenUp) {
  // `timeout` in front of the script's own, so that the test need not wait as long as a user would.
  script("python3", "exec sleep 60");
  script("timeout", "shift\nexec /usr/bin/timeout 0.2 \"$@\"");
  EXPECT_THAT(doctor().out, HasSubstr("engines   --  python3 did not answer in 10 s"));
}

TEST_F(DoctorEngines, WhatTheReportHoldsReachesNoTerminalAsControl) {
  script(
      "python3",
      R"(printf '{"engines": [{"name": "a\\u001b[31m", "version": "\\u0007", "note": "b\\nverdict   fine"}]}')");
  EXPECT_THAT(doctor().out, AllOf(Not(HasSubstr("\x1b")), Not(HasSubstr("\nverdict   fine")),
                                  HasSubstr("engine    a\\x1B[31m")));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
