// The combinations of shape, routing, data and choices that are cases. A case's seed is its index,
// so add new cases at the end.
#include <algorithm>
#include <span>
#include <utility>

#include "cases/cases.h"
#include "cases/choices.h"
#include "support/sizes.h"

namespace nvfp4_moe::internal {
namespace {

struct Shape {
  int64_t experts, top_k, hidden, intermediate;
};
// K multiples of 16 but not of 64, output counts that are not multiples of a panel, and plain ones.
constexpr Shape kShapes[] = {
    {8, 2, 64, 48}, {16, 4, 256, 128}, {4, 2, 80, 112}, {8, 3, 208, 80}, {32, 8, 128, 64},
};
// The same with one expert a token, for on_input.
constexpr Shape kOnInputShapes[] = {{8, 1, 64, 48}, {16, 1, 256, 128}, {8, 1, 208, 80}};
constexpr Routing kRoutings[] = {Routing::kUniform,      Routing::kZipf,   Routing::kDuplicates,
                                 Routing::kPartlyNone,   Routing::kBadIds, Routing::kOneExpert,
                                 Routing::kEmptyExperts, Routing::kAllNone};
constexpr DataKind kData[] = {DataKind::kNormal, DataKind::kOutliers,   DataKind::kTiny,
                              DataKind::kZeros,  DataKind::kSaturating, DataKind::kNan};
// Below, at and above the tiles of 16, 32 and 128 lines.
constexpr int64_t kTokens[] = {0, 1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129};

Case make(const Choice& choice, const Shape& shape, Routing routing, int64_t tokens, DataKind data,
          uint64_t seed) {
  Case c;
  c.options = test::sizes_of(shape.experts, shape.top_k, shape.hidden, shape.intermediate);
  c.range = {0, shape.experts};
  c.tokens = tokens;
  c.routing = routing;
  c.data = data;
  c.seed = seed;
  choice.apply(c);
  c.name = std::string(choice.name) + "/e" + std::to_string(shape.experts) + "_k" +
           std::to_string(shape.top_k) + "_h" + std::to_string(shape.hidden) + "_i" +
           std::to_string(shape.intermediate) + "/" + to_string(routing) + "_t" +
           std::to_string(tokens) + "/" + to_string(data);
  return c;
}

class Table {
 public:
  void add(const Choice& choice, const Shape& shape, Routing routing, int64_t tokens,
           DataKind data) {
    Case c = make(choice, shape, routing, tokens, data, 1000 + cases_.size());
    for (const Case& other : cases_)
      if (other.name == c.name) return;
    cases_.push_back(std::move(c));
  }
  // Adds the choice with every shape, walking through routings and data at coprime steps.
  void add_walk(const Choice& choice, std::span<const Shape> shapes, size_t& turn) {
    for (const Shape& shape : shapes) {
      add(choice, shape, kRoutings[turn % 7], 9 + static_cast<int64_t>(turn * 5 % 17),
          kData[turn * 5 % 6]);
      ++turn;
    }
  }
  void add_data(const Choice& choice, const Shape& shape) {
    for (DataKind data : kData) add(choice, shape, Routing::kUniform, 10, data);
  }
  void add_routings_and_tokens(const Choice& choice, const Shape& of_routings,
                               const Shape& of_tokens) {
    for (Routing routing : kRoutings) add(choice, of_routings, routing, 24, DataKind::kNormal);
    for (int64_t tokens : kTokens)
      add(choice, of_tokens, Routing::kZipf, tokens, DataKind::kNormal);
  }
  void add_huge(const Choice& choice, const Shape& shape) {
    add(choice, shape, Routing::kUniform, 12, DataKind::kHuge);
  }

