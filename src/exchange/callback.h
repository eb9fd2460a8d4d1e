// Ranks that the caller's own communication connects: torch.distributed, MPI, or any other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "exchange/exchange.h"

namespace nvfp4_moe::internal {

// A host's functions, which must not throw. all_to_all_v is called from the thread that calls the
// exchange, one call at a time.
struct ExchangeCallbacks {
  void* user = nullptr;
  // send: (sum of send_bytes), recv: (sum of recv_bytes), blocks in the order of the ranks, `world`
  // counts each. Returns 0 once recv is filled and send may be written to again. Anything else is a
  // failure, with its cause in error, a text of at most error_bytes that ends with 0; it names the
  // rank that is missing if it knows it. Returns within timeout_ms: nobody else can end it.
  int (*all_to_all_v)(void* user, const void* send, const int64_t* send_bytes, void* recv,
                      const int64_t* recv_bytes, int64_t timeout_ms, char* error,
                      size_t error_bytes) = nullptr;
  // Tells the other ranks to end, as well as the host can; null if it cannot. At most once, from
  // any thread, a thread of the library's own included, and also while all_to_all_v is in flight on
  // another.
  void (*abort)(void* user, const char* message) = nullptr;
};

// Ranks of one host also poll each other's processes (processes.h), since the functions report the
// end of a rank only in a call. If they cannot, the exchange works without, and its can_poll()
// returns the reason.
Result<std::unique_ptr<Exchange>> connect_callbacks(const ExchangeCallbacks& callbacks, int rank,
                                                    int world, Timeout timeout = kExchangeTimeout);

}  // namespace nvfp4_moe::internal
