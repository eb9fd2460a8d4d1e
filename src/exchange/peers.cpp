// A region is allocated by every rank for itself and opened by every other one: by its address in the same process, else by
// a handle. What a larger one replaces stays, since captured graphs hold its addresses.
#include "exchange/peers.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <fstream>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "exchange/watch.h"

namespace nvfp4_moe {
namespace {

constexpr int64_t kGranularity = int64_t{2} << 20;  // an allocation of its own, which can be shared whole

// Who a rank is, as far as that says how others reach its memory.
struct Identity {
  uint64_t process = 0;
  char host[40] = {};  // the kernel's number of its start
  int32_t device = 0;
};

Identity identity_of(const PeerDevice& device) {
  static const uint64_t process = [] {
    std::random_device random;
    return static_cast<uint64_t>(random()) << 32 | random();
  }();
  Identity mine;
  mine.process = process;
  std::ifstream("/proc/sys/kernel/random/boot_id").read(mine.host, sizeof(mine.host) - 1);
  mine.device = device.index();
  return mine;
}

// A rank's memory, as it tells the others.
struct Offer {
  PeerHandle handle;
  uint64_t address = 0;
};

class Peers : public PeerMemory {
 public:
  Peers(Exchange& exchange, std::unique_ptr<PeerDevice> device, std::vector<Identity> ranks,
        const PeerDevice::HostWords& host)
      : exchange_(exchange), device_(std::move(device)), ranks_(std::move(ranks)), host_(host) {
    link_.rank = exchange.rank();
    link_.world = exchange.world();
    link_.host = host.on_device;
    link_.timeout_ns =
        static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(exchange.timeout()).count());
  }

  ~Peers() override {
    // What is enqueued ends first, by itself or by its time, while all memory is there.
    static_cast<void>(device_->synchronize());
    watch_.reset();
    for (void* memory : opened_) device_->close(memory);
    memory_.clear();
    device_->drop_host_words(host_);
  }

  // The memory in which ranks meet; from then on it is watched.
  Status begin() {
    NVFP4_MOE_ASSIGN(const Region control, reserve(PeerRegion::kControl, sizeof(PeerControl)));
    link_.control = control.addresses;
    control_ = reinterpret_cast<PeerControl*>(control.addresses.of_rank[link_.rank]);
    watch_.emplace(exchange_, Watch::Watched{[this] { return late(); }, [this](const Status&) { stop(); }});
    return {};
  }

  Result<Region> reserve(PeerRegion which, int64_t size_bytes) override {
    Region& region = regions_[static_cast<size_t>(which)];
    if (region.size_bytes >= size_bytes) return region;
    Region larger;
    larger.size_bytes = (size_bytes + kGranularity - 1) / kGranularity * kGranularity;
    Offer mine;
    const auto offer = [&]() -> Status {
      NVFP4_MOE_ASSIGN(Buffer memory, device_->allocate_zeros(larger.size_bytes));
      mine.address = reinterpret_cast<uint64_t>(memory.data());
      const bool alone = std::all_of(ranks_.begin(), ranks_.end(), [&](const Identity& other) {
        return other.process == ranks_[static_cast<size_t>(link_.rank)].process;
      });
      if (!alone) {
        NVFP4_MOE_ASSIGN(mine.handle, device_->share(memory.data()));
      }
      memory_.push_back(std::move(memory));
      return {};
    };
    NVFP4_MOE_TRY(exchange_.agree(offer()));
    std::vector<Offer> offers(ranks_.size());
    NVFP4_MOE_TRY(exchange_.all_gather(&mine, sizeof(mine), offers.data()));
    const auto open = [&]() -> Status {
      for (size_t rank = 0; rank < ranks_.size(); ++rank) {
        NVFP4_MOE_ASSIGN(larger.addresses.of_rank[rank], open_of(rank, offers[rank]));
      }
      return {};
    };
    NVFP4_MOE_TRY(exchange_.agree(open()));
    region = larger;
    return region;
  }

