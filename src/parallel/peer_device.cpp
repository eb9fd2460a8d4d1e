#include "parallel/peer_device.h"

namespace nvfp4_moe {
namespace {

class BackendPeerDevice : public PeerDevice {
 public:
  explicit BackendPeerDevice(const DeviceFacts& facts)
      : index_(facts.index),
        peers_(*device_peers(facts.kind)),
        memory_(*device_memory(facts.kind)),
        topology_(*device_topology(facts.kind)) {}

  int index() const override { return index_; }
  Result<std::string> pci_address() override { return topology_.pci_address(index_); }
  Result<PeerReach> reach(const std::string& pci_address) override { return topology_.reach(index_, pci_address); }
  Result<Buffer> allocate_zeros(int64_t size_bytes) override {
    NVFP4_MOE_ASSIGN(Buffer memory,
                     memory_.allocate(static_cast<size_t>(size_bytes), index_, "memory for other ranks"));
    NVFP4_MOE_TRY(peers_.clear(index_, memory.data(), size_bytes));
    return memory;
  }
  Result<PeerHandle> share(void* memory) override {
    PeerHandle handle;
    NVFP4_MOE_TRY(peers_.share(index_, memory, &handle));
    return handle;
  }
  Result<void*> open(const PeerHandle& handle) override { return peers_.open(index_, handle); }
  void close(void* memory) override { peers_.close(index_, memory); }
  Status stop(PeerControl* control) override { return peers_.stop(index_, control); }
  Result<PeerControl> control(const PeerControl* control) override {
    PeerControl seen;
    NVFP4_MOE_TRY(peers_.read(index_, control, &seen));
    return seen;
  }
  Status synchronize() override { return memory_.synchronize(index_); }
  Status enable(int other) override { return peers_.reach(index_, other); }
  Result<HostWords> make_host_words() override {
    HostWords made;
    NVFP4_MOE_TRY(peers_.make_host_words(index_, &made.words, &made.on_device));
    return made;
  }
  void drop_host_words(const HostWords& words) override { peers_.drop_host_words(index_, words.words); }

 private:
  const int index_;
  const DevicePeers& peers_;
  const DeviceMemory& memory_;
  const DeviceTopology& topology_;
};

}  // namespace

std::unique_ptr<PeerDevice> make_peer_device(const DeviceFacts& facts) {
  return std::make_unique<BackendPeerDevice>(facts);
}

}  // namespace nvfp4_moe
