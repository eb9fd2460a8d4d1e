// Arbitrary values at each position of another rank's messages of a run: a named failure, or only
// the results of that rank's own tokens change.

#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "exchange/callback.h"
#include "exchange/echo_peer.h"
#include "exchange/parallel_case.h"
#include "exchange/received.h"
#include "parallel/exchange_counts.h"
#include "support/attack.h"
#include "support/backends.h"

namespace nvfp4_moe::internal::test {
namespace {

constexpr int64_t kTokens = 4;
constexpr uint32_t kInfinity = 0x7F800000, kNaN = 0x7FC00000, kDenormal = 1;

CaseData case_of(ActivationFormat format) {
  Case spec = sized_case(4, 2, 64, 32, kTokens);
  spec.options.activation_format = format;
  spec.options.batch_invariant = true;
  auto data = must(make_case(spec));
  for (int64_t token = 0; token < kTokens;
       ++token)  // all choices are experts of rank 0, so that it waits for nothing from rank 1
    for (int64_t k = 0; k < 2; ++k) data->set_id(token, k, (token + k) % 2);
  return std::move(*data);
}

// The messages of a run, in the order of the calls.
enum Message : int64_t { kCounts, kPackets, kRows };
constexpr int64_t kMessages = 3;

struct Received {
  Status status;
  std::vector<uint8_t> out;
  std::vector<size_t> sizes;  // (kMessages) bytes from rank 1
};

// Rank 0 of two; a test alters its peer's messages.
class RankZero {
 public:
  RankZero(const Backend& backend, const CaseData& data, int64_t capacity) : data_(data) {
    auto connected =
        connect_callbacks({&peer_, EchoPeer::all_to_all_v, nullptr}, 0, 2, kCaseTimeout);
    EXPECT_OK(connected);
    ExpertParallelOptions options = with_capacity(capacity);
    const LayerSource source = source_of(data);
    auto opened = open_over_ranks_on(backend, data.config, source, options_of(data), options,
                                     std::shared_ptr<Exchange>(std::move(*connected)));
    EXPECT_OK(opened);
    layer_ = std::move(*opened);
  }

  // A run in which `change` alters rank 1's messages.
  Received run(const std::function<void(int64_t message, std::span<std::byte>)>& change) {
    Received result;
    peer_.change = [&, before = peer_.calls](int64_t call, std::span<std::byte> received) {
      result.sizes.push_back(received.size());
      if (change) change(call - before, received);
    };
    result.out.assign(data_.out_bytes(), 0xFF);
    PoisonedWorkspace workspace(layer_->workspace_bytes(kTokens));
    result.status =
        layer_->run(data_.batch(result.out.data()), workspace.data(), workspace.size_bytes());
    expect_said(result.status);
    return result;
  }

