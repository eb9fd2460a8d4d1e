#include "cli/run_tool.h"

#include <fcntl.h>
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

// Everything the child writes to the terminal; `descriptor` is the terminal's other end.
std::string drain(int descriptor) {
  std::string text;
  char bytes[4096];
  for (ssize_t count; (count = read(descriptor, bytes, sizeof bytes)) > 0;)
    text.append(bytes, static_cast<size_t>(count));
  return text;
}

}  // namespace

ToolRun run_tool(const std::vector<std::string>& arguments,
                 const std::map<std::string, std::string>& env, Stdout where,
                 const std::string& tool) {
  const TempDir dir;
  const std::string out_path = dir.file("out"), err_path = dir.file("err");
  int master = -1, out = -1;
  if (where == Stdout::kTerminal) {
    if (openpty(&master, &out, nullptr, nullptr, nullptr) != 0) return {};
  } else if (where == Stdout::kClosedPipe) {
    int ends[2];
    if (pipe(ends) != 0) return {};
    close(ends[0]);
    out = ends[1];
  } else {
    out = open(where == Stdout::kFull ? "/dev/full" : out_path.c_str(), O_WRONLY | O_CREAT, 0600);
  }
  const int err = open(err_path.c_str(), O_WRONLY | O_CREAT, 0600);
  std::vector<std::string> words = joined({{tool.empty() ? NVFP4_MOE_TOOL : tool}, arguments});

  const pid_t child = fork();
  if (child == 0) {
    dup2(out, STDOUT_FILENO);
    dup2(err, STDERR_FILENO);
    if (master >= 0) close(master);
    for (const char* name : {"NO_COLOR", "NVFP4_MOE_BACKEND", "NVFP4_MOE_DUMP", "NVFP4_MOE_CHECK",
                             "NVFP4_MOE_SELF_CHECK"})
      unsetenv(name);
    for (const auto& [name, value] : env) setenv(name.c_str(), value.c_str(), 1);
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    execv(argv[0], argv.data());
    _exit(127);
  }
  close(out);
  close(err);
  ToolRun result;
  if (master >= 0) {
    result.out = drain(master);
    close(master);
  }
  int status = 0;
  waitpid(child, &status, 0);
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  if (where == Stdout::kFile) result.out = read_file(out_path);
  result.err = read_file(err_path);
  return result;
}

ToolRun run_ok(const std::vector<std::string>& arguments,
               const std::map<std::string, std::string>& env) {
  ToolRun run = run_tool(arguments, env);
  EXPECT_EQ(run.exit_code, 0) << testing::PrintToString(arguments) << run.out << run.err;
  return run;
}
nlohmann::json json_of(std::vector<std::string> arguments,
                       const std::map<std::string, std::string>& env) {
  arguments.push_back("--json");
  return run_ok(arguments, env).json();
}
std::vector<std::string> joined(const std::vector<std::vector<std::string>>& lists) {
  std::vector<std::string> all;
  for (const std::vector<std::string>& list : lists)
    all.insert(all.end(), list.begin(), list.end());
  return all;
}

bool has_mpi() {
#ifdef NVFP4_MOE_MPI_ADAPTER
  return true;
#else
  return false;
#endif
}

ToolRun run_under_mpi(const std::vector<std::string>& arguments,
                      std::map<std::string, std::string> env, const std::string& tool) {
#ifdef NVFP4_MOE_MPI_ADAPTER
  env.insert({"NVFP4_MOE_MPI", NVFP4_MOE_MPI_ADAPTER});
  const std::vector<std::string> rank = joined({{tool.empty() ? NVFP4_MOE_TOOL : tool}, arguments});
  // Shared memory between the ranks, loopback between mpirun and the ranks.
  const std::vector<std::string> options = {
      "--allow-run-as-root", "--oversubscribe", "--bind-to",          "none", "--mca", "btl",
      "self,vader",          "--mca",           "oob_tcp_if_include", "lo",   "-n",    "1"};
  const std::vector<std::string> words =
      joined({options, rank, {":", "-n", "1", "sh", "-c", "exec \"$0\" \"$@\" >/dev/null"}, rank});
  return run_tool(words, env, Stdout::kFile, NVFP4_MOE_MPIEXEC);
#else
  static_cast<void>(arguments), static_cast<void>(env), static_cast<void>(tool);
  return {};
#endif
}

int count_lines(const std::string& text) {
  return static_cast<int>(std::count(text.begin(), text.end(), '\n'));
}

}  // namespace nvfp4_moe::internal::test
