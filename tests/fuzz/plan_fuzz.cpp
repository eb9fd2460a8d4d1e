// Text as the plan file of an unfinished quantize: refused with one line, or read, written and read
// again as the same.
#include <cstdint>
#include <string_view>

#include "convert/quantize_plan.h"
#include "fuzz/require.h"

using namespace nvfp4_moe::internal;

namespace {

void check_line(const Status& status, Code code) {
  REQUIRE(status.code() == code);
  REQUIRE(!status.message().empty() && status.message().size() < 20000);
  for (const char c : status.message()) REQUIRE(static_cast<unsigned char>(c) >= 0x20);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto plan = parse_quantize_plan({reinterpret_cast<const char*>(data), size});
  if (!plan.ok()) {
    check_line(plan.status(), Code::kBadInput);
    return 0;
  }
  const std::string text = to_json(*plan);
  const auto again = parse_quantize_plan(text);
  REQUIRE(again.ok());
  REQUIRE(to_json(*again) == text);
  REQUIRE(check_same_work(*plan, *again).ok());
  REQUIRE(again->shards == plan->shards && again->experts.size() == plan->experts.size());
  // Against the work of a run, which never matches: the answer is one line too.
  const QuantizePlan other;
  if (const Status differs = check_same_work(other, *plan); !differs.ok())
    check_line(differs, Code::kInvalidArgument);
  return 0;
}
