// RankHosts: the ranks of this process. Each has a device, threads and a recorder of the bytes it
// sends, shared by all layers that are timed.
//
// Traffic between ranks is counted at its transport: host memory by the exchange's observer, device
// memory by a transport around NCCL's.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cli/bench/ranks_over.h"
#include "core/executor.h"
#include "exchange/local_ranks.h"

namespace nvfp4_moe::internal::cli {

// The parts of a rank's exchange in a run. all_reduce has only a combine.
enum class WirePart : uint8_t { kAgree, kDispatch, kCombine };
inline constexpr size_t kWireParts = 3;
inline constexpr const char* kWirePartNames[kWireParts] = {"agree", "dispatch", "combine"};

// One rank's run. Sent between ranks as raw bytes.
struct RankRun {
  double us = 0;
  // own experts on devices: only the batches in which this rank is the busiest, per batch
  double as_busiest_us = 0;
  std::array<double, kWireParts> part_us{};     // zeros on devices
  std::array<double, kWireParts> sent_bytes{};  // to other ranks
  double all_sent_bytes() const { return sent_bytes[0] + sent_bytes[1] + sent_bytes[2]; }
};

// Attributes transfers of one run to RankRun's parts by their operation.
class WireRecorder {
 public:
  void begin_run() { dispatched_ = false; }
  void clear() { run_ = RankRun(); }
  void add(std::string_view what, int64_t sent_bytes, double us);
  // Adds to a part that is known beforehand.
  void add(WirePart part, int64_t sent_bytes) {
    run_.sent_bytes[static_cast<size_t>(part)] += static_cast<double>(sent_bytes);
  }
  const RankRun& run() const { return run_; }

 private:
  RankRun run_;
  bool dispatched_ = false;  // the run has had an all_to_all_v: later transfers are the combine
};

// The ranks of this process, for all layers that are timed over them.
class RankHosts {
 public:
  // device(index): the device of rank first + index. threads: per rank.
  static Result<RankHosts> make(const LocalRanks& ranks,
                                const std::function<std::string(int index)>& device, int threads);
  const LocalRanks& ranks() const { return *ranks_; }
  int threads() const { return threads_; }
  const std::string& device(int index) const { return hosts_[static_cast<size_t>(index)]->device; }
  // Connects the devices of every rank's exchange and counts the bytes sent. Collective.
  Status connect_devices(RanksOver over);
  ~RankHosts();
  RankHosts(RankHosts&&) = default;

 private:
  RankHosts() = default;
  friend class TimedRanks;
  struct Host {
    std::string device;
    std::unique_ptr<Executor> executor;
    WireRecorder recorder;
  };
  const LocalRanks* ranks_ = nullptr;
  int threads_ = 1;
  std::vector<std::unique_ptr<Host>> hosts_;  // by index; the exchanges hold pointers to them
};

}  // namespace nvfp4_moe::internal::cli
