// verify: compares the checkpoint, as this build packs and runs it, with the file's bytes, the
// exact reference and the original weights. Exit code 1 names the failure by layer, expert, tensor
// and coordinate, or by token and channel.
#include "verify/verify.h"

#include <fmt/format.h>

#include "cli/console/lists.h"
#include "cli/verbs/choices.h"
#include "cli/verbs/layers.h"
#include "cli/verbs/output_option.h"
#include "cli/verbs/ranks.h"
#include "cli/verbs/shared_options.h"
#include "cli/verbs/verbs.h"
#include "verify/verify_ranks.h"

namespace nvfp4_moe::internal::cli {
namespace {

struct VerifyVerb {
  std::string path;
  std::string against;
  std::string layers;
  std::string input;
  std::optional<int64_t> tokens;
  uint64_t seed = 42;
  std::optional<double> limit_sqnr_db;
  NumericChoices choices;
  LocalPart part;
  int ranks = 0;  // --ep; 0: not given, one rank
  std::string combine = "all_to_all";
  std::string over;  // empty: nccl on GPUs
  ReadingChoices reading;
  std::string html;
};

Result<VerifyOptions> engine_options(const VerifyVerb& verb, const ModelInfo& model) {
  VerifyOptions options;
  options.against = verb.against;
  NVFP4_MOE_ASSIGN(options.layers, chosen_layers(model, verb.layers));
  NVFP4_MOE_ASSIGN(options.range, verb.part.range(model.options.num_experts));
  options.input = verb.input;
  options.states.seed = verb.seed;
  options.states.tokens = verb.tokens.value_or(verb.input.empty() ? 32 : 0);
  options.limit_sqnr_db = verb.limit_sqnr_db;
  if (verb.limit_sqnr_db && verb.against.empty())
    return invalid_argument("--limit: expected --against ORIGINAL too");
  MoeOptions probe = model.options;
  NVFP4_MOE_TRY(verb.choices.apply(probe));  // unknown names are refused before any work
  options.adjust = [choices = verb.choices](MoeOptions& layer) { (void)choices.apply(layer).ok(); };
  options.choose_format = verb.choices.chooses_format();
  return options;
}

std::string coordinates(int64_t a, int64_t b) {
  return a < 0 ? "-" : fmt::format("({}, {})", a, b);
}

void add_packed_row(const LayerVerification& layer, Table& table) {
  const PackedCheck& check = *layer.packed;
  const std::string first =
      check.faults.empty()
          ? ""
          : fmt::format("expert {} {}", check.faults[0].expert, check.faults[0].projection);
  const Cell where =
      check.faults.empty()
          ? no_cell()
          : cell(first + " " + coordinates(check.faults[0].row, check.faults[0].col));
  table.add({cell(layer.layer), cell("file's bytes, unpacked"), no_cell(), no_cell(), no_cell(),
             no_cell(), where,
             cell(check.passed() ? fmt::format("{} equal", bytes_text(check.bytes_compared))
                                 : fmt::format("{} bytes of {} tensors differ",
                                               check.differing_bytes, check.faulty_tensors)),
             verdict(check.passed())});
}

void add_run_row(const LayerVerification& layer, Table& table) {
  const RunCheck& check = *layer.run;
  const Comparison& c = check.comparison;
  table.add(
      {cell(layer.layer),
       cell("exact reference, " + check.backend),
       cell(c.cosine, "{:.8f}"),
       cell(c.relative_l2, "{:.1e}"),
       {c.worst_token < 0 ? "" : fmt::format("{:.1e} (token {})", c.worst_token_l2, c.worst_token),
        c.worst_token_l2},
       cell(c.max_abs, "{:.2e}"),
       cell(c.max_abs > 0 ? coordinates(c.max_token, c.max_channel) : ""),
       cell(fmt::format("L2 {:.0e}, token {:.0e}", check.limits.relative_l2,
                        check.limits.worst_token_l2)),
       verdict(check.passed())});
}

void add_original_row(const LayerVerification& layer, const std::optional<double>& limit,
                      Table& table) {
  const OriginalCheck& check = *layer.original;
  // The coordinates of the first fault, else of the largest error.
  std::string where =
      fmt::format("expert {} {}", check.max_expert, coordinates(check.max_row, check.max_col));
  if (!check.faults.empty()) {
    const WeightFault& fault = check.faults.front();
    where = fmt::format("expert {} {} {}", fault.expert, fault.projection,
                        coordinates(fault.row, fault.col));
  }
  table.add({cell(layer.layer), cell(check.format + " original"), cell(check.cosine, "{:.8f}"),
             cell(check.relative_l2, "{:.1e}"), no_cell(), cell(check.max_abs, "{:.2e}"),
             cell(where),
             cell(fmt::format("half step; {:.2f} dB{}", check.sqnr_db,
                              limit ? fmt::format(" >= {:g}", *limit) : std::string())),
             verdict(check.passed())});
}

// Reports saturation and rounding to zero: for activations in the run, for weights in the
// quantization.
void report_saturation(const VerifyReport& verified, Report& report) {
  Table table({{"layer", "layer"},
               {"hidden_blocks", "hidden blocks"},
               {"hidden_saturated", "at 448"},
               {"hidden_zeroed", "to zero"},
               {"intermediate_blocks", "intermediate blocks"},
               {"intermediate_saturated", "at 448"},
               {"intermediate_zeroed", "to zero"},
               {"nonfinite_rows", "non-finite rows"},
               {"nonfinite_outputs", "non-finite outputs"},
               {"weights_saturated", "weights beyond their block"},
               {"weight_blocks_zeroed", "weight blocks to zero"}});
  for (const LayerVerification& layer : verified.layers) {
    if (!layer.run && !layer.original) continue;
    std::vector<Cell> cells = {cell(layer.layer)};
    if (layer.run) {
      const RunStatus& s = layer.run->status;
      cells.insert(cells.end(),
                   {count_cell(s.hidden_blocks), count_cell(s.hidden_saturated),
                    count_cell(s.hidden_zeroed), count_cell(s.intermediate_blocks),
                    count_cell(s.intermediate_saturated), count_cell(s.intermediate_zeroed),
                    count_cell(s.nonfinite_rows), count_cell(s.nonfinite_outputs)});
    }
    cells.resize(9);
    if (layer.original) {
      cells.push_back(count_cell(layer.original->saturated));
      cells.push_back(count_cell(layer.original->zeroed_blocks));
    }
    table.add(std::move(cells));
  }
  if (table.empty()) return;
  report.line("");
  report.line("saturation");
  report.table("saturation", table);
}

// Reports how many weights E4M3 rounds, for layers that ran in fp8.
void report_fp8(const VerifyReport& verified, Report& report) {
  Json layers = Json::array();
  for (const LayerVerification& layer : verified.layers) {
    if (!layer.fp8) continue;
    const Fp8LayerWeights& fp8 = *layer.fp8;
    const double share = static_cast<double>(fp8.inexact) / static_cast<double>(fp8.weights);
    report.fact("fp8",
                fmt::format("layer {}: E4M3 rounds {} of {} weights ({:.1f} %), shifts {} to {}",
                            layer.layer, fp8.inexact, fp8.weights, 100 * share, fp8.least_shift,
                            fp8.most_shift));
    Json one = fp8_weights_json(fp8);
    one["layer"] = layer.layer;
    layers.push_back(one);
  }
  if (!layers.empty()) report.json()["fp8_weights"] = layers;
}

// Lists what was not checked, so that a "pass" is not read as more than it is.
void report_unchecked(bool against_original, Report& report) {
  Json unchecked = Json::array();
  const auto add = [&](const char* what, const char* why) {
    report.fact("unchecked", fmt::format("{}: {}", what, why));
    unchecked.push_back({{"what", what}, {"why", why}});
  };
  if (!against_original)
    add("weights",
        "without --against ORIGINAL only illegal bytes are errors; wrong codes and scales that are "
        "legal pass");
  add("input_scale", "it comes from calibration, and there is nothing to compare it with");
  report.json()["unchecked"] = unchecked;
}

// verify --ep: compares a layer over ranks with the same layer on one rank.
Status verify_ranks_verb(const VerifyVerb& verb, const std::string& page, Report& report) {
  if (!verb.against.empty() || !verb.input.empty() || !verb.part.expert_range.empty() ||
      verb.limit_sqnr_db)
    return invalid_argument(
        "--ep: expected none of --against, --input, --limit and --expert-range with it");
  const std::string& device = report.common().device;
  NVFP4_MOE_ASSIGN(const std::optional<RanksOver> over, parse_over(verb.over, device));
  RanksOptions options;
  NVFP4_MOE_ASSIGN(options.combine, parse<CombineBy>(verb.combine, "--combine"));
  NVFP4_MOE_ASSIGN(options.reading, verb.reading.options());
  {
    NVFP4_MOE_ASSIGN(const Checkpoint checkpoint, Checkpoint::open(verb.path, options.reading));
    NVFP4_MOE_ASSIGN(options.layers, chosen_layers(checkpoint.model(), verb.layers));
    MoeOptions probe = checkpoint.model().options;
    NVFP4_MOE_TRY(verb.choices.apply(probe));
  }
  options.states.seed = verb.seed;
  options.states.tokens = verb.tokens.value_or(32);
  NVFP4_MOE_ASSIGN(options.backend, wanted_backend(report.common().backend));
  options.threads = report.common().threads.value_or(0);
  options.adjust = [choices = verb.choices](MoeOptions& layer) { (void)choices.apply(layer).ok(); };
  options.choose_format = verb.choices.chooses_format();
  NVFP4_MOE_ASSIGN(const VerbRanks ranks, connect_ranks(verb.ranks, device));
  const bool first = ranks.ranks.has_first();
  begin_page(first ? page : "", report);
  options.device = [&](int index) { return ranks.device_of(device, index); };
  if (over) NVFP4_MOE_TRY(connect_devices(ranks, device, *over));
  Result<std::vector<RanksCheck>> checks = std::vector<RanksCheck>();
  {
    ProgressBar bar(progress_of(ranks, report.progress()));
    options.progress = bar.callback();
    checks = verify_ranks(verb.path, ranks.ranks, options);
  }
  NVFP4_MOE_TRY(checks.status());
  report.json()["ranks"] = verb.ranks;
  report.json()["combine"] = verb.combine;
  report.json()["device"] = device;
  report.json()["over"] = over ? Json(name_of(*over)) : Json();
  if (!first) return {};  // rank 0 reports for all
  report.fact("checked",
              fmt::format("{}: {} ranks ({}), {}{}", verb.path, verb.ranks,
                          ranks.launched ? "processes" : "threads of this process", verb.combine,
                          over ? fmt::format(" on {} over {}", device, name_of(*over)) : ""));
  Table table({{"layer", "layer"},
               {"backend", "backend", false},
               {"tokens", "tokens"},
               {"batch_invariant", over ? "batch-invariant" : "", false},
               {"same_bits", "bits of one rank", false},
               {"relative_l2", "rel. L2"},
               {"max_abs", "max abs"},
               {"passed", "result", false}});
  for (const RanksCheck& check : *checks) {
    table.add({cell(check.layer),
               cell(check.backend),
               cell(check.tokens),
               {check.batch_invariant ? "yes" : "no", check.batch_invariant},
               cell(check.same_bits ? "equal" : "others"),
               cell(check.comparison.relative_l2, "{:.1e}"),
               cell(check.comparison.max_abs, "{:.2e}"),
               verdict(check.broken.empty())});
    if (!check.broken.empty()) report.fail(fmt::format("layer {}: {}", check.layer, check.broken));
  }
  report.table("checks", table);
  return {};
}

Status verify_verb(const VerifyVerb& verb, Report& report) {
  NVFP4_MOE_ASSIGN(const std::string page,
                   checked_page(verb.html, verb.input, {verb.path, verb.against}));
  if (verb.ranks > 0) return verify_ranks_verb(verb, page, report);
  begin_page(page, report);
  if (!verb.over.empty()) return invalid_argument("--over: expected --ep too");
  VerifyOptions options;
  {
    NVFP4_MOE_ASSIGN(const CheckpointOptions reading, verb.reading.options());
    NVFP4_MOE_ASSIGN(const Checkpoint checkpoint, Checkpoint::open(verb.path, reading));
    NVFP4_MOE_ASSIGN(options, engine_options(verb, checkpoint.model()));
    options.reading = reading;
    NVFP4_MOE_ASSIGN(options.backend, wanted_backend(report.common().backend));
    options.device = report.common().device;
  }
  options.executor = &report.executor();
  VerifyReport verified;
  {
    ProgressBar bar(report.progress());
    options.progress = bar.callback();
    NVFP4_MOE_ASSIGN(verified, verify(verb.path, options));
  }

  report.fact("checked", fmt::format("{}: {} ({})", verb.path, verified.family, verified.format));
  Table table({{"layer", "layer"},
               {"vs", "vs", false},
               {"cosine", "cosine"},
               {"relative_l2", "rel. L2"},
               {"worst_token_l2", "worst token"},
               {"max_abs", "max abs"},
               {"at", "at", false},
               {"limit", "limit", false},
               {"passed", "result", false}});
  int64_t checks_by_themselves = 0;
  for (const LayerVerification& layer : verified.layers) {
    if (layer.packed) add_packed_row(layer, table);
    if (layer.run) add_run_row(layer, table);
    if (layer.original) add_original_row(layer, verb.limit_sqnr_db, table);
    if (!layer.packed && !layer.run && !layer.original) {
      table.add({cell(layer.layer), cell("its own scales"), no_cell(), no_cell(), no_cell(),
                 no_cell(), no_cell(), cell("no errors"), verdict(layer.passed())});
    }
    if (layer.run && layer.run->backend_is_reference) ++checks_by_themselves;
    for (const std::string& failure : layer.failures) report.fail(failure);
  }
  report.table("checks", table);
  std::vector<LayerActivations> activations;
  for (const LayerVerification& layer : verified.layers) {
    if (!layer.activations_because.empty())
      activations.push_back(
          {layer.layer, layer.options.activation_format, layer.activations_because});
  }
  report_activations(activations, report);
  report_saturation(verified, report);
  report_fp8(verified, report);

  report.line("");
  for (const LayerVerification& layer : verified.layers) {
    for (const std::string& failure : layer.failures) report.fact("FAIL", failure, Style::kBad);
    if (layer.original && !layer.original->hint.empty())
      report.fact("hint", layer.original->hint, Style::kWarning);
  }
  report.line(
      "\"exact reference\" computes with the same NVFP4 weights without rounding in between, and "
      "so checks the kernels. \"original\" checks the quantization.");
  report_unchecked(!verb.against.empty(), report);
  if (checks_by_themselves > 0) {
    report.fact(
        "note",
        "the chosen backend is the reference itself, so the comparison with it checks no kernels",
        Style::kWarning);
  }
  report.fact("verdict",
              verified.passed() ? fmt::format("{} layers passed in {}", verified.layers.size(),
                                              duration_text(verified.seconds))
                                : fmt::format("{} of {} layers failed", verified.failed_layers(),
                                              verified.layers.size()),
              verified.passed() ? Style::kGood : Style::kBad);
  if (!verified.passed() && !report.failed()) report.fail("a check of the whole checkpoint failed");
  report.json()["path"] = verb.path;
  report.json()["device"] = options.device;
  report.json()["input"] = verb.input.empty() ? Json(nullptr) : Json(verb.input);
  report.json()["against"] = verb.against.empty() ? Json(nullptr) : Json(verb.against);
  report.json()["failed_layers"] = verified.failed_layers();
  report.json()["elapsed_s"] = verified.seconds;
  report.json()["details"] = Json::parse(to_json(verified));
  return {};
}

}  // namespace

void add_verify(CLI::App& app, Invocation& invocation) {
  add_verb<VerifyVerb>(
      app, invocation, "verify",
      "Check a checkpoint: packed bytes, kernels, and the quantization against the original",
      UsesBackend::kYes, verify_verb, [](CLI::App& verb, VerifyVerb& options) {
        add_checkpoint_directory(verb, options.path);
        verb.add_option("--against", options.against,
                        "The original checkpoint that DIR was quantized from")
            ->type_name(kDirectory);
        add_layer_list(verb, options.layers, "Layers to check");
        add_states(verb, options.input, options.tokens, 0, "default 32; 0 skips the run");
        verb.add_option(
            "--limit", options.limit_sqnr_db,
            "With --against: lowest signal to quantization noise ratio of a layer in dB "
            "that passes");
        add_seed(verb, options.seed);
        add_numeric_choices(verb, options.choices);
        add_expert_range(verb, options.part);
        add_ranks(verb, options.ranks, options.over,
                  "Compare each layer over N ranks with one rank");
        verb.add_option("--combine", options.combine, "With --ep, how ranks exchange")
            ->type_name(choice_of<CombineBy>())
            ->capture_default_str();
        add_reading_choices(verb, options.reading);
        add_html(verb, options.html);
      });
}

}  // namespace nvfp4_moe::internal::cli
