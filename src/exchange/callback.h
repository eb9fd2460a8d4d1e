// Connects ranks over the caller's own communication: torch.distributed, MPI, or any other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "exchange/exchange.h"

namespace nvfp4_moe::internal {

// The caller's functions. They must not throw. all_to_all_v is called from the thread that calls
// the exchange, one call at a time.
struct ExchangeCallbacks {
  void* user = nullptr;
  // As in AllToAll. Returns 0 when recv is filled and send may be overwritten. Any other value is a
  // failure, with its cause in error: a null-terminated text of at most error_bytes, which names
  // the missing rank if it is known. Must return within timeout_ms.
  int (*all_to_all_v)(void* user, const void* send, const int64_t* send_bytes, void* recv,
                      const int64_t* recv_bytes, int64_t timeout_ms, char* error,
                      size_t error_bytes) = nullptr;
  // Asks the other ranks to end; null if the caller's communication cannot. Called at most once,
  // from any thread, possibly while all_to_all_v is in flight on another.
  void (*abort)(void* user, const char* message) = nullptr;
};

// Ranks on one host also poll each other's processes (processes.h), since the functions report a
// rank's exit only during a call. If they cannot poll, the exchange works without it, and
// can_poll() returns the reason.
Result<std::unique_ptr<Exchange>> connect_callbacks(const ExchangeCallbacks& callbacks, int rank,
                                                    int world, Timeout timeout = kExchangeTimeout);

}  // namespace nvfp4_moe::internal
