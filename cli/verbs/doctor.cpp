// doctor: shows whether this machine is ready. Four lines: the build and a self-test of the number
// formats and of every backend on a tiny layer; the backends that run here; the engines with an
// adapter; what is missing. --verbose adds host, GPUs, reasons and the tests. Exit code 1 if a
// self-test fails. A missing GPU is not a failure. --self-check first checks the kernels of
// backends that have a self-check, with a line each.
#include <fmt/format.h>
#include <gnu/libc-version.h>

#include <array>
#include <chrono>
#include <cmath>
#include <set>
#include <utility>

#include "cli/bench/host.h"
#include "cli/bench/random_layer.h"
#include "cli/console/lists.h"
#include "cli/verbs/engines.h"
#include "cli/verbs/layers.h"
#include "cli/verbs/self_checks.h"
#include "cli/verbs/verbs.h"
#include "core/float_formats.h"
#include "core/printable.h"
#include "core/scale_layout.h"
#include "judge/judge.h"
#include "moe/layer.h"
#include "moe/placed_batch.h"
#include "moe/readiness.h"
#include "moe/registry.h"

namespace nvfp4_moe::internal::cli {
namespace {

struct DoctorOptions {
  bool verbose = false;
  bool self_check = false;
};

struct Device {
  std::string name;  // "cpu", "cuda:0"
  DeviceFacts facts;
};

// The host, and the GPUs that CUDA shows to this process.
std::vector<Device> all_devices() {
  std::vector<Device> devices = {{"cpu", host_facts()}};
  for (int index = 0;; ++index) {
    const std::string name = "cuda:" + std::to_string(index);
    const Result<DeviceFacts> facts = device_facts(name);
    if (!facts.ok()) return devices;
    devices.push_back({name, *facts});
  }
}

struct SelfTest {
  std::string name;
  bool ok = false;
  std::string detail;
};

// Compares with values computed here from the format's definition, not from the codec's tables.
SelfTest test_e2m1() {
  int good = 0;
  for (int code = 0; code < 16; ++code) {
    const int exponent = (code >> 1) & 3, mantissa = code & 1;
    const double magnitude =
        exponent == 0 ? 0.5 * mantissa : std::ldexp(1.0 + 0.5 * mantissa, exponent - 1);
    const double value = (code & 8) != 0 ? -magnitude : magnitude;
    const float decoded = e2m1_to_float(static_cast<uint8_t>(code));
    const bool same = decoded == value && std::signbit(decoded) == std::signbit(value);
    good += same && e2m1_from_float(decoded) == code && e2m1_from_double(value) == code;
  }
  return {"e2m1", good == 16, fmt::format("{}/16 codes", good)};
}

SelfTest test_e4m3() {
  int good = 0;
  for (int byte = 0; byte < 256; ++byte) {
    const int exponent = (byte >> 3) & 15, mantissa = byte & 7;
    const float decoded = e4m3_to_float(static_cast<uint8_t>(byte));
    if ((byte & 0x7F) == 0x7F) {
      good += std::isnan(decoded);
      continue;
    }
    const double magnitude =
        exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
    const double value = (byte & 0x80) != 0 ? -magnitude : magnitude;
    const bool same = decoded == value && std::signbit(decoded) == std::signbit(value);
    good += same && e4m3_from_float(decoded) == byte && e4m3_from_double(value) == byte;
  }
  return {"e4m3", good == 256, fmt::format("{}/256 bytes", good)};
}

SelfTest test_swizzle() {
  constexpr int64_t kRows = 131, kCols = 7;  // neither a multiple of 128 nor of 4
  std::vector<uint8_t> linear(kRows * kCols), back(kRows * kCols, 0xFF);
  for (size_t i = 0; i < linear.size(); ++i) linear[i] = static_cast<uint8_t>(1 + i * 7 % 251);
  std::vector<uint8_t> swizzled(static_cast<size_t>(swizzled_scale_bytes(kRows, kCols)), 0xFF);
  swizzle_scales(linear.data(), kCols, kRows, kCols, swizzled.data());
  // A known position: row 33 of column 5 is in tile column 1, 16-byte line 1, second group of four.
  const bool placed = swizzled[512 + 1 * 16 + 1 * 4 + 1] == linear[33 * kCols + 5] &&
                      swizzled[2 * 512] == linear[128 * kCols];
  unswizzle_scales(swizzled.data(), kRows, kCols, back.data(), kCols);
  return {"scale layout 128x4", placed && back == linear,
          fmt::format("({}, {}) there and back", kRows, kCols)};
}

Status run_layer(const MoeConfig& config, const std::string& backend, const std::string& device,
                 Executor& executor, RandomTokens& tokens) {
  LayerOptions options;
  options.backend = backend;
  options.device = device;
  options.limits.max_tokens = tokens.tokens;
  options.executor = &executor;
  NVFP4_MOE_ASSIGN(const std::unique_ptr<MoeLayer> layer,
                   MoeLayer::open(config, random_layer(config.options(), 1), options));
  return run_from_host(*layer, tokens.batch()).status();
}

Result<MoeConfig> tiny_config(ActivationFormat format) {
  MoeOptions options;
  options.num_experts = 8;
  options.top_k = 3;
  options.hidden_size = 256;
  options.intermediate_size = 128;
  options.activation = Activation::kSwigluClamped;
  options.swiglu_limit = 10.0f;
  options.activation_format = format;
  return MoeConfig::make(options);
}

// Runs a tiny layer on every backend that takes it, on the host and on each GPU, and compares it
// with the reference.
std::vector<SelfTest> test_layers(const std::vector<Device>& devices, Executor& executor) {
  std::vector<SelfTest> tests;
  std::set<std::string> occupied;  // devices on which a kernel of this process hangs
  const std::pair<ActivationFormat, const char*> formats[] = {
      {ActivationFormat::kNvfp4, "W4A4"},
      {ActivationFormat::kBf16, "W4A16"},
      {ActivationFormat::kInt8Block, "W4A8"},
      {ActivationFormat::kFp8, "W4A8 fp8"}};
  for (const auto& [format, weights_and_activations] : formats) {
    const std::string suffix = weights_and_activations;
    const Result<MoeConfig> config = tiny_config(format);
    if (!config.ok()) return {{"tiny layer", false, config.status().message()}};
    const MoeOptions& sizes = config->options();
    RandomTokens expected = random_tokens(sizes, {0, sizes.num_experts}, 13, 2);
    const Status reference = run_layer(*config, "reference", "cpu", executor, expected);
    tests.push_back({"tiny layer " + suffix + ", reference", reference.ok(),
                     reference.ok() ? "13 tokens, 8 experts" : reference.message()});
    if (!reference.ok()) continue;
    for (const Device& device : devices) {
      for (const Backend* backend : backends()) {
        if (occupied.contains(device.name)) break;
        const std::string name = backend->name;
        if (name == "reference" || !backend->supports(*config, device.facts).ok()) continue;
        if (const auto failed = failed_self_check(*backend, *config, device.facts)) {
          if (!failed->ran_here || failed->outcome.verdict != CheckOutcome::Verdict::kTimedOut)
            continue;
          tests.push_back(
              {"self-check of " + CheckScope::of(*backend, *config).name() + " on " + device.name,
               false, failed->text() + "; nothing else is tested on this device"});
          occupied.insert(device.name);
          continue;
        }
        RandomTokens actual = random_tokens(sizes, {0, sizes.num_experts}, 13, 2);
        const Status status = run_layer(*config, name, device.name, executor, actual);
        const std::string where =
            device.facts.kind == DeviceKind::kCpu ? name : name + " on " + device.name;
        SelfTest test{"tiny layer " + suffix + ", " + where, status.ok(), status.message()};
        if (status.ok()) {
          const Comparison comparison =
              compare(expected.out_floats().data(), actual.out_floats().data(), actual.tokens,
                      sizes.hidden_size);
          test.detail = broken_limit(comparison, layer_limits(*config));
          test.ok = test.detail.empty();
          if (test.ok)
            test.detail = fmt::format("against reference: cosine {:.8f}", comparison.cosine);
        }
        tests.push_back(test);
      }
    }
  }
  return tests;
}

std::string joined(const std::vector<std::string>& words, const std::string& separator) {
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : separator) + word;
  return out;
}

// A fact under --verbose.
void detail(const DoctorOptions& options, Report& report, const std::string& label,
            const std::string& text) {
  if (options.verbose) report.fact(label, text);
}

void report_host(const DoctorOptions& options, Report& report) {
  const HostFacts host = read_host();
  std::string limits;
  if (host.memory_limit_bytes > 0)
    limits += ", control group allows " + bytes_text(host.memory_limit_bytes);
  if (host.cpu_limit_cores > 0) limits += fmt::format(", {:.1f} cores", host.cpu_limit_cores);
  detail(options, report, "compiler",
         fmt::format("gcc-compatible {}, glibc {}", __VERSION__, gnu_get_libc_version()));
  detail(options, report, "host",
         fmt::format("{}, {} threads, {}{}", host.cpu, host.threads, bytes_text(host.memory_bytes),
                     limits));
  detail(options, report, "system", host.system);
  detail(options, report, "cpu has", joined(host.instruction_sets, " "));
  report.json()["host"] = {{"cpu", host.cpu},
                           {"system", host.system},
                           {"threads", host.threads},
                           {"memory_bytes", host.memory_bytes},
                           {"memory_limit_bytes", host.memory_limit_bytes},
                           {"cpu_limit_cores", host.cpu_limit_cores},
                           {"instruction_sets", host.instruction_sets}};
  report.json()["compiler"] = __VERSION__;
  report.json()["glibc"] = gnu_get_libc_version();
}

// The backend that would run a plain layer on the device, or why there is none.
std::string gpu_backend(const Result<DeviceFacts>& device) {
  const auto run = [&]() -> Result<const Backend*> {
    NVFP4_MOE_ASSIGN(const MoeConfig config, tiny_config(ActivationFormat::kNvfp4));
    NVFP4_MOE_TRY(device.status());
    return choose_backend(config, *device, "auto");
  };
  const auto backend = run();
  if (!backend.ok()) return backend.status().message();
  const char* const caveat = (*backend)->caveat;
  return fmt::format("backend {}{}{}", (*backend)->name, caveat != nullptr ? "; " : "",
                     caveat != nullptr ? caveat : "");
}

// The GPUs that CUDA shows, in its order; if it shows none, those that the driver knows of.
void report_gpus(const DoctorOptions& options, const std::vector<Device>& devices, Report& report) {
  const std::vector<GpuFacts> known = read_gpus();
  const std::string driver = known.empty() ? "unknown" : known.front().driver;
  Json list = Json::array();
  const auto add = [&](const std::string& name, const std::string& memory, int capability,
                       int units, const std::string& runs) {
    detail(
        options, report, fmt::format("gpu {}", list.size()),
        fmt::format("{} {} driver {}{}: {}", name, memory, driver,
                    capability == 0 ? std::string()
                                    : fmt::format(", compute capability {}.{}, {} multiprocessors",
                                                  capability / 10, capability % 10, units),
                    runs));
    list.push_back({{"name", name},
                    {"driver", driver},
                    {"memory", memory},
                    {"compute_capability", capability},
                    {"multiprocessors", units},
                    {"runs", runs}});
  };
  for (const Device& device : devices) {
    if (device.facts.kind == DeviceKind::kCpu) continue;
    add(device.facts.name, bytes_text(static_cast<uint64_t>(device.facts.memory_bytes)),
        device.facts.compute_capability, device.facts.compute_units, gpu_backend(device.facts));
  }
  if (list.empty()) {
    for (const GpuFacts& gpu : known)
      add(gpu.name, gpu.memory, 0, 0, gpu_backend(device_facts("cuda:0")));
  }
  if (list.empty()) detail(options, report, "gpu", "none here; the CPU backends need none");
  report.json()["gpus"] = list;
}

// The reasons for and against each backend on --device.
Result<Json> read_backends(const DoctorOptions& options, Report& report) {
  NVFP4_MOE_ASSIGN(const MoeConfig config, tiny_config(ActivationFormat::kNvfp4));
  NVFP4_MOE_ASSIGN(const std::string forced, wanted_backend(report.common().backend));
  NVFP4_MOE_ASSIGN(const DeviceFacts device, device_facts(report.common().device));
  Json list = Json::array();
  bool any = false;
  for (const BackendReport& choice : explain(config, device, forced)) {
    any = any || choice.chosen;
    detail(options, report, "backend",
           fmt::format("{:<14} {:<10}  {}", choice.backend, result_text(choice), choice.reason));
    list.push_back({{"name", choice.backend},
                    {"chosen", choice.chosen},
                    {"supported", choice.supported},
                    {"reason", choice.reason}});
  }
  if (!any) return unsupported("no backend of this build runs here");
  return list;
}

std::vector<SelfTest> run_self_tests(const std::vector<Device>& devices, Report& report) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<SelfTest> tests = {test_e2m1(), test_e4m3(), test_swizzle()};
  for (SelfTest& test : test_layers(devices, report.executor())) tests.push_back(std::move(test));
  report.json()["self_test_s"] =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return tests;
}

