// The seven environment variables of the library (docs/reference/environment.md), read in one
// place.
//
// They are read when a layer opens and kept with it. Changing one later affects no open layer, and
// run never reads the environment.
#pragma once

#include <string>

#include "core/enum_names.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

// Log lines go to one callback per process; by default there is none. The library never prints, but
// for log_or_print.
enum class LogLevel : int { kOff = 0, kError = 1, kWarning = 2, kInfo = 3, kDebug = 4 };
const char* to_string(
    LogLevel);  // as NVFP4_MOE_LOG spells it: "off", "error", "warning", "info", "debug"
template <>
struct EnumNames<LogLevel> {
  static constexpr const char* kWhat = "NVFP4_MOE_LOG";
  static constexpr std::array kAll = {"off", "error", "warning", "info", "debug"};
};

// When the kernels of a backend with a self-check are checked (moe/kept_checks.h).
enum class SelfCheckMode : uint8_t {
  kAuto,    // once, before "auto" takes a backend that no GPU of its kind has run yet
  kOff,     // never: all backends are trusted
  kAlways,  // in each process, and the other backends with a self-check too
};
template <>
struct EnumNames<SelfCheckMode> {
  static constexpr const char* kWhat = "NVFP4_MOE_SELF_CHECK";
  static constexpr std::array kAll = {"auto", "off", "always"};
};

using LogFn = void (*)(int level, const char* text, void* user);

// Any thread may call these. The callback is called with a lock held, so calls never overlap. It
// must not log and must not set the callback. null: off.
void set_log_callback(LogFn callback, void* user);
// Lines above this level are dropped. NVFP4_MOE_LOG sets it when a layer opens.
void set_log_level(LogLevel level);
// For cold paths only: run never logs, except for a requested check or dump.
void log_line(LogLevel level, const std::string& text);

// Like log_line, but without a callback the text goes to stderr. Only for what a requested check
// has found and no call can return any more.
void log_or_print(LogLevel level, const std::string& text);

struct Env {
  std::string backend;  // NVFP4_MOE_BACKEND: used if the option is "auto"
  // NVFP4_MOE_THREADS: size of a pool that a layer creates; 0: one thread per core
  int threads = 0;
  std::string dump_directory;  // NVFP4_MOE_DUMP: each call writes a repro here before it runs
  // NVFP4_MOE_CHECK: each run is repeated on the reference backend and compared; on a device one
  // token of it
  bool check = false;
  // NVFP4_MOE_ONE_LAUNCH: see Limits::one_launch
  bool one_launch = true;
  // NVFP4_MOE_SELF_CHECK
  SelfCheckMode self_check = SelfCheckMode::kAuto;
  // NVFP4_MOE_LOG: the highest level that the log callback receives
  LogLevel log_level = LogLevel::kInfo;
};

// kInvalidArgument, naming the variable, if a value is invalid.
Result<Env> read_env();

// The user's folder for caches: XDG_CACHE_HOME, or ~/.cache. Empty if neither is known.
std::string user_cache_folder();

}  // namespace nvfp4_moe::internal
