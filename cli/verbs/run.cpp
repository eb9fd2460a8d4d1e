// run: runs one layer on the hidden states of a safetensors file, or replays a dumped call.
//
// Input: hidden (T, H) BF16, F16 or F32; topk_ids (T, k) I32 or I64 and topk_weights (T, k) F32,
// random from the seed if missing. Output: `out` (T, H) in hidden's dtype.
#include <fmt/format.h>

#include <algorithm>

#include "cli/console/console.h"
#include "cli/console/lists.h"
#include "cli/verbs/layers.h"
#include "cli/verbs/output_option.h"
#include "cli/verbs/shared_options.h"
#include "cli/verbs/subject_options.h"
#include "cli/verbs/verbs.h"
#include "moe/placed_batch.h"
#include "moe/repro.h"
#include "safetensors/safetensors.h"
#include "verify/states.h"

namespace nvfp4_moe::internal::cli {
namespace {

// Short runs are repeated for this long, because one run is only one sample.
constexpr double kRepeatSeconds = 1.0;

struct RunVerb {
  SubjectOptions subject;
  std::string input;
  std::string output;
  std::string dump;
  std::string replay;
  int64_t tokens = 0;
};

Status write_output(const std::string& path, const Batch& batch, int64_t channels,
                    const std::string& describe) {
  TensorInfo info;
  info.name = "out";
  info.dtype = batch.out_dtype;
  info.shape = {batch.tokens, channels};
  const size_t size_bytes =
      static_cast<size_t>(batch.tokens * channels) * static_cast<size_t>(bits(batch.out_dtype) / 8);
  NVFP4_MOE_ASSIGN(SafetensorsWriter writer,
                   SafetensorsWriter::create(path, {info}, {{"nvfp4_moe", describe}}));
  NVFP4_MOE_TRY(writer.write({static_cast<const std::byte*>(batch.out), size_bytes}));
  return writer.finish();
}

void report_status(const RunStatus& status, Report& report) {
  Table table({{"what", "of activations", false},
               {"blocks", "blocks"},
               {"saturated", "at 448"},
               {"zeroed", "to zero"}});
  const auto row = [&](const char* what, uint64_t blocks, uint64_t saturated, uint64_t zeroed) {
    table.add({cell(what), count_cell(blocks), count_cell(saturated), count_cell(zeroed)});
  };
  row("hidden", status.hidden_blocks, status.hidden_saturated, status.hidden_zeroed);
  row("intermediate", status.intermediate_blocks, status.intermediate_saturated,
      status.intermediate_zeroed);
  report.table("quantized", table);
  if (status.bad_expert_ids > 0) {
    report.fact("warn",
                fmt::format("{} expert ids out of range were skipped", status.bad_expert_ids),
                Style::kWarning);
  }
  if (status.nonfinite_tokens + status.nonfinite_rows > 0) {
    report.fact("warn",
                fmt::format("{} tokens and {} rows are not finite", status.nonfinite_tokens,
                            status.nonfinite_rows),
                Style::kWarning);
  }
  if (status.nonfinite_weights > 0) {
    report.fact("warn", fmt::format("{} router weights are not finite", status.nonfinite_weights),
                Style::kWarning);
  }
  if (status.nonfinite_outputs > 0) {
    const bool overflow = status.nonfinite_tokens + status.nonfinite_weights == 0;
    report.fact("warn",
                fmt::format("{} elements of out are not finite{}", status.nonfinite_outputs,
                            overflow ? ", by overflow: hidden and router weights are" : ""),
                Style::kWarning);
  }
  report.json()["bad_expert_ids"] = status.bad_expert_ids;
  report.json()["nonfinite_tokens"] = status.nonfinite_tokens;
  report.json()["nonfinite_rows"] = status.nonfinite_rows;
  report.json()["nonfinite_weights"] = status.nonfinite_weights;
  report.json()["nonfinite_outputs"] = status.nonfinite_outputs;
}

// The files that the options name, after symbolic links; empty if an option is not given.
struct RunOutputs {
  std::string output;
  std::string dump;
};

Result<RunOutputs> run_outputs(const RunVerb& verb) {
  const std::vector<NamedFile> inputs = {{"--input", verb.input}};
  RunOutputs outputs;
  if (!verb.output.empty()) {
    NVFP4_MOE_ASSIGN(outputs.output,
                     checked_output("--output", verb.output, inputs, verb.subject.path));
  }
  if (!verb.dump.empty()) {
    const std::vector<NamedFile> others = {inputs[0], {"--output", outputs.output}};
    NVFP4_MOE_ASSIGN(outputs.dump, checked_output("--dump", verb.dump, others, verb.subject.path));
  }
  return outputs;
}

Status run_layer(const RunVerb& verb, Report& report) {
  NVFP4_MOE_ASSIGN(const std::string backend, wanted_backend(report.common().backend));
  NVFP4_MOE_ASSIGN(const RunOutputs outputs, run_outputs(verb));
  NVFP4_MOE_ASSIGN(const Subject subject,
                   open_subject(verb.subject, CheckScales::kYes, backend, report.common().device));
  NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(subject.options));
  const int64_t layer_number =
      verb.subject.layer.value_or(subject.checkpoint->model().layers.front());
  StatesOptions states_options;
  states_options.tokens = verb.tokens;
  states_options.seed = verb.subject.seed;
  NVFP4_MOE_ASSIGN(const LayerStates states,
                   load_states(verb.input, subject.options, layer_number, states_options));

