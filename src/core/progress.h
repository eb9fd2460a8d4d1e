// Progress of a long operation (load, pack, quantize), reported to a callback. The library never
// prints.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

namespace nvfp4_moe::internal {

struct Progress {
  std::string_view what;  // "pack", "quantize", "verify"
  std::string_view item;  // "layer 12 expert 7"
  int64_t done = 0;       // items
  int64_t total = 0;
  int64_t done_bytes = 0;  // bytes processed so far; 0 if bytes are no measure of progress
  int64_t total_bytes = 0;
  double elapsed_s = 0;
};

// Called from the thread that runs the operation, at least once per item. Returning false cancels
// the operation.
using ProgressFn = std::function<bool(const Progress&)>;

}  // namespace nvfp4_moe::internal
