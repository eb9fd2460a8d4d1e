// Ranks that share their devices' memory, over a double of the device.
#include "exchange/peers.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "exchange/board.h"
#include "exchange/echo_peer.h"
#include "exchange/ranks.h"
#include "support/attack.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

// The resources that all doubles of a test hold now, and how often they were stopped.
struct Counts {
  std::atomic<int> allocations{0}, host_words{0}, opened{0}, stops{0};
};

// A device in host memory. The test sets which devices it can reach.
class DeviceDouble : public PeerDevice {
 public:
  struct Answers {
    std::function<Result<std::string>(int index)> pci_address =
        [](int index) -> Result<std::string> { return address_of(index); };
    std::function<Result<PeerReach>(int index, const std::string& address)> reach =
        [](int, const std::string&) { return Result<PeerReach>(PeerReach::kYes); };
    Status enable, open;
  };
  static std::string address_of(int index) { return "0000:0" + std::to_string(index) + ":00.0"; }

  DeviceDouble(int index, Counts& counts, Answers answers)
      : index_(index), counts_(counts), answers_(std::move(answers)) {}

  int index() const override { return index_; }
  Result<std::string> pci_address() override { return answers_.pci_address(index_); }
  Result<PeerReach> reach(const std::string& address) override {
    return answers_.reach(index_, address);
  }
  Result<Buffer> allocate_zeros(int64_t size_bytes) override {
    ++counts_.allocations;
    auto* const bytes = new std::byte[static_cast<size_t>(size_bytes)]();
    return Buffer(bytes, static_cast<size_t>(size_bytes), [this](std::byte* data, size_t) {
      --counts_.allocations;
      delete[] data;
    });
  }
  Result<PeerHandle> share(void*) override { return PeerHandle(); }
  Result<void*> open(const PeerHandle&) override {
    NVFP4_MOE_TRY(answers_.open);
    ++counts_.opened;
    return static_cast<void*>(&counts_);
  }
  void close(void*) override { --counts_.opened; }
  Status synchronize() override { return {}; }
  Status stop(PeerControl* control) override {
    ++counts_.stops;
    std::atomic_ref<uint32_t>(control->stop).store(1);
    return {};
  }
  Result<PeerControl> control(const PeerControl* control) override {
    auto& seen = const_cast<PeerControl&>(*control);
    PeerControl copy{};
    for (int rank = 0; rank < kMostPeers; ++rank)
      copy.taken[rank] = std::atomic_ref<uint64_t>(seen.taken[rank]).load();
    copy.dispatch_of_rows = std::atomic_ref<uint64_t>(seen.dispatch_of_rows).load();
    copy.stop = std::atomic_ref<uint32_t>(seen.stop).load();
    return copy;
  }
  Status enable(int) override { return answers_.enable; }
  Result<HostWords> make_host_words() override {
    ++counts_.host_words;
    words = new PeerHostWords{};
    return HostWords{words, words};
  }
  void drop_host_words(const HostWords& made) override {
    --counts_.host_words;
    delete made.words;
  }

  PeerHostWords* words = nullptr;  // written as a kernel would write them

 private:
  const int index_;
  Counts& counts_;
  const Answers answers_;
};

using Answers = DeviceDouble::Answers;

// Calls body with each rank's memory, and with its device as a kernel sees it.
void on_peers(
    int world, Counts& counts,
    const std::function<void(Exchange&, std::unique_ptr<PeerMemory>&, const DeviceDouble&)>& body) {
  on_ranks(Over::kThreads, world, kLong, [&](Exchange& exchange) {
    auto device = std::make_unique<DeviceDouble>(exchange.rank(), counts, Answers());
    const DeviceDouble& kernels = *device;
    auto peers = must(connect_peers(exchange, std::move(device)));
    ASSERT_OK(exchange.barrier());
    body(exchange, *peers, kernels);
  });
  EXPECT_EQ(counts.allocations, 0);
  EXPECT_EQ(counts.host_words, 0);
}

