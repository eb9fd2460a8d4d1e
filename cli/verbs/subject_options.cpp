#include "cli/verbs/subject_options.h"

#include <fmt/format.h>

#include "cli/bench/random_layer.h"
#include "cli/bench/shapes.h"
#include "cli/verbs/layers.h"
#include "cli/verbs/shared_options.h"
#include "moe/activation_choice.h"

namespace nvfp4_moe::internal::cli {
namespace {

Result<Subject> checkpoint_subject(const SubjectOptions& options, CheckScales check,
                                   const std::string& backend, const std::string& device) {
  Subject subject;
  NVFP4_MOE_ASSIGN(const CheckpointOptions reading, options.reading.options());
  NVFP4_MOE_ASSIGN(Checkpoint checkpoint, Checkpoint::open(options.path, reading));
  subject.checkpoint = std::make_unique<Checkpoint>(std::move(checkpoint));
  const std::vector<int64_t>& layers = subject.checkpoint->model().layers;
  if (layers.empty()) return bad_input(fmt::format("{}: no layer with experts", options.path));
  const int64_t layer = options.layer.value_or(layers.front());
  NVFP4_MOE_TRY(
      chosen_layers(subject.checkpoint->model(), fmt::format("{}", layer), "--layer").status());
  NVFP4_MOE_ASSIGN(subject.options, subject.checkpoint->layer_options(layer));
  NVFP4_MOE_TRY(options.choices.apply(subject.options));
  // A missing device is refused later, when the layer is opened on it.
  if (options.choices.chooses_format() && device_facts(device).ok()) {
    LayerOptions layer_options;
    layer_options.backend = backend;
    layer_options.device = device;
    NVFP4_MOE_ASSIGN(subject.options, with_chosen_format(subject.options, layer_options));
  }
  NVFP4_MOE_ASSIGN(subject.range, options.part.range(subject.options.num_experts));
  const int64_t whole = subject.options.intermediate_size;
  NVFP4_MOE_ASSIGN(const IntermediateSlice slice, options.part.slice(whole));
  NVFP4_MOE_TRY(subject.checkpoint->check_layout(layer, subject.range));
  if (check == CheckScales::kYes) {
    NVFP4_MOE_ASSIGN(const std::vector<Finding> findings,
                     subject.checkpoint->validate(layer, subject.range));
    for (const Finding& finding : findings) {
      if (finding.severity == Severity::kError) return error_of(finding);
    }
  }
  NVFP4_MOE_ASSIGN(subject.source, layer_source(*subject.checkpoint, layer, slice));
  if (slice.count > 0) {
    subject.options.intermediate_size = slice.count;
    // layer_source has checked that the shared expert is cut in the same proportion.
    subject.options.shared_intermediate_size =
        subject.options.shared_intermediate_size * slice.count / whole;
  }
  subject.name = fmt::format("layer {} of {}", layer, options.path);
  return subject;
}

}  // namespace

void add_subject(CLI::App& verb, SubjectOptions& options, bool shapes_too) {
  verb.add_option("DIR", options.path,
                  "Checkpoint: a model directory, or one safetensors or GGUF file")
      ->type_name("");
  verb.add_option("--layer", options.layer,
                  shapes_too ? "Number of a MoE layer of DIR (default: the first)"
                             : "Number of a MoE layer of DIR");
  if (shapes_too) {
    verb.add_option(
            "--shape", options.shape,
            "Instead of DIR, random weights in the sizes of a known model (A and B: two small "
            "layers of the benchmarks)")
        ->type_name(choice_of(shape_names()));
    verb.add_option("--experts", options.experts,
                    "With --shape: number of experts, all of them local")
        ->check(CLI::Range(int64_t{1}, int64_t{65536}));
  }
  add_seed(verb, options.seed);
  add_numeric_choices(verb, options.choices);
  add_expert_range(verb, options.part);
  add_intermediate_slice(verb, options.part);
  add_reading_choices(verb, options.reading);
}

Result<Subject> open_subject(const SubjectOptions& options, CheckScales check,
                             const std::string& backend, const std::string& device) {
  if (options.path.empty() == options.shape.empty())
    return invalid_argument("expected either DIR or --shape NAME");
  if (!options.path.empty()) {
    if (options.experts > 0) return invalid_argument("--experts: only with --shape");
    return checkpoint_subject(options, check, backend, device);
  }
  if (options.layer) return invalid_argument("--layer: only with DIR");
  Subject subject;
  NVFP4_MOE_ASSIGN(const ShapedLayer layer, shaped_layer(options.shape, options.experts));
  subject.options = layer.options;
  subject.range = layer.range;
  NVFP4_MOE_TRY(options.choices.apply(subject.options));
  if (!options.part.expert_range.empty()) {
    NVFP4_MOE_ASSIGN(subject.range, options.part.range(subject.options.num_experts));
  }
  NVFP4_MOE_ASSIGN(const IntermediateSlice slice,
                   options.part.slice(subject.options.intermediate_size));
  if (slice.count > 0) subject.options.intermediate_size = slice.count;
  subject.source = random_layer(subject.options, options.seed);
  subject.name = "shape " + options.shape;
  return subject;
}

}  // namespace nvfp4_moe::internal::cli
