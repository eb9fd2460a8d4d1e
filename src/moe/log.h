// Log lines for whoever wants them: one callback for the process, none by default. The library never prints.
#pragma once

#include <string>

#include "core/enum_names.h"

namespace nvfp4_moe {

enum class LogLevel : int { kOff = 0, kError = 1, kWarning = 2, kInfo = 3, kDebug = 4 };
const char* to_string(LogLevel);  // as NVFP4_MOE_LOG spells it: "off", "error", "warning", "info", "debug"
template <>
struct EnumNames<LogLevel> {
  static constexpr const char* kWhat = "NVFP4_MOE_LOG";
  static constexpr std::array kAll = {"off", "error", "warning", "info", "debug"};
};

using LogFn = void (*)(int level, const char* text, void* user);

// Any thread may call these. The callback is called with a lock held, so that calls do not overlap: it must not log
// and must not set the callback. null: off.
void set_log_callback(LogFn callback, void* user);
// Lines above this level are dropped. NVFP4_MOE_LOG sets it when a layer is opened.
void set_log_level(LogLevel level);
// Cold paths only: never from run, unless a check or a dump was asked for.
void log_line(LogLevel level, const std::string& text);

}  // namespace nvfp4_moe
