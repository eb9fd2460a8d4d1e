#include "cli/verbs/engines.h"

#include <fmt/format.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <memory>
#include <string>

#include "cli/bench/host.h"
#include "core/printable.h"

namespace nvfp4_moe::internal::cli {
namespace {

constexpr int kSeconds = 10;            // an import from a cold network drive takes seconds
constexpr size_t kMostBytes = 1 << 20;  // of an answer
constexpr int kTimedOut = 124,
              kNone = 1;  // exit codes of `timeout`, and of Python if it does not find the module

struct Answer {
  std::string text;
  int exit_code = -1;
};

// Runs in /, because Python would import modules from the current directory.
Answer ask() {
  const std::string command = fmt::format(
      "cd / && exec timeout {} python3 -m nvfp4_moe.engines --json 2>/dev/null </dev/null",
      kSeconds);
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return {};
  Answer answer;
  std::array<char, 4096> bytes{};
  for (size_t count; (count = std::fread(bytes.data(), 1, bytes.size(), pipe)) > 0;) {
    if (answer.text.size() < kMostBytes) answer.text.append(bytes.data(), count);
  }
  const int status = pclose(pipe);
  if (WIFEXITED(status)) answer.exit_code = WEXITSTATUS(status);
  return answer;
}

}  // namespace

Result<Json> read_engines() {
  if (!on_path("python3")) return unsupported("there is no python3 on PATH");
  if (!on_path("timeout"))
    return unsupported("there is no timeout on PATH, which is needed to query python3");
  const Answer answer = ask();
  if (answer.exit_code == kTimedOut)
    return unsupported(fmt::format("python3 did not answer in {} s", kSeconds));
  if (answer.exit_code == kNone) return unsupported("python3 on PATH has no nvfp4_moe");
  if (answer.exit_code != 0)
    return unsupported(fmt::format("python3 ended with {}", answer.exit_code));
  const Json json = Json::parse(answer.text);
  if (!json.is_object() || json["engines"].size() == 0 || !json["summary"].is_string())
    return unsupported(fmt::format("python3 gave no report: {}", printable(answer.text, 60)));
  return json;
}

std::string engines_text(const Result<Json>& report) {
  if (!report.ok())
    return report.status().message() +
           "; run python -m nvfp4_moe in the environment of your engine";
  return fmt::format("{} (in {})", printable((*report)["summary"].text()),
                     printable((*report)["python"].text()));
}

std::vector<std::string> missing_for_engines(const Result<Json>& report) {
  std::vector<std::string> missing;
  if (!report.ok()) return missing;
  for (const Json& one : (*report)["missing"]) missing.push_back(printable(one.text()));
  return missing;
}

}  // namespace nvfp4_moe::internal::cli
