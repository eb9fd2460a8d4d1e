// The command line as a function: main() calls it, and so does the Python package's nvfp4-moe.
#pragma once

namespace nvfp4_moe::internal::cli {

// Runs the tool with main()'s arguments; argv[argc] is null. Takes over SIGINT and SIGPIPE, writes
// to stdout and stderr, throws nothing, and returns the exit status.
int command_line(int argc, char** argv);

}  // namespace nvfp4_moe::internal::cli
