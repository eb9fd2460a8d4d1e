// Arbitrary messages from another rank, and the C interface of exchanges, placements and
// rearranging with arguments of every kind.
//
// One input is another rank's messages in a layer's runs, altered in some places; or a list of
// calls on a layer over a world of one rank, in which no call can wait for another rank. Checks
// that nothing crashes or leaks, that codes are known ones, that every failure has a text of one
// line, and that nothing takes longer than its timeout.
#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "exchange/echo_peer.h"
#include "fuzz/c_api_arguments.h"
#include "fuzz/require.h"
#include "nvfp4_moe/nvfp4_moe.h"

using nvfp4_moe::internal::fuzz::Arguments;

namespace {

using namespace nvfp4_moe::internal;  // NOLINT: a target is one file

// ---- the C interface, over a world of one

bool check(nvfp4_moe_status code) {
  REQUIRE(code >= NVFP4_MOE_STATUS_OK && code <= NVFP4_MOE_STATUS_CANCELLED);
  if (code == NVFP4_MOE_STATUS_OK) return true;
  const std::string text = nvfp4_moe_last_error();
  REQUIRE(!text.empty() && text.find('\n') == std::string::npos);
  // A peer may report any failure.
  REQUIRE((code != NVFP4_MOE_STATUS_INTERNAL && code != NVFP4_MOE_STATUS_OUT_OF_MEMORY) ||
          text.starts_with("rank 1: "));
  return false;
}

constexpr int64_t kExperts = 3, kTopK = 2, kHidden = 32, kInner = 16, kTokens = 4;

int32_t copy_own_block(void* user, const void* send, const int64_t* send_bytes, void* recv,
                       const int64_t*, int64_t, char* error, size_t error_bytes) {
  if (*static_cast<int*>(user) == 1) {
    std::strncpy(error, "no\nluck", error_bytes - 1);
    return 7;
  }
  if (*send_bytes > 0) std::memcpy(recv, send, static_cast<size_t>(*send_bytes));
  return 0;
}

class Calls {
 public:
  explicit Calls(Arguments& a, nvfp4_moe_exchange* exchange = nullptr)
      : a_(a), exchange_(exchange) {}
  ~Calls() {
    nvfp4_moe_layer_close(layer_);
    nvfp4_moe_exchange_close(exchange_);
  }

  void play() {
    connect();
    for (int calls = 0; calls < 16 && a_.more(); ++calls) one_call();
  }
  // If there is an exchange: opens a layer as all ranks do, then runs.
  template <class Opened>
  void play_as_rank_0(const Opened& opened) {
    for (int attempts = 0; layer_ == nullptr && attempts < 4 && a_.more(); ++attempts) open();
    if (layer_ == nullptr) return;
    opened();
    for (int runs = 0; runs < 4 && a_.more(); ++runs) run();
  }

 private:
  void connect() {
    const int32_t world = a_.rarely(3) ? static_cast<int32_t>(a_.bad_size()) : 1;
    const int32_t rank = a_.rarely(3) ? static_cast<int32_t>(a_.bad_size()) : 0;
    const int64_t timeout = a_.rarely(2) ? a_.in(-3, 3) : 50;
    nvfp4_moe_exchange** const out = a_.maybe(&exchange_);
    if (a_.pick(2) == 0) {
      nvfp4_moe_exchange_callbacks callbacks{};
      fails_ = a_.rarely(3) ? 1 : 0;
      callbacks.user = &fails_;
      callbacks.all_to_all_v = a_.rarely(4) ? nullptr : copy_own_block;
      // A host's function that copies one block: it only serves a world of one.
      const bool one = rank == 0 && world == 1;
      check(nvfp4_moe_exchange_connect(one ? a_.structure(callbacks) : nullptr, rank, world,
                                       timeout, out));
      return;
    }
    nvfp4_moe_thread_group* group = nullptr;
    if (check(nvfp4_moe_thread_group_create(a_.rarely(4) ? world : 1, &group)))
      check(nvfp4_moe_thread_group_join(group, rank, world, timeout, out));
    nvfp4_moe_thread_group_close(group);
  }

  std::vector<int64_t> slots() {
    std::vector<int64_t> slots(static_cast<size_t>(a_.in(0, 6)));
    for (size_t i = 0; i < slots.size(); ++i)
      slots[i] = a_.rarely(4) ? a_.any_int64() : static_cast<int64_t>(i) % 3;
    return slots;
  }

  nvfp4_moe_layer_tensors tensors() {
    nvfp4_moe_layer_tensors t{};
    a_.give_weights(t, kExperts * kInner * kHidden);
    t.gate_tensor_scales = a_.maybe(a_.floats(kExperts));
    t.up_tensor_scales = a_.maybe(a_.floats(kExperts));
    t.down_tensor_scales = a_.maybe(a_.floats(kExperts));
    if (a_.rarely()) t.reserved = 1;
    return t;
  }

