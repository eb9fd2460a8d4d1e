// The table itself: which combinations of shape, routing, data and choices are cases.
// Long because the table stands here whole.
#include <algorithm>
#include <functional>
#include <utility>

#include "cases/cases.h"
#include "cases/choices.h"

namespace nvfp4_moe::internal {
namespace {

struct Shape {
  int64_t experts, top_k, hidden, intermediate;
};
// K multiples of 16 that are not of 64, output counts that are no multiple of a panel, and plain ones.
constexpr Shape kShapes[] = {
    {8, 2, 64, 48}, {16, 4, 256, 128}, {4, 2, 80, 112}, {8, 3, 208, 80}, {32, 8, 128, 64},
};
// The same with one expert a token, for on_input.
constexpr Shape kOnInputShapes[] = {{8, 1, 64, 48}, {16, 1, 256, 128}, {8, 1, 208, 80}};
constexpr Routing kRoutings[] = {Routing::kUniform, Routing::kZipf,      Routing::kDuplicates,   Routing::kPartlyNone,
                                 Routing::kBadIds,  Routing::kOneExpert, Routing::kEmptyExperts, Routing::kAllNone};
constexpr DataKind kData[] = {DataKind::kNormal, DataKind::kOutliers,   DataKind::kTiny,
                              DataKind::kZeros,  DataKind::kSaturating, DataKind::kNan};
// Below, at and above the tiles of 16, 32 and 128 lines.
constexpr int64_t kTokens[] = {0, 1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129};

void bf16(Case& c) { c.options.activation_format = ActivationFormat::kBf16; }
void int8(Case& c) { c.options.activation_format = ActivationFormat::kInt8Block; }
const std::vector<Choice>& choices() {
  using A = Activation;
  using H = ActivationScale;
  using I = IntermediateScale;
  static const std::vector<Choice> all = {
      {"w4a4", [](Case&) {}},
      {"w4a16", bf16},
      {"w4a8", int8},
      {"w4a4_static",
       [](Case& c) {
         c.options.activation_scale = H::kStatic;
         c.options.static_headroom = 4;
       }},
      {"w4a4_compat",
       [](Case& c) {
         c.options.activation_scale = H::kCompat;
         c.options.intermediate_scale = I::kCompat;
       }},
      // Only here alpha is no power of two times the tensor scale, and fp32 rows and output show its last bit.
      {"w4a4_compat_rows_fp32",
       [](Case& c) {
         c.options.activation_scale = H::kCompat;
         c.options.intermediate_scale = I::kCompat;
         c.options.row_format = RowFormat::kFp32;
         c.out_dtype = DType::kF32;
       }},
      {"w4a4_fixed_given",
       [](Case& c) {
         c.options.intermediate_scale = I::kFixed;
         c.options.intermediate_fixed = 0x1p-7f;
       }},
      {"w4a4_fixed_clamp",
       [](Case& c) {
         clamp(c, A::kSwigluClamped, 2);
         c.options.intermediate_scale = I::kFixed;
       }},
      {"w4a4_fixed_clamp_oai_before_down",
       [](Case& c) {
         clamp(c, A::kSwigluOai, 2.5f);
         before_down(c);
         c.options.intermediate_scale = I::kFixed;
       }},
      {"w4a4_fixed_checkpoint",
       [](Case& c) {
         c.options.activation_scale = H::kStatic;
         c.options.intermediate_scale = I::kFixed;
       }},
      {"w4a4_clamped", [](Case& c) { clamp(c, A::kSwigluClamped, 1.5f); }},
      {"w4a4_step", [](Case& c) { clamp(c, A::kSwigluStep, 1); }},
      {"w4a4_oai", [](Case& c) { clamp(c, A::kSwigluOai, 1.25f); }},
      {"w4a16_clamped",
       [](Case& c) {
         bf16(c);
         clamp(c, A::kSwigluClamped, 1.5f);
       }},
      {"w4a16_step",
       [](Case& c) {
         bf16(c);
         clamp(c, A::kSwigluStep, 1);
       }},
      {"w4a16_oai",
       [](Case& c) {
         bf16(c);
         clamp(c, A::kSwigluOai, 1.25f);
         c.options.swiglu_alpha = 1.5f;
       }},
      {"w4a4_before_down", before_down},
      {"w4a16_before_down",
       [](Case& c) {
         bf16(c);
         before_down(c);
       }},
      {"w4a4_rows_fp32", [](Case& c) { c.options.row_format = RowFormat::kFp32; }},
      {"w4a16_rows_fp32",
       [](Case& c) {
         bf16(c);
         c.options.row_format = RowFormat::kFp32;
       }},
      {"w4a4_shared",
       [](Case& c) {
         c.options.shared_intermediate_size = 96;
         c.shared_weights = true;
       }},
      {"w4a4_shared_before_down",
       [](Case& c) {
         before_down(c);
         c.options.shared_intermediate_size = 32;
       }},
      {"w4a16_shared",
       [](Case& c) {
         bf16(c);
         c.options.shared_intermediate_size = 144;
         c.shared_weights = true;
       }},
      {"w4a4_ep",
       [](Case& c) {
         c.range = {c.options.num_experts / 4, c.options.num_experts / 2};
       }},
      {"w4a16_ep_i64",
       [](Case& c) {
         bf16(c);
         c.range = {c.options.num_experts / 2, c.options.num_experts / 4};
         c.ids_dtype = DType::kI64;
       }},
      {"w4a4_i64_fp32",
       [](Case& c) {
         c.ids_dtype = DType::kI64;
         c.hidden_dtype = c.out_dtype = DType::kF32;
       }},
      {"w4a4_fp16", [](Case& c) { c.hidden_dtype = c.out_dtype = DType::kF16; }},
      {"w4a16_fp16_to_fp32",
       [](Case& c) {
         bf16(c);
         c.hidden_dtype = DType::kF16;
         c.out_dtype = DType::kF32;
       }},
      {"w4a16_fp32_to_bf16",
       [](Case& c) {
         bf16(c);
         c.hidden_dtype = DType::kF32;
       }},
      {"w4a8_clamped",
       [](Case& c) {
         int8(c);
         clamp(c, A::kSwigluClamped, 1.5f);
       }},
      {"w4a8_oai_before_down",
       [](Case& c) {
         int8(c);
         clamp(c, A::kSwigluOai, 1.25f);
         before_down(c);
       }},
      {"w4a8_step_fp16",
       [](Case& c) {
         int8(c);
         clamp(c, A::kSwigluStep, 1);
         c.hidden_dtype = c.out_dtype = DType::kF16;
       }},
      // hidden of fp32: codes and scales follow the two fp32 divisions, not the quotients of bf16 numbers.
      {"w4a8_rows_fp32_i64",
       [](Case& c) {
         int8(c);
         c.options.row_format = RowFormat::kFp32;
         c.hidden_dtype = c.out_dtype = DType::kF32;
         c.ids_dtype = DType::kI64;
       }},
      {"w4a8_shared_ep",
       [](Case& c) {
         int8(c);
         c.options.shared_intermediate_size = 96;
         c.shared_weights = true;
         c.range = {c.options.num_experts / 4, c.options.num_experts / 2};
       }},
      {"w4a4_batch_invariant", [](Case& c) { c.options.batch_invariant = true; }},
  };
  return all;
}

// Of one expert a token: its router weight multiplies hidden, but not the shared expert's.
const std::vector<Choice>& on_input_choices() {
  static const std::vector<Choice> all = {
      {"w4a4_on_input_shared", [](Case& c) { shared(c, 96); }},
      {"w4a16_on_input_shared",
       [](Case& c) {
         bf16(c);
         shared(c, 144);
       }},
      {"w4a8_on_input_shared",
       [](Case& c) {
         int8(c);
         shared(c, 96);
       }},
      {"w4a4_on_input", [](Case&) {}},
      {"w4a16_on_input", bf16},
      {"w4a8_on_input", int8},
      {"w4a4_on_input_static_shared",
       [](Case& c) {
         c.options.activation_scale = ActivationScale::kStatic;
         shared(c, 32);
       }},
      {"w4a4_on_input_compat_shared_rows_fp32",
       [](Case& c) {
         c.options.activation_scale = ActivationScale::kCompat;
         c.options.intermediate_scale = IntermediateScale::kCompat;
         c.options.row_format = RowFormat::kFp32;
         c.out_dtype = DType::kF32;
         shared(c, 32);
       }},
      {"w4a4_on_input_shared_ep_i64",
       [](Case& c) {
         c.range = {c.options.num_experts / 4, c.options.num_experts / 2};
         c.ids_dtype = DType::kI64;
         shared(c, 64);
       }},
      {"w4a16_on_input_ep",
       [](Case& c) {
         bf16(c);
         c.range = {c.options.num_experts / 2, c.options.num_experts / 4};
       }},
      {"w4a4_on_input_shared_fp16",
       [](Case& c) {
         c.hidden_dtype = c.out_dtype = DType::kF16;
         shared(c, 96);
       }},
      {"w4a4_on_input_fp32", [](Case& c) { c.hidden_dtype = c.out_dtype = DType::kF32; }},
      {"w4a16_on_input_shared_fp32_to_bf16",
       [](Case& c) {
         bf16(c);
         c.hidden_dtype = DType::kF32;
         shared(c, 48);
       }},
      {"w4a16_on_input_fp16",
       [](Case& c) {
         bf16(c);
         c.hidden_dtype = c.out_dtype = DType::kF16;
       }},
      {"w4a8_on_input_shared_fp16",
       [](Case& c) {
         int8(c);
         c.hidden_dtype = c.out_dtype = DType::kF16;
         c.options.shared_intermediate_size = 48;
       }},
      {"w4a4_on_input_shared_batch_invariant",
       [](Case& c) {
         c.options.batch_invariant = true;
         shared(c, 96);
       }},
  };
  return all;
}

Case make(const Choice& choice, const Shape& shape, Routing routing, int64_t tokens, DataKind data, uint64_t seed) {
  Case c;
  c.options.num_experts = shape.experts;
  c.options.top_k = shape.top_k;
  c.options.hidden_size = shape.hidden;
  c.options.intermediate_size = shape.intermediate;
  c.range = {0, shape.experts};
  c.tokens = tokens;
  c.routing = routing;
  c.data = data;
  c.seed = seed;
  choice.apply(c);
  c.name = std::string(choice.name) + "/e" + std::to_string(shape.experts) + "_k" + std::to_string(shape.top_k) + "_h" +
           std::to_string(shape.hidden) + "_i" + std::to_string(shape.intermediate) + "/" + to_string(routing) + "_t" +
           std::to_string(tokens) + "/" + to_string(data);
  return c;
}

// The cases of on_input: every choice with every shape, and each activation format, with a shared expert, through
// routings, data and token counts.
void add_on_input(const std::function<void(const Choice&, const Shape&, Routing, int64_t, DataKind)>& add) {
  const std::vector<Choice>& all = on_input_choices();
  size_t turn = 0;
  for (const Choice& choice : all) {
    const Choice weighed = {choice.name, [&choice](Case& c) {
                              choice.apply(c);
                              c.options.router_weight = RouterWeight::kOnInput;
                            }};
    for (const Shape& shape : kOnInputShapes) {
      add(weighed, shape, kRoutings[turn % 7], 9 + static_cast<int64_t>(turn * 5 % 17), kData[turn * 5 % 6]);
      ++turn;
    }
    if (&choice >= &all[3]) continue;
    for (Routing routing : kRoutings) add(weighed, kOnInputShapes[0], routing, 24, DataKind::kNormal);
    for (int64_t tokens : kTokens) add(weighed, kOnInputShapes[0], Routing::kZipf, tokens, DataKind::kNormal);
    for (DataKind data : kData) add(weighed, kOnInputShapes[2], Routing::kUniform, 10, data);
    add(weighed, kOnInputShapes[2], Routing::kUniform, 12, DataKind::kHuge);
  }
}

void add_fp8(const std::function<void(const Choice&, const Shape&, Routing, int64_t, DataKind)>& add) {
  const auto in_fp8 = [](const Choice& choice, RouterWeight router_weight) {
    return Choice{choice.name, [&choice, router_weight](Case& c) {
                    c.options.activation_format = ActivationFormat::kFp8;
                    choice.apply(c);
                    if (router_weight == RouterWeight::kOnInput) c.options.router_weight = router_weight;
                  }};
  };
  size_t turn = 0;
  for (const Choice& choice : fp8_choices()) {
    const Choice fp8 = in_fp8(choice, RouterWeight::kAfterDown);
    for (const Shape& shape : kShapes) {
      add(fp8, shape, kRoutings[turn % 7], 9 + static_cast<int64_t>(turn * 5 % 17), kData[turn * 5 % 6]);
      ++turn;
    }
    if (&choice >= &fp8_choices()[3]) continue;
    for (DataKind data : kData) add(fp8, kShapes[3], Routing::kUniform, 10, data);
  }
  const Choice plain = in_fp8(fp8_choices()[0], RouterWeight::kAfterDown);
  for (Routing routing : kRoutings) add(plain, kShapes[2], routing, 24, DataKind::kNormal);
  for (int64_t tokens : kTokens) add(plain, kShapes[0], Routing::kZipf, tokens, DataKind::kNormal);
  add(plain, kShapes[3], Routing::kUniform, 12, DataKind::kHuge);
  for (const Choice& choice : fp8_on_input_choices())
    for (const Shape& shape : kOnInputShapes) {
      add(in_fp8(choice, RouterWeight::kOnInput), shape, kRoutings[turn % 7], 9 + static_cast<int64_t>(turn * 5 % 17),
          kData[turn * 5 % 6]);
      ++turn;
    }
}

// Cases of biases and relu2: every choice every shape; the first four, one of each activation format, every data kind;
// the first two routings and token counts too. set: what makes a case one of them.
void add_each(const std::vector<Choice>& choices, void (*set)(Case&),
              const std::function<void(const Choice&, const Shape&, Routing, int64_t, DataKind)>& add) {
  size_t turn = 0;
  for (const Choice& choice : choices) {
    const Choice one = {choice.name, [&choice, set](Case& c) {
                          set(c);
                          choice.apply(c);
                        }};
    for (const Shape& shape : kShapes) {
      add(one, shape, kRoutings[turn % 7], 9 + static_cast<int64_t>(turn * 5 % 17), kData[turn * 5 % 6]);
      ++turn;
    }
    if (&choice < &choices[4])
      for (DataKind data : kData) add(one, kShapes[3], Routing::kUniform, 10, data);
    if (&choice >= &choices[2]) continue;
    for (Routing routing : kRoutings) add(one, kShapes[2], routing, 24, DataKind::kNormal);
    for (int64_t tokens : kTokens) add(one, kShapes[0], Routing::kZipf, tokens, DataKind::kNormal);
    add(one, kShapes[3], Routing::kUniform, 12, DataKind::kHuge);
  }
}

std::vector<Case> build() {
  std::vector<Case> table;
  auto add = [&](const Choice& choice, const Shape& shape, Routing routing, int64_t tokens, DataKind data) {
    Case c = make(choice, shape, routing, tokens, data, 1000 + table.size());
    for (const Case& other : table)
      if (other.name == c.name) return;
    table.push_back(std::move(c));
  };
  // Every choice runs with every shape, and walks through routings and data at coprime steps.
  size_t turn = 0;
  for (const Choice& choice : choices())
    for (const Shape& shape : kShapes) {
      add(choice, shape, kRoutings[turn % 7], 9 + static_cast<int64_t>(turn * 5 % 17), kData[turn * 5 % 6]);
      ++turn;
    }
  const std::vector<Choice>& all = choices();
  for (size_t format : {0u, 1u, 2u}) {
    for (Routing routing : kRoutings) add(all[format], kShapes[2], routing, 24, DataKind::kNormal);
    for (int64_t tokens : kTokens) add(all[format], kShapes[0], Routing::kZipf, tokens, DataKind::kNormal);
    add(all[format], kShapes[3], Routing::kUniform, 12, DataKind::kHuge);
  }
  for (const Choice& choice : all) {  // every scale policy with every data kind
    if (std::string(choice.name).find("static") == std::string::npos &&
        std::string(choice.name).find("fixed") == std::string::npos &&
        std::string(choice.name).find("compat") == std::string::npos && &choice != &all[0] && &choice != &all[1] &&
        &choice != &all[2])
      continue;
    for (DataKind data : kData) add(choice, kShapes[3], Routing::kUniform, 10, data);
  }
  add_on_input(add);
  add_fp8(add);
  add_each(
      bias_choices(), [](Case& c) { c.options.expert_biases = true; }, add);
  add_each(
      relu2_choices(), [](Case& c) { c.options.activation = Activation::kRelu2; }, add);
  return table;
}

}  // namespace

const std::vector<Case>& case_table() {
  static const std::vector<Case> table = build();
  return table;
}

std::vector<Case> cases_named(const std::string& part) {
  std::vector<Case> found;
  std::copy_if(case_table().begin(), case_table().end(), std::back_inserter(found),
               [&](const Case& c) { return c.name.find(part) != std::string::npos; });
  return found;
}

}  // namespace nvfp4_moe::internal
