// A message is a header and its bytes; a header of kind kAbort carries the text of a failure instead.
//
// A rank sends its header to all at once and a message's bytes once the other's header has come and says the same: ranks
// that do not agree on an operation or a size then have the cause and not half a message. A rank that fails says why to
// all whose bytes it has not begun, and closes.
#include "exchange/tcp.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <vector>

#include "core/fork.h"
#include "exchange/rendezvous.h"
#include "exchange/socket.h"

namespace nvfp4_moe {
namespace {

constexpr size_t kLongestFailure = 1024;  // of an abort's text
constexpr Timeout kOthersSayWhy{200};     // for a failure's cause to come from whoever saw it first
constexpr Timeout kLeaving{1000};         // to tell the others
enum class Kind : uint32_t { kCall = 1, kBytes = 2, kAbort = 3 };  // of a header

struct Header {
  Kind kind = Kind::kCall;
  uint32_t call = 0;    // its number; of an abort: the Code
  int64_t bytes = 0;    // that follow
  int64_t expects = 0;  // of the other rank
  char what[16] = {};
  uint64_t balance = 0;  // of kCall: the rank's balance_of
};

// The sizes that a rank sends less those that it expects, each as a hash with its two ranks. Over all ranks it is 0 if each
// two of them agree; if not, once in 2^64 calls.
uint64_t balance_of(const AllToAll& call, int rank, int world) {
  const auto hash = [](int from, int to, int64_t bytes) {
    uint64_t bits = static_cast<uint64_t>(bytes) * 0x9E3779B97F4A7C15 + static_cast<uint64_t>(from * kMostRanks + to);
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB;
    return bits ^ bits >> 31;
  };
  uint64_t balance = 0;
  for (int peer = 0; peer < world; ++peer)
    balance += hash(rank, peer, call.send_bytes[peer]) - hash(peer, rank, call.recv_bytes[peer]);
  return balance;
}

// One call with one other rank: a header of kCall each way, then, where there are bytes, one of kBytes and the bytes.
struct Flow {
  enum class Stage { kHeader, kGo, kBytes, kDone };
  Stage out = Stage::kHeader, in = Stage::kHeader;
  size_t out_at = 0, in_at = 0;  // of the header that is being moved
  Header mine, theirs;
  std::span<const std::byte> send;  // what is left
  std::span<std::byte> recv;
  bool done() const { return out == Stage::kDone && in == Stage::kDone; }
  bool may_send() const { return out != Stage::kDone && (out != Stage::kGo || in != Stage::kHeader); }
  // Whether the other rank looks at what comes next as a header.
  bool between_messages() const { return out_at == 0 && out != Stage::kBytes; }
};

class TcpTransport : public Transport {
 public:
  TcpTransport(std::vector<Socket> peers, int rank, Socket wake)
      : peers_(std::move(peers)),
        rank_(rank),
        world_(static_cast<int>(peers_.size())),
        wake_(std::move(wake)),
        flows_(peers_.size()) {}

  Status all_to_all_v(const AllToAll& call) override {
    const std::lock_guard lock(in_call_);
    const Status status = transfer(call);
    if (!status.ok()) say_why(status);
    return status;
  }

  void abort(const Status& why) override {
    {
      const std::lock_guard lock(reason_mutex_);
      if (reason_.ok()) reason_ = why;
    }
    const uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake_.fd(), &one, sizeof(one));
    const std::unique_lock lock(in_call_, std::try_to_lock);
    if (lock.owns_lock()) say_why(why);  // else the call in flight does
  }

