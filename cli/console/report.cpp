#include "cli/console/report.h"

#include <fmt/format.h>

#include "cli/console/console.h"
#include "cli/console/exit_code.h"
#include "core/printable.h"

namespace nvfp4_moe::internal::cli {
namespace {

// ASCII only: programs read the same strings, and no control characters reach a terminal.
std::string dump(const Json& json) { return json.dump(-1, true) + "\n"; }

Json head(const std::string& verb, bool ok) {
  return {{"schema", kJsonSchema}, {"verb", verb}, {"version", NVFP4_MOE_VERSION}, {"ok", ok}};
}

// "invalid argument" -> "invalid_argument": a stable name for programs.
std::string code_name(Code code) {
  std::string name = to_string(code);
  for (char& c : name) {
    if (c == ' ' || c == '/') c = '_';
  }
  return name;
}

}  // namespace

void print_error(const std::string& message) { log_line("nvfp4-moe: error: " + message); }

std::string error_json(const std::string& verb, const Status& status) {
  Json json = head(verb, false);
  json["error"] = {{"status", code_name(status.code())}, {"message", status.message()}};
  if (!status.finding().empty()) json["error"]["finding"] = status.finding();
  return dump(json);
}

Report::Report(std::string verb, std::string repro, CommonOptions common)
    : verb_(std::move(verb)),
      repro_(std::move(repro)),
      common_(std::move(common)),
      json_(Json::object()) {}

Executor& Report::executor() {
  if (executor_ == nullptr) executor_ = make_thread_pool(common_.threads.value_or(0));
  return *executor_;
}

void Report::fact(const std::string& label, const std::string& text, Style style) {
  if (!common_.json) {
    print(styled(fmt::format("{:<8}", label), style, stdout_has_color()) + "  " +
          printable(text, kWholeText) + "\n");
  }
}

void Report::line(const std::string& text) {
  if (!common_.json) print(printable(text, kWholeText) + "\n");
}

void Report::table(const std::string& key, const Table& table) {
  json_[key] = table.json();
  if (!common_.json) print(table.text(stdout_has_color()));
}

void Report::fail(const std::string& what) { failures_.push_back(what); }

int Report::finish(const Status& status) {
  int code = exit_code(status.code());
  if (!status.ok()) {
    if (interrupted()) code = kExitInterrupted;
    if (common_.json) print(error_json(verb_, status));
  } else {
    if (failed()) code = kExitCheckFailed;
    if (common_.json) {
      Json json = head(verb_, !failed());
      json.update(json_);
      json["failures"] = failures_;
      json["repro"] = repro_;
      print(dump(json));
    } else {
      print("repro     " + repro_ + "\n");
    }
  }
  const std::string trouble = close_stdout();
  if (!status.ok()) {
    print_error(status.message());
  } else if (!trouble.empty()) {
    print_error("stdout: " + trouble);
    code = kExitBadInput;
  } else if (failed()) {
    const size_t more = failures_.size() - 1;
    log_line("nvfp4-moe: check failed: " + failures_.front() +
             (more > 0 ? fmt::format(" (and {} more)", more) : ""));
  }
  return code;
}

}  // namespace nvfp4_moe::internal::cli
