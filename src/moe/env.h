// The environment variables of the library, all five of them (docs/reference/environment.md), read
// in one place.
//
// They are read when a layer is opened and kept with it: changing one later changes no open layer,
// and run never reads the environment.
#pragma once

#include <string>

#include "core/enum_names.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

// Log lines for whoever wants them: one callback for the process, none by default. The library
// never prints.
enum class LogLevel : int { kOff = 0, kError = 1, kWarning = 2, kInfo = 3, kDebug = 4 };
const char* to_string(
    LogLevel);  // as NVFP4_MOE_LOG spells it: "off", "error", "warning", "info", "debug"
template <>
struct EnumNames<LogLevel> {
  static constexpr const char* kWhat = "NVFP4_MOE_LOG";
  static constexpr std::array kAll = {"off", "error", "warning", "info", "debug"};
};

using LogFn = void (*)(int level, const char* text, void* user);

// Any thread may call these. The callback is called with a lock held, so that calls do not overlap:
// it must not log and must not set the callback. null: off.
void set_log_callback(LogFn callback, void* user);
// Lines above this level are dropped. NVFP4_MOE_LOG sets it when a layer is opened.
void set_log_level(LogLevel level);
// Cold paths only: never from run, unless a check or a dump was asked for.
void log_line(LogLevel level, const std::string& text);

struct Env {
  std::string backend;  // NVFP4_MOE_BACKEND: used if the option says "auto"
  int threads = 0;  // NVFP4_MOE_THREADS: of a pool that a layer makes for itself; 0: one per core
  std::string
      dump_directory;  // NVFP4_MOE_DUMP: a repro of each call is written here before the call
  bool check = false;  // NVFP4_MOE_CHECK: each run is also run on the reference and compared
  LogLevel log_level = LogLevel::kInfo;  // NVFP4_MOE_LOG: what the log callback gets
};

// kInvalidArgument, naming the variable, if one has a value that means nothing.
Result<Env> read_env();

}  // namespace nvfp4_moe::internal
