// The whole command line: parses the arguments and runs the verb.
//
// Results go to stdout, progress and errors to stderr. docs/reference/cli.md lists exit codes and
// JSON keys.
#include "cli/verbs/command_line.h"

#include <algorithm>
#include <cstdio>
#include <string_view>

#include "cli/console/console.h"
#include "cli/console/exit_code.h"
#include "cli/console/parse_error.h"
#include "cli/verbs/verbs.h"
#include "moe/env.h"

namespace nvfp4_moe::internal::cli {
namespace {

int usage_error(const std::string& message, bool json, const std::string& verb) {
  if (json) print(error_json(verb, invalid_argument(message)));
  close_stdout();
  print_error(message);
  return kExitUsage;
}

bool wants_json(int argc, char** argv) {
  return std::any_of(argv + 1, argv + argc,
                     [](const char* argument) { return std::string_view(argument) == "--json"; });
}

// Reports an exception that no verb reported. Usually memory is exhausted, and this report may get
// none either.
int report_exception(const Status& status, int argc, char** argv) noexcept {
  try {
    if (wants_json(argc, argv) && !stdout_used()) print(error_json("", status));
    close_stdout();
    print_error(status.message());
    return exit_code(status.code());
  } catch (...) {
    static_assert(kJsonSchema == 1);
    if (wants_json(argc, argv) && !stdout_used())
      print("{\"schema\":1,\"verb\":\"\",\"version\":\"" NVFP4_MOE_VERSION
            "\",\"ok\":false,\"error\":{\"status\":\"out_of_memory\",\"message\":\"out of "
            "memory\"}}\n");
    std::fflush(stdout);
    log_raw("nvfp4-moe: error: out of memory\n");
    return kExitUnsupported;
  }
}

int run_command_line(int argc, char** argv) {
  CLI::App app{"Checks, converts, runs and times mixture-of-experts layers with NVFP4 weights",
               "nvfp4-moe"};  // independent of argv[0]
  app.set_version_flag("--version", NVFP4_MOE_VERSION);
  app.require_subcommand(1);
  const std::string footer =
      "nvfp4-moe VERB --help lists a verb's options.\n"
      "Exit codes: 0 ok, 1 check failed, 2 usage, 3 unsupported here, 4 bad input.";
  app.footer(footer);  // the verbs inherit it

  Invocation invocation;
  add_inspect(app, invocation);
  add_quantize(app, invocation);
  add_calibrate(app, invocation);
  add_verify(app, invocation);
  add_run(app, invocation);
  add_bench(app, invocation);
  add_doctor(app, invocation);
  add_explain(app, invocation);
  add_synthesize(app, invocation);
  add_completion(app);
  app.footer(
      "To try it without a model: nvfp4-moe synthesize demo, then quantize demo demo-nvfp4, then "
      "verify demo-nvfp4 --against demo.\n" +
      footer);

  const bool json = wants_json(argc, argv);
  std::string repro = "nvfp4-moe";
  for (int i = 1; i < argc; ++i) repro += " " + shell_quoted(argv[i]);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    const auto parsed = app.get_subcommands();
    const std::string verb = parsed.empty() ? "" : parsed.front()->get_name();
    return usage_error(parse_error_text(app, error, {argv + 1, argv + argc}), json, verb);
  }
  if (!invocation.run) {  // completion has printed
    const std::string trouble = close_stdout();
    if (!trouble.empty()) print_error("stdout: " + trouble);
    return trouble.empty() ? kExitOk : kExitBadInput;
  }
  if (!invocation.common.threads) {
    const Result<Env> env = read_env();
    if (!env.ok()) return usage_error(env.status().message(), json, invocation.verb);
    invocation.common.threads = env->threads;
  }

  Report report(invocation.verb, repro, invocation.common);
  Status status;
  try {
    status = invocation.run(report);
  } catch (...) {
    status = caught_exception();
  }
  return report.finish(status);
}

}  // namespace

int command_line(int argc, char** argv) {
  install_signal_handlers();
  try {
    return run_command_line(argc, argv);
  } catch (...) {
    return report_exception(caught_exception(), argc, argv);
  }
}

}  // namespace nvfp4_moe::internal::cli
