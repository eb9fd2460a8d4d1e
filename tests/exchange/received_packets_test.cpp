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
  // all choices are experts of rank 0, so that it waits for nothing from rank 1
  for (int64_t token = 0; token < kTokens; ++token)
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
        must(connect_callbacks({&peer, EchoPeer::all_to_all_v, nullptr}, 0, 2, kCaseTimeout));
    const LayerSource source = source_of(data);
    layer_ = std::move(*must(
        open_over_ranks_on(backend, data.config, source, options_of(data),
                           internal::Parallel{std::move(*connected), with_capacity(capacity)})));
  }

  // A run in which `change` alters rank 1's messages.
  Received run(const std::function<void(int64_t message, std::span<std::byte>)>& change) {
    Received result;
    peer.change = [&, before = peer.calls](int64_t call, std::span<std::byte> received) {
      result.sizes.push_back(received.size());
      if (change) change(call - before, received);
    };
    result.out.assign(data_.out_bytes(), 0xFF);
    PoisonedWorkspace workspace(layer_->workspace_bytes(kTokens));
    result.status =
        layer_->run(data_.batch(result.out.data()), workspace.data(), workspace.size_bytes());
    // a known code, and a message of one line if and only if the status is a failure
    const std::string& message = result.status.message();
    EXPECT_TRUE(result.status.code() >= Code::kOk && result.status.code() <= Code::kCancelled);
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    EXPECT_EQ(result.status.ok(), message.empty()) << message;
    return result;
  }

  EchoPeer peer;

 private:
  const CaseData& data_;
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

TEST_P(ReceivedPackets, ScalesThatNoQuantizerWritesFailByName) {
  const struct {
    ActivationFormat format;
    size_t at;  // after the codes
    std::vector<uint32_t> words;
    const char* text;
  } cases[] = {{ActivationFormat::kInt8Block,
                64,
                {kInfinity, kNaN, kDenormal, 0x80000001u, 0u},
                "block scale: expected a finite number from 2^-116, got "},
               {ActivationFormat::kNvfp4,
                32,
                {0x7F7F7F7Fu, 0x80808080u},
                "block scale: expected an E4M3 byte of at most 126, got "}};
  for (const auto& one : cases) {
    const CaseData data = case_of(one.format);
    if (declines(backend(), data.config)) continue;
    for (const uint32_t word : one.words) {
      const Received received =
          RankZero(backend(), data, 0).run([&](int64_t message, std::span<std::byte> bytes) {
            if (message == kPackets) put(bytes, one.at, word);
          });
      EXPECT_THAT(received.status.message(),
                  HasSubstr(std::string("token 0 from rank 1: dispatch: ") + one.text));
    }
  }
}

TEST_P(ReceivedPackets, ARanksOwnExchangeCountsComeBackAsTheyWere) {
  const CaseData data = case_of(ActivationFormat::kBf16);
  RankZero rank(backend(), data, 0);
  rank.peer.spoils = true;
  EXPECT_THAT(rank.run({}).status.message(),
              HasSubstr("exchange counts: expected this rank's own bytes back"));
}

// No run can have these numbers: arrays would be read and written past their ends.
ATTACK_TEST(kReceivedPackets, PacketCounts, NumbersThatCannotBeAreNamedWithTheirRank) {
  const struct {
    int64_t tokens_of_rank_1, tokens, rows;
    const char* text;
  } cases[] = {
      {2, 2, 4, ""},
      {2, 3, 4, "expected at most 2 tokens for rank 0, of 2 rows each, got 3 and 4 rows"},
      {2, 2, 5, "got 2 and 5 rows"},
      {2, 0, 1, "got 0 and 1 rows"},
      {2, 2, INT64_MAX, "rows"},
      {-1, 2, 4, "expected counts from 0, got -1"},
      {2, 2, -5, "expected counts from 0, got -5"},
      {2, INT64_MIN, 4, "expected counts from 0, got -9223372036854775808"},
  };
  for (const auto& one : cases) {
    attacked();
    on_ranks(Over::kThreads, 2, kCaseTimeout, [&](Exchange& exchange) {
      PacketCounts sizes(2, INT64_MAX, false, 2);
      const bool first = exchange.rank() == 0;
      sizes.own()[0] = first ? 1 : one.tokens;
      sizes.own()[1] = first ? 2 : one.rows;
      const Status status = sizes.gather(exchange, first ? 1 : one.tokens_of_rank_1, {}, false);
      EXPECT_EQ(status.ok(), *one.text == 0);
      if (*one.text != 0) {
        EXPECT_THAT(status.message(),
                    AllOf(StartsWith("exchange counts of rank 1: "), HasSubstr(one.text)));
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Hosts, ReceivedPackets, testing::ValuesIn(host_backends()),
                         hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal::test
