// Sums, agreement and barriers, built on a transport's all_to_all_v.
#include "exchange/exchange.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <thread>

namespace nvfp4_moe::internal {
namespace {

// "VFP4EPE1": identifies this library's handshake, and this byte order
constexpr uint64_t kMagic = 0x3145504534504656;

// Limit of a rank's text in check_same: large enough for a placement with many slots.
constexpr int64_t kLongestText = int64_t{64} << 20;

struct Handshake {
  uint64_t magic = 0;
  int32_t rank = 0;
  int32_t world = 0;
  char version[24] = {};  // of the library, truncated to fit, ends with 0
};

// The first element of the shard that a rank sums. Divides first, since count * world may overflow.
int64_t first_of_shard(int64_t count, int rank, int world) {
  return count / world * rank + std::min<int64_t>(rank, count % world);
}

Status check_blocks(const char* name, std::span<const int64_t> blocks, int world,
                    const void* data) {
  if (blocks.size() != static_cast<size_t>(world))
    return invalid_argument(std::string(name) + "_bytes: expected one number for each of " +
                            std::to_string(world) + " ranks, got " + std::to_string(blocks.size()));
  int64_t total = 0;
  for (const int64_t bytes : blocks)
    if (bytes < 0 || __builtin_add_overflow(total, bytes, &total))
      return invalid_argument(std::string(name) + "_bytes: expected sizes in memory, got " +
                              std::to_string(bytes));
  if (total > 0 && data == nullptr)
    return invalid_argument(std::string(name) + ": expected a pointer, got null");
  return {};
}

}  // namespace

// Claims the exchange for one call: two at once would reach the other ranks in no defined order. A
// poll is short, so a call waits for it.
class Exchange::Call {
 public:
  explicit Call(Exchange& exchange, Use use = Use::kCall) : exchange_(exchange) {
    if (exchange_.forked()) return;  // a thread of the parent may have been in a call or a poll
    Use found = Use::kNone;
    while (!exchange_.in_use_.compare_exchange_weak(found, use)) {
      if (found == Use::kCall) return;
      found = Use::kNone;
      std::this_thread::yield();
    }
    granted_ = true;
  }
  ~Call() {
    if (granted_) exchange_.in_use_.store(Use::kNone);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  Status status() const {
    if (granted_) return {};
    if (exchange_.forked())
      return unsupported(
          "exchange: expected the process that connected it, got one forked from it, whose "
          "connections are its parent's (start it with spawn or exec, and connect there)");
    return {Code::kBusy,
            "exchange: expected one call at a time, got a second one while another is in flight"};
  }

 private:
  Exchange& exchange_;
  bool granted_ = false;
};

std::string name_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

Status rank_is_gone(int rank) {
  return io_error("exchange: expected rank " + std::to_string(rank) + ", got none: it has left");
}

Exchange::Exchange(std::unique_ptr<Transport> transport, int rank, int world, Timeout timeout)
    : transport_(std::move(transport)),
      rank_(rank),
      world_(world),
      timeout_(timeout),
      send_bytes_(static_cast<size_t>(world)),
      recv_bytes_(static_cast<size_t>(world)) {}

Exchange::~Exchange() {
  if (!forked()) return;
  // Their destructors wait for threads that do not exist in the child, and for CUDA.
  static_cast<void>(device_.release());
  static_cast<void>(peers_.release());
  transport_.release()->drop_in_child();
}

Status Exchange::check_rank(int rank, int world, Timeout timeout) {
  if (world < 1 || world > kMostRanks)
    return invalid_argument("world: expected 1 to " + std::to_string(kMostRanks) + " ranks, got " +
                            std::to_string(world));
  if (rank < 0 || rank >= world)
    return invalid_argument("rank: expected 0 to " + std::to_string(world - 1) + " in a world of " +
                            std::to_string(world) + ", got " + std::to_string(rank));
  if (timeout <= Timeout{0})
    return invalid_argument("timeout: expected more than 0 ms, got " +
                            std::to_string(timeout.count()));
  if (timeout > kLongestExchangeTimeout)
    return invalid_argument("timeout: expected at most " +
                            std::to_string(kLongestExchangeTimeout.count()) + " ms, got " +
                            std::to_string(timeout.count()));
  return {};
}

Result<std::unique_ptr<Exchange>> Exchange::connect(std::unique_ptr<Transport> transport, int rank,
                                                    int world, Timeout timeout) {
  NVFP4_MOE_TRY(check_rank(rank, world, timeout));
  std::unique_ptr<Exchange> exchange(new Exchange(std::move(transport), rank, world, timeout));
  Handshake mine{kMagic, rank, world, {}};
  std::string_view(NVFP4_MOE_VERSION).copy(mine.version, sizeof(mine.version) - 1);
  std::vector<Handshake> all(static_cast<size_t>(world));
  NVFP4_MOE_TRY(exchange->gather("handshake", &mine, sizeof(mine), all.data(), timeout));
  for (int r = 0; r < world; ++r) {
    Handshake& other = all[static_cast<size_t>(r)];
    if (other.magic != kMagic)
      return invalid_argument("exchange: expected a handshake of this library from rank " +
                              std::to_string(r) + ", got other bytes");
    other.version[sizeof(other.version) - 1] = 0;
    if (std::strcmp(other.version, all[0].version) != 0)
      return invalid_argument("exchange: expected nvfp4-moe " + std::string(all[0].version) +
                              " on rank " + std::to_string(r) + " as on rank 0, got " +
                              other.version);
    if (other.rank == r && other.world == world) continue;
    return invalid_argument("exchange: expected rank " + std::to_string(r) + " of a world of " +
                            std::to_string(world) + " in place " + std::to_string(r) +
                            ", got rank " + std::to_string(other.rank) + " of a world of " +
                            std::to_string(other.world));
  }
  return exchange;
}

Status Exchange::move(const char* what, const void* send, std::span<const int64_t> send_bytes,
                      void* recv, std::span<const int64_t> recv_bytes, Timeout timeout) {
  if (broken_.ok()) broken_ = aborted();
  NVFP4_MOE_TRY(broken_);
  const AllToAll call{what,
                      static_cast<const std::byte*>(send),
                      send_bytes.data(),
                      static_cast<std::byte*>(recv),
                      recv_bytes.data(),
                      timeout};
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  broken_ = transport_->all_to_all_v(call);
  const double us = std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
  const int64_t sent = std::reduce(send_bytes.begin(), send_bytes.end());
  observe({what, sent - send_bytes[static_cast<size_t>(rank_)], us});
  return broken_;
}

std::byte* Exchange::scratch(size_t size_bytes) {
  if (scratch_.size() < size_bytes) scratch_.resize(size_bytes);
  return scratch_.data();
}

Status Exchange::gather(const char* what, const void* mine, int64_t bytes, void* all,
                        Timeout timeout) {
  std::byte* const copies = scratch(static_cast<size_t>(bytes) * static_cast<size_t>(world_));
  for (int r = 0; r < world_ && bytes > 0; ++r)
    std::memcpy(copies + r * bytes, mine, static_cast<size_t>(bytes));
  std::fill(send_bytes_.begin(), send_bytes_.end(), bytes);
  return move(what, copies, send_bytes_, all, send_bytes_, timeout);
}

Status Exchange::all_to_all_v(const void* send, std::span<const int64_t> send_bytes, void* recv,
                              std::span<const int64_t> recv_bytes) {
  NVFP4_MOE_TRY(check_blocks("send", send_bytes, world_, send));
  NVFP4_MOE_TRY(check_blocks("recv", recv_bytes, world_, recv));
  const Call call(*this);
  NVFP4_MOE_TRY(call.status());
  return move("all_to_all_v", send, send_bytes, recv, recv_bytes, timeout_);
}

Status Exchange::all_gather(const void* mine, int64_t bytes, void* all) {
  if (bytes < 0) return invalid_argument("bytes: expected 0 or more, got " + std::to_string(bytes));
  const Call call(*this);
  NVFP4_MOE_TRY(call.status());
  return gather("all_gather", mine, bytes, all, timeout_);
}

Status Exchange::all_reduce(float* data, int64_t count) {
  if (count < 0) return invalid_argument("count: expected 0 or more, got " + std::to_string(count));
  const Call call(*this);
  NVFP4_MOE_TRY(call.status());
  const int64_t first = first_of_shard(count, rank_, world_);
  const int64_t mine = first_of_shard(count, rank_ + 1, world_) - first;
  // Each rank sums one shard and sends it to all. Every element is added on one rank only, so its
  // order is fixed. Each rank sends 2 (world - 1) / world of the data, as in a ring.
  for (int r = 0; r < world_; ++r) {
    const int64_t shard = first_of_shard(count, r + 1, world_) - first_of_shard(count, r, world_);
    send_bytes_[static_cast<size_t>(r)] = shard * int64_t{sizeof(float)};
    recv_bytes_[static_cast<size_t>(r)] = mine * int64_t{sizeof(float)};
  }
  auto* const parts =
      reinterpret_cast<float*>(scratch(static_cast<size_t>(mine * world_) * sizeof(float)));
  NVFP4_MOE_TRY(move("all_reduce", data, send_bytes_, parts, recv_bytes_, timeout_));
  for (int64_t i = 0; i < mine; ++i) {
    float sum = parts[i];
    for (int rank = 1; rank < world_; ++rank) sum += parts[rank * mine + i];
    data[first + i] = sum;
  }
  for (int r = 0; r < world_ && mine > 0; ++r) std::copy_n(data + first, mine, parts + r * mine);
  return move("all_reduce", parts, recv_bytes_, data, send_bytes_, timeout_);
}

Status Exchange::barrier() {
  const Call call(*this);
  NVFP4_MOE_TRY(call.status());
  const std::byte nothing{0};
  // one byte from each rank: a transport need not wait for an empty message
  std::vector<std::byte> all(static_cast<size_t>(world_));
  return gather("barrier", &nothing, 1, all.data(), timeout_);
}

Status Exchange::agree(const Status& mine, Timeout timeout) {
  const Call call(*this);
  NVFP4_MOE_TRY(call.status());
  const SentStatus<508> sent(mine);
  std::vector<SentStatus<508>> all(static_cast<size_t>(world_));
  NVFP4_MOE_TRY(
      gather("agree", &sent, sizeof(sent), all.data(), timeout == Timeout{0} ? timeout_ : timeout));
  for (int r = 0; r < world_; ++r)
    if (const auto& other = all[static_cast<size_t>(r)]; other.code != 0)
      return other.failure().in("rank " + std::to_string(r));
  return {};
}

Status Exchange::gather_texts(const char* what, const std::string& mine,
                              std::vector<std::string>& all) {
  const auto size = static_cast<int64_t>(mine.size());
  std::vector<int64_t> sizes(static_cast<size_t>(world_));
  NVFP4_MOE_TRY(gather(what, &size, sizeof(size), sizes.data(), timeout_));
  for (int r = 0; r < world_; ++r) {
    const int64_t sent = sizes[static_cast<size_t>(r)];
    if (sent < 0 || sent > kLongestText)
      return invalid_argument(std::string("exchange: ") + what + ": expected a text of at most " +
                              std::to_string(kLongestText) + " bytes from rank " +
                              std::to_string(r) + ", got " + std::to_string(sent));
  }
  std::string copies;
  for (int r = 0; r < world_; ++r) copies += mine;
  std::string received(static_cast<size_t>(std::reduce(sizes.begin(), sizes.end())), '\0');
  std::fill(send_bytes_.begin(), send_bytes_.end(), size);
  NVFP4_MOE_TRY(move(what, copies.data(), send_bytes_, received.data(), sizes, timeout_));
  all.clear();
  size_t at = 0;
  for (const int64_t bytes : sizes) {
    all.push_back(received.substr(at, static_cast<size_t>(bytes)));
    at += static_cast<size_t>(bytes);
  }
  return {};
}

Status Exchange::check_same(std::string_view what, const Facts& mine) {
  const Call call(*this);
  NVFP4_MOE_TRY(call.status());
  std::string text;  // name 0 value 0 name 0 ...: neither contains a 0
  for (const auto& [name, value] : mine) text += name + '\0' + value + '\0';
  std::vector<std::string> all;
  NVFP4_MOE_TRY(gather_texts("check_same", text, all));
  const auto parse = [](const std::string& from) {
    std::vector<std::string> parts;
    for (size_t at = 0, end = 0; (end = from.find('\0', at)) != std::string::npos; at = end + 1)
      parts.push_back(from.substr(at, end - at));
    return parts;
  };
  const std::vector<std::string> expected = parse(all[0]);
  for (int r = 1; r < world_; ++r) {
    const std::vector<std::string> got = parse(all[static_cast<size_t>(r)]);
    const std::string where = std::string(what) + " of rank " + std::to_string(r);
    for (size_t i = 0; i + 1 < std::min(expected.size(), got.size()); i += 2) {
      if (got[i] != expected[i])
        return invalid_argument(where + ": expected " + expected[i] + " as on rank 0, got " +
                                got[i]);
      if (got[i + 1] != expected[i + 1])
        return invalid_argument(where + ": expected " + got[i] + " " + expected[i + 1] +
                                " as on rank 0, got " + got[i + 1]);
    }
    if (got.size() != expected.size())
      return invalid_argument(where + ": expected " + std::to_string(expected.size() / 2) +
                              " values as on rank 0, got " + std::to_string(got.size() / 2));
  }
  return {};
}

Status Exchange::aborted() {
  const std::lock_guard lock(abort_mutex_);
  return aborted_;
}

Status Exchange::poll() {
  const Call call(*this, Use::kPoll);
  if (const Status status = call.status(); !status.ok()) return forked() ? status : Status();
  if (broken_.ok()) broken_ = aborted();
  if (broken_.ok()) broken_ = transport_->poll();
  return broken_;
}

void Exchange::abort(const Status& why) { abort_agreed(why.in("rank " + std::to_string(rank_))); }

void Exchange::abort_agreed(const Status& why) {
  if (forked()) return;
  {
    const std::lock_guard lock(abort_mutex_);
    if (!aborted_.ok()) return;
    aborted_ = why;
  }
  const Call call(*this);
  if (call.status().ok()) {
    if (!broken_.ok()) return;
    broken_ = why;
  }
  transport_->abort(why);
}

}  // namespace nvfp4_moe::internal