TEST(Peers, EachReachesTheMemoryOfAll) {
  constexpr int kPeers = 3;
  Counts counts;
  PeerMemory::Region first;
  on_peers(kPeers, counts, [&](Exchange& exchange, const auto& peers, const DeviceDouble&) {
    const int rank = exchange.rank();
    EXPECT_EQ(peers->link().wait.timeout_ns, 20000000000u);
    for (const int64_t size_bytes : {100, 5000000, 100}) {
      const auto region = must(peers->reserve(PeerRegion::kRows, size_bytes));
      EXPECT_GE(region->size_bytes, size_bytes);
      for (int64_t i = 0; i < size_bytes; i += 99999)
        EXPECT_EQ(region->addresses.of_rank[rank][i], std::byte{0});
      if (rank == 0) first = *region;
      ASSERT_OK(exchange.barrier());
      for (int other = 0; other < kPeers; ++other) {
        EXPECT_EQ(region->addresses.of_rank[other], first.addresses.of_rank[other]);
        EXPECT_NE(region->addresses.of_rank[other], peers->link().control.of_rank[other]);
      }
      ASSERT_OK(exchange.barrier());
    }
    EXPECT_EQ(counts.allocations, kPeers * 3)
        << "control, and both sizes of rows: graphs hold the smaller one";
    EXPECT_OK(peers->state());
    ASSERT_OK(exchange.barrier());
  });
}

// Kernels would write there.
ATTACK_TEST(kReceivedPackets, Peers, AnAddressThatNobodyOfferedIsRefused) {
  constexpr size_t kOffer = sizeof(PeerHandle) + sizeof(uint64_t);
  for (const uint64_t address : {uint64_t{0}, uint64_t{4096}, UINT64_MAX}) {
    attacked();
    Counts counts;
    EchoPeer peer;
    const auto exchange =
        must(connect_callbacks({&peer, EchoPeer::all_to_all_v, nullptr}, 0, 2, kLong));
    const auto connect = [&] {
      return connect_peers(**exchange, std::make_unique<DeviceDouble>(0, counts, Answers()))
          .status();
    };
    EXPECT_OK(connect());
    peer.change = [&](int64_t, std::span<std::byte> received) {
      if (received.size() == kOffer) std::memcpy(received.data() + sizeof(PeerHandle), &address, 8);
    };
    EXPECT_THAT(connect().message(),
                HasSubstr("of rank 1, got an address that no rank of this process has offered"));
  }
}

// Every rank reports the failing rank, with CUDA's message if the library has none of its own.
TEST(Peers, ADeviceThatFailsIsNamedOnEveryRank) {
  const std::string both =
      "rank 1: peers: expected cuda:1 (0000:01:00.0) of rank 1 to reach the memory of cuda:0 "
      "(0000:00:00.0) of rank 0, got ";
  const struct {
    std::function<void(Answers&)> change;  // of rank 1
    Code code;
    std::string message;
  } cases[] = {
      // Another process's device may be reachable by its handle without being visible.
      {[](Answers& a) { a.reach = [](auto&&...) { return PeerReach::kNotVisible; }; }, Code::kOk,
       ""},
      {[](Answers& a) { a.reach = [](auto&&...) { return PeerReach::kNoAccess; }; },
       Code::kUnsupported, both + "no peer access: the kind of the GPUs, PCIe's topology, ACS or"},
      {[](Answers& a) { a.enable = Status(Code::kInternal, "enable: too many peers"); },
       Code::kUnsupported, both + "enable: too many peers"},
      {[](Answers& a) { a.enable = Status(Code::kOutOfMemory, "enable: no memory"); },
       Code::kOutOfMemory, both + "enable: no memory"},
      {[](Answers& a) {
         a.reach = [](auto&&...) { return Status(Code::kInternal, "driver shutting down"); };
       },
       Code::kInternal, "rank 1: driver shutting down"},
      {[](Answers& a) { a.pci_address = [](int) { return unsupported("no address"); }; },
       Code::kUnsupported, "rank 1: no address"},
  };
  for (const auto& one : cases) {
    Counts counts;
    on_ranks(Over::kThreads, 2, kLong, [&](Exchange& exchange) {
      Answers answers;
      if (exchange.rank() == 1) one.change(answers);
      EXPECT_THAT(
          connect_peers(exchange, std::make_unique<DeviceDouble>(exchange.rank(), counts, answers)),
          Refused(one.code, one.message));
      EXPECT_OK(exchange.barrier());
    });
    EXPECT_EQ(counts.allocations, 0);
    EXPECT_EQ(counts.host_words, 0);
  }
}

