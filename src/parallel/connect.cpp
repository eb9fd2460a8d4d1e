#include "parallel/connect.h"

#include "exchange/nccl.h"
#include "exchange/peers.h"
#include "moe/layer.h"
#include "moe/registry.h"

namespace nvfp4_moe::internal {
namespace {

// Implements PeerDevice (exchange/peers.h) with a backend's functions.
class BackendPeerDevice : public PeerDevice {
 public:
  explicit BackendPeerDevice(const DeviceFacts& facts)
      : index_(facts.index),
        peers_(*device_peers(facts.kind)),
        memory_(*device_memory(facts.kind)),
        topology_(*device_topology(facts.kind)) {}

  int index() const override { return index_; }
  Result<std::string> pci_address() override { return topology_.pci_address(index_); }
  Result<PeerReach> reach(const std::string& pci_address) override {
    return topology_.reach(index_, pci_address);
  }
  Result<Buffer> allocate_zeros(int64_t size_bytes) override {
    NVFP4_MOE_ASSIGN(Buffer memory, memory_.allocate(static_cast<size_t>(size_bytes), index_,
                                                     "memory for other ranks"));
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
  void drop_host_words(const HostWords& words) override {
    peers_.drop_host_words(index_, words.words);
  }

 private:
  const int index_;
  const DevicePeers& peers_;
  const DeviceMemory& memory_;
  const DeviceTopology& topology_;
};

Result<std::shared_ptr<const FailureWord>> make_failure_word(const DeviceRanks& ranks, int device) {
  uint32_t *word = nullptr, *on_device = nullptr;
  NVFP4_MOE_TRY(ranks.make_host_word(device, &word, &on_device));
  // It is dropped after the layers. Freeing their memory has waited for kernels that read the word.
  return std::shared_ptr<const FailureWord>(new FailureWord{word, on_device},
                                            [&ranks, device](const FailureWord* dropped) {
                                              ranks.drop_host_word(device, dropped->word);
                                              delete dropped;
                                            });
}

// The facts of a rank's device, if the exchange can be given a link between devices. Collective.
Result<DeviceFacts> device_for_link(Exchange& exchange, const std::string& device,
                                    const std::string& link) {
  const auto find = [&]() -> Result<DeviceFacts> {
    if (exchange.device_link() != nullptr)
      return invalid_argument(link + ": expected an exchange without devices, got one with " +
                              exchange.device_link()->describe() +
                              "; call use_nccl or use_peers, once");
    NVFP4_MOE_ASSIGN(DeviceFacts facts, device_facts(device));
    if (device_ranks(facts.kind) == nullptr || device_peers(facts.kind) == nullptr)
      return unsupported(link + ": expected a device cuda:N, got " + device);
    return facts;
  };
  const Result<DeviceFacts> facts = find();
  NVFP4_MOE_TRY(exchange.agree(facts.status()));
  return facts;
}

}  // namespace

Status use_nccl(Exchange& exchange, const std::string& device, const std::string& library,
                void* communicator) {
  NVFP4_MOE_ASSIGN(const DeviceFacts facts, device_for_link(exchange, device, "nccl"));
  const DeviceRanks& ranks = *device_ranks(facts.kind);
  const int index = facts.index;
  const auto word = make_failure_word(ranks, index);
  NVFP4_MOE_TRY(exchange.agree(word.status()));
  NcclOptions options{library, communicator, {}, *word, {}};
  options.events = {
      [&ranks, index](void** event, void* stream) { return ranks.set_event(index, event, stream); },
      [&ranks, index](void* event) { return ranks.event_reached(index, event); },
      [&ranks, index](void* event) { ranks.drop_event(index, event); }};
  options.on_device = [&ranks, index](const std::function<void()>& body) {
    const auto call = [&]() -> Status {
      body();
      return {};
    };
    if (!on_device(ranks, index, call).ok()) body();  // runs even without the device
  };
  return on_device(ranks, index, [&]() -> Status {
    NVFP4_MOE_ASSIGN(auto transport, connect_nccl(exchange, options));
    exchange.set_device(std::move(transport));
    return {};
  });
}

Status use_peers(Exchange& exchange, const std::string& device) {
  NVFP4_MOE_ASSIGN(const DeviceFacts facts, device_for_link(exchange, device, "peers"));
  NVFP4_MOE_ASSIGN(auto peers, connect_peers(exchange, std::make_unique<BackendPeerDevice>(facts)));
  exchange.set_peers(std::move(peers));
  return {};
}

}  // namespace nvfp4_moe::internal
