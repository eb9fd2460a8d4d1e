// synthesize: writes a small random checkpoint with the structure and names of a real model, as
// the demo's input.
#include "convert/synthesize.h"

#include <fmt/format.h>

#include "cli/console/console.h"
#include "cli/console/lists.h"
#include "cli/verbs/shared_options.h"
#include "cli/verbs/verbs.h"

namespace nvfp4_moe::internal::cli {
namespace {

struct SynthesizeVerb {
  std::string out;
  SynthesizeOptions sizes;
  std::string dtype = "BF16";
  std::string max_shard_size = "64MiB";
  std::string of_size;
};

Status synthesize(const SynthesizeVerb& verb, Report& report) {
  SynthesizeOptions options = verb.sizes;
  NVFP4_MOE_ASSIGN(options.max_shard_bytes, parse_bytes(verb.max_shard_size));
  if (!verb.of_size.empty()) {
    NVFP4_MOE_ASSIGN(const uint64_t total_bytes, parse_bytes(verb.of_size));
    options = SynthesizeOptions::of_size(total_bytes);
    options.seed = verb.sizes.seed;
  }
  const std::optional<DType> dtype = dtype_from_string(verb.dtype);
  if (!dtype || !is_activation(*dtype)) {
    return invalid_argument(fmt::format("--dtype: expected BF16, F16 or F32, got {}", verb.dtype));
  }
  options.dtype = *dtype;
  options.executor = &report.executor();
  SynthesizeResult made;
  {
    ProgressBar bar(report.progress());
    options.progress = bar.callback();
    NVFP4_MOE_ASSIGN(made, synthesize_checkpoint(verb.out, options));
  }
  report.fact("made",
              fmt::format("{}: {} layers x {} experts, hidden {}, intermediate {}, {} {}",
                          options.family, options.layers, options.num_experts, options.hidden_size,
                          options.intermediate_size, to_string(options.dtype), verb.out));
  report.fact("size", fmt::format("{} in {} shards, {} tensors, {:.1f} s", bytes_text(made.bytes),
                                  made.shards, made.tensors, made.seconds));
  report.fact("next", fmt::format("nvfp4-moe quantize {} {}", shell_quoted(verb.out),
                                  shell_quoted(verb.out + "-NVFP4")));
  Json& json = report.json();
  json["path"] = verb.out;
  json["family"] = options.family;
  json["layers"] = options.layers;
  json["num_experts"] = options.num_experts;
  json["shards"] = made.shards;
  json["tensors"] = made.tensors;
  json["size_bytes"] = made.bytes;
  json["expert_bytes"] = made.expert_bytes;
  json["elapsed_s"] = made.seconds;
  return {};
}

}  // namespace

void add_synthesize(CLI::App& app, Invocation& invocation) {
  add_verb<SynthesizeVerb>(
      app, invocation, "synthesize",
      "Write a small random checkpoint with the structure and names of a real model",
      UsesBackend::kNo, synthesize, [](CLI::App& verb, SynthesizeVerb& options) {
        SynthesizeOptions& sizes = options.sizes;
        const CLI::Range positive(int64_t{1}, int64_t{1} << 24);
        verb.add_option("OUT", options.out, "Directory to write")->required()->type_name("");
        verb.add_option("--family", sizes.family, "Model family")
            ->type_name("deepseek_v4|qwen3_moe|nemotron_h")
            ->capture_default_str();
        const auto size = [&](const char* name, int64_t& value, const char* help) {
          verb.add_option(name, value, help)->check(positive)->capture_default_str();
        };
        size("--layers", sizes.layers, "Number of MoE layers");
        size("--experts", sizes.num_experts, "Experts per layer");
        size("--top-k", sizes.top_k, "Experts per token");
        size("--hidden", sizes.hidden_size, "Hidden size, a multiple of 16");
        size("--intermediate", sizes.intermediate_size, "Intermediate size, a multiple of 16");
        verb.add_option("--latent", sizes.latent_size,
                        "nemotron_h: the experts' hidden size, after a projection");
        size("--vocab", sizes.vocab_size, "Size of the vocabulary");
        verb.add_option("--dtype", options.dtype, "Type of the weights")
            ->type_name("BF16|F16|F32")
            ->capture_default_str();
        add_seed(verb, sizes.seed);
        verb.add_option("--max-shard-size", options.max_shard_size,
                        "Size limit of a written file, for example 5GB")
            ->capture_default_str();
        verb.add_option("--of-size", options.of_size,
                        "Instead of the sizes above, about this many bytes of experts, for example "
                        "5GB");
      });
}

}  // namespace nvfp4_moe::internal::cli
