// The process of the translator, which serves one emulated program.
#include "cudart/translator.h"

#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <sstream>

extern char** environ;

namespace ptxemu {
namespace {

// It starts with the first kernel and ends with this process, because starting Python takes longer
// than translating most kernels. It needs only the standard library, so site packages are not
// searched. Its bytecode is cached regardless of the environment: without that, Python takes as
// long as g++ for most kernels.
std::string command() {
  const char* python = std::getenv("PTXEMU_PYTHON");
  std::ostringstream text;
  text << "cd '" << source_folder().string() << "' && exec env LD_PRELOAD= '"
       << (python ? python : "python3") << "' -S -E -X pycache_prefix='"
       << (cache_folder() / "bytecode").string() << "' -m translator --serve";
  return text.str();
}

class Process {
 public:
  // Sends a line. Returns whether the answer is exit code 0, and prints the messages that follow
  // it.
  bool ask(const std::string& line) {
    if (socket_ < 0 && !start()) return false;
    size_t sent = 0;
    while (sent < line.size()) {
      const ssize_t count = send(socket_, line.data() + sent, line.size() - sent, MSG_NOSIGNAL);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return end();
      sent += static_cast<size_t>(count);
    }
    std::string answer;
    char byte = 0;
    for (;;) {
      const ssize_t count = read(socket_, &byte, 1);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return end();
      if (byte == 0) break;
      answer.push_back(byte);
    }
    if (answer.size() > 1) std::fputs(answer.c_str() + 1, stderr);
    return answer[0] == '0';
  }

  // The next request starts another process. A fork of this process has only copies to close.
  bool end() {
    if (socket_ < 0) return false;
    const bool own = getpid() == parent_;
    if (own) shutdown(socket_, SHUT_RDWR);
    close(socket_);
    socket_ = -1;
    while (own && waitpid(process_, nullptr, 0) < 0 && errno == EINTR) {
    }
    return false;
  }

 private:
  bool start() {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return false;
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 0);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
    // Peers of a program that is killed see its sockets close at once.
    posix_spawn_file_actions_addclosefrom_np(&actions, 3);
    const std::string text = command();
    const char* const words[] = {"sh", "-c", text.c_str(), nullptr};
    const int failed = posix_spawn(&process_, "/bin/sh", &actions, nullptr,
                                   const_cast<char* const*>(words), environ);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    if (failed) {
      close(ends[0]);
      return false;
    }
    socket_ = ends[0];
    parent_ = getpid();
    return true;
  }

  int socket_ = -1;
  pid_t process_ = -1, parent_ = -1;
};

Process& process() {
  static auto* const only = new Process;  // still there while the program ends
  return *only;
}

}  // namespace

std::filesystem::path source_folder() {
  const char* asked = std::getenv("PTXEMU_SOURCE");
  return asked ? asked : PTXEMU_SOURCE_DIR;
}

std::filesystem::path cache_folder() {
  const char* asked = std::getenv("PTXEMU_CACHE");
  return asked ? asked : PTXEMU_CACHE_DIR;
}

bool translate(const std::filesystem::path& ptx, const std::string& kernel,
               const std::filesystem::path& library, bool checked) {
  // The translator's processor time is part of this process's once it has been waited for.
  static const int registered = std::atexit([] { process().end(); });
  (void)registered;
  std::string line = ptx.string() + "\t--kernel\t" + kernel + "\t--output\t" + library.string();
  if (checked) line += "\t--check";
#ifdef PTXEMU_PLANT
  line += "\t--plant";
#endif
  return process().ask(line + "\n");
}

}  // namespace ptxemu
