#include "core/status.h"

#include <exception>
#include <new>
#include <system_error>

namespace nvfp4_moe::internal {

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

Status caught_exception() noexcept {
  try {
    try {
      throw;
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::system_error& error) {  // also of std::filesystem
      const bool memory =
          error.code() == std::errc::not_enough_memory ||
          error.code() ==
              std::errc::resource_unavailable_try_again;  // a thread could not be created
      return {memory ? Code::kOutOfMemory : Code::kInternal, error.what()};
    } catch (const std::exception& error) {
      return {Code::kInternal, error.what()};
    } catch (...) {
      return {Code::kInternal, "an unknown exception"};
    }
  } catch (...) {
    return {Code::kOutOfMemory, "out of memory"};  // short enough to need no allocation
  }
}

}  // namespace nvfp4_moe::internal
