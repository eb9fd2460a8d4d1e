// The command line in a separate process with failing memory: it exits with the documented code and
// a message, or succeeds.
#pragma once
#ifdef NVFP4_MOE_TOOL

#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "cli/run_tool.h"
#include "memory/operations.h"
#include "support/attack.h"

namespace nvfp4_moe::internal::test {

inline constexpr int kExitOutOfMemory = 3;  // docs/reference/cli.md

using Arguments = std::vector<std::string>;
inline constexpr struct {
  const char* name;
  Arguments (*arguments)(const OperationFiles&);
} kVerbs[] = {
    {"inspect",
     [](const OperationFiles& f) {
       return Arguments{"inspect", f.packed()};
     }},
    {"inspect_json",
     [](const OperationFiles& f) {
       return Arguments{"inspect", f.packed(), "--json"};
     }},
    {"verify",
     [](const OperationFiles& f) {
       return Arguments{"verify", f.packed(), "--tokens", "2", "--json"};
     }},
    {"quantize",
     [](const OperationFiles& f) {
       return Arguments{"quantize", f.floats(), f.out()};
     }},
    {"run",
     [](const OperationFiles& f) {
       return Arguments{"run",      f.packed(), "--layer",           "0",     "--input",
                        f.states(), "--output", f.states() + ".out", "--json"};
     }},
    {"explain",
     [](const OperationFiles& f) {
       return Arguments{"explain", f.packed()};
     }},
    {"calibrate",
     [](const OperationFiles& f) {
       return Arguments{"calibrate", f.packed(), "--random", "1", "--json"};
     }},
    {"synthesize",
     [](const OperationFiles& f) {
       return Arguments{"synthesize", f.out(), "--layers", "1", "--experts", "8"};
     }},
};

inline std::string verb_name(const testing::TestParamInfo<size_t>& info) {
  return kVerbs[info.param].name;
}

// A test for each verb, by its number.
class ToolMemory : public testing::TestWithParam<size_t> {
 protected:
  // The first twenty requests of the verb and then each step-th, until one that the verb does not
  // reach.
  static void sweep(int64_t step) {
    if (!kFailingMemory) GTEST_SKIP() << "a sanitizer owns malloc";
    static const OperationFiles files;
    const std::string verb = kVerbs[GetParam()].name;
    const Arguments arguments = kVerbs[GetParam()].arguments(files);
    const TempDir dir;
    const std::string tell = dir.file("refused");
    for (const bool all : {false, true}) {
      const std::string which = verb + (all ? ", all from " : ", ");
      int64_t tried = 0, out_of_memory = 0, faults = 0;
      for (int64_t at = 1; faults < 5; at += at < 20 ? 1 : step) {
        std::filesystem::remove_all(files.out());
        std::filesystem::remove(tell);
        std::map<std::string, std::string> env = {{"LD_PRELOAD", NVFP4_MOE_FAILING_MEMORY_OBJECT},
                                                  {"NVFP4_MOE_FAIL_AT", std::to_string(at)},
                                                  {"NVFP4_MOE_FAIL_TELL", tell},
                                                  {"NVFP4_MOE_THREADS", "2"}};
        if (all) env["NVFP4_MOE_FAIL_ALL"] = "1";
        const ToolRun run = run_tool(arguments, env);
        const bool refused = std::filesystem::exists(tell) || run.exit_code > 100;
        if (!refused) {
          EXPECT_EQ(run.exit_code, 0) << verb << " without a failure: " << run.err;
          break;
        }
        ++tried;
        attacked();
        out_of_memory += run.exit_code == kExitOutOfMemory;
        bool told = run.exit_code == 0 || run.err.find("memory") != std::string::npos;
        if (arguments.back() == "--json") told = told && run.json().is_object();
        if ((run.exit_code != 0 && run.exit_code != kExitOutOfMemory) || !told) {
          ++faults;
          ADD_FAILURE() << which << at << ": exit code " << run.exit_code << ": " << run.err;
        }
      }
      std::printf("%s1 on: %lld runs, %lld out of memory\n", which.c_str(),
                  static_cast<long long>(tried), static_cast<long long>(out_of_memory));
      EXPECT_GT(out_of_memory, 0) << verb;
    }
  }
};

}  // namespace nvfp4_moe::internal::test
#endif