  const PeerLink& link() const override { return link_; }
  const std::vector<Identity>& ranks() const { return ranks_; }

  Status state() override {
    const Watch::Lock lock = watch_->lock();
    return watch_->failure();
  }
  Status state_of_work() override {
    const bool lost = std::atomic_ref<uint32_t>(host_.words->late).load() != 0 ||
                      std::atomic_ref<uint32_t>(host_.words->stopped).load() != 0;
    if (!lost) return {};
    const Watch::Lock lock = watch_->lock();
    return watch_->fail(late());  // the watch may not have looked yet
  }
  void abort(const Status& why) override {
    const Watch::Lock lock = watch_->lock();
    watch_->fail(why);
  }
  std::string describe() const override { return "peers"; }

 private:
  Result<std::byte*> open_of(size_t rank, const Offer& offer) {
    const Identity &mine = ranks_[static_cast<size_t>(link_.rank)], &other = ranks_[rank];
    if (other.process == mine.process) {
      NVFP4_MOE_TRY(device_->reach(other.device).in("peers: memory of rank " + std::to_string(rank)));
      return reinterpret_cast<std::byte*>(offer.address);
    }
    auto opened = device_->open(offer.handle);
    if (!opened.ok()) return opened.status().in("peers: memory of rank " + std::to_string(rank));
    opened_.push_back(*opened);
    return static_cast<std::byte*>(*opened);
  }

  // Waits of this rank's kernels end. Where not even that reaches the device, they end by their time.
  void stop() {
    const Status asked = device_->stop(control_);
    static_cast<void>(asked);
  }

  Status late() const {
    const uint32_t late = std::atomic_ref<uint32_t>(host_.words->late).load();
    if (late == 0) return {};
    return io_error("peers: expected rank " + std::to_string(late - 1) + " on the device within " +
                    std::to_string(exchange_.timeout().count()) +
                    " ms, got none: it has stopped, or has come with another call");
  }

  Exchange& exchange_;
  const std::unique_ptr<PeerDevice> device_;
  const std::vector<Identity> ranks_;
  const PeerDevice::HostWords host_;
  PeerLink link_;
  PeerControl* control_ = nullptr;  // this rank's
  std::array<Region, kPeerRegions> regions_;
  std::vector<Buffer> memory_;  // this rank's, of all regions that there have been
  std::vector<void*> opened_;   // the others', of other processes
  std::optional<Watch> watch_;  // once there is memory to meet in
};

Status check_ranks(const std::vector<Identity>& ranks) {
  for (size_t rank = 1; rank < ranks.size(); ++rank)
    if (std::memcmp(ranks[rank].host, ranks[0].host, sizeof(ranks[0].host)) != 0)
      return unsupported("peers: expected all ranks on one host, got rank " + std::to_string(rank) +
                         " on another than rank 0's");
  return {};
}

}  // namespace

Result<std::unique_ptr<PeerMemory>> connect_peers(Exchange& exchange, std::unique_ptr<PeerDevice> device) {
  if (exchange.world() > kMostPeers)
    return unsupported("peers: expected at most " + std::to_string(kMostPeers) + " ranks, got " +
                       std::to_string(exchange.world()));
  const Result<PeerDevice::HostWords> host = device->make_host_words();
  if (const Status all = exchange.agree(host.status()); !all.ok()) {
    if (host.ok()) device->drop_host_words(*host);
    return all;
  }
  const Identity mine = identity_of(*device);
  std::vector<Identity> ranks(static_cast<size_t>(exchange.world()));
  const Status gathered = exchange.all_gather(&mine, sizeof(mine), ranks.data());
  auto peers = std::make_unique<Peers>(exchange, std::move(device), std::move(ranks), *host);
  NVFP4_MOE_TRY(gathered);
  NVFP4_MOE_TRY(check_ranks(peers->ranks()));
  NVFP4_MOE_TRY(peers->begin());
  return std::unique_ptr<PeerMemory>(std::move(peers));
}

}  // namespace nvfp4_moe
