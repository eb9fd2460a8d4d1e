// Exit codes of nvfp4-moe: one per class of failure, so that scripts need not read messages.
#pragma once

#include "core/status.h"

namespace nvfp4_moe::internal::cli {

enum ExitCode : int {
  kExitOk = 0,
  // a comparison or self-test failed, or the library has a bug
  kExitCheckFailed = 1,
  kExitUsage = 2,          // an option or argument is wrong
  kExitUnsupported = 3,    // legal, but not on this machine
  kExitBadInput = 4,       // a file is missing, unreadable, unwritable or wrong
  kExitInterrupted = 130,  // Ctrl-C, as shells have it
};

inline int exit_code(Code code) {
  switch (code) {
    case Code::kOk: return kExitOk;
    case Code::kCheckFailed: return kExitCheckFailed;
    case Code::kInvalidArgument: return kExitUsage;
    case Code::kUnsupported: return kExitUnsupported;
    case Code::kBadInput: return kExitBadInput;
    case Code::kIo: return kExitBadInput;
    case Code::kOutOfMemory: return kExitUnsupported;
    case Code::kBusy: return kExitUnsupported;
    case Code::kInternal: return kExitCheckFailed;
    case Code::kCancelled: return kExitInterrupted;
  }
  return kExitCheckFailed;
}

}  // namespace nvfp4_moe::internal::cli