  void add_plain() {
    const std::vector<Choice>& all = plain_choices();
    size_t turn = 0;
    for (const Choice& choice : all) add_walk(choice, kShapes, turn);
    for (size_t format : {0u, 1u, 2u}) {
      add_routings_and_tokens(all[format], kShapes[2], kShapes[0]);
      add_huge(all[format], kShapes[3]);
    }
    for (const Choice& choice : all) {  // every scale policy with every data kind
      const std::string name = choice.name;
      const auto has = [&name](const char* policy) {
        return name.find(policy) != std::string::npos;
      };
      if (has("static") || has("fixed") || has("vllm_order") || &choice < &all[3])
        add_data(choice, kShapes[3]);
    }
  }
  void add_on_input() {
    size_t turn = 0;
    for (const Choice& choice : on_input_choices()) {
      const Choice on_input_choice = on_input(choice);
      add_walk(on_input_choice, kOnInputShapes, turn);
      if (&choice >= &on_input_choices()[3]) continue;
      add_routings_and_tokens(on_input_choice, kOnInputShapes[0], kOnInputShapes[0]);
      add_data(on_input_choice, kOnInputShapes[2]);
      add_huge(on_input_choice, kOnInputShapes[2]);
    }
  }
  void add_fp8() {
    const Setting fp8 = [](Case& c) { c.options.activation_format = ActivationFormat::kFp8; };
    size_t turn = 0;
    for (const Choice& choice : fp8_choices()) {
      add_walk(after(fp8, choice), kShapes, turn);
      if (&choice < &fp8_choices()[3]) add_data(after(fp8, choice), kShapes[3]);
    }
    const Choice plain = after(fp8, fp8_choices()[0]);
    add_routings_and_tokens(plain, kShapes[2], kShapes[0]);
    add_huge(plain, kShapes[3]);
    for (const Choice& choice : fp8_on_input_choices())
      add_walk(on_input(after(fp8, choice)), kOnInputShapes, turn);
  }
  void add_gelu_and_situ() {
    size_t turn = 0;
    for (const Choice& choice : gelu_and_situ_choices()) {
      add_walk(choice, kShapes, turn);
      if (&choice < &gelu_and_situ_choices()[4]) add_data(choice, kShapes[3]);
      if (&choice < &gelu_and_situ_choices()[4]) add_walk(on_input(choice), kOnInputShapes, turn);
    }
    add_huge(gelu_and_situ_choices()[1], kShapes[3]);
  }
  // set: makes the case one of biases or of relu2.
  void add_each(const std::vector<Choice>& choices, const Setting& set) {
    size_t turn = 0;
    for (const Choice& choice : choices) {
      const Choice one = after(set, choice);
      add_walk(one, kShapes, turn);
      if (&choice < &choices[4]) add_data(one, kShapes[3]);
      if (&choice >= &choices[2]) continue;
      add_routings_and_tokens(one, kShapes[2], kShapes[0]);
      add_huge(one, kShapes[3]);
    }
  }

  std::vector<Case> take() { return std::move(cases_); }

 private:
  static Choice after(const Setting& first, Choice choice) {
    choice.settings.insert(choice.settings.begin(), first);
    return choice;
  }
  static Choice on_input(Choice choice) {
    choice.settings.push_back([](Case& c) { c.options.router_weight = RouterWeight::kOnInput; });
    return choice;
  }
  std::vector<Case> cases_;
};

}  // namespace

const std::vector<Case>& case_table() {
  static const std::vector<Case> all = [] {
    Table table;
    table.add_plain();
    table.add_on_input();
    table.add_fp8();
    table.add_each(bias_choices(), [](Case& c) { c.options.expert_biases = true; });
    table.add_each(relu2_choices(), [](Case& c) { c.options.activation = Activation::kRelu2; });
    table.add_gelu_and_situ();
    return table.take();
  }();
  return all;
}

std::vector<Case> cases_named(const std::string& part) {
  std::vector<Case> found;
  std::copy_if(case_table().begin(), case_table().end(), std::back_inserter(found),
               [&](const Case& c) { return c.name.find(part) != std::string::npos; });
  return found;
}

}  // namespace nvfp4_moe::internal