  Status look() override {
    const std::unique_lock lock(in_call_, std::try_to_lock);
    if (!lock.owns_lock()) return {};
    Status seen = reason();
    if (seen.ok() && !anything_came()) return {};
    for (int peer = 0; peer < world_; ++peer) {
      if (peer == rank_ || !socket(peer).open()) continue;
      // Before the bytes: where the end has come by now, all that the rank has said lies there.
      const bool left = has_ended(socket(peer));
      // A rank that is ahead has sent its next call's header. It sends no bytes before this rank's header, so that what
      // lies behind can only be why it left; where it is anything else, the next call says what is wrong with it.
      std::array<Header, 2> headers;
      const size_t there = peek(socket(peer), bytes_of(headers)).bytes / sizeof(Header);
      size_t ahead = 0;
      while (ahead < there && headers[ahead].kind != Kind::kAbort) ++ahead;
      // A rank that says why it left knows more than the end of another's connection does.
      if (ahead < there) {
        read_all(socket(peer), bytes_of(headers).first((ahead + 1) * sizeof(Header)), Deadline(kLeaving));
        seen = failure_of(peer, headers[ahead]);
      } else if (left && there < headers.size() && seen.ok()) {
        seen = rank_is_gone(peer);
      }
    }
    if (!seen.ok()) say_why(seen);
    return seen;
  }

  void drop_in_child() override { wake_.close(); }

 private:
  const Socket& socket(int peer) const { return peers_[static_cast<size_t>(peer)]; }
  Flow& flow(int peer) { return flows_[static_cast<size_t>(peer)]; }
  Status reason() {
    const std::lock_guard lock(reason_mutex_);
    return reason_;
  }
  void begin(const AllToAll& call) {
    ++calls_;
    const uint64_t balance = balance_of(call, rank_, world_);
    const std::byte* send = call.send;
    std::byte* recv = call.recv;
    for (int peer = 0; peer < world_; ++peer) {
      const int64_t out = call.send_bytes[peer], in = call.recv_bytes[peer];
      if (peer == rank_) {
        if (out > 0) std::memcpy(recv, send, static_cast<size_t>(out));
      } else {
        Flow& each = flow(peer) = Flow{};
        each.mine.call = calls_;
        each.mine.bytes = out;
        each.mine.expects = in;
        each.mine.balance = balance;
        std::string_view(call.what).copy(each.mine.what, sizeof(each.mine.what) - 1);
        each.send = {send, static_cast<size_t>(out)};
        each.recv = {recv, static_cast<size_t>(in)};
      }
      if (out > 0) send += out;
      if (in > 0) recv += in;
    }
  }

  // The text behind an abort's header.
  Status failure_of(int peer, const Header& header) {
    std::string text(static_cast<size_t>(std::clamp<int64_t>(header.bytes, 0, kLongestFailure)), ' ');
    if (!read_all(socket(peer), std::as_writable_bytes(std::span(text)), Deadline(kLeaving))) return rank_is_gone(peer);
    if (text.empty()) text = "exchange: rank " + std::to_string(peer) + " ended it and gave no reason";
    return {code_of_failure(header.call), text};
  }

  Status check_header(int peer, Kind expected) {
    const Flow& each = flow(peer);
    const Header& theirs = each.theirs;
    if (theirs.kind == Kind::kAbort) return failure_of(peer, theirs);
    const auto what = [](const Header& header) {
      return std::string(header.what, strnlen(header.what, sizeof(header.what)));
    };
    if (theirs.kind != expected || theirs.call != calls_ || what(theirs) != what(each.mine))
      return invalid_argument("exchange: expected one operation on all ranks, got " + what(each.mine) + " on rank " +
                              std::to_string(rank_) + " and " + what(theirs) + " on rank " + std::to_string(peer));
    if (theirs.bytes != each.mine.expects)
      return sizes_differ(theirs.what, rank_, each.mine.expects, peer, theirs.bytes);
    if (each.mine.bytes != theirs.expects)
      return sizes_differ(theirs.what, peer, theirs.expects, rank_, each.mine.bytes);
    return {};
  }

