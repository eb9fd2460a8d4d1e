// Prints the work of the Blackwell GEMMs, computed without a device by their plan and scheduler, as
// one JSON object for bench/estimate_blackwell.py.
//
//   bench_blackwell_plans
//
// For every chip, layer shape and number of tokens it prints the configuration that the plan
// chooses and the work of its launch, as the mean over several uniformly random routings: tiles;
// k-blocks of all ctas and of the busiest cta; octets of rows times k-blocks (the multiplications),
// in the same two ways; bytes of weights and rows that are read. Configurations, bounds and the
// schedule are those of the kernels.
//
// "hopper" is the work of sm90's GEMMs on 132 multiprocessors, for the cells that were measured:
// the routings of moe_bench (up to 64 tokens the draw nearest to the mean) and of
// bench_hopper_layers (any draw with a local expert).
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <set>
#include <vector>

#include "backend/cuda/gemm/scheduler.h"
#include "backend/cuda/packed_tile.h"
#include "backend/cuda/steps/sizes.h"
#include "backend/sm120/config.h"
#include "backend/sm90/config_table.h"
#include "core/config.h"
#include "core/random.h"
#include "io/json.h"
#if __has_include("backend/sm100/config.h")
#include "backend/sm100/config.h"
#define NVFP4_MOE_HAS_SM100
#endif