void report_version(const Readiness& readiness, const std::vector<SelfTest>& tests,
                    Report& report) {
  size_t failed = 0;
  for (const SelfTest& test : tests) {
    failed += !test.ok;
    if (!test.ok) report.fail(test.name + ": " + test.detail);
  }
  const std::string result =
      failed == 0 ? fmt::format("{} self-tests passed", tests.size())
                  : fmt::format(
                        "{} of {} self-tests FAILED: do not trust results of this build on "
                        "this machine",
                        failed, tests.size());
  report.fact("version",
              fmt::format("nvfp4-moe {}, {}; {}", NVFP4_MOE_VERSION, build_text(readiness), result),
              failed == 0 ? Style::kGood : Style::kBad);
  report.json()["cuda"] = {{"runtime", readiness.cuda.runtime}, {"driver", readiness.cuda.driver}};
}

// Never a failure: an engine that is missing or does not fit runs without the library.
void report_engines(const Result<Json>& engines, Report& report) {
  report.fact("engines", engines_text(engines));
  report.json()["engines"] = engines.ok() ? (*engines)["engines"] : Json();
  if (!engines.ok()) report.json()["engines_note"] = engines.status().message();
}

void report_missing(std::vector<std::string> missing, Report& report) {
  for (const std::string& one : missing) report.fact("missing", one, Style::kBad);
  if (missing.empty()) report.fact("missing", "nothing");
  report.json()["missing"] = missing;
}

