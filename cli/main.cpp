// nvfp4-moe: the command line.
#include "cli/verbs/command_line.h"

int main(int argc, char** argv) { return nvfp4_moe::internal::cli::command_line(argc, argv); }