namespace nvfp4_moe::internal {
namespace {

// More draws if a rank has few rows, because then the number of experts hit varies most.
int draws_of(int64_t tokens) { return tokens <= 64 ? 128 : 8; }

struct Chip {
  const char* name;
  const char* backend;
  int multiprocessors;
};
constexpr Chip kChips[] = {
    {"B200", "sm100", 148}, {"RTX 5090", "sm120", 170}, {"RTX PRO 6000", "sm120", 188}};

// The shapes of bench_hopper_layers, and the ranks of published figures.
struct LayerShape {
  const char* name;
  int64_t local_experts, experts, top_k, hidden, intermediate;
};
constexpr LayerShape kShapes[] = {
    {"v4pro_ep8", 48, 384, 6, 7168, 3072},  {"v4flash", 256, 256, 6, 4096, 2048},
    {"qwen30b", 128, 128, 8, 2048, 768},    {"mixtral", 8, 8, 2, 4096, 14336},
    {"v4pro_ep4", 96, 384, 6, 7168, 3072},  {"v4flash_ep4", 64, 256, 6, 4096, 2048},
    {"v4flash_ep8", 32, 256, 6, 4096, 2048}};
constexpr size_t kOwnShapes = 4;  // the others are of published figures, all on B200 and similar
constexpr int64_t kTokens[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096};
constexpr int64_t kPublishedTokens[] = {8,    32,   256,   2048,
                                        4096, 8192, 32768, 65536};  // of all ranks

// A backend's configurations, from its config.h.
struct Table {
  int block_k, max_ctas;
  std::vector<const char*> names;
  std::vector<int> tile_n;
  std::vector<int32_t> min_saved, max_splits;
  std::vector<int64_t> partial_bytes;
  int (*routed_config)(const MoeConfig&, const ExpertRange&, int64_t tokens);
  bool (*splits_k)(const MoeConfig&, int64_t k);
};
template <class Configs, class MinSaved, class MaxSplits>
Table table_of(const Configs& configs, int block_k, int max_ctas, MinSaved min_saved,
               MaxSplits max_splits, decltype(Table::routed_config) routed_config,
               decltype(Table::splits_k) splits_k) {
  Table table{block_k, max_ctas, {}, {}, {}, {}, {}, routed_config, splits_k};
  for (const auto& config : configs) {
    table.names.push_back(config.name);
    table.tile_n.push_back(config.tile_n);
    table.min_saved.push_back(min_saved(config));
    table.max_splits.push_back(max_splits(config));
    table.partial_bytes.push_back(config.partial_bytes());
  }
  return table;
}
bool table_of(const std::string& backend, Table& table) {
  if (backend == "sm120") {
    table =
        table_of(sm120::kGemmConfigs, sm120::kBlockK, sm120::kMaxCtas, sm120::min_saved_k_blocks,
                 sm120::max_splits, sm120::routed_config, sm120::splits_k);
    return true;
  }
#ifdef NVFP4_MOE_HAS_SM100
  table = table_of(sm100::kGemmConfigs, sm100::kBlockK, sm100::kMaxCtas, sm100::min_saved_k_blocks,
                   sm100::max_splits, sm100::routed_config, sm100::splits_k);
  return true;
#else
  return false;
#endif
}

// Draws a routing and returns the rows of each local expert.
std::vector<int32_t> draw_rows(Random& random, const LayerShape& shape, int64_t tokens,
                               int64_t& local_tokens) {
  std::vector<int32_t> rows(static_cast<size_t>(shape.local_experts), 0);
  std::vector<int32_t> ids(static_cast<size_t>(shape.experts));
  std::iota(ids.begin(), ids.end(), 0);
  for (int64_t t = 0; t < tokens; ++t) {
    bool local = false;
    for (int64_t k = 0; k < shape.top_k; ++k) {  // the first top_k of a shuffle
      std::swap(ids[static_cast<size_t>(k)],
                ids[static_cast<size_t>(k + static_cast<int64_t>(random.below(
                                                static_cast<uint64_t>(shape.experts - k))))]);
      const int32_t id = ids[static_cast<size_t>(k)];
      if (id >= shape.local_experts) continue;
      ++rows[static_cast<size_t>(id)];
      local = true;
    }
    local_tokens += local;
  }
  return rows;
}

// The work of one launch.
struct Launch {
  double tiles = 0, splits = 0, k_blocks = 0, longest_k_blocks = 0, octet_k_blocks = 0,
         longest_octet_k_blocks = 0;
  double weight_bytes = 0, row_bytes = 0, partial_bytes = 0;
  Json json(double draws) const {
    const auto mean = [&](double sum) { return std::round(sum / draws * 10) / 10; };
    Json json = Json::object();
    json["tiles"] = mean(tiles);
    json["split_partials"] = mean(splits);
    json["k_blocks"] = mean(k_blocks);
    json["longest_k_blocks"] = mean(longest_k_blocks);
    json["octet_k_blocks"] = mean(octet_k_blocks);
    json["longest_octet_k_blocks"] = mean(longest_octet_k_blocks);
    json["weight_bytes"] = mean(weight_bytes);
    json["row_bytes"] = mean(row_bytes);
    json["partial_bytes"] = mean(partial_bytes);
    return json;
  }
};

// tile_rows: the rows of each tile, in the order in which route lists them. m, k: weight rows and
// columns of an expert.
void add_launch(Launch& sum, const Table& table, size_t config, bool split_k, int ctas, int64_t m,
                int64_t k, const std::vector<int32_t>& tile_rows) {
  const auto k_blocks = static_cast<int32_t>(cuda::ceil_div(k, table.block_k));
  const cuda::ScheduleParams params(static_cast<int32_t>(cuda::ceil_div(m, cuda::kTileRows)),
                                    k_blocks, ctas, split_k, table.min_saved[config],
                                    table.max_splits[config]);
  const cuda::Schedule schedule(params, static_cast<int32_t>(tile_rows.size()));
  int64_t longest = 0, longest_octets = 0;
  for (int32_t cta = 0; cta < ctas; ++cta) {
    int64_t own = 0, octets = 0;
    cuda::WorkTileIterator work_tiles(schedule, cta);
    for (cuda::WorkTile work; work_tiles.next(work);) {
      const int64_t rows = tile_rows[static_cast<size_t>(work.tile.n_tile)];
      own += work.k_blocks;
      octets += work.k_blocks * ((rows + 7) / 8);
      sum.tiles += 1;
      sum.splits += work.partial >= 0;
      sum.weight_bytes +=
          static_cast<double>(work.k_blocks) * table.block_k * cuda::kTileRows * 0.5625;
      sum.row_bytes += static_cast<double>(work.k_blocks * rows) * table.block_k * 0.5625;
      if (work.partial >= 0)
        sum.partial_bytes += 2.0 * static_cast<double>(rows * cuda::kTileRows) * 4;
    }
    sum.k_blocks += static_cast<double>(own);
    sum.octet_k_blocks += static_cast<double>(octets);
    longest = std::max(longest, own);
    longest_octets = std::max(longest_octets, octets);
  }
  sum.longest_k_blocks += static_cast<double>(longest);
  sum.longest_octet_k_blocks += static_cast<double>(longest_octets);
}

Json cell_json(const Chip& chip, const Table& table, const LayerShape& shape, int64_t tokens) {
  MoeOptions options;
  options.num_experts = shape.experts;
  options.top_k = shape.top_k;
  options.hidden_size = shape.hidden;
  options.intermediate_size = shape.intermediate;
  const auto made = MoeConfig::make(options);
  const MoeConfig& config = *made;
  const auto index =
      static_cast<size_t>(table.routed_config(config, {0, shape.local_experts}, tokens));
  const int ctas = std::min(chip.multiprocessors, table.max_ctas);
  Random random(static_cast<uint64_t>(tokens));
  Launch gemm1, gemm2;
  int64_t rows = 0, hit = 0, local_tokens = 0;
  const int draws = draws_of(tokens);
  for (int draw = 0; draw < draws; ++draw) {
    std::vector<int32_t> tiles;
    std::vector<int32_t> rows_of_experts;
    do
      // a rank without rows does not count
      rows_of_experts = draw_rows(random, shape, tokens, local_tokens);
    while (std::reduce(rows_of_experts.begin(), rows_of_experts.end()) == 0);
    for (const int32_t of_expert : rows_of_experts) {
      const int32_t step = cuda::even_tile_rows(of_expert, table.tile_n[index]);
      for (int32_t first = 0; first < of_expert; first += step)
        tiles.push_back(std::min(step, of_expert - first));
      rows += of_expert;
      hit += of_expert > 0;
    }
    if (table.tile_n[index] >= cuda::kMinSortedTileN)
      std::stable_sort(tiles.begin(), tiles.end(), std::greater<>());
    add_launch(gemm1, table, index, table.splits_k(config, shape.hidden), ctas,
               2 * shape.intermediate, shape.hidden, tiles);
    add_launch(gemm2, table, index, table.splits_k(config, shape.intermediate), ctas, shape.hidden,
               shape.intermediate, tiles);
  }
  Json json = Json::object();
  json["chip"] = chip.name;
  json["shape"] = shape.name;
  json["tokens"] = tokens;
  json["config"] = table.names[index];
  json["tile_n"] = table.tile_n[index];
  json["block_k"] = table.block_k;
  json["ctas"] = ctas;
  json["rows"] = static_cast<double>(rows) / draws;
  json["experts_hit"] = static_cast<double>(hit) / draws;
  json["local_tokens"] = static_cast<double>(local_tokens) / draws;
  json["gemm1"] = gemm1.json(draws);
  json["gemm2"] = gemm2.json(draws);
  return json;
}

// ---- sm90, whose cells were measured
constexpr LayerShape kHopperShapes[] = {
    {"v4pro_ep8", 48, 384, 6, 7168, 3072},    {"v4flash", 256, 256, 6, 4096, 2048},
    {"v41flash_ep8", 48, 384, 6, 5120, 2304}, {"qwen30b", 128, 128, 8, 2048, 768},
    {"qwen_next", 512, 512, 10, 2048, 512},   {"mixtral", 8, 8, 2, 4096, 14336},
    {"k3_ep8", 112, 896, 16, 3584, 3072},     {"gptoss_ep4", 32, 128, 4, 2880, 2880}};
constexpr int kHopperCtas = 132;  // one per multiprocessor
// Clocks of the tensor core for one tile's k-block: products have one of the configuration's widths
// and take at least 13 clocks (bench/notes/hopper.md). They have 16 k, or 32 under fp8.
int64_t product_clocks(const sm90::GemmConfig& gemm, int64_t rows) {
  const int64_t width =
      std::max<int64_t>(gemm.min_n, cuda::ceil_div(rows, gemm.n_step) * gemm.n_step);
  return gemm.tile_m / 64 * (cuda::kTileK / (gemm.fp8 ? 32 : 16)) *
         std::max<int64_t>(13, width / 2);
}

// k-blocks and clocks of the busiest cta; tiles and partials of all.
struct HopperLaunch {
  double longest_k_blocks = 0, longest_clocks = 0, tiles = 0, partials = 0;
  Json json(double draws) const {
    Json json = Json::object();
    for (const auto& [name, sum] : {std::pair("longest_k_blocks", longest_k_blocks),
                                    std::pair("longest_clocks", longest_clocks),
                                    std::pair("tiles", tiles), std::pair("partials", partials)})
      json[name] = std::round(sum / draws * 10) / 10;
    return json;
  }
};
void add_launch(HopperLaunch& sum, const sm90::GemmConfig& gemm, bool split_k, int64_t m, int64_t k,
                const std::vector<int32_t>& tile_rows) {
  const cuda::ScheduleParams params(
      static_cast<int32_t>(cuda::ceil_div(m, gemm.tile_m)),
      static_cast<int32_t>(cuda::ceil_div(k, cuda::kTileK)), kHopperCtas, split_k,
      static_cast<int32_t>(sm90::min_saved_k_blocks(gemm)), sm90::max_splits(gemm));
  const cuda::Schedule schedule(params, static_cast<int32_t>(tile_rows.size()));
  int64_t longest = 0, longest_clocks = 0;
  for (int32_t cta = 0; cta < kHopperCtas; ++cta) {
    int64_t own = 0, clocks = 0;
    cuda::WorkTileIterator work_tiles(schedule, cta);
    for (cuda::WorkTile work; work_tiles.next(work);) {
      const int64_t rows = tile_rows[static_cast<size_t>(work.tile.n_tile)];
      own += work.k_blocks;
      clocks += work.k_blocks * product_clocks(gemm, rows);
      sum.tiles += 1;
      sum.partials += work.partial >= 0;
    }
    longest = std::max(longest, own);
    longest_clocks = std::max(longest_clocks, clocks);
  }
  sum.longest_k_blocks += static_cast<double>(longest);
  sum.longest_clocks += static_cast<double>(longest_clocks);
}

// The rows of each local expert. nearest: of up to 40 draws the one nearest to the mean rows and
// experts, as bench/moe_bench/workload.py takes it up to 64 tokens.
std::vector<int32_t> draw_hopper_rows(Random& random, const LayerShape& shape, int64_t tokens,
                                      bool nearest, int64_t& local_tokens) {
  const auto share = static_cast<double>(shape.top_k) / static_cast<double>(shape.experts);
  const double rows_wanted =
                   std::max(1.0, static_cast<double>(tokens * shape.local_experts) * share),
               hit_wanted = std::max(1.0, static_cast<double>(shape.local_experts) *
                                              (1 - std::pow(1 - share, tokens)));
  std::vector<int32_t> best;
  int64_t tokens_of_best = 0;
  double least = 1e30;
  for (int tries = nearest && tokens <= 64 ? 40 : 1; tries > 0 || best.empty(); --tries) {
    int64_t local = 0;
    const std::vector<int32_t> rows = draw_rows(random, shape, tokens, local);
    const auto sum = std::reduce(rows.begin(), rows.end());
    if (sum == 0) continue;
    const auto hit = std::count_if(rows.begin(), rows.end(), [](int32_t n) { return n > 0; });
    const double distance = std::abs(static_cast<double>(sum) - rows_wanted) +
                            std::abs(static_cast<double>(hit) - hit_wanted);
    if (distance < least) least = distance, best = rows, tokens_of_best = local;
    if (distance <= 1) break;
  }
  local_tokens += tokens_of_best;
  return best;
}

Json hopper_cell(const LayerShape& shape, int64_t tokens, bool fp8, bool nearest) {
  MoeOptions options;
  options.num_experts = shape.experts;
  options.top_k = shape.top_k;
  options.hidden_size = shape.hidden;
  options.intermediate_size = shape.intermediate;
  options.activation_format = fp8 ? ActivationFormat::kFp8 : ActivationFormat::kBf16;
  const auto made = MoeConfig::make(options);
  const MoeConfig& config = *made;
  const sm90::ConfigTable& table = fp8 ? sm90::kFp8Table : sm90::kBf16Table;
  const auto& gemm = table.configs[static_cast<size_t>(
      sm90::routed_config(table, config, {0, shape.local_experts}, tokens))];
  Random random(static_cast<uint64_t>(tokens));
  HopperLaunch gemm1, gemm2;
  int64_t rows = 0, hit = 0, local_tokens = 0;
  const int draws = draws_of(tokens);
  for (int draw = 0; draw < draws; ++draw) {
    std::vector<int32_t> tiles;
    for (const int32_t n : draw_hopper_rows(random, shape, tokens, nearest, local_tokens)) {
      const int32_t step = cuda::even_tile_rows(n, gemm.tile_n);
      for (int32_t first = 0; first < n; first += step) tiles.push_back(std::min(step, n - first));
      rows += n, hit += n > 0;
    }
    if (gemm.tile_n >= cuda::kMinSortedTileN)
      std::stable_sort(tiles.begin(), tiles.end(), std::greater<>());
    add_launch(gemm1, gemm, sm90::splits_k(config, shape.hidden), 2 * shape.intermediate,
               shape.hidden, tiles);
    add_launch(gemm2, gemm, sm90::splits_k(config, shape.intermediate), shape.hidden,
               shape.intermediate, tiles);
  }
  Json json = Json::object();
  json["shape"] = shape.name;
  json["tokens"] = tokens;
  json["products"] = fp8 ? "fp8" : "bf16";
  json["routing"] = nearest ? "nearest" : "any";
  json["config"] = gemm.name;
  json["tile_m"] = gemm.tile_m;
  json["tile_n"] = gemm.tile_n;
  json["tma_rows"] = gemm.tma_rows;
  json["rows"] = static_cast<double>(rows) / draws;
  json["experts_hit"] = static_cast<double>(hit) / draws;
  json["local_tokens"] = static_cast<double>(local_tokens) / draws;
  json["gemm1"] = gemm1.json(draws);
  json["gemm2"] = gemm2.json(draws);
  return json;
}

}  // namespace
}  // namespace nvfp4_moe::internal