Status doctor(const DoctorOptions& options, Report& report) {
  NVFP4_MOE_ASSIGN(const std::string forced, wanted_backend(report.common().backend));
  NVFP4_MOE_TRY(device_facts(report.common().device).status());
  // First, so that all that follows leaves out what has failed.
  if (options.self_check) {
    NVFP4_MOE_ASSIGN(const bool usable, report_self_checks(report));
    if (!usable) {
      report.fact("check", "a check timed out, so its device may hang: nothing else is tested",
                  Style::kBad);
      return {};
    }
  }
  const std::vector<Device> devices = all_devices();
  const std::vector<SelfTest> tests = run_self_tests(devices, report);
  // After the tests, which may have run self-checks.
  NVFP4_MOE_ASSIGN(const Readiness readiness, read_readiness(forced));
  const Result<Json> engines = read_engines();

  report_version(readiness, tests, report);
  report.fact("backends", backends_text(readiness));
  report_engines(engines, report);
  std::vector<std::string> missing = missing_for_gpus(readiness);
  for (std::string& one : missing_for_engines(engines)) missing.push_back(std::move(one));
  report_missing(std::move(missing), report);

  report_host(options, report);
  report_gpus(options, devices, report);
  NVFP4_MOE_ASSIGN(report.json()["backends"], read_backends(options, report));
  if (engines.ok()) {
    for (const Json& engine : (*engines)["engines"]) {
      const std::string version = engine["version"].is_string() ? engine["version"].text() : "--";
      detail(options, report, "engine",
             fmt::format("{:<13} {:<12} {}", printable(engine["name"].text()), printable(version),
                         printable(engine["note"].text())));
    }
  }
  Table table({{"name", "self-test", false}, {"ok", "result", false}, {"detail", "detail", false}});
  for (const SelfTest& test : tests)
    table.add({cell(test.name), verdict(test.ok), cell(test.detail)});
  report.json()["self_test"] = table.json();
  if (options.verbose) report.table("self_test", table);
  return {};
}

}  // namespace

void add_doctor(CLI::App& app, Invocation& invocation) {
  add_verb<DoctorOptions>(
      app, invocation, "doctor",
      "Show which backends and engines work here and what is missing; run a self-test",
      UsesBackend::kYes, doctor, [](CLI::App& verb, DoctorOptions& options) {
        verb.add_flag("--verbose", options.verbose,
                      "Also show host, GPUs, why each backend does or does not run, and each test");
        verb.add_flag("--self-check", options.self_check,
                      "Check the kernels of sm90, sm100 and sm120 on --device, or on all GPUs, and "
                      "keep the results");
      });
}

}  // namespace nvfp4_moe::internal::cli
