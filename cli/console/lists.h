// The small languages of option values: lists, sweeps, ranges and sizes. All errors are
// kInvalidArgument.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/status.h"

namespace nvfp4_moe::internal::cli {

// "0,3,5-9": ascending, without repetitions. At most 1 000 000 numbers.
Result<std::vector<int64_t>> parse_list(std::string_view text);
// "1,8,64..4096:x2" or "0..64:+8": in the order written. A range without a step doubles; it ends at
// the last value that does not pass its end.
Result<std::vector<int64_t>> parse_sweep(std::string_view text);
// "16:8": first 16, count 8.
Result<std::pair<int64_t, int64_t>> parse_first_count(std::string_view text);
// "cpu,cpu:avx2": in the order written, none empty.
Result<std::vector<std::string>> parse_names(std::string_view text);
// "5GB", "4GiB", "200MB", "1048576": bytes. GB is 10^9, GiB 2^30.
Result<uint64_t> parse_bytes(std::string_view text);

// "64 B", "1.3 GiB".
std::string bytes_text(uint64_t bytes);
// "0.8 s", "2:05", "1:02:03".
std::string duration_text(double seconds);

}  // namespace nvfp4_moe::internal::cli