int main() {
  using namespace nvfp4_moe::internal;
  Json report = Json::object(), shapes = Json::array(), cells = Json::array();
  for (const LayerShape& shape : kShapes) {
    Json one = Json::object();
    one["name"] = shape.name;
    one["local_experts"] = shape.local_experts;
    one["experts"] = shape.experts;
    one["top_k"] = shape.top_k;
    one["hidden"] = shape.hidden;
    one["intermediate"] = shape.intermediate;
    shapes.push_back(one);
  }
  for (const Chip& chip : kChips) {
    Table table{};
    if (!table_of(chip.backend, table)) continue;
    for (const LayerShape& shape : kShapes) {
      const bool published =
          shape.local_experts != shape.experts && chip.backend == std::string("sm100");
      if (&shape >= kShapes + kOwnShapes && !published) continue;
      std::set<int64_t> all(std::begin(kTokens), std::end(kTokens));
      if (published) all.insert(std::begin(kPublishedTokens), std::end(kPublishedTokens));
      for (const int64_t tokens : all) cells.push_back(cell_json(chip, table, shape, tokens));
    }
  }
  report["shapes"] = shapes;
  report["cells"] = cells;
  Json measured = Json::array();
  for (const LayerShape& shape : kHopperShapes)
    for (int64_t tokens = 1; tokens <= 8192; tokens *= 2) {
      for (const bool fp8 : {false, true})
        measured.push_back(hopper_cell(shape, tokens, fp8, true));
      if (tokens <= 8) measured.push_back(hopper_cell(shape, tokens, false, false));
    }
  report["hopper"] = measured;
  std::printf("%s\n", report.dump(1).c_str());
  return 0;
}
