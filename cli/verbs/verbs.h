// The verbs. Each is in its own file of this folder and adds itself to the parser.
#pragma once

#include "cli/console/verb.h"

namespace nvfp4_moe::internal::cli {

void add_inspect(CLI::App& app, Invocation& invocation);
void add_quantize(CLI::App& app, Invocation& invocation);
void add_calibrate(CLI::App& app, Invocation& invocation);
void add_verify(CLI::App& app, Invocation& invocation);
void add_run(CLI::App& app, Invocation& invocation);
void add_bench(CLI::App& app, Invocation& invocation);
void add_doctor(CLI::App& app, Invocation& invocation);
void add_explain(CLI::App& app, Invocation& invocation);
void add_synthesize(CLI::App& app, Invocation& invocation);

// `completion SHELL` prints a script of that shell, made from the options of `app`. It is not run
// as the other verbs are: parsing it prints, and leaves the invocation empty.
void add_completion(CLI::App& app);

}  // namespace nvfp4_moe::internal::cli
