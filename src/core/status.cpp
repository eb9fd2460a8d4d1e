#include "core/status.h"

namespace nvfp4_moe {

const char* to_string(Code code) {
  switch (code) {
    case Code::kOk: return "ok";
    case Code::kCheckFailed: return "check failed";
    case Code::kInvalidArgument: return "invalid argument";
    case Code::kUnsupported: return "unsupported";
    case Code::kBadInput: return "bad input";
    case Code::kIo: return "input/output error";
    case Code::kOutOfMemory: return "out of memory";
    case Code::kBusy: return "busy";
    case Code::kInternal: return "internal error";
    case Code::kCancelled: return "cancelled";
  }
  return "unknown";
}

}  // namespace nvfp4_moe
