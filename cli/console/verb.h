// Verb: adds a subcommand to the parser, with the options that every verb has.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>

#include "cli/console/report.h"

namespace nvfp4_moe::internal::cli {

// The verb on the command line. The parser fills it, then it is run.
struct Invocation {
  std::string verb;
  CommonOptions common;
  std::function<Status(Report&)> run;
};

// Adds the subcommand with the common options. `run` is called with the verb's own options after
// parsing.
enum class UsesBackend : bool { kNo, kYes };
template <class Options>
CLI::App* add_verb(CLI::App& app, Invocation& invocation, const std::string& name,
                   const std::string& description, UsesBackend uses_backend,
                   Status (*run)(const Options&, Report&),
                   const std::function<void(CLI::App&, Options&)>& add_options) {
  CLI::App* verb = app.add_subcommand(name, description);
  auto options = std::make_shared<Options>();
  add_options(*verb, *options);
  CommonOptions& common = invocation.common;
  verb->add_flag("--json", common.json, "Print one JSON object instead of text")->group("Common");
  verb->add_flag("--quiet", common.quiet, "Print no progress")->group("Common");
  verb->add_option("--threads", common.threads,
                   "Number of threads; 0 is one per available core (default: the environment "
                   "variable NVFP4_MOE_THREADS, else 0)")
      ->check(CLI::Range(0, 4096))
      ->group("Common");
  if (uses_backend == UsesBackend::kYes) {
    verb->add_option("--backend", common.backend,
                     "Implementation to use: auto, or a name that `nvfp4-moe doctor` lists")
        ->group("Common");
    verb->add_option("--device", common.device, "Device that runs the layers")
        ->type_name("cpu|cuda:N")
        ->group("Common")
        ->capture_default_str();
  }
  verb->callback([&invocation, name, options, run] {
    invocation.verb = name;
    invocation.run = [options, run](Report& report) { return run(*options, report); };
  });
  return verb;
}

}  // namespace nvfp4_moe::internal::cli
