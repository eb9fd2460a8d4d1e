// Every rank allocates its own memory for a region and opens that of all others: by address in one
// process, otherwise by handle. Old memory stays allocated, since captured graphs hold its address.
#include "exchange/peers.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/boot_id.h"
#include "exchange/watch.h"

namespace nvfp4_moe::internal {
namespace {

constexpr const char* kHidden =
    ": the process of the former does not see the latter (CUDA_VISIBLE_DEVICES, or another "
    "container)";
constexpr Timeout kLastWords{10 * 1000};  // how long to wait, at the end, for a rank that is late
// large enough to be an allocation of its own, which can be shared as a whole
constexpr int64_t kGranularity = int64_t{2} << 20;

// Identifies a rank as far as others need it to reach its memory.
struct Identity {
  uint64_t process = 0;
  int64_t pid = 0;     // distinguishes a forked child, which has the same `process` as its parent
  char host[40] = {};  // boot id
  char pci_address[32] = {};
  int32_t device = 0;
  bool shares_process(const Identity& other) const {
    return process == other.process && pid == other.pid;
  }
};

Result<Identity> identity_of(PeerDevice& device) {
  static const uint64_t process = [] {
    std::random_device random;
    return static_cast<uint64_t>(random()) << 32 | random();
  }();
  Identity mine;
  mine.process = process;
  mine.pid = getpid();
  // Ranks whose host is unknown must not be treated as ranks of one host.
  NVFP4_MOE_ASSIGN(const std::string host, boot_id());
  host.copy(mine.host, sizeof(mine.host) - 1);
  NVFP4_MOE_ASSIGN(const std::string address, device.pci_address());
  address.copy(mine.pci_address, sizeof(mine.pci_address) - 1);
  mine.device = device.index();
  return mine;
}

// "cuda:1 (0000:3B:00.0) of rank 1".
std::string name_of(const std::vector<Identity>& ranks, size_t rank) {
  const Identity& one = ranks[rank];
  return "cuda:" + std::to_string(one.device) + " (" + one.pci_address + ") of rank " +
         std::to_string(rank);
}

Status refusal(const std::vector<Identity>& ranks, size_t mine, size_t other, const Status& why) {
  // CUDA's own errors have no more specific code.
  const Code code = why.code() == Code::kInternal ? Code::kUnsupported : why.code();
  return {code, "peers: expected " + name_of(ranks, mine) + " to reach the memory of " +
                    name_of(ranks, other) + ", got " + why.message()};
}

// Checks that are possible before any memory is shared. A device that this process does not see may
// still be reachable.
Status check_reach(PeerDevice& device, const std::vector<Identity>& ranks, size_t mine) {
  for (size_t other = 0; other < ranks.size(); ++other) {
    if (other == mine) continue;
    NVFP4_MOE_ASSIGN(const PeerReach reach, device.reach(ranks[other].pci_address));
    if (reach == PeerReach::kNoAccess)
      return refusal(ranks, mine, other,
                     unsupported("no peer access: the kind of the GPUs, PCIe's topology, ACS or a "
                                 "virtual machine forbids it (nvidia-smi topo -p2p r)"));
  }
  return {};
}

// How other ranks can open a rank's memory.
struct Offer {
  PeerHandle handle;
  uint64_t address = 0;
};

// The memory that ranks of this process have offered. An address that another rank sends is used
// only if it is one of these.
class OfferedHere {
 public:
  static OfferedHere& all() {
    static OfferedHere& all = *new OfferedHere;  // never destroyed: an exchange may end after main
    return all;
  }
  void set(const void* memory, int64_t size_bytes) {  // 0: no longer
    const std::lock_guard lock(mutex_);
    sizes_[reinterpret_cast<uint64_t>(memory)] = size_bytes;
    if (size_bytes == 0) sizes_.erase(reinterpret_cast<uint64_t>(memory));
  }
  bool holds(uint64_t address, int64_t size_bytes) {
    const std::lock_guard lock(mutex_);
    const auto found = sizes_.find(address);
    return found != sizes_.end() && found->second >= size_bytes;
  }

 private:
  std::mutex mutex_;
  std::map<uint64_t, int64_t> sizes_;
};

class Peers : public PeerMemory {
 public:
  Peers(Exchange& exchange, std::unique_ptr<PeerDevice> device, std::vector<Identity> ranks,
        const PeerDevice::HostWords& host)
      : exchange_(exchange), device_(std::move(device)), ranks_(std::move(ranks)), host_(host) {
    link_.rank = exchange.rank();
    link_.world = exchange.world();
    link_.wait.host = host.on_device;
    link_.wait.timeout_ns = static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(exchange.timeout()).count());
  }

  ~Peers() override {
    // Wait first for enqueued work, which finishes or times out, while all memory exists.
    if (device_->synchronize().ok()) await_last_words();
    watch_.reset();
    for (void* memory : opened_) device_->close(memory);
    for (const Buffer& memory : memory_) OfferedHere::all().set(memory.data(), 0);
    memory_.clear();
    device_->drop_host_words(host_);
  }

