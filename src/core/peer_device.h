// PeerDevice: what sharing memory between ranks needs from a rank's device.
#pragma once

#include <string>

#include "core/buffer.h"
#include "core/peer_memory.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

class PeerDevice {
 public:
  struct HostWords {
    PeerHostWords* words = nullptr;
    PeerHostWords* on_device = nullptr;
  };
  virtual ~PeerDevice() = default;
  virtual int index() const = 0;
  // "0000:3B:00.0": the same in all processes of the host, regardless of the devices they see and
  // their order.
  virtual Result<std::string> pci_address() = 0;
  // Whether its kernels can access the memory of the device at that address.
  virtual Result<PeerReach> reach(const std::string& pci_address) = 0;
  virtual Result<Buffer> allocate_zeros(int64_t size_bytes) = 0;  // synchronous
  // Shares memory with other processes; memory is the start of an allocation.
  virtual Result<PeerHandle> share(void* memory) = 0;
  virtual Result<void*> open(const PeerHandle& handle) = 0;  // memory of another process
  virtual void close(void* memory) = 0;
  virtual Status synchronize() = 0;
  // Sets PeerControl::stop while kernels may run.
  virtual Status stop(PeerControl* control) = 0;
  // Reads it while other ranks' kernels may write to it.
  virtual Result<PeerControl> control(const PeerControl* control) = 0;
  // Allows access to the memory of another device of this process.
  virtual Status enable(int other) = 0;
  // Zeroed words in pinned host memory, and their device address.
  virtual Result<HostWords> make_host_words() = 0;
  virtual void drop_host_words(const HostWords& words) = 0;
};

}  // namespace nvfp4_moe::internal
