// The command line in a separate process with failing memory: it exits with the documented code and
// a message, or succeeds.
#pragma once

#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "cli/run_tool.h"
#include "memory/operations.h"
#include "support/attack.h"

namespace nvfp4_moe::internal::test {

inline constexpr int kExitOutOfMemory = 3;  // docs/reference/cli.md

struct Verb {
  std::string name;
  std::vector<std::string> arguments;
};

inline std::string verb_name(const testing::TestParamInfo<size_t>& info) {
  static const char* const kNames[] = {"inspect", "inspect_json", "verify",    "quantize",
                                       "run",     "explain",      "calibrate", "synthesize"};
  return kNames[info.param];
}

inline constexpr size_t kVerbs = 8;

// A test for each verb, by its number.
class ToolMemory : public testing::TestWithParam<size_t> {
 protected:
  static const OperationFiles& files() {
    static const OperationFiles made;
    return made;
  }
  static std::vector<Verb> verbs() {
    const OperationFiles& f = files();
    return {{"inspect", {"inspect", f.packed()}},
            {"inspect_json", {"inspect", f.packed(), "--json"}},
            {"verify", {"verify", f.packed(), "--tokens", "2", "--json"}},
            {"quantize", {"quantize", f.floats(), f.out()}},
            {"run",
             {"run", f.packed(), "--layer", "0", "--input", f.states(), "--output",
              f.states() + ".out", "--json"}},
            {"explain", {"explain", f.packed()}},
            {"calibrate", {"calibrate", f.packed(), "--random", "1", "--json"}},
            {"synthesize", {"synthesize", f.out(), "--layers", "1", "--experts", "8"}}};
  }

  // The first twenty requests of the verb and then each step-th, until one that the verb does not
  // reach.
  static void sweep(int64_t step) {
    if (!kFailingMemory) GTEST_SKIP() << "a sanitizer owns malloc";
    ASSERT_EQ(verbs().size(), kVerbs);
    const Verb verb = verbs()[GetParam()];
    EXPECT_EQ(verb.name, verb_name({GetParam(), 0}));
    const TempDir dir;
    const std::string tell = dir.file("refused");
    for (const bool all : {false, true}) {
      int64_t tried = 0, out_of_memory = 0, faults = 0;
      for (int64_t at = 1; faults < 5; at += at < 20 ? 1 : step) {
        std::filesystem::remove_all(files().out());
        std::filesystem::remove(tell);
        std::map<std::string, std::string> env = {{"LD_PRELOAD", NVFP4_MOE_FAILING_MEMORY_OBJECT},
                                                  {"NVFP4_MOE_FAIL_AT", std::to_string(at)},
                                                  {"NVFP4_MOE_FAIL_TELL", tell},
                                                  {"NVFP4_MOE_THREADS", "2"}};
        if (all) env["NVFP4_MOE_FAIL_ALL"] = "1";
        const ToolRun run = run_tool(verb.arguments, env);
        const bool refused = std::filesystem::exists(tell) || run.exit_code > 100;
        if (!refused) {
          EXPECT_EQ(run.exit_code, 0) << verb.name << " without a failure: " << run.err;
          break;
        }
        ++tried;
        attacked();
        out_of_memory += run.exit_code == kExitOutOfMemory;
        bool told = run.exit_code == 0 || run.err.find("memory") != std::string::npos;
        if (verb.arguments.back() == "--json") told = told && run.json().is_object();
        if ((run.exit_code != 0 && run.exit_code != kExitOutOfMemory) || !told) {
          ++faults;
          ADD_FAILURE() << verb.name << (all ? ", all from " : ", ") << at << ": exit code "
                        << run.exit_code << ": " << run.err;
        }
      }
      std::printf("%s, %s: %lld runs, %lld out of memory\n", verb.name.c_str(),
                  all ? "all from one on" : "one", static_cast<long long>(tried),
                  static_cast<long long>(out_of_memory));
      EXPECT_GT(out_of_memory, 0) << verb.name;
    }
  }
};

}  // namespace nvfp4_moe::internal::test
