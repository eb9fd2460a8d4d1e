#include "cli/console/console.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/printable.h"

namespace nvfp4_moe::internal::cli {
namespace {

volatile std::sig_atomic_t g_interrupted = 0;
int g_stdout_errno = 0;
bool g_stdout_used = false;

bool no_color() {
  const char* value = std::getenv("NO_COLOR");  // any non-empty value, see no-color.org
  return value != nullptr && *value != '\0';
}

}  // namespace

void install_signal_handlers() {
  std::signal(SIGPIPE, SIG_IGN);
  struct sigaction action = {};
  action.sa_handler = [](int) { g_interrupted = 1; };
  action.sa_flags = static_cast<int>(SA_RESETHAND);  // the second Ctrl-C kills
  sigaction(SIGINT, &action, nullptr);
}

bool interrupted() { return g_interrupted != 0; }

bool stdout_has_color() {
  static const bool value = isatty(STDOUT_FILENO) == 1 && !no_color();
  return value;
}

bool stderr_is_terminal() {
  static const bool value = isatty(STDERR_FILENO) == 1 && !no_color();
  return value;
}

int stderr_columns() {
  winsize size = {};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

std::string shell_quoted(const std::string& argument) {
  const auto plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           std::string_view("_-./:=,+@%").find(c) != std::string_view::npos;
  };
  if (!argument.empty() && std::all_of(argument.begin(), argument.end(), plain)) return argument;
  std::string out = "'";
  if (printable(argument, kWholeText) == argument) {
    for (const char c : argument) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return out + "'";
  }
  // Such bytes must not reach the terminal. bash, zsh, ksh and POSIX.1-2024 read $'...' with three
  // octal digits in the same way, whatever follows the digits.
  for (const char c : argument) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte >= 0x7F) {
      out += '\\';
      for (const int digit : {byte >> 6, byte >> 3 & 7, byte & 7})
        out += static_cast<char>('0' + digit);
    } else {
      out += c == '\'' || c == '\\' ? std::string("\\") + c : std::string(1, c);
    }
  }
  return "$" + out + "'";
}

void print(std::string_view text) {
  g_stdout_used = true;
  if (g_stdout_errno != 0) return;
  errno = 0;
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size())
    g_stdout_errno = errno != 0 ? errno : EIO;
}

bool stdout_used() { return g_stdout_used; }

std::string close_stdout() {
  errno = 0;
  if (g_stdout_errno == 0 && std::fflush(stdout) != 0) g_stdout_errno = errno != 0 ? errno : EIO;
  return g_stdout_errno == 0 || g_stdout_errno == EPIPE ? "" : std::strerror(g_stdout_errno);
}

void log_line(std::string_view text) { log_raw(printable(text, kWholeText) + "\n"); }

void log_raw(std::string_view text) {
  // One write per line keeps lines whole if several threads or processes share the stream.
  while (!text.empty()) {
    const ssize_t written = write(STDERR_FILENO, text.data(), text.size());
    if (written <= 0) return;  // there is nowhere to report it
    text.remove_prefix(static_cast<size_t>(written));
  }
}

}  // namespace nvfp4_moe::internal::cli
