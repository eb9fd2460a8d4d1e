// The command line tool, for the package's script nvfp4-moe. Only in builds with NVFP4_MOE_CLI.
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "cli/verbs/command_line.h"
#include "errors.h"

namespace nvfp4_moe::internal::python {

void bind_tool(nanobind::module_& m) {
  m.def(
      "run_tool",
      [](const std::vector<nanobind::bytes>& words) {  // a path may be no UTF-8
        std::vector<std::string> arguments;
        for (const nanobind::bytes& word : words) arguments.emplace_back(word.c_str(), word.size());
        std::vector<char*> argv;
        for (std::string& argument : arguments) argv.push_back(argument.data());
        argv.push_back(nullptr);
        const WithoutLock unlocked;
        return cli::command_line(static_cast<int>(arguments.size()), argv.data());
      },
      nanobind::arg("arguments"),
      "Runs the command line with these arguments, the program's name first, and returns the exit "
      "status. Takes over SIGINT and SIGPIPE: for a process that does nothing else.");
}

}  // namespace nvfp4_moe::internal::python