  // Allocates the memory that ranks share and starts the watch.
  Status begin() {
    NVFP4_MOE_ASSIGN(const Region control, reserve(PeerRegion::kControl, sizeof(PeerControl)));
    link_.control = control.addresses;
    control_ = reinterpret_cast<PeerControl*>(control.addresses.of_rank[link_.rank]);
    link_.wait.control = control_;
    watch_.emplace(exchange_,
                   Watch::Watched{[this] { return late(); }, [this](const Status&) { stop(); }});
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
        return other.shares_process(ranks_[static_cast<size_t>(link_.rank)]);
      });
      if (!alone) {
        NVFP4_MOE_ASSIGN(mine.handle, device_->share(memory.data()));
      }
      OfferedHere::all().set(memory.data(), larger.size_bytes);
      memory_.push_back(std::move(memory));
      return {};
    };
    NVFP4_MOE_TRY(exchange_.agree(offer()));
    std::vector<Offer> offers(ranks_.size());
    NVFP4_MOE_TRY(exchange_.all_gather(&mine, sizeof(mine), offers.data()));
    const auto open = [&]() -> Status {
      for (size_t rank = 0; rank < ranks_.size(); ++rank) {
        NVFP4_MOE_ASSIGN(larger.addresses.of_rank[rank],
                         open_of(rank, offers[rank], larger.size_bytes));
      }
      return {};
    };
    NVFP4_MOE_TRY(exchange_.agree(open()));
    region = larger;
    return region;
  }

  const PeerLink& link() const override { return link_; }

  Status state() override {
    // Check now, not at the watch's next poll: a run would otherwise wait for the late rank again.
    NVFP4_MOE_TRY(state_of_work());
    const Watch::Lock lock = watch_->lock();
    return watch_->failure();
  }
  Status state_of_work() override {
    const bool lost = std::atomic_ref<uint32_t>(host_.words->late).load() != 0 ||
                      std::atomic_ref<uint32_t>(host_.words->stopped).load() != 0;
    if (!lost) return {};
    Watch::Lock lock = watch_->lock();
    if (!watch_->failure().ok()) return watch_->failure();
    if (const Status why = late(); !why.ok())
      return watch_->fail_all(lock, why);  // the watch has not polled yet
    return {};
  }
  void abort(const Status& why) override {
    const Watch::Lock lock = watch_->lock();
    watch_->fail(why);
  }
  std::string describe() const override { return "peers"; }

 private:
  // Waits until all ranks have reported that they took this rank's last packets. No kernel of this
  // rank waits for that report, but it is written into this rank's memory.
  void await_last_words() {
    const Deadline deadline(std::min(exchange_.timeout(), kLastWords));
    while (control_ != nullptr && state().ok() && !deadline.passed()) {
      const Result<PeerControl> seen = device_->control(control_);
      if (!seen.ok() || seen->stop != 0) return;
      const auto* const end = seen->taken + link_.world;
      if (std::all_of(seen->taken, end,
                      [&](uint64_t taken) { return taken >= seen->dispatch_of_rows; }))
        return;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }

  Result<std::byte*> open_of(size_t rank, const Offer& offer, int64_t size_bytes) {
    const auto me = static_cast<size_t>(link_.rank);
    const Identity& other = ranks_[rank];
    if (other.shares_process(ranks_[me])) {
      if (const Status enabled = device_->enable(other.device); !enabled.ok())
        return refusal(ranks_, me, rank, enabled);
      if (!OfferedHere::all().holds(offer.address, size_bytes))
        return refusal(ranks_, me, rank,
                       io_error("an address that no rank of this process has offered"));
      return reinterpret_cast<std::byte*>(offer.address);
    }
    const auto opened = device_->open(offer.handle);
    if (!opened.ok()) {
      const auto reach = device_->reach(other.pci_address);
      const bool hidden = reach.ok() && *reach == PeerReach::kNotVisible;
      return refusal(ranks_, me, rank,
                     {opened.status().code(), opened.status().message() + (hidden ? kHidden : "")});
    }
    opened_.push_back(*opened);
    return static_cast<std::byte*>(*opened);
  }

  // Ends the waits of this rank's kernels. If the request cannot reach the device, they time out.
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
  std::vector<Buffer> memory_;  // this rank's, for all regions ever reserved
  std::vector<void*> opened_;   // memory of ranks in other processes
  std::optional<Watch> watch_;  // set once there is shared memory
};

Status check_hosts(const std::vector<Identity>& ranks) {
  for (size_t rank = 1; rank < ranks.size(); ++rank)
    if (std::memcmp(ranks[rank].host, ranks[0].host, sizeof(ranks[0].host)) != 0)
      return unsupported("peers: expected all ranks on one host, got rank " + std::to_string(rank) +
                         " on another than rank 0's; use NCCL between hosts");
  return {};
}

}  // namespace

Result<std::unique_ptr<PeerMemory>> connect_peers(Exchange& exchange,
                                                  std::unique_ptr<PeerDevice> device) {
  if (exchange.world() > kMostPeers)
    return unsupported("peers: expected at most " + std::to_string(kMostPeers) + " ranks, got " +
                       std::to_string(exchange.world()) + "; use NCCL for more");
  const Result<Identity> mine = identity_of(*device);
  NVFP4_MOE_TRY(exchange.agree(mine.status()));
  std::vector<Identity> ranks(static_cast<size_t>(exchange.world()));
  NVFP4_MOE_TRY(exchange.all_gather(&*mine, sizeof(*mine), ranks.data()));
  for (Identity& rank : ranks) rank.pci_address[sizeof(rank.pci_address) - 1] = 0;
  NVFP4_MOE_TRY(check_hosts(ranks));
  NVFP4_MOE_TRY(exchange.agree(check_reach(*device, ranks, static_cast<size_t>(exchange.rank()))));
  const Result<PeerDevice::HostWords> host = device->make_host_words();
  if (const Status all = exchange.agree(host.status()); !all.ok()) {
    if (host.ok()) device->drop_host_words(*host);
    return all;
  }
  auto peers = std::make_unique<Peers>(exchange, std::move(device), std::move(ranks), *host);
  NVFP4_MOE_TRY(peers->begin());
  return std::unique_ptr<PeerMemory>(std::move(peers));
}

}  // namespace nvfp4_moe::internal