  // Moves what can be moved now. Ok, or why this rank cannot go on.
  Status move_with(int peer) {
    Flow& each = flow(peer);
    using Stage = Flow::Stage;
    // Reads first: a rank that went has said why, and writing to it would only fail.
    while (each.in != Stage::kDone) {
      const bool header = each.in != Stage::kBytes;
      const Movement read = read_some(socket(peer), header ? bytes_of(each.theirs).subspan(each.in_at) : each.recv);
      if (read.moved == Moved::kEnded) return rank_is_gone(peer);
      if (read.moved == Moved::kNothingYet) break;
      if (!header) {
        each.recv = each.recv.subspan(read.bytes);
        if (each.recv.empty()) each.in = Stage::kDone;
      } else if ((each.in_at += read.bytes) == sizeof(Header)) {
        NVFP4_MOE_TRY(check_header(peer, each.in == Stage::kHeader ? Kind::kCall : Kind::kBytes));
        each.in_at = 0;
        each.in = each.in == Stage::kGo ? Stage::kBytes : each.recv.empty() ? Stage::kDone : Stage::kGo;
      }
    }
    while (each.may_send()) {
      const bool header = each.out != Stage::kBytes;
      each.mine.kind = each.out == Stage::kHeader ? Kind::kCall : Kind::kBytes;
      const Movement sent =
          write_some(socket(peer), header ? bytes_of(std::as_const(each.mine)).subspan(each.out_at) : each.send);
      if (sent.moved == Moved::kEnded) return rank_is_gone(peer);
      if (sent.moved == Moved::kNothingYet) break;
      if (!header) {
        each.send = each.send.subspan(sent.bytes);
        if (each.send.empty()) each.out = Stage::kDone;
      } else if ((each.out_at += sent.bytes) == sizeof(Header)) {
        each.out_at = 0;
        each.out = each.out == Stage::kGo ? Stage::kBytes : each.send.empty() ? Stage::kDone : Stage::kGo;
      }
    }
    return {};
  }

  // Bytes or an end, on any connection: what a look almost always finds none of, by one call for all of them.
  bool anything_came() {
    polled_.clear();
    for (const Socket& peer : peers_)
      if (peer.open()) polled_.push_back({peer.fd(), POLLIN | POLLRDHUP, 0});
    return ::poll(polled_.data(), polled_.size(), 0) != 0;
  }

  // Waits until something can move. False once the deadline has passed.
  bool wait(const Deadline& deadline) {
    polled_.assign(1, {wake_.fd(), POLLIN, 0});
    for (int peer = 0; peer < world_; ++peer) {
      if (peer == rank_ || flow(peer).done()) continue;
      const Flow& each = flow(peer);
      const int events = (each.in != Flow::Stage::kDone ? POLLIN : 0) | (each.may_send() ? POLLOUT : 0);
      polled_.push_back({socket(peer).fd(), static_cast<int16_t>(events), 0});
    }
    ::poll(polled_.data(), polled_.size(), deadline.left_ms());
    return !deadline.passed();
  }

  Status transfer(const AllToAll& call) {
    NVFP4_MOE_TRY(reason());
    if (call.send_bytes[rank_] != call.recv_bytes[rank_])
      return sizes_differ(call.what, rank_, call.recv_bytes[rank_], rank_, call.send_bytes[rank_]);
    begin(call);
    const Deadline deadline(call.timeout);
    while (true) {
      NVFP4_MOE_TRY(reason());
      bool done = true;
      for (int peer = 0; peer < world_; ++peer) {
        if (peer == rank_ || flow(peer).done()) continue;
        if (const Status moved = move_with(peer); !moved.ok()) return cause_of(moved, peer);
        done = done && flow(peer).done();
      }
      if (done && all_agree(call)) return {};
      // Two others disagree about a block between them. They see it, and each says so to all.
      for (int peer = 0; peer < world_ && done; ++peer)
        if (peer != rank_) flow(peer).in = Flow::Stage::kHeader;
      if (!wait(deadline)) return late(call);
    }
  }

  // A rank whose own blocks all fit learns here that two others disagree, so that a call succeeds on all ranks or on none. In a
  // world of two each rank sees all blocks.
  bool all_agree(const AllToAll& call) {
    uint64_t sum = balance_of(call, rank_, world_);
    for (int peer = 0; peer < world_; ++peer) sum += peer == rank_ ? 0 : flow(peer).theirs.balance;
    return sum == 0 || world_ == 2;
  }