  if (states.tokens == 0 && !verb.dump.empty())
    return invalid_argument(
        "--dump: expected an input of at least one token, got none: there is nothing to replay");

  LayerOptions options;
  options.backend = backend;
  options.device = report.common().device;
  options.range = subject.range;
  // an empty input gives an empty output
  options.limits.max_tokens = std::max<int64_t>(states.tokens, 1);
  options.executor = &report.executor();
  std::unique_ptr<MoeLayer> layer;
  {
    ProgressBar bar(report.progress());
    NVFP4_MOE_ASSIGN(layer, MoeLayer::open(config, subject.source, options, bar.callback()));
  }
  Batch batch = states.batch();
  std::vector<uint8_t> out(states.hidden.size());
  batch.out = out.data();
  batch.out_dtype = batch.hidden_dtype;
  NVFP4_MOE_ASSIGN(const TimedRun run, run_from_host(*layer, batch, kRepeatSeconds));
  const double elapsed_us = run.seconds * 1e6;
  if (!verb.output.empty()) {
    NVFP4_MOE_TRY(write_output(outputs.output, batch, config->hidden_size, layer->describe_json()));
  }
  if (!verb.dump.empty()) NVFP4_MOE_TRY(write_repro(outputs.dump, *layer, batch, true));

  report.fact("layer", fmt::format("{}, experts {}:{}", subject.name, subject.range.first,
                                   subject.range.count));
  std::string drawn;
  if (!states.ids_from_file) drawn += ", topk_ids drawn from the seed";
  if (!states.weights_from_file) drawn += ", topk_weights drawn from the seed";
  report.fact("input", fmt::format("{} tokens of {}, {}{}", states.tokens,
                                   to_string(states.hidden_dtype), states.source, drawn));
  std::string ran = fmt::format("backend {} on {}, {:.0f} us (first run)", layer->backend().name,
                                options.device, elapsed_us);
  if (!run.again.empty())
    ran +=
        fmt::format(", then {:.0f} us (median of {})", run.median_again() * 1e6, run.again.size());
  report.fact("ran", ran);
  const Json described = Json::parse(layer->describe_json());
  report.fact("activations", fmt::format("{}, because {}", to_string(config->activation_format),
                                         described.find("activations")->value("because", "")));
  report_status(run.status, report);
  if (!verb.output.empty())
    report.fact("wrote",
                fmt::format("{}: out ({}, {})", verb.output, states.tokens, config->hidden_size));
  if (!verb.dump.empty()) {
    report.fact("dumped", verb.dump);
    report.fact("next", "nvfp4-moe run --replay " + shell_quoted(verb.dump));
  }
  Json& json = report.json();
  json["layer"] = layer_number;
  json["tokens"] = states.tokens;
  json["device"] = options.device;
  json["dtype"] = to_string(states.hidden_dtype);
  json["states"] = states.source;
  json["elapsed_us"] = elapsed_us;
  json["again_us"] = run.again.empty() ? Json(nullptr) : Json(run.median_again() * 1e6);
  json["repeats"] = run.again.size();
  json["output"] = verb.output.empty() ? Json(nullptr) : Json(verb.output);
  json["dump"] = verb.dump.empty() ? Json(nullptr) : Json(verb.dump);
  json["describe"] = described;
  return {};
}

void add_comparison(const char* vs, const Comparison& c, const std::string& broken, Table& table) {
  table.add({cell(vs), cell(c.cosine, "{:.8f}"), cell(c.relative_l2, "{:.1e}"),
             cell(c.worst_token_l2, "{:.1e}"), cell(c.max_abs, "{:.2e}"),
             cell(c.max_abs > 0 ? fmt::format("({}, {})", c.max_token, c.max_channel) : ""),
             verdict(broken.empty())});
}

Status replay_call(const RunVerb& verb, Report& report) {
  NVFP4_MOE_ASSIGN(const std::string backend, wanted_backend(report.common().backend));
  NVFP4_MOE_ASSIGN(const ReplayReport replayed,
                   replay(verb.replay, backend, &report.executor(), report.common().device));
  report.fact("replayed",
              fmt::format("{}: {} tokens, recorded on {}, run on {}", verb.replay, replayed.tokens,
                          replayed.recorded_backend, replayed.backend));
  Table table({{"vs", "vs", false},
               {"cosine", "cosine"},
               {"relative_l2", "rel. L2"},
               {"worst_token_l2", "worst token"},
               {"max_abs", "max abs"},
               {"at", "(token, channel)", false},
               {"passed", "result", false}});
  if (replayed.with_output)
    add_comparison("stored output", *replayed.with_output, replayed.broken_output_limit, table);
  add_comparison("exact reference", replayed.with_reference, replayed.broken_reference_limit,
                 table);
  report.table("checks", table);
  if (replayed.same_bits)
    report.fact("bits", *replayed.same_bits ? "the same as stored" : "differ from those stored");
  if (!replayed.broken_output_limit.empty())
    report.fail("stored output: " + replayed.broken_output_limit);
  if (!replayed.broken_reference_limit.empty())
    report.fail("exact reference: " + replayed.broken_reference_limit);
  report_status(replayed.status, report);
  Json& json = report.json();
  json["replay"] = verb.replay;
  json["tokens"] = replayed.tokens;
  json["recorded_backend"] = replayed.recorded_backend;
  json["backend"] = replayed.backend;
  json["same_bits"] = replayed.same_bits ? Json(*replayed.same_bits) : Json(nullptr);
  json["describe"] = Json::parse(replayed.describe);
  return {};
}

Status run_verb(const RunVerb& verb, Report& report) {
  if (!verb.replay.empty()) {
    if (!verb.subject.path.empty() || !verb.input.empty() || !verb.output.empty() ||
        !verb.dump.empty()) {
      return invalid_argument(
          "--replay: expected no DIR, --input, --output or --dump, since the file has everything");
    }
    return replay_call(verb, report);
  }
  if (verb.subject.path.empty()) return invalid_argument("run: expected DIR, or --replay FILE");
  if (!verb.subject.layer)
    return invalid_argument("run: expected --layer L (`nvfp4-moe inspect DIR` lists the layers)");
  if (verb.input.empty()) return invalid_argument("run: expected --input FILE");
  if (verb.output.empty() && verb.dump.empty())
    return invalid_argument("run: expected --output FILE or --dump FILE");
  return run_layer(verb, report);
}

}  // namespace

void add_run(CLI::App& app, Invocation& invocation) {
  add_verb<RunVerb>(
      app, invocation, "run", "Run one layer on hidden states from a file, or replay a dumped call",
      UsesBackend::kYes, run_verb, [](CLI::App& verb, RunVerb& options) {
        add_subject(verb, options.subject, false);
        verb.add_option("--input", options.input,
                        "Safetensors file with hidden states: hidden, optionally topk_ids and "
                        "topk_weights; what is missing is drawn from the seed")
            ->type_name(kFile);
        verb.add_option("--output", options.output,
                        "Safetensors file to write the result to, as out")
            ->type_name(kFile);
        add_token_count(verb, "--tokens", options.tokens,
                        "Most tokens to read from the input; 0 reads all");
        verb.add_option("--dump", options.dump,
                        "Write the call, including the weights, to this file, for --replay")
            ->type_name(kFile);
        verb.add_option("--replay", options.replay,
                        "Run a dumped call again, and check it against its output and the "
                        "reference")
            ->type_name(kFile);
      });
}

}  // namespace nvfp4_moe::internal::cli
