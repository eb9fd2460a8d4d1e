// Ranks that a host's own communication connects: torch.distributed, MPI, whatever the caller has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "exchange/exchange.h"
#include "exchange/links.h"

namespace nvfp4_moe {

// A host's functions, which must not throw. all_to_all_v is called from the thread that calls the exchange, one call at a
// time.
struct ExchangeCallbacks {
  void* user = nullptr;
  // send: (sum of send_bytes), recv: (sum of recv_bytes), blocks in the order of the ranks, `world` counts each. Returns
  // 0 once recv is filled and send may be written to again. Anything else is a failure, with its cause in error, a text
  // of at most error_bytes that ends with 0; it names the rank that is missing where it knows it. Returns within
  // timeout_ms: nobody else can end it.
  int (*all_to_all_v)(void* user, const void* send, const int64_t* send_bytes, void* recv, const int64_t* recv_bytes,
                      int64_t timeout_ms, char* error, size_t error_bytes) = nullptr;
  // Tells the other ranks to end, as well as the host can; null where it cannot. At most once, from any thread, a thread of
  // the library's own included, and also while all_to_all_v is in flight on another.
  void (*abort)(void* user, const char* message) = nullptr;
};

// Beside the host's functions, which say nothing of a rank whose process ends between two calls, ranks have connections of
// their own; where those are not wanted or cannot be had, the exchange goes without, and its sees_ends() says why.
Result<std::unique_ptr<Exchange>> connect_callbacks(const ExchangeCallbacks& callbacks, int rank, int world,
                                                    Timeout timeout = kExchangeTimeout, const LinkOptions& links = {});

}  // namespace nvfp4_moe