  // A connection that ends may be the second thing that happened: whoever saw the first one says so.
  Status cause_of(const Status& failure, int failed) {
    if (failure.code() != Code::kIo) return failure;
    std::vector<int> others;
    for (int peer = 0; peer < world_; ++peer)
      if (peer != rank_ && peer != failed && flow(peer).in != Flow::Stage::kBytes) others.push_back(peer);
    const Deadline deadline(kOthersSayWhy);
    while (!others.empty() && !deadline.passed()) {
      polled_.clear();
      for (const int peer : others) polled_.push_back({socket(peer).fd(), POLLIN, 0});
      if (::poll(polled_.data(), polled_.size(), deadline.left_ms()) <= 0) break;
      std::vector<int> silent;
      for (const int peer : others) {
        Flow& each = flow(peer);
        const Movement read = read_some(socket(peer), bytes_of(each.theirs).subspan(each.in_at));
        each.in_at += read.bytes;
        if (each.in_at == sizeof(Header) && each.theirs.kind == Kind::kAbort) return failure_of(peer, each.theirs);
        if (read.moved != Moved::kEnded && each.in_at < sizeof(Header)) silent.push_back(peer);
      }
      others = silent;
    }
    return failure;
  }

  Status late(const AllToAll& call) {
    std::vector<int> missing;
    for (int peer = 0; peer < world_; ++peer)
      if (peer != rank_ && !flow(peer).done()) missing.push_back(peer);
    return late_ranks(call.what, world_, missing, call.timeout);
  }

  // Once: to all that are not in the middle of this rank's bytes, to whom only the end of the connection can be said.
  void say_why(const Status& why) {
    const std::string text = why.message().substr(0, kLongestFailure);
    Header header;
    header.kind = Kind::kAbort;
    header.call = static_cast<uint32_t>(why.code());
    header.bytes = static_cast<int64_t>(text.size());
    const Deadline deadline(kLeaving);
    for (int peer = 0; peer < world_; ++peer) {
      Socket& to = peers_[static_cast<size_t>(peer)];
      if (peer != rank_ && to.open() && flow(peer).between_messages() &&
          write_all(to, bytes_of(std::as_const(header)), deadline))
        write_all(to, std::as_bytes(std::span(text)), deadline);
      to.close();
    }
  }

  std::vector<Socket> peers_;  // (world), this rank's not open
  const int rank_, world_;
  Socket wake_;  // an eventfd: readable once this rank is to end
  std::mutex in_call_;
  std::vector<Flow> flows_;     // (world) of the call in flight, guarded by in_call_
  std::vector<pollfd> polled_;  // likewise
  uint32_t calls_ = 0;          // likewise
  std::mutex reason_mutex_;
  Status reason_;  // of abort
  // A connection that a child still held would hide this process's end from the other ranks, and a child may never know of
  // the exchange.
  const InEveryChild closes_{[](void* self) {
                               for (Socket& peer : static_cast<TcpTransport*>(self)->peers_) peer.close();
                             },
                             this};
};

}  // namespace

Result<std::unique_ptr<Transport>> make_tcp_transport(std::vector<Socket> peers, int rank) {
  Socket wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.open()) return io_error(std::string("exchange: eventfd: ") + std::strerror(errno));
  return std::unique_ptr<Transport>(std::make_unique<TcpTransport>(std::move(peers), rank, std::move(wake)));
}

Result<std::unique_ptr<Exchange>> connect_peers(std::vector<Socket> peers, int rank, Timeout timeout) {
  const int world = static_cast<int>(peers.size());
  NVFP4_MOE_ASSIGN(std::unique_ptr<Transport> transport, make_tcp_transport(std::move(peers), rank));
  return Exchange::connect(std::move(transport), rank, world, timeout);
}

Result<std::unique_ptr<Exchange>> connect_tcp(const std::string& address, int port, int rank, int world,
                                              Timeout timeout) {
  NVFP4_MOE_TRY(Exchange::check_rank(rank, world, timeout));
  NVFP4_MOE_ASSIGN(std::vector<Socket> peers, meet(address, port, rank, world, timeout));
  return connect_peers(std::move(peers), rank, timeout);
}

}  // namespace nvfp4_moe
