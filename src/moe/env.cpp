#include "moe/env.h"

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string_view>

#include "core/fork.h"

namespace nvfp4_moe::internal {
namespace {

std::string_view variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view() : std::string_view(value);
}

Status bad_variable(const char* name, const char* expected, std::string_view actual) {
  return invalid_argument(std::string("environment ") + name + ": expected " + expected +
                          ", got \"" + std::string(actual) + "\"");
}

struct LogState {
  // Held while the callback runs. The callback may block on anything, so fork() does not wait for
  // it.
  ForkMutex calls{ForkMutex::AtFork::kAbandoned};
  ForkMutex mutex;  // guards the rest; taken after `calls`
  LogFn callback = nullptr;
  void* user = nullptr;
  LogLevel level = LogLevel::kInfo;
};
LogState& log_state() {
  static LogState& state = *new LogState;  // outlives threads that log while the process exits
  return state;
}

void write_to_stderr(int, const char* text, void*) { std::fprintf(stderr, "%s\n", text); }

// without_callback: called if there is no callback; may be null.
void deliver(LogLevel level, const std::string& text, LogFn without_callback) {
  LogState& state = log_state();
  const std::lock_guard one_call(state.calls);
  LogFn callback = without_callback;
  void* user = nullptr;
  {
    const std::lock_guard lock(state.mutex);
    if (static_cast<int>(level) > static_cast<int>(state.level)) return;
    if (state.callback != nullptr) callback = state.callback;
    user = state.user;
  }
  if (callback != nullptr)
    callback(static_cast<int>(level), printable(text, kWholeText).c_str(), user);
}

}  // namespace

Result<Env> read_env() {
  Env env;
  env.backend = variable("NVFP4_MOE_BACKEND");
  env.dump_directory = variable("NVFP4_MOE_DUMP");

  if (const auto threads = variable("NVFP4_MOE_THREADS"); !threads.empty()) {
    const auto [end, error] =
        std::from_chars(threads.data(), threads.data() + threads.size(), env.threads);
    if (error != std::errc() || end != threads.data() + threads.size() || env.threads < 1 ||
        env.threads > 4096)
      return bad_variable("NVFP4_MOE_THREADS", "a number from 1 to 4096", threads);
  }
  if (const auto check = variable("NVFP4_MOE_CHECK"); !check.empty()) {
    if (check != "0" && check != "1") return bad_variable("NVFP4_MOE_CHECK", "0 or 1", check);
    env.check = check == "1";
  }
  if (const auto one = variable("NVFP4_MOE_ONE_LAUNCH"); !one.empty()) {
    if (one != "0" && one != "1") return bad_variable("NVFP4_MOE_ONE_LAUNCH", "0 or 1", one);
    env.one_launch = one == "1";
  }
  if (const auto mode = variable("NVFP4_MOE_SELF_CHECK"); !mode.empty()) {
    NVFP4_MOE_ASSIGN(env.self_check,
                     parse<SelfCheckMode>(mode, "environment NVFP4_MOE_SELF_CHECK"));
  }
  if (const auto level = variable("NVFP4_MOE_LOG"); !level.empty()) {
    NVFP4_MOE_ASSIGN(env.log_level, parse<LogLevel>(level, "environment NVFP4_MOE_LOG"));
  }
  return env;
}

std::string user_cache_folder() {
  // The specification of XDG_CACHE_HOME has relative paths ignored.
  if (const auto cache = variable("XDG_CACHE_HOME"); cache.starts_with('/'))
    return std::string(cache);
  const auto folder = variable("HOME");
  return folder.starts_with('/') ? std::string(folder) + "/.cache" : "";
}

const char* to_string(LogLevel level) { return name_of(level); }

void set_log_callback(LogFn callback, void* user) {
  LogState& state = log_state();
  const std::lock_guard no_call(state.calls);  // when this returns, the old callback has returned
  const std::lock_guard lock(state.mutex);
  state.callback = callback;
  state.user = user;
}

void set_log_level(LogLevel level) {
  LogState& state = log_state();
  const std::lock_guard lock(state.mutex);
  state.level = level;
}

void log_line(LogLevel level, const std::string& text) { deliver(level, text, nullptr); }

void log_or_print(LogLevel level, const std::string& text) {
  deliver(level, text, write_to_stderr);
}

}  // namespace nvfp4_moe::internal
