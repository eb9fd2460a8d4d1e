// Connections between ranks that another communication has connected, on which nothing is said while all is well: by them a
// rank sees at once that another one's process has ended, and hears why another one gave up, without a call.
#pragma once

#include <memory>
#include <string>

#include "exchange/exchange.h"

namespace nvfp4_moe {

struct LinkOptions {
  bool wanted = true;  // false on any rank: there are none
  Timeout within{3000};
  // Which ranks reach each other by loopback: those that have it alike. Empty: what the kernel says.
  std::string host;
};

// Collective. A transport over a connection with each other rank, for its look and its abort; null in a world of one. On all
// ranks or on none: the failure that comes back then says on all of them what keeps which rank from having it, and the
// exchange goes on; where it is the exchange's own, look() says so.
Result<std::unique_ptr<Transport>> connect_links(Exchange& exchange, const LinkOptions& options = {});

}  // namespace nvfp4_moe
