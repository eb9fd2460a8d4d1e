// calibrate: measures static activation scales with the reference, on sample hidden states.
#include "verify/calibrate.h"

#include <fmt/format.h>

#include "cli/console/console.h"
#include "cli/console/lists.h"
#include "cli/verbs/layers.h"
#include "cli/verbs/shared_options.h"
#include "cli/verbs/verbs.h"
#include "convert/quantize_checkpoint.h"

namespace nvfp4_moe::internal::cli {
namespace {

struct CalibrateVerb {
  std::string path;
  std::string layers;
  std::string input;
  std::optional<float> random_amplitude;
  std::optional<int64_t> tokens;
  uint64_t seed = 42;
  std::string write;
  std::string moments;
  ReadingChoices reading;
};

Status calibrate_verb(const CalibrateVerb& verb, Report& report) {
  if (verb.input.empty() == !verb.random_amplitude) {
    return invalid_argument("calibrate: expected either --input FILE or --random AMPLITUDE");
  }
  NVFP4_MOE_ASSIGN(const CheckpointOptions reading, verb.reading.options());
  NVFP4_MOE_ASSIGN(const Checkpoint checkpoint, Checkpoint::open(verb.path, reading));
  if (!verb.write.empty())
    NVFP4_MOE_TRY(check_takes_input_scales(checkpoint, verb.write));  // before the long measurement
  CalibrateOptions options;
  NVFP4_MOE_ASSIGN(options.layers, chosen_layers(checkpoint.model(), verb.layers));
  options.input = verb.input;
  options.moments = verb.moments;
  options.states.seed = verb.seed;
  options.states.tokens = verb.tokens.value_or(verb.input.empty() ? 128 : 0);
  if (verb.random_amplitude) options.states.amplitude = *verb.random_amplitude;
  options.executor = &report.executor();
  Calibration calibration;
  {
    ProgressBar bar(report.progress());
    options.progress = bar.callback();
    NVFP4_MOE_ASSIGN(calibration, calibrate(checkpoint, options));
  }

  Table table({{"layer", "layer"},
               {"tokens", "tokens"},
               {"experts_seen", "experts seen"},
               {"hidden_amax", "hidden amax"},
               {"hidden_scale", "hidden scale"},
               {"intermediate_amax", "intermediate amax"},
               {"intermediate_scale", "intermediate scale"},
               {"source", "states", false}});
  const auto scale_cell = [](std::optional<float> scale) {
    return scale ? cell(*scale, "{:.4e}") : no_cell();
  };
  for (const LayerCalibration& layer : calibration.layers) {
    const LayerScales scales = layer.scales();
    table.add({cell(layer.layer), cell(layer.tokens), cell(layer.experts_seen),
               cell(layer.hidden_amax, "{:.4g}"), scale_cell(scales.hidden),
               cell(layer.intermediate_amax, "{:.4g}"), scale_cell(scales.intermediate),
               cell(layer.source)});
  }
  report.table("layers", table);
  for (const std::string& note : calibration.notes) report.fact("note", note);
  report.json()["path"] = verb.path;
  report.json()["notes"] = calibration.notes;
  report.json()["elapsed_s"] = calibration.seconds;

  if (!verb.moments.empty()) {
    report.json()["moments"] = verb.moments;
    report.fact("moments",
                fmt::format("{}: for nvfp4-moe quantize {} OUT --search sweep --calibration {}",
                            verb.moments, shell_quoted(verb.path), shell_quoted(verb.moments)));
  }
  if (verb.write.empty()) {
    report.fact("next",
                checkpoint.model().format == SourceFormat::kFloat
                    ? fmt::format("nvfp4-moe quantize {} OUT --input-scales FILE, FILE being "
                                  "this command's --json output",
                                  shell_quoted(verb.path))
                    : std::string("the same command with --write OUT makes a copy with "
                                  "these scales"));
    return {};
  }
  if (calibration.scales().empty())
    return bad_input(verb.input + ": no token has an expert, so there are no scales to write");
  {
    ProgressBar bar(report.progress());
    NVFP4_MOE_TRY(write_input_scales(verb.path, verb.write, calibration.scales(), 5ull << 30,
                                     bar.callback(), reading));
  }
  report.json()["written"] = verb.write;
  report.fact("wrote", verb.write + ": the same checkpoint with these input scales");
  report.fact("next", "nvfp4-moe verify " + shell_quoted(verb.write) +
                          " --activation-scale static" + verb.reading.text());
  return {};
}

}  // namespace

void add_calibrate(CLI::App& app, Invocation& invocation) {
  add_verb<CalibrateVerb>(
      app, invocation, "calibrate", "Measure static activation scales from sample hidden states",
      UsesBackend::kNo, calibrate_verb, [](CLI::App& verb, CalibrateVerb& options) {
        add_checkpoint_directory(verb, options.path);
        add_states(verb, options.input, options.tokens, 1, "default 128");
        verb.add_option("--random", options.random_amplitude,
                        "Instead of --input, random hidden states: the standard deviation of most "
                        "channels, 0.5 to 1.5 times this; 1 channel of 128 is an outlier");
        add_layer_list(verb, options.layers, "Layers to measure");
        add_seed(verb, options.seed);
        verb.add_option("--moments", options.moments,
                        "Write the mean square of each channel (second moments) to this new file, "
                        "for quantize --calibration")
            ->type_name(kFile);
        verb.add_option("--write", options.write,
                        "Copy an NVFP4 checkpoint to this new directory, with the measured scales")
            ->type_name(kDirectory);
        add_reading_choices(verb, options.reading);
      });
}

}  // namespace nvfp4_moe::internal::cli
