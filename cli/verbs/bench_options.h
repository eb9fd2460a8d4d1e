// Options and preparations of `bench`, on one rank and over several.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/bench/configuration.h"
#include "cli/console/report.h"
#include "cli/verbs/subject_options.h"

namespace nvfp4_moe::internal::cli {

struct BenchVerb {
  SubjectOptions subject;  // activation_format: a list
  std::string tokens = "1,8,64";
  int64_t rounds = 1;
  Repeat repeat;
  bool steps = false;
  int ranks = 0;                 // --ep; 0: not given, one rank
  std::string combine, routing;  // lists; empty: all
  std::string over;              // empty: nccl on GPUs
  bool balance = false;
  std::optional<int64_t> slots_per_rank;  // with balance
  std::string html;                       // --html
};

// Parses --tokens.
Result<std::vector<int64_t>> token_sweep(const BenchVerb& verb);
// All combinations of --backend and --activation-format, each a list.
Result<std::vector<Configuration>> configurations(const BenchVerb& verb, const Report& report);
// Returns false if one disagrees with the reference; then nothing is timed.
Result<bool> check_all(const std::vector<Configuration>& all, const std::string& device,
                       uint64_t seed, Report& report);

// Runs bench --ep. page: as checked_page returns it.
Status bench_ranks(const BenchVerb& verb, const std::string& page, Report& report);

}  // namespace nvfp4_moe::internal::cli