  void open() {
    nvfp4_moe_config config{};
    config.num_experts = kExperts;
    config.top_k = kTopK;
    config.hidden_size = kHidden;
    config.intermediate_size = kInner;
    config.activation_format = a_.enumerator(4);
    nvfp4_moe_expert_parallel parallel{};
    parallel.exchange = a_.maybe(exchange_);
    const std::vector<int64_t> placement = slots();
    if (a_.pick(2) == 0) {
      parallel.expert_of_slot = placement.data();
      parallel.slots = static_cast<int64_t>(placement.size());
    } else if (a_.rarely()) {
      parallel.slots = a_.bad_size();
    }
    parallel.capacity = a_.rarely(2) ? a_.bad_size() : 0;
    parallel.combine = a_.enumerator(2);
    parallel.reserved = a_.rarely() ? 1 : 0;
    nvfp4_moe_layer_options options{};
    options.max_tokens = a_.rarely() ? a_.bad_size() : kTokens;
    options.threads = 1;
    options.first_expert = a_.rarely() ? a_.bad_size() : 0;
    options.slice_count = a_.rarely() ? 16 : 0;
    options.device = a_.rarely() ? "cuda:x" : nullptr;
    options.expert_parallel = a_.structure(parallel);
    nvfp4_moe_layer* opened = nullptr;
    config.struct_size = sizeof(config);
    if (!check(nvfp4_moe_layer_open_tensors(&config, a_.structure(tensors()), a_.structure(options),
                                            &opened)))
      return;
    nvfp4_moe_layer_close(layer_);
    layer_ = opened;
  }

  void run() {
    if (layer_ == nullptr) return open();
    size_t workspace_bytes = 0;
    const int64_t tokens = a_.in(0, kTokens);
    if (!check(nvfp4_moe_layer_workspace_bytes(layer_, tokens, &workspace_bytes))) return;
    if (workspace_bytes > (size_t{64} << 20)) return;  // of a capacity that is legal, and large
    std::vector<uint8_t> memory(workspace_bytes + 256, 0xFF);
    auto* const workspace =
        reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256);
    std::vector<int32_t> ids(static_cast<size_t>(tokens * kTopK));
    for (int32_t& id : ids) id = a_.rarely(2) ? static_cast<int32_t>(a_.any_int64()) : a_.pick(3);
    std::vector<uint16_t> out(static_cast<size_t>(tokens * kHidden));
    nvfp4_moe_batch batch{};
    batch.struct_size = sizeof(batch);
    batch.tokens = tokens;
    batch.hidden = a_.bytes(tokens * kHidden * 2);
    batch.topk_ids = ids.data();
    batch.topk_weights = a_.floats(tokens * kTopK);
    batch.out = out.data();
    check(nvfp4_moe_layer_run(layer_, &batch, workspace, workspace_bytes, nullptr));
  }

  void one_call() {
    uint64_t load[kExperts] = {};
    int64_t placed[64] = {};
    switch (a_.pick(7)) {
      case 0: return open();
      case 1:
      case 2: return run();
      case 3:
        check(nvfp4_moe_layer_expert_load(a_.maybe(layer_), a_.maybe(load),
                                          a_.rarely() ? a_.bad_size() : kExperts));
        check(nvfp4_moe_layer_reset_expert_load(a_.maybe(layer_)));
        return;
      case 4: {
        const std::vector<int64_t> placement = slots();
        const int64_t count = a_.rarely() ? a_.bad_size() : static_cast<int64_t>(placement.size());
        // The library cannot detect a count larger than the caller's memory, so any count that a
        // layer accepts is backed by memory.
        if (count > static_cast<int64_t>(placement.size()) && count <= 64) return;
        check(nvfp4_moe_layer_rearrange_tensors(a_.maybe(layer_), a_.maybe(placement.data()), count,
                                                a_.structure(tensors())));
        return;
      }
      case 5: {
        for (uint64_t& each : load) each = static_cast<uint64_t>(a_.any_int64()) >> a_.pick(64);
        const auto world = static_cast<int32_t>(a_.rarely() ? a_.bad_size() : a_.in(1, 3));
        const int64_t each = a_.rarely() ? a_.bad_size() : a_.in(0, 4);
        check(nvfp4_moe_propose_placement(a_.maybe(load), kExperts, world, each, a_.maybe(placed)));
        return;
      }
      default:
        if (exchange_ == nullptr) return;
        if (a_.rarely())
          check(nvfp4_moe_exchange_use_peers(exchange_, a_.maybe("cpu")));
        else
          check(nvfp4_moe_exchange_use_nccl(exchange_, a_.maybe("cpu"),
                                            a_.rarely() ? "none.so" : nullptr, nullptr));
    }
  }

  Arguments& a_;
  nvfp4_moe_exchange* exchange_;
  int fails_ = 0;
  nvfp4_moe_layer* layer_ = nullptr;
};

// Runs of a layer in which rank 1 sends rank 0's messages with some words altered: from the opening
// on, or in the runs only.
void take_a_peers_packets(Arguments& a) {
  test::EchoPeer peer;
  const bool from_the_start = a.rarely(2);
  int64_t opened = 0;
  peer.change = [&](int64_t, std::span<std::byte> received) {
    if (received.empty() || (opened == 0 && !from_the_start)) return;
    for (int changes = a.pick(4); changes > 0; --changes) {
      const int64_t at = a.in(0, static_cast<int64_t>(received.size()) - 1);
      const float number = a.number();
      const auto word = static_cast<uint32_t>(a.any_int64());
      const size_t bytes = std::min<size_t>(4, received.size() - static_cast<size_t>(at));
      if (a.pick(2) == 0)
        std::memcpy(received.data() + at, &number, bytes);
      else
        std::memcpy(received.data() + at, &word, bytes);
    }
  };
  nvfp4_moe_exchange_callbacks callbacks{};
  callbacks.struct_size = sizeof(callbacks);
  callbacks.user = &peer;
  callbacks.all_to_all_v = test::EchoPeer::all_to_all_v;
  nvfp4_moe_exchange* exchange = nullptr;
  if (!check(nvfp4_moe_exchange_connect(&callbacks, 0, 2, 50, &exchange))) return;
  Calls(a, exchange).play_as_rank_0([&] { opened = peer.calls; });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Arguments a(data, size);
  if (a.pick(2) == 0)
    Calls(a).play();
  else
    take_a_peers_packets(a);
  return 0;
}
