// Runs the nvfp4-moe executable as a user does, in a separate process with separate streams.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace nvfp4_moe::internal::test {

struct ToolRun {
  int exit_code = -1;  // 128 + signal if a signal ended it
  std::string out;
  std::string err;
  // stdout as JSON; a discarded value unless it is exactly one JSON text.
  nlohmann::json json() const { return nlohmann::json::parse(out, nullptr, false); }
};

enum class Stdout { kFile, kClosedPipe, kFull, kTerminal };

// Arguments without the program's name. `env` is added to this process's environment, without
// NO_COLOR and the library's own variables. tool: another program than nvfp4-moe; empty: nvfp4-moe.
ToolRun run_tool(const std::vector<std::string>& arguments,
                 const std::map<std::string, std::string>& env = {}, Stdout where = Stdout::kFile,
                 const std::string& tool = "");

// Runs that are expected to end with 0; json_of returns the stdout of one with --json.
ToolRun run_ok(const std::vector<std::string>& arguments,
               const std::map<std::string, std::string>& env = {});
nlohmann::json json_of(std::vector<std::string> arguments,
                       const std::map<std::string, std::string>& env = {});
std::vector<std::string> joined(const std::vector<std::vector<std::string>>& lists);

// Two processes under mpirun, one per rank, if the build has MPI. Returns rank 0's stdout and both
// processes' stderr.
ToolRun run_under_mpi(const std::vector<std::string>& arguments,
                      std::map<std::string, std::string> env = {}, const std::string& tool = "");
bool has_mpi();
inline constexpr const char* kNoMpi = "built without MPI (libopenmpi-dev)";

int count_lines(const std::string& text);

}  // namespace nvfp4_moe::internal::test
