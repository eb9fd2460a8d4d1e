// doctor's lines, and its report of engines with a python3 that is present, missing, slow, broken
// or hostile. None of these is a failure.
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "cli/run_tool.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

using testing::MatchesRegex;
using testing::Not;

// A folder at the front of PATH with a shell script as python3, or without one.
class DoctorEngines : public testing::Test {
 protected:
  void script(const std::string& name, const std::string& body) {
    const std::string path = dir_.file(name);
    std::ofstream(path) << "#!/bin/sh\n" << body << "\n";
    ASSERT_EQ(chmod(path.c_str(), 0700), 0);
  }
  ToolRun doctor(const std::string& more_path = ":/usr/bin:/bin", bool verbose = false) {
    std::vector<std::string> words = {"doctor"};
    if (verbose) words.emplace_back("--verbose");
    ToolRun run = run_tool(words, {{"PATH", dir_.path().string() + more_path}});
    EXPECT_EQ(run.exit_code, 0) << run.out << run.err;
    return run;
  }
  TempDir dir_;
};

TEST_F(DoctorEngines, FiveLinesAreAllUnlessMoreIsAskedFor) {
  script("python3", "exit 1");
  const std::string out = doctor().out;
  EXPECT_THAT(out, MatchesRegex("version   nvfp4-moe [0-9.]+, [^;\n]*; [0-9]+ self-tests passed\n"
                                "backends  .* on the host \\(runs cpu:[a-z0-9]+\\).*\n"
                                "engines   .*\n"
                                "missing   .*\n"
                                "repro     nvfp4-moe doctor\n"));
  EXPECT_EQ(count_lines(out), 5) << out;
  const std::string more = doctor(":/usr/bin:/bin", true).out;
  for (const char* words :
       {"\nhost ", "\ncpu has ", "\ngpu", "\nbackend   reference ", "256/256 bytes"}) {
    EXPECT_THAT(more, HasSubstr(words));
    EXPECT_THAT(out, Not(HasSubstr(words)));
  }
}

TEST_F(DoctorEngines, SelfChecksAreALineEach) {
  script("python3", "exit 1");
  const std::map<std::string, std::string> path = {
      {"PATH", dir_.path().string() + ":/usr/bin:/bin"}, {"CUDA_VISIBLE_DEVICES", ""}};
  EXPECT_THAT(run_ok({"doctor", "--self-check"}, path).out,
              StartsWith("check     no backend with a self-check runs on a GPU here\nversion "));
  EXPECT_EQ(json_of({"doctor", "--self-check"}, path)["self_check"], nlohmann::json::array());
  EXPECT_FALSE(json_of({"doctor"}, path).contains("self_check"));
}

// The module is asked from no folder of the user.
TEST_F(DoctorEngines, AreNamedWithTheirVersionAndNote) {
  script("python3", R"sh([ "$*" = '-m nvfp4_moe.engines --json' ] && [ "$(pwd)" = / ] || exit 3
    echo '{"mode": "auto", "python": "/env/bin/python3", "summary": "vllm 0.32.0 fits; no sglang",
  "missing": ["a release of other that fits"], "engines": [
  {"name": "vllm", "version": "0.32.0", "fits": true, "misfits": {}, "note": "the adapter fits"},
  {"name": "sglang", "version": null, "fits": null, "misfits": {}, "note": "not installed"}]}')sh");
  const std::string out = doctor(":/usr/bin:/bin", true).out;
  EXPECT_THAT(out, HasSubstr("engines   vllm 0.32.0 fits; no sglang (in /env/bin/python3)\n"));
  EXPECT_THAT(out, HasSubstr("missing   a release of other that fits\n"));
  EXPECT_THAT(out, Not(HasSubstr("missing   nothing")));
  EXPECT_THAT(out, HasSubstr("engine    vllm          0.32.0       the adapter fits\n"));
  EXPECT_THAT(out, HasSubstr("engine    sglang        --           not installed\n"));
  const std::string path = dir_.path().string() + ":/usr/bin:/bin";
  const nlohmann::json json = json_of({"doctor", "--quiet"}, {{"PATH", path}});
  EXPECT_EQ(json["engines"][0]["version"], "0.32.0");
  EXPECT_EQ(json["engines"][0]["fits"], true);
  EXPECT_TRUE(json["engines"][1]["version"].is_null());
  EXPECT_THAT(json["missing"].dump(), HasSubstr("a release of other that fits"));
}

TEST_F(DoctorEngines, NobodyToAskIsAFact) {
  for (const auto& [body, text] : std::vector<std::pair<std::string, std::string>>{
           {"exit 1",
            "python3 on PATH has no nvfp4_moe; run python -m nvfp4_moe in the environment "
            "of your engine\n"},
           {"exit 7", "python3 ended with 7"},
           {"echo Traceback", "python3 gave no report: Traceback"},
           {"echo '{\"summary\": \"\", \"engines\": []}'", "python3 gave no report"},
           {"echo '{\"engines\": [{\"name\": \"vllm\"}]}'", "python3 gave no report"},
           {"yes | head -c 50000000", "python3 gave no report: y"}}) {
    script("python3", body);
    EXPECT_THAT(doctor().out, HasSubstr("engines   " + text));
  }
  EXPECT_THAT(doctor("").out, HasSubstr("engines   there is no timeout on PATH"));
  std::filesystem::remove(dir_.file("python3"));
  EXPECT_THAT(doctor("").out, HasSubstr("engines   there is no python3 on PATH"));
}

TEST_F(DoctorEngines, APythonThatHangsIsGivenUp) {
  // `timeout` in front of the script's own, so that the test need not wait as long as a user would.
  script("python3", "exec sleep 60");
  script("timeout", "shift\nexec /usr/bin/timeout 0.2 \"$@\"");
  EXPECT_THAT(doctor().out, HasSubstr("engines   python3 did not answer in 10 s"));
}

TEST_F(DoctorEngines, WhatTheReportHoldsReachesNoTerminalAsControl) {
  script(
      "python3",
      R"(printf '{"summary": "a\\u001b[31m", "missing": ["\\u001b"], "engines": [{"name": "a\\u001b[31m", "version": "\\u0007", "note": "b\\nverdict   fine"}]}')");
  for (const bool verbose : {false, true})
    EXPECT_THAT(
        doctor(":/usr/bin:/bin", verbose).out,
        AllOf(Not(HasSubstr("\x1b")), Not(HasSubstr("\nverdict   fine")), HasSubstr("a\\x1B[31m")));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
