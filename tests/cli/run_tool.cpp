#include "cli/run_tool.h"

#include <fcntl.h>
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// Everything the child writes into a terminal whose other end is `descriptor`.
std::string drain(int descriptor) {
  std::string text;
  char bytes[4096];
  for (ssize_t count; (count = read(descriptor, bytes, sizeof bytes)) > 0;)
    text.append(bytes, static_cast<size_t>(count));
  return text;
}

}  // namespace

ToolRun run_tool(const std::vector<std::string>& arguments, const std::map<std::string, std::string>& env, Stdout where,
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
  std::vector<std::string> words = {tool.empty() ? NVFP4_MOE_TOOL : tool};
  words.insert(words.end(), arguments.begin(), arguments.end());

  const pid_t child = fork();
  if (child == 0) {
    dup2(out, STDOUT_FILENO);
    dup2(err, STDERR_FILENO);
    if (master >= 0) close(master);
    for (const char* name : {"NO_COLOR", "NVFP4_MOE_BACKEND", "NVFP4_MOE_DUMP", "NVFP4_MOE_CHECK"}) unsetenv(name);
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
  if (where == Stdout::kFile) result.out = contents(out_path);
  result.err = contents(err_path);
  return result;
}

bool has_mpi() {
#ifdef NVFP4_MOE_MPI_ADAPTER
  return true;
#else
  return false;
#endif
}

ToolRun run_under_mpi(const std::vector<std::string>& arguments, std::map<std::string, std::string> env,
                      const std::string& tool) {
#ifdef NVFP4_MOE_MPI_ADAPTER
  env.insert({"NVFP4_MOE_MPI", NVFP4_MOE_MPI_ADAPTER});
  std::vector<std::string> rank = {tool.empty() ? NVFP4_MOE_TOOL : tool};
  rank.insert(rank.end(), arguments.begin(), arguments.end());
  // Memory between the ranks, loopback between mpirun and them.
  std::vector<std::string> words = {
      "--allow-run-as-root", "--oversubscribe", "--bind-to",          "none", "--mca", "btl",
      "self,vader",          "--mca",           "oob_tcp_if_include", "lo",   "-n",    "1"};
  words.insert(words.end(), rank.begin(), rank.end());
  for (const char* word : {":", "-n", "1", "sh", "-c", "exec \"$0\" \"$@\" >/dev/null"}) words.push_back(word);
  words.insert(words.end(), rank.begin(), rank.end());
  return run_tool(words, env, Stdout::kFile, NVFP4_MOE_MPIEXEC);
#else
  static_cast<void>(arguments), static_cast<void>(env), static_cast<void>(tool);
  return {};
#endif
}

int count_lines(const std::string& text) { return static_cast<int>(std::count(text.begin(), text.end(), '\n')); }

}  // namespace nvfp4_moe::internal::test
