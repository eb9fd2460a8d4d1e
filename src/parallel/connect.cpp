#include "parallel/connect.h"

#include "exchange/nccl.h"
#include "exchange/peers.h"
#include "moe/layer.h"
#include "moe/registry.h"

namespace nvfp4_moe::internal {
namespace {

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
  NVFP4_MOE_ASSIGN(auto peers,
                   connect_peers(exchange, device_peers(facts.kind)->make_device(facts.index)));
  exchange.set_peers(std::move(peers));
  return {};
}

}  // namespace nvfp4_moe::internal
