#include "checkpoint/model_types.h"

namespace nvfp4_moe::internal {
namespace {

constexpr RouterWeight kAfter = RouterWeight::kAfterDown;
constexpr RouterWeight kBefore = RouterWeight::kBeforeDown;
constexpr RouterWeight kInput = RouterWeight::kOnInput;
constexpr const char* kMoe = "moe_intermediate_size";
constexpr const char* kPlain = "intermediate_size";
constexpr ModelRow kModels[] = {
    {"deepseek_v2", "deepseek_v3", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount,
     kAfter},
    {"deepseek_v3", "deepseek_v3", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount,
     kAfter},
    {"deepseek_v32", "deepseek_v3", kMoe, ActRule::kSilu, LayerRule::kFirstDense,
     SharedRule::kCount, kAfter},
    {"deepseek_v4", "deepseek_v4", kMoe, ActRule::kClamped, LayerRule::kAll, SharedRule::kCount,
     kBefore},
    {"deepseek_v41", "deepseek_v4", kMoe, ActRule::kClamped, LayerRule::kAll, SharedRule::kCount,
     kBefore},
    {"deepseek_v41_text", "deepseek_v4", kMoe, ActRule::kClamped, LayerRule::kAll,
     SharedRule::kCount, kBefore},
    {"kimi_k2", "kimi", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount, kAfter},
    {"kimi_k25", "kimi", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount, kAfter},
    {"kimi_k3", "kimi", kMoe, ActRule::kKimi, LayerRule::kFirstDense, SharedRule::kCount, kAfter},
    {"kimi_linear", "kimi", kMoe, ActRule::kKimi, LayerRule::kFirstDense, SharedRule::kCount,
     kAfter},
    {"qwen2_moe", "qwen", kMoe, ActRule::kSilu, LayerRule::kSparseStep, SharedRule::kOwnSize,
     kAfter},
    {"qwen3_moe", "qwen", kMoe, ActRule::kSilu, LayerRule::kSparseStep, SharedRule::kNone, kAfter},
    {"qwen3_next", "qwen", kMoe, ActRule::kSilu, LayerRule::kSparseStep, SharedRule::kOwnSize,
     kAfter},
    {"qwen3_5_moe", "qwen", kMoe, ActRule::kSilu, LayerRule::kSparseStep, SharedRule::kOwnSize,
     kAfter},
    {"qwen3_5_moe_text", "qwen", kMoe, ActRule::kSilu, LayerRule::kSparseStep, SharedRule::kOwnSize,
     kAfter},
    {"qwen3_6_moe", "qwen", kMoe, ActRule::kSilu, LayerRule::kSparseStep, SharedRule::kOwnSize,
     kAfter},
    {"qwen3_6_moe_text", "qwen", kMoe, ActRule::kSilu, LayerRule::kSparseStep, SharedRule::kOwnSize,
     kAfter},
    {"qwen3_vl_moe", "qwen_vl", kMoe, ActRule::kSilu, LayerRule::kSparseStep, SharedRule::kNone,
     kAfter},
    {"qwen3_vl_moe_text", "qwen_vl", kMoe, ActRule::kSilu, LayerRule::kSparseStep,
     SharedRule::kNone, kAfter},
    {"glm4_moe", "glm", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount, kAfter},
    {"glm4_moe_lite", "glm", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount,
     kAfter},
    {"glm4v_moe", "glm", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount, kAfter},
    {"glm4v_moe_text", "glm", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount,
     kAfter},
    {"glm_moe_dsa", "glm", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount,
     kAfter},
    {"glm5_next", "glm", kMoe, ActRule::kClamped, LayerRule::kFirstDense, SharedRule::kCount,
     kAfter},
    {"glm5_next_text", "glm", kMoe, ActRule::kClamped, LayerRule::kFirstDense, SharedRule::kCount,
     kAfter},
    {"minimax_m2", "minimax", kPlain, ActRule::kSilu, LayerRule::kAll, SharedRule::kMinimax,
     kAfter},
    {"minimax_m3", "minimax", kPlain, ActRule::kOai, LayerRule::kAll, SharedRule::kMinimax, kAfter},
    {"minimax_m3_vl", "minimax", kPlain, ActRule::kOai, LayerRule::kAll, SharedRule::kMinimax,
     kAfter},
    {"minimax_m3_vl_text", "minimax", kPlain, ActRule::kOai, LayerRule::kAll, SharedRule::kMinimax,
     kAfter},
    {"mixtral", "mixtral", kPlain, ActRule::kSilu, LayerRule::kAll, SharedRule::kNone, kAfter},
    {"llama4", "llama4", kPlain, ActRule::kSilu, LayerRule::kLlama4, SharedRule::kLlama4, kInput},
    {"llama4_text", "llama4", kPlain, ActRule::kSilu, LayerRule::kLlama4, SharedRule::kLlama4,
     kInput},
    {"motif", "motif", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount, kAfter},
    {"Motif", "motif", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount, kAfter},
    {"gpt_oss", "gpt_oss", kPlain, ActRule::kGptOss, LayerRule::kAll, SharedRule::kNone, kAfter,
     true},
    {"openai_privacy_filter", "privacy_filter", kPlain, ActRule::kGptOss, LayerRule::kAll,
     SharedRule::kNone, kAfter, true},
    {"afmoe", "afmoe", kMoe, ActRule::kSilu, LayerRule::kDenseLayers, SharedRule::kCount, kAfter},
    {"aria", "aria", kPlain, ActRule::kSilu, LayerRule::kAll, SharedRule::kCount, kAfter},
    {"aria_text", "aria", kPlain, ActRule::kSilu, LayerRule::kAll, SharedRule::kCount, kAfter},
    {"axk1", "axk", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount, kAfter},
    {"axk2", "axk", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount, kAfter},
    {"bailing_moe", "bailing", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kOwnCount,
     kAfter},
    {"bailing_moe_v2", "bailing", kMoe, ActRule::kSilu, LayerRule::kFirstDense,
     SharedRule::kOwnCount, kAfter},
    {"bailing_moe_linear", "bailing", kMoe, ActRule::kSilu, LayerRule::kFirstDense,
     SharedRule::kOwnCount, kAfter},
    {"bailing_hybrid", "bailing", kMoe, ActRule::kSilu, LayerRule::kFirstDense,
     SharedRule::kOwnCount, kAfter},
    {"beam", "beam", kMoe, ActRule::kSilu, LayerRule::kListed, SharedRule::kNone, kAfter},
    {"cohere2_moe", "cohere", kPlain, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kNone,
     kAfter},
    {"deepseek_ocr2_text", "deepseek_v3", kMoe, ActRule::kSilu, LayerRule::kFirstDense,
     SharedRule::kCount, kAfter},
    {"dots1", "dots", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount, kAfter},
    {"dots3_note", "dots", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kOwnCount,
     kAfter},
    {"dots3_note_text", "dots", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kOwnCount,
     kAfter},
    {"ernie4_5_moe", "ernie", kMoe, ActRule::kSilu, LayerRule::kInterval, SharedRule::kCount,
     kAfter},
    {"exaone_moe", "exaone", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount,
     kAfter},
    {"flint", "flint", kMoe, ActRule::kSilu, LayerRule::kSparseStep, SharedRule::kOwnSize, kAfter},
    {"flex_olmo", "olmo", kPlain, ActRule::kSilu, LayerRule::kAll, SharedRule::kNone, kAfter},
    {"gemma4", "gemma", kMoe, ActRule::kGelu, LayerRule::kAll, SharedRule::kNone, kAfter},
    {"gemma4_text", "gemma", kMoe, ActRule::kGelu, LayerRule::kAll, SharedRule::kNone, kAfter},
    {"granitemoe", "granite", kPlain, ActRule::kSilu, LayerRule::kAll, SharedRule::kNone, kAfter},
    {"granitemoe_swa", "granite", kPlain, ActRule::kSilu, LayerRule::kAll, SharedRule::kGranite,
     kAfter},
    {"granitemoehybrid", "granite", kPlain, ActRule::kSilu, LayerRule::kAll, SharedRule::kGranite,
     kAfter},
    {"granitemoeshared", "granite", kPlain, ActRule::kSilu, LayerRule::kAll, SharedRule::kGranite,
     kAfter},
    {"hunyuan_v1_moe", "hunyuan", kPlain, ActRule::kSilu, LayerRule::kAll, SharedRule::kMlp,
     kAfter},
    {"hy_v3", "hunyuan_v3", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount,
     kAfter},
    {"hy_v4", "hunyuan_v4", kMoe, ActRule::kClamped, LayerRule::kFirstDense, SharedRule::kNone,
     kAfter},
    {"hy_v4_vl", "hunyuan_v4", kMoe, ActRule::kClamped, LayerRule::kFirstDense, SharedRule::kNone,
     kAfter},
    {"hy_v4_vl_text", "hunyuan_v4", kMoe, ActRule::kClamped, LayerRule::kFirstDense,
     SharedRule::kNone, kAfter},
    {"inkling_text", "inkling", kMoe, ActRule::kSilu, LayerRule::kListed, SharedRule::kNone,
     kAfter},
    {"inkling2", "inkling", kMoe, ActRule::kSoftCapped, LayerRule::kAll, SharedRule::kNone, kAfter},
    {"inkling2_text", "inkling", kMoe, ActRule::kSoftCapped, LayerRule::kAll, SharedRule::kNone,
     kAfter},
    {"inkling2_loop", "inkling", kMoe, ActRule::kSoftCapped, LayerRule::kAll, SharedRule::kNone,
     kAfter},
    {"inkling2_loop_text", "inkling", kMoe, ActRule::kSoftCapped, LayerRule::kAll,
     SharedRule::kNone, kAfter},
    {"jamba", "jamba", kPlain, ActRule::kSilu, LayerRule::kPeriod, SharedRule::kNone, kAfter},
    {"kolibri1", "kolibri", kMoe, ActRule::kSilu, LayerRule::kAll, SharedRule::kOwnSize, kAfter},
    {"laguna", "laguna", kMoe, ActRule::kSilu, LayerRule::kListed, SharedRule::kOwnSize, kAfter},
    {"lara_mini", "lara", kMoe, ActRule::kSilu, LayerRule::kAll, SharedRule::kOwnSize, kAfter},
    {"lfm2_moe", "lfm2", kMoe, ActRule::kSiluAlone, LayerRule::kDenseLayers, SharedRule::kNone,
     kAfter},
    {"longcat_flash", "longcat", "expert_ffn_hidden_size", ActRule::kSiluAlone, LayerRule::kAll,
     SharedRule::kNone, kAfter, false, "num_layers"},
    {"mellum", "mellum", kMoe, ActRule::kSilu, LayerRule::kAll, SharedRule::kNone, kAfter},
    {"mimo_v2_flash", "mimo", kMoe, ActRule::kSilu, LayerRule::kListed, SharedRule::kMaybeCount,
     kAfter},
    {"minimax", "minimax", kPlain, ActRule::kSilu, LayerRule::kAll, SharedRule::kMinimax, kAfter},
    {"mistral4", "mistral", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kCount,
     kAfter},
    {"mistral_large4", "mistral_large", kMoe, ActRule::kSilu, LayerRule::kFirstDense,
     SharedRule::kCount, kAfter},
    {"mistral_large4_text", "mistral_large", kMoe, ActRule::kSilu, LayerRule::kFirstDense,
     SharedRule::kCount, kAfter},
    {"olmoe", "olmo", kPlain, ActRule::kSilu, LayerRule::kAll, SharedRule::kNone, kAfter},
    {"phimoe", "phi", kPlain, ActRule::kSilu, LayerRule::kAll, SharedRule::kNone, kAfter},
    {"qwen3_omni_moe_text", "qwen", kMoe, ActRule::kSilu, LayerRule::kSparseStep, SharedRule::kNone,
     kAfter},
    {"qwen4_exp", "qwen", kMoe, ActRule::kSilu, LayerRule::kSparseStep, SharedRule::kOwnSize,
     kAfter},
    {"qwen4_exp_text", "qwen", kMoe, ActRule::kSilu, LayerRule::kSparseStep, SharedRule::kOwnSize,
     kAfter},
    {"sarvam_mla", "sarvam", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kOwnCount,
     kAfter},
    {"sarvam_moe", "sarvam", kMoe, ActRule::kSilu, LayerRule::kFirstDense, SharedRule::kOwnCount,
     kAfter},
    {"solar_open", "solar", kMoe, ActRule::kSilu, LayerRule::kAll, SharedRule::kCount, kAfter},
    {"step3p5", "step", kMoe, ActRule::kStep, LayerRule::kStep, SharedRule::kNone, kAfter},
    {"unlimited_ocr", "deepseek_v3", kMoe, ActRule::kSilu, LayerRule::kFirstDense,
     SharedRule::kCount, kAfter},
    {"unlimited_ocr_text", "deepseek_v3", kMoe, ActRule::kSilu, LayerRule::kFirstDense,
     SharedRule::kCount, kAfter},
    {"step5", "step", kMoe, ActRule::kStep, LayerRule::kStep, SharedRule::kNone, kAfter},
    {"step5_text", "step", kMoe, ActRule::kStep, LayerRule::kStep, SharedRule::kNone, kAfter},
    {"step5_vl", "step", kMoe, ActRule::kStep, LayerRule::kStep, SharedRule::kNone, kAfter},
    {"zaya", "zaya", kMoe, ActRule::kSilu, LayerRule::kAll, SharedRule::kNone, kAfter},
    {"nemotron_h", "nemotron_h", kMoe, ActRule::kRelu2, LayerRule::kBlockTypes,
     SharedRule::kNemotron, kAfter},
};

struct DeclinedModel {
  std::string_view model_type;
  std::string_view reason;
};
constexpr std::string_view kNormedExperts =
    "an expert's output is normalized before its router weight, which is not implemented";
constexpr std::string_view kTwoStacks =
    "an encoder and a decoder have experts in layers of the same numbers, which is not read";
constexpr DeclinedModel kDeclined[] = {
    {"muse_spark", kNormedExperts},
    {"muse_spark_text", kNormedExperts},
    {"dbrx",
     "its experts are rows of one matrix (experts * intermediate, hidden), which is not read"},
    {"diffusion_gemma", kTwoStacks},
    {"diffusion_gemma_text", kTwoStacks},
    {"doge", "its experts are rows of an embedding, one vector each, which is not this layer"},
    {"ernie4_5_vl_moe",
     "a layer has two sets of experts, one for text and one for images, of sizes of their own"},
    {"ernie4_5_vl_moe_text",
     "a layer has two sets of experts, one for text and one for images, of sizes of their own"},
    {"jetmoe", "a layer adds a bias to the sum of its experts, and its attention has experts too"},
    {"nllb-moe", "its experts have biases, relu and no gate, which is not implemented"},
    {"switch_transformers", "its experts have relu and no gate, which is not implemented"},
};

}  // namespace

std::span<const ModelRow> model_rows() { return kModels; }

const ModelRow* model_row(std::string_view model_type) {
  for (const ModelRow& row : kModels) {
    if (row.model_type == model_type) return &row;
  }
  return nullptr;
}

std::string_view reason_to_decline(std::string_view model_type) {
  for (const DeclinedModel& declined : kDeclined) {
    if (declined.model_type == model_type) return declined.reason;
  }
  return {};
}

}  // namespace nvfp4_moe::internal
