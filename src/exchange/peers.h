// Ranks on GPUs of one host whose kernels write directly into other ranks' memory.
//
// The Exchange carries memory handles, the facts that ranks must agree on, and failures that no
// device can detect. Kernels time out by the device's own clock, in a captured graph too. A thread
// watches for timeouts and for ranks that are gone, and then ends all waits.
#pragma once

#include <memory>
#include <string>

#include "core/buffer.h"
#include "exchange/exchange.h"

namespace nvfp4_moe::internal {

// The operations on a rank's device that sharing memory needs.
class PeerDevice {
 public:
  struct HostWords {
    PeerHostWords* words = nullptr;
    PeerHostWords* on_device = nullptr;
  };
  virtual ~PeerDevice() = default;
  virtual int index() const = 0;
  // The same in all processes of the host: "0000:3B:00.0".
  virtual Result<std::string> pci_address() = 0;
  // whether it can access the memory of the device at that address
  virtual Result<PeerReach> reach(const std::string& pci_address) = 0;
  virtual Result<Buffer> allocate_zeros(int64_t size_bytes) = 0;
  virtual Result<PeerHandle> share(void* memory) = 0;
  virtual Result<void*> open(const PeerHandle& handle) = 0;  // memory of another process
  virtual void close(void* memory) = 0;
  virtual Status synchronize() = 0;
  virtual Status stop(PeerControl* control) = 0;  // sets PeerControl::stop, while kernels run
  virtual Result<PeerControl> control(
      const PeerControl* control) = 0;  // reads it while other ranks' kernels run
  // allows access to memory of another device of this process
  virtual Status enable(int other) = 0;
  virtual Result<HostWords> make_host_words() = 0;
  virtual void drop_host_words(const HostWords& words) = 0;
};

// Collective. kUnsupported on all ranks if there are more than kMostPeers, if they are on several
// hosts, or if one's device cannot access another's memory. The exchange must outlive the result.
Result<std::unique_ptr<PeerMemory>> connect_peers(Exchange& exchange,
                                                  std::unique_ptr<PeerDevice> device);

}  // namespace nvfp4_moe::internal
