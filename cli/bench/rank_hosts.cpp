#include "cli/bench/rank_hosts.h"

#include <utility>

namespace nvfp4_moe::internal::cli {
namespace {

// Counts the bytes that go through another transport.
class CountedTransport : public DeviceTransport {
 public:
  CountedTransport(std::unique_ptr<DeviceTransport> inner, int rank, int world,
                   WireRecorder& recorder)
      : inner_(std::move(inner)), rank_(rank), world_(world), recorder_(recorder) {}

  Status all_to_all_v(const AllToAll& call, void* stream, bool captured) override {
    int64_t sent = 0;
    for (int r = 0; r < world_; ++r)
      if (r != rank_) sent += call.send_bytes[r];
    recorder_.add("all_to_all_v", sent, 0);  // dispatch or combine
    return inner_->all_to_all_v(call, stream, captured);
  }
  Status all_gather(const void* mine, const int64_t* bytes, void* all, void* stream,
                    bool captured) override {
    recorder_.add("all_reduce", bytes[rank_] * (world_ - 1), 0);
    return inner_->all_gather(mine, bytes, all, stream, captured);
  }
  Status all_reduce(void* data, int64_t count, DType dtype, void* stream, bool captured) override {
    // NCCL decides how. In a ring each rank sends this much.
    recorder_.add("all_reduce", 2 * (world_ - 1) * count / world_ * bits(dtype) / 8, 0);
    return inner_->all_reduce(data, count, dtype, stream, captured);
  }
  const uint32_t* failure_word() const override { return inner_->failure_word(); }
  Status state() override { return inner_->state(); }
  Status state_of_work() override { return inner_->state_of_work(); }
  void abort(const Status& why) override { inner_->abort(why); }
  std::string describe() const override { return inner_->describe(); }

 private:
  const std::unique_ptr<DeviceTransport> inner_;
  const int rank_, world_;
  WireRecorder& recorder_;
};

// Makes the recorder count transfers between devices. With peer memory they are computed from the
// batches instead.
void count_device(Exchange& exchange, RanksOver over, WireRecorder& recorder) {
  if (over == RanksOver::kNccl)
    exchange.set_device(std::make_unique<CountedTransport>(exchange.take_device(), exchange.rank(),
                                                           exchange.world(), recorder));
}

}  // namespace

void WireRecorder::add(std::string_view what, int64_t sent_bytes, double us) {
  WirePart part = WirePart::kAgree;
  if (what == "all_reduce") part = WirePart::kCombine;
  if (what == "all_to_all_v") {
    part = dispatched_ ? WirePart::kCombine : WirePart::kDispatch;
    dispatched_ = true;
  }
  run_.part_us[static_cast<size_t>(part)] += us;
  run_.sent_bytes[static_cast<size_t>(part)] += static_cast<double>(sent_bytes);
}

Result<RankHosts> RankHosts::make(const LocalRanks& ranks,
                                  const std::function<std::string(int index)>& device,
                                  int threads) {
  RankHosts hosts;
  hosts.ranks_ = &ranks;
  hosts.threads_ = threads;
  for (int index = 0; index < ranks.here(); ++index) {
    auto host = std::make_unique<Host>();
    host->device = device(index);
    host->executor = make_thread_pool(threads);
    ranks.exchange(index)->set_observer([recorder = &host->recorder](const Transfer& transfer) {
      recorder->add(transfer.what, transfer.sent_bytes, transfer.us);
    });
    hosts.hosts_.push_back(std::move(host));
  }
  return hosts;
}

RankHosts::~RankHosts() {
  for (size_t index = 0; index < hosts_.size(); ++index)
    ranks_->exchange(static_cast<int>(index))->set_observer({});
}

Status RankHosts::connect_devices(RanksOver over) {
  std::vector<Status> connected(hosts_.size());
  NVFP4_MOE_TRY(ranks_->each([&](int index) -> Status {
    Exchange& exchange = *ranks_->exchange(index);
    Status& mine = connected[static_cast<size_t>(index)] =
        connect_device(exchange, device(index), over);
    if (mine.ok()) count_device(exchange, over, hosts_[static_cast<size_t>(index)]->recorder);
    return {};  // collective: all ranks have received the failure
  }));
  return connected.front();
}

}  // namespace nvfp4_moe::internal::cli