 private:
  const CaseData& data_;
  EchoPeer peer_;
  std::unique_ptr<MoeLayer> layer_;
};

void put(std::span<std::byte> received, size_t at, uint32_t word) {
  std::memcpy(received.data() + at, &word, std::min(sizeof(word), received.size() - at));
}

class ReceivedPackets : public BackendTest {};

// A scale, a slot, a count or a row's number at each place: either the run fails, or memory is safe
// (under sanitizers) and this rank's own tokens keep their bits.
ATTACK_TEST_P(kReceivedPackets, ReceivedPackets, AnyNumberInAnyPlaceLeavesOtherTokensAlone) {
  constexpr size_t kPlaces = 320;  // more than a packet of any format
  for (const auto& [format, capacity] :
       {std::pair(ActivationFormat::kNvfp4, 0), std::pair(ActivationFormat::kNvfp4, 4),
        std::pair(ActivationFormat::kFp8, 0), std::pair(ActivationFormat::kInt8Block, 0),
        std::pair(ActivationFormat::kBf16, 0)}) {
    const CaseData data = case_of(format);
    if (declines(backend(), data.config)) continue;
    auto rank = std::make_unique<RankZero>(backend(), data, capacity);
    const Received clean = rank->run({});
    ASSERT_OK(clean.status);
    ASSERT_EQ(std::ssize(clean.sizes), kMessages);
    for (int64_t message = 0; message < kMessages; ++message)
      for (size_t at = 0; at < clean.sizes[static_cast<size_t>(message)]; at += 4) {
        // Exchange counts are a number of tokens, a code and whether the stream is captured, the
        // text of a failure, and counts.
        if (message == kCounts ? at >= 16 && at < 512 : at >= kPlaces) continue;
        for (const uint32_t word :
             {kInfinity, kNaN, kDenormal, 0xFFFFFFFFu, 0x80000000u, 0x7F7FFFFFu, 2u}) {
          attacked();
          const Received received =
              rank->run([&, message = message](int64_t of, std::span<std::byte> bytes) {
                if (of == message) put(bytes, at, word);
              });
          if (received.status.ok()) {
            EXPECT_EQ(received.out, clean.out)
                << "message " << message << ", byte " << at << ", " << word;
          } else {
            rank = std::make_unique<RankZero>(backend(), data, capacity);
          }
        }
      }
  }
}

TEST(ReceivedPacket, ScalesThatNoQuantizerWritesFailByName) {
  const CaseData data = case_of(ActivationFormat::kInt8Block);
  for (const Backend* backend : runnable_backends()) {
    if (declines(*backend, data.config)) continue;
    for (const uint32_t word : {kInfinity, kNaN, kDenormal, 0x80000001u, 0u}) {
      const Received received =
          RankZero(*backend, data, 0).run([&](int64_t message, std::span<std::byte> bytes) {
            if (message == kPackets) put(bytes, 64, word);  // after the codes
          });
      EXPECT_THAT(received.status.message(),
                  HasSubstr("token 0 from rank 1: dispatch: block scale: expected a finite number "
                            "from 2^-116, got "));
    }
  }
}

TEST(ReceivedPacket, ARanksOwnExchangeCountsComeBackAsTheyWere) {
  const CaseData data = case_of(ActivationFormat::kBf16);
  struct Host : EchoPeer {
    bool spoils = false;
    static int32_t all_to_all_v(void* user, const void* send, const int64_t* send_bytes, void* recv,
                                const int64_t* recv_bytes, int64_t timeout, char* error,
                                size_t size) {
      const int32_t code =
          EchoPeer::all_to_all_v(user, send, send_bytes, recv, recv_bytes, timeout, error, size);
      if (static_cast<Host*>(user)->spoils) static_cast<char*>(recv)[0] = 99;
      return code;
    }
  } host;
  auto connected =
      must(connect_callbacks({&host, Host::all_to_all_v, nullptr}, 0, 2, kCaseTimeout));
  const LayerSource source = source_of(data);
  const auto layer = open_over_ranks(data.config, source, options_of(data), {},
                                     std::shared_ptr<Exchange>(std::move(*connected)));
  ASSERT_OK(layer);
  host.spoils = true;
  std::vector<uint8_t> out(data.out_bytes());
  PoisonedWorkspace workspace((*layer)->workspace_bytes(kTokens));
  EXPECT_THAT(
      (*layer)->run(data.batch(out.data()), workspace.data(), workspace.size_bytes()).message(),
      HasSubstr("exchange counts: expected this rank's own bytes back"));
}

ATTACK_TEST(kReceivedPackets, ReceivedPacket, CountsBelowZeroAreRefusedOnAllRanks) {
  for (const int64_t wrong : {int64_t{-1}, int64_t{-5}, INT64_MIN}) {
    for (const bool tokens : {false, true}) {
      attacked();
      on_ranks(Over::kThreads, 2, kLong, [&](Exchange& exchange) {
        ExchangeCounts exchange_counts(2, 3);
        const bool lies = exchange.rank() == 1;
        const int64_t counts[3] = {4, lies && !tokens ? wrong : 5, 6};
        const Status status =
            exchange_counts.gather(exchange, lies && tokens ? wrong : 7, {}, false, counts);
        EXPECT_EQ(status.code(), Code::kIo);
        EXPECT_EQ(status.message(), "exchange counts of rank 1: expected counts from 0, got " +
                                        std::to_string(wrong));
      });
    }
  }
}

// No run can have these numbers: arrays would be read and written past their ends.
TEST(PacketCounts, NumbersThatCannotBeAreNamedWithTheirRank) {
  const struct {
    int64_t tokens_of_rank_1, tokens, rows;
    const char* text;
  } cases[] = {
      {2, 2, 4, ""},
      {2, 3, 4,
       "exchange counts of rank 1: expected at most 2 tokens for rank 0, of 2 rows each, got 3 and "
       "4 rows"},
      {2, 2, 5, "got 2 and 5 rows"},
      {2, 0, 1, "got 0 and 1 rows"},
      {2, 2, INT64_MAX, "rows"},
  };
  for (const auto& one : cases)
    on_ranks(Over::kThreads, 2, kCaseTimeout, [&](Exchange& exchange) {
      PacketCounts sizes(2, INT64_MAX, false, 2);
      const bool first = exchange.rank() == 0;
      const std::array<int64_t, 4> counts = {first ? 1 : one.tokens, first ? 2 : one.rows, 0, 0};
      const Status status =
          sizes.gather(exchange, first ? 1 : one.tokens_of_rank_1, {}, false, counts);
      EXPECT_EQ(status.ok(), *one.text == 0);
      EXPECT_THAT(status.message(), HasSubstr(one.text));
    });
}

INSTANTIATE_TEST_SUITE_P(Hosts, ReceivedPackets, testing::ValuesIn(host_backends()),
                         hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal::test
