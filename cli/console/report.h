// Report: one verb's result. It prints text and tables as they come, or one JSON object at the end
// (--json).
//
// The JSON object: {"schema": 1, "verb", "version", "ok", ...the verb's own keys with units in
// their names..., "failures": [...], "repro"}. An error gives {"schema": 1, "verb", "version",
// "ok": false, "error": {"status", "message"}} instead, and one line on stderr in either form.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/console/progress_bar.h"
#include "cli/console/table.h"
#include "core/executor.h"
#include "core/status.h"

namespace nvfp4_moe::internal::cli {

inline constexpr int kJsonSchema = 1;

// Options that every verb has.
struct CommonOptions {
  bool json = false;
  bool quiet = false;
  std::optional<int> threads;  // 0: one per available core; nullopt: from the environment
  std::string backend = "auto";
  std::string device = "cpu";
};

class Report {
 public:
  Report(std::string verb, std::string repro, CommonOptions common);

  const CommonOptions& common() const { return common_; }
  Json& json() { return json_; }  // the verb adds its keys here
  Executor& executor();           // a pool of --threads threads, made at the first call
  ProgressStyle progress() const { return progress_style(common_.quiet); }

  // Text for people; nothing with --json.
  void fact(const std::string& label, const std::string& text,
            Style style = Style::kPlain);  // "label    text"
  void line(const std::string& text);
  // Prints the table as text, or adds its rows as JSON under `key`.
  void table(const std::string& key, const Table& table);

  // Records a failed check: exit code 1, but the whole report is still printed.
  void fail(const std::string& what);
  bool failed() const { return !failures_.empty(); }

  // Prints the rest (repro line, JSON, error) and returns the exit code.
  int finish(const Status& status);

 private:
  std::string verb_;
  std::string repro_;
  CommonOptions common_;
  Json json_;
  std::vector<std::string> failures_;
  std::unique_ptr<Executor> executor_;
};

// Prints one line on stderr.
void print_error(const std::string& message);
// The JSON form of an error, as one line.
std::string error_json(const std::string& verb, const Status& status);

}  // namespace nvfp4_moe::internal::cli