// Two processes with a device each, cuda:0 in both. Returns the status of this one's connect_peers.
Status between_processes(const Answers& answers) {
  const auto board = Board::make();
  const auto connect = [&](int rank) -> Status {
    Counts counts;
    BoardRank end(board, rank, 2);
    NVFP4_MOE_ASSIGN(const auto exchange, end.connect(kLong));
    const Status status =
        connect_peers(*exchange, std::make_unique<DeviceDouble>(0, counts, answers)).status();
    NVFP4_MOE_TRY(exchange->barrier());
    if (counts.opened != 0 || counts.allocations != 0) return check_failed("memory is left");
    return status;
  };
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(30);
    ::_exit(connect(1).ok() ? 0 : 1);
  }
  Status status = connect(0);
  int exit = 0;
  EXPECT_EQ(::waitpid(child, &exit, 0), child);
  EXPECT_EQ(exit == 0, status.ok());
  return status;
}

TEST(Peers, MemoryOfAnotherProcessThatDoesNotOpenNamesBothDevices) {
  EXPECT_OK(between_processes({}));
  Answers fails;
  fails.open = Status(Code::kInternal, "cudaIpcOpenMemHandle: mapping of buffer object failed");
  const std::string message =
      "rank 0: peers: expected cuda:0 (0000:00:00.0) of rank 0 to reach the memory of cuda:0 "
      "(0000:00:00.0) of rank 1, got " +
      fails.open.message();
  EXPECT_THAT(between_processes(fails), Refused(Code::kUnsupported, message));
  fails.reach = [](auto&&...) { return PeerReach::kNotVisible; };
  EXPECT_THAT(between_processes(fails).message(),
              HasSubstr(message + ": the process of the former does not see the latter"));
}

// Waits until rank 1 has taken its last packets; no kernel waits for that.
TEST(Peers, MemoryStaysUntilTheOthersHaveWrittenToItLast) {
  Counts counts;
  on_peers(2, counts, [](Exchange& exchange, auto& peers, const DeviceDouble&) {
    if (exchange.rank() == 0) {
      auto& own = *reinterpret_cast<PeerControl*>(peers->link().control.of_rank[0]);
      std::atomic_ref<uint64_t>(own.dispatch_of_rows).store(1);
      std::atomic_ref<uint64_t>(own.taken[0]).store(1);
      std::atomic<bool> written{false};
      std::thread kernel([&] {
        std::this_thread::sleep_for(Timeout{100});
        std::atomic_ref<uint64_t>(own.taken[1]).store(1);
        written = true;
      });
      peers.reset();
      EXPECT_TRUE(written);
      kernel.join();
    }
    EXPECT_OK(exchange.barrier());
  });
}

// A status that finds a late rank before the watch does reports to the others too.
TEST(Peers, ARankThatIsLateEndsTheWaitsOfAll) {
  const std::string late =
      "peers: expected rank 2 on the device within 20000 ms, got none: it has stopped, or has come "
      "with another call";
  enum { kByWatch, kByState, kByStateOfWork };
  for (const int by : {kByWatch, kByState, kByStateOfWork}) {
    Counts counts;
    std::atomic<int> received{0};
    on_peers(3, counts, [&](Exchange& exchange, auto& peers, const DeviceDouble& kernels) {
      const bool first = exchange.rank() == 0;
      EXPECT_OK(peers->state_of_work());
      ASSERT_OK(exchange.barrier());
      if (first) std::atomic_ref<uint32_t>(kernels.words->late).store(1 + 2);
      if (first && by == kByState) EXPECT_EQ(peers->state().message(), late);
      if (first && by == kByStateOfWork) EXPECT_EQ(peers->state_of_work().message(), late);
      if (!first || by == kByWatch) comes_true([&] { return !exchange.poll().ok(); });
      comes_true([&] { return !peers->state().ok(); });
      EXPECT_EQ(peers->state().message(), first ? late : "rank 0: " + late);
      // If a rank's device has waited in vain, its results are invalid, on that rank only.
      EXPECT_EQ(peers->state_of_work().message(), first ? late : "");
      peers->abort(Status(Code::kIo, "later"));
      EXPECT_THAT(peers->state().message(), HasSubstr(late)) << "the first failure stays";
      for (++received; received < 3;) std::this_thread::sleep_for(Timeout{5});
    });
    EXPECT_EQ(counts.stops, 3);
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
