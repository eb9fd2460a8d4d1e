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

}  // namespace nvfp4_moe::internal::cli
