// Ranks on GPUs of one host that reach each other's memory: no library between them, and one launch
// where a library has its own.
//
// A rank has an Exchange first: through it go the handles of memory, what ranks have to agree on,
// and the failures that no device can detect. What a kernel waits for ends by the device's own
// clock, in a captured graph too; a thread watches for that, and for ranks that are gone, and then
// ends all waits.
#pragma once

#include <memory>
#include <string>

#include "core/buffer.h"
#include "exchange/exchange.h"

namespace nvfp4_moe::internal {

// A rank's device, as far as its memory is shared.
class PeerDevice {
 public:
  struct HostWords {
    PeerHostWords* words = nullptr;
    PeerHostWords* on_device = nullptr;
  };
  virtual ~PeerDevice() = default;
  virtual int index() const = 0;
  // Alike in all processes of the host: "0000:3B:00.0".
  virtual Result<std::string> pci_address() = 0;
  virtual Result<PeerReach> reach(
      const std::string& pci_address) = 0;  // whether it reaches the memory of the device there
  virtual Result<Buffer> allocate_zeros(int64_t size_bytes) = 0;
  virtual Result<PeerHandle> share(void* memory) = 0;
  virtual Result<void*> open(const PeerHandle& handle) = 0;  // of another process
  virtual void close(void* memory) = 0;
  virtual Status synchronize() = 0;
  virtual Status stop(PeerControl* control) = 0;  // sets PeerControl::stop, while kernels run
  virtual Result<PeerControl> control(
      const PeerControl* control) = 0;   // as it is, while other ranks' kernels run
  virtual Status enable(int other) = 0;  // lets it reach memory of another device of this process
  virtual Result<HostWords> make_host_words() = 0;
  virtual void drop_host_words(const HostWords& words) = 0;
};

// Collective, as connect is. kUnsupported on all ranks, by name, if they are more than kMostPeers,
// of several hosts, or one's device does not reach another's: then both are named, and why. The
// exchange lives longer than what comes back.
Result<std::unique_ptr<PeerMemory>> connect_peers(Exchange& exchange,
                                                  std::unique_ptr<PeerDevice> device);

}  // namespace nvfp4_moe::internal
