// Random routings for benches: the experts that the tokens of a batch select.
//
//   uniform   every expert is equally likely
//   zipf:S    the r-th most popular expert has weight r^-S. A token's top_k are drawn without
//             replacement. The order of popularity is a permutation that depends only on the shape,
//             so that a rank has its share of popular experts
//   hot       every assignment is to one of the rank's own experts, equally likely: the busiest
//             possible rank
//
// With the suffix +spread, each local assignment is replaced by an expert drawn uniformly from the
// local ones. The number of rows stays the same but they are spread evenly, as a comparison for
// uneven routing.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include "core/random.h"

namespace nvfp4_moe::internal {

struct Routing {
  enum class Kind { kUniform, kZipf, kHot };
  std::string text = "uniform";
  Kind kind = Kind::kUniform;
  double exponent = 0;
  bool spread = false;

  // Returns false for an unknown routing.
  static bool parse(std::string text, Routing& routing) {
    routing.text = text;
    const size_t plus = text.find("+spread");
    routing.spread = plus != std::string::npos && plus + 7 == text.size();
    if (routing.spread) text.resize(plus);
    routing.kind = text == "hot"                 ? Kind::kHot
                   : text.rfind("zipf:", 0) == 0 ? Kind::kZipf
                                                 : Kind::kUniform;
    if (routing.kind != Kind::kZipf) return text == "hot" || text == "uniform";
    char* end = nullptr;
    routing.exponent = std::strtod(text.c_str() + 5, &end);
    return *end == '\0' && end != text.c_str() + 5 && routing.exponent >= 0 &&
           routing.exponent <= 4;
  }
};

struct RoutedShape {
  int64_t local_experts, experts, top_k;
};
// Counts of one batch on this rank, which has the first experts.
struct LocalCounts {
  int64_t rows = 0, experts_hit = 0, tokens = 0, most_rows = 0;  // most_rows: of one expert
};

class RoutingDraw {
 public:
  RoutingDraw(const Routing& routing, const RoutedShape& shape) : routing_(routing), shape_(shape) {
    if (routing.kind != Routing::Kind::kZipf) return;
    std::vector<int32_t> order(static_cast<size_t>(shape.experts));
    std::iota(order.begin(), order.end(), 0);
    Random random(0x5A1F + static_cast<uint64_t>(shape.experts));
    for (int64_t i = shape.experts - 1; i > 0; --i)
      std::swap(order[static_cast<size_t>(i)], order[static_cast<size_t>(random.below(i + 1))]);
    std::vector<double> weights(order.size());
    for (size_t r = 0; r < order.size(); ++r)
      weights[static_cast<size_t>(order[r])] =
          std::pow(static_cast<double>(r + 1), -routing.exponent);
    up_to_.resize(order.size());
    std::partial_sum(weights.begin(), weights.end(), up_to_.begin());
  }
  // Appends the (tokens, top_k) ids of one batch.
  LocalCounts draw(Random& random, int64_t tokens, std::vector<int32_t>& ids) const {
    std::vector<int64_t> rows(static_cast<size_t>(shape_.local_experts));
    LocalCounts counts;
    std::vector<int32_t> chosen;
    for (int64_t t = 0; t < tokens; ++t) {
      chosen.clear();
      while (static_cast<int64_t>(chosen.size()) < shape_.top_k)
        add_other(chosen, [&] { return one(random); });
      if (routing_.spread) spread(random, chosen);
      bool local = false;
      for (int32_t id : chosen) {
        ids.push_back(id);
        if (id >= shape_.local_experts) continue;
        counts.most_rows = std::max(counts.most_rows, ++rows[static_cast<size_t>(id)]);
        ++counts.rows;
        local = true;
      }
      counts.tokens += local;
    }
    counts.experts_hit = std::count_if(rows.begin(), rows.end(), [](int64_t n) { return n > 0; });
    return counts;
  }

 private:
  // Draws one expert and adds it if the token does not have it yet.
  template <class Draw>
  static void add_other(std::vector<int32_t>& chosen, const Draw& draw) {
    const int32_t id = draw();
    if (std::find(chosen.begin(), chosen.end(), id) == chosen.end()) chosen.push_back(id);
  }
  int32_t one(Random& random) const {
    if (routing_.kind == Routing::Kind::kUniform)
      return static_cast<int32_t>(random.below(shape_.experts));
    if (routing_.kind == Routing::Kind::kHot)
      return static_cast<int32_t>(random.below(shape_.local_experts));
    const auto at =
        std::upper_bound(up_to_.begin(), up_to_.end(), random.uniform() * up_to_.back());
    return static_cast<int32_t>(std::min<int64_t>(at - up_to_.begin(), shape_.experts - 1));
  }
  void spread(Random& random, std::vector<int32_t>& chosen) const {
    std::vector<int32_t> local;
    const auto is_local = [&](int32_t id) { return id < shape_.local_experts; };
    const auto count = static_cast<size_t>(std::count_if(chosen.begin(), chosen.end(), is_local));
    while (local.size() < count)
      add_other(local, [&] { return static_cast<int32_t>(random.below(shape_.local_experts)); });
    for (int32_t& id : chosen)
      if (is_local(id)) id = local.back(), local.pop_back();
  }

  Routing routing_;
  RoutedShape shape_;
  std::vector<double> up_to_;  // (experts) cumulative weights
};

}  // namespace nvfp4_moe::internal
