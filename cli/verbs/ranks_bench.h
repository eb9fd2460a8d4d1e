// RanksBench: the measurements of `bench --ep` and their order.
//
// A cell is a number of tokens and a routing. Each round times all its rows:
// - the layer on one rank,
// - the ranks' own experts without an exchange,
// - the layer over ranks, for each --combine and each --over,
// - with --balance the same again, with a placement proposed from the cell's load.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/bench/ranks_table.h"
#include "cli/console/progress_bar.h"
#include "cli/verbs/bench_options.h"
#include "cli/verbs/ranks.h"

namespace nvfp4_moe::internal::cli {

// The ranks for one value of --over. Each has its own ranks, because an exchange connects devices
// in one way only.
struct RanksWay {
  std::optional<RanksOver> over;  // nullopt: host memory
  VerbRanks ranks;
  std::optional<RankHosts> hosts;  // holds the address of ranks
  Status connected;                // kUnsupported: its rows show that
};

class RanksBench {
 public:
  // ways: at least one. all: the configurations to time.
  RanksBench(const BenchVerb& verb, Report& report,
             const std::vector<std::unique_ptr<RanksWay>>& ways, std::vector<Configuration>& all);
  Status run(const std::vector<int64_t>& sweep, const std::vector<CombineBy>& combines,
             const std::vector<RankRouting>& routings);

 private:
  // A layer over ranks.
  struct Divided {
    RanksWay* way;
    bool balanced;
    TimedRanks timed;
  };
  struct Layers {
    Configuration* configuration;
    std::vector<Divided> divided;
  };
  // The subject of a cell's row: the configuration on one rank, or over ranks.
  struct Row {
    Configuration* configuration;
    Divided* divided;  // null: one rank
    RanksWork work;
  };

  const LocalRanks& ranks() const { return ways_.front()->ranks.ranks; }
  const RankHosts& hosts() const { return *ways_.front()->hosts; }
  int64_t experts() const { return all_.front().subject.options.num_experts; }
  // Shares the status of a step that this process did alone. A failure ends all processes.
  Status share(const Status& mine) const;
  ProgressStyle progress() const;
  Status choose_slots();
  Status prepare_copies(size_t combines);
  Status open_all(const std::vector<CombineBy>& combines, int64_t most_tokens);
  Status open_over(Layers& layers, RanksWay& way, const std::string& backend,
                   const RanksLayer& divided, const ProgressFn& progress, Json& described);
  // Compares the ranks' output for a few tokens with one rank's.
  Status check(const Configuration& one, TimedRanks& timed) const;
  std::vector<Row> rows_of(RankRouting routing);
  RanksCell cell_of(const Row& row, int64_t tokens, RankRouting routing) const;
  Status time_all(const std::vector<int64_t>& sweep, const std::vector<RankRouting>& routings);
  template <class Step>
  Status time_cell(int64_t tokens, RankRouting routing, const Step& step, Json& in_order);
  Status prepare(const std::vector<Row>& rows);
  Result<RanksRound> time(const Row& row) const;
  // Times the whole layer on rank 0 while the others wait.
  Result<RanksRound> time_alone(Configuration& one) const;

  const BenchVerb& verb_;
  Report& report_;
  const std::vector<std::unique_ptr<RanksWay>>& ways_;
  std::vector<Configuration>& all_;
  const bool first_;
  int64_t slots_per_rank_ = 0;  // 0: no --balance
  int64_t copies_ = 1;
  std::vector<Layers> layers_;  // by configuration
  std::vector<RanksCell> cells_;
  std::shared_ptr<ColdBatches> batches_;  // the cell's
};

}  // namespace nvfp4_moe::internal::cli
