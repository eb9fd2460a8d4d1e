// nvfp4-moe: the command line. Each verb has a file of its own and adds itself to the parser.
#include <CLI/CLI.hpp>

int main(int argc, char** argv) {
  CLI::App app{"NVFP4 mixture-of-experts layers: inspect, quantize, verify, run"};
  app.set_version_flag("--version", NVFP4_MOE_VERSION);
  app.require_subcommand(1);
  CLI11_PARSE(app, argc, argv);
  return 0;
}
