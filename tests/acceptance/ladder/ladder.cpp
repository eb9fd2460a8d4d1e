// One rung of the acceptance's ladder in a process of its own
// (tests/acceptance/acceptance_ladder.py), on the first device:
//
//   ladder --list                 the instructions, backend and configurations of the device
//   ladder --instruction NAME     one instruction by itself
//   ladder --layer SIZE FORMAT TOKENS CONFIGURATION SPLIT HOW
//                                 a layer with exact sums against the reference. SIZE: stage (one
//                                 k-block), tile (one tile of gemm1) or layer. CONFIGURATION: of
//                                 the GEMMs, or -1 for the plan's own. SPLIT: 1 if tiles may be
//                                 split along K. HOW: steps, synchronized one by one, or run
//
// Further options: --wait-ms N, after which a wait is reported and traps (1000), and --plant FAULT,
// for the rehearsal. Prints one line of JSON.
#include <cuda_runtime.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <tuple>

#include "acceptance/ladder/instructions.h"
#include "backend/cuda/ptx/wait_report.h"
#include "core/executor.h"
#include "cuda/configurations.h"
#include "io/json.h"
#include "moe/layer.h"
#include "moe/registry.h"
#include "support/case_run.h"
#include "support/exact_case.h"

namespace nvfp4_moe::internal::ladder {
namespace {

using cuda::ptx::kMaxLateWaits;
using cuda::ptx::LateWait;
using cuda::ptx::WaitReport;

// acceptance_ladder.py computes the same.
static_assert(cuda::ptx::wait_file_hash("/src/backend/sm90/producer.cuh") == 0x52933A09u);

// The report's page, for this process and the kernels of its device.
Result<WaitReport*> map_wait_report() {
  void* const asked = reinterpret_cast<void*>(cuda::ptx::kWaitReportAddress);
  void* const page = mmap(asked, sizeof(WaitReport), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  if (page != asked) return Status(Code::kInternal, "the report of waits: its address is taken");
  std::memset(page, 0, sizeof(WaitReport));
  cudaError_t error = cudaHostRegister(page, sizeof(WaitReport), cudaHostRegisterMapped);
  void* seen = nullptr;
  if (error == cudaSuccess) error = cudaHostGetDevicePointer(&seen, page, 0);
  if (error != cudaSuccess)
    return Status(Code::kInternal,
                  std::string("the report of waits: ") + cudaGetErrorString(error));
  if (seen != page)
    return Status(Code::kInternal, "the report of waits: the device has it at another address");
  return static_cast<WaitReport*>(page);
}

// "hang" or "descriptor"; "hang@640" for kernels of 640 threads only, "hang@640:20000" for their
// barriers that expect at least 20000 bytes.
Status plant(const std::string& fault, WaitReport& report) {
  const size_t at = fault.find('@');
  const std::string kind = fault.substr(0, at);
  if (kind == "hang")
    report.plant_bytes = 16;
  else if (kind == "descriptor")
    report.plant_stride = 96;  // 512 bytes between eights of rows in place of 1024
  else
    return invalid_argument("--plant: expected hang or descriptor, got " + kind);
  if (at == std::string::npos) return {};
  report.plant_threads = static_cast<uint32_t>(std::atoi(fault.c_str() + at + 1));
  const size_t colon = fault.find(':', at);
  if (colon != std::string::npos)
    report.plant_least_bytes = static_cast<uint32_t>(std::atoi(fault.c_str() + colon + 1));
  return {};
}

// The waits at one call for one phase, those that began first at the front.
Json waits_json(const WaitReport& report) {
  struct Group {
    std::set<uint32_t> ctas, barriers;
    std::set<std::pair<uint32_t, uint32_t>> warps;
    uint32_t first_us = UINT32_MAX, thread = 0, cta = 0;
  };
  std::map<std::tuple<uint32_t, uint32_t, uint32_t>, Group> groups;
  const uint32_t count = std::min(report.waits_claimed, kMaxLateWaits);
  for (uint32_t i = 0; i < count; ++i) {
    const LateWait& late = report.waits[i];
    if (late.written == 0) continue;
    Group& group = groups[{late.file, late.at, late.parity}];
    group.warps.emplace(late.cta, late.thread / 32);
    group.ctas.insert(late.cta);
    group.barriers.insert(late.barrier);
    if (late.begin_us < group.first_us)
      group.first_us = late.begin_us, group.thread = late.thread, group.cta = late.cta;
  }
  std::vector<std::pair<uint32_t, Json>> waits;
  for (const auto& [key, group] : groups) {
    Json one = Json::object();
    one["file_hash"] = std::get<0>(key);
    one["line"] = std::get<1>(key);
    one["parity"] = std::get<2>(key);
    one["warps"] = static_cast<int64_t>(group.warps.size());
    one["ctas"] = static_cast<int64_t>(group.ctas.size());
    one["barriers"] = static_cast<int64_t>(group.barriers.size());
    one["first_cta"] = group.cta;
    one["first_thread"] = group.thread;
    waits.emplace_back(group.first_us, one);
  }
  std::stable_sort(waits.begin(), waits.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  Json json = Json::array();
  for (auto& [begin_us, one] : waits) {
    one["began_us_after_the_first"] = begin_us - waits.front().first;
    json.push_back(one);
  }
  return json;
}

const Backend& backend_of(const DeviceFacts& facts) {
  const int major = facts.compute_capability / 10;
  const char* const name = major == 9    ? "sm90"
                           : major == 10 ? "sm100"
                           : major == 12 ? "sm120"
                                         : "cuda";
  return *find_backend(name);
}

std::vector<Instruction> instructions_of(const DeviceFacts& facts) {
  const int major = facts.compute_capability / 10;
  if (major == 9) return sm90_instructions();
  if (major == 10) return sm100_instructions();
  if (major == 12) return sm120_instructions();
  return {};
}

void list(const DeviceFacts& facts, Json& report) {
  const Backend& backend = backend_of(facts);
  report["backend"] = backend.name;
  Json names = Json::array();
  for (const Instruction& one : instructions_of(facts)) names.push_back(one.name);
  report["instructions"] = names;
  for (const ActivationFormat format : {ActivationFormat::kNvfp4, ActivationFormat::kBf16})
    report["configurations"][to_string(format)] = test::configurations_of(backend, format);
}

// The kernels of a run's steps, and the first array that differs from the reference's.
struct Layer {
  test::ExactSizes sizes;
  ActivationFormat format;
  int64_t tokens;
  int configuration;
  bool may_split, by_steps;
};

template <class T>
std::string first_difference(const char* what, const T* expected, const T* actual, int64_t rows,
                             int64_t cols) {
  if (std::memcmp(expected, actual, static_cast<size_t>(rows * cols) * sizeof(T)) == 0) return "";
  int64_t wrong = 0, first = -1;
  for (int64_t i = 0; i < rows * cols; ++i)
    if (std::memcmp(expected + i, actual + i, sizeof(T)) != 0 && ++wrong == 1) first = i;
  return std::string(what) + ": " + std::to_string(wrong) + " of " + std::to_string(rows * cols) +
         " values differ from the reference, first row " + std::to_string(first / cols) +
         " column " + std::to_string(first % cols);
}

// Runs one step and waits for it. False: CUDA or the step failed, as the report then has it.
class Steps {
 public:
  explicit Steps(Json& report) : report_(report) {}
  bool passed(const char* name, const Status& status) {
    const cudaError_t error = status.ok() ? cudaDeviceSynchronize() : cudaSuccess;
    if (status.ok() && error == cudaSuccess) return true;
    report_["step"] = name;
    report_["problem"] = std::string(name) + ": " +
                         (status.ok() ? cudaGetErrorString(error) : status.message().c_str());
    return false;
  }

 private:
  Json& report_;
};

void run_layer(const Layer& layer, const DeviceFacts& facts, Json& report) {
  const Backend& backend = backend_of(facts);
  report["backend"] = backend.name;
  const CaseData data = test::exact_case(layer.sizes, layer.format, layer.tokens, !layer.may_split);
  test::CaseRun reference(kReferenceBackend, data), own(backend, data, -1, layer.configuration);
  if (!own.ok() || !reference.ok()) {
    report["problem"] = "the layer cannot be opened";
    return;
  }
  Json kernels = Json::array();
  for (const StepPlan& step :
       describe_run(backend, data.config, data.spec.range, own.plan(), layer.tokens))
    kernels.push_back(step.step + ": " + step.kernel);
  report["kernels"] = kernels;
  Steps step(report);
  std::vector<uint8_t> out(data.out_bytes(), 0xFF);
  const Batch batch = own.place(data.batch(out.data()));
  if (layer.by_steps) {
    const StepContext walk = own.step(batch, serial_executor());
    const LayerSteps& steps = *backend.steps;
    const PartBuffers& part = walk.buffers.routed;
    if (!step.passed("route", steps.route(walk)) ||
        !step.passed("quantize", steps.quantize(walk)) ||
        !step.passed("gemm1_swiglu", steps.gemm1_swiglu(walk, part)) ||
        !step.passed("requantize", steps.requantize(walk, part)) ||
        !step.passed("gemm2", steps.gemm2(walk, part)) ||
        !step.passed("combine", steps.combine(walk)))
      return;
  } else if (!step.passed("run", own.run_into(batch, serial_executor()))) {
    return;
  }
  own.fetch(batch, out.data());
  const std::vector<uint8_t> expected = reference.run_steps(data);
  const PartBuffers &right = reference.buffers().routed, &left = own.buffers().routed;
  const int64_t rows = layer.tokens * layer.sizes.top_k;
  std::string problem;
  if (layer.by_steps) {
    problem = first_difference("route, rows of assignments", right.assignment_of_row,
                               left.assignment_of_row, rows, 1);
    if (problem.empty())
      problem = first_difference("gemm1_swiglu, intermediate", right.intermediate.bf16,
                                 left.intermediate.bf16, rows, layer.sizes.intermediate);
    if (problem.empty())
      problem =
          first_difference("gemm2, rows_out", static_cast<const float*>(right.rows_out),
                           static_cast<const float*>(left.rows_out), rows, layer.sizes.hidden);
    if (!problem.empty()) report["step"] = problem.substr(0, problem.find(','));
  }
  if (problem.empty()) {
    problem = test::difference(expected, out, DType::kF32, layer.sizes.hidden);
    if (!problem.empty()) problem = "out: " + problem;
  }
  if (problem.empty() && own.broken_guard() != -1)
    problem = "a byte outside all arrays was written";
  report["problem"] = problem;
}

Result<Layer> layer_of(const std::vector<std::string>& words) {
  if (words.size() != 6)
    return invalid_argument("--layer: expected SIZE FORMAT TOKENS CONFIGURATION SPLIT HOW");
  static const std::map<std::string, test::ExactSizes> kSizes = {
      {"stage", {1, 1, 128, 128}}, {"tile", {1, 1, 1040, 64}}, {"layer", {}}};
  const auto sizes = kSizes.find(words[0]);
  if (sizes == kSizes.end()) return invalid_argument("--layer: expected stage, tile or layer");
  if (words[1] != "nvfp4" && words[1] != "bf16")
    return invalid_argument("--layer: expected nvfp4 or bf16, got " + words[1]);
  return Layer{sizes->second,
               words[1] == "bf16" ? ActivationFormat::kBf16 : ActivationFormat::kNvfp4,
               std::atoll(words[2].c_str()),
               std::atoi(words[3].c_str()),
               words[4] == "1",
               words[5] == "steps"};
}

Status run(const std::vector<std::string>& arguments, Json& report) {
  std::string what, fault;
  std::vector<std::string> words;
  uint32_t wait_ms = 1000;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool has_value = i + 1 < arguments.size();
    if (arguments[i] == "--wait-ms" && has_value)
      wait_ms = static_cast<uint32_t>(std::atoi(arguments[++i].c_str()));
    else if (arguments[i] == "--plant" && has_value)
      fault = arguments[++i];
    else if (what.empty())
      what = arguments[i];
    else
      words.push_back(arguments[i]);
  }
  NVFP4_MOE_ASSIGN(WaitReport* const waits, map_wait_report());
  waits->limit_us = wait_ms * 1000;
  if (!fault.empty()) {
    NVFP4_MOE_TRY(plant(fault, *waits));
    report["planted"] = fault;
  }
  NVFP4_MOE_ASSIGN(const DeviceFacts facts, device_facts("cuda:0"));
  report["compute_capability"] = facts.compute_capability;
  if (what == "--list") {
    list(facts, report);
  } else if (what == "--instruction" && words.size() == 1) {
    const std::vector<Instruction> all = instructions_of(facts);
    const auto one = std::find_if(all.begin(), all.end(),
                                  [&](const Instruction& own) { return own.name == words[0]; });
    if (one == all.end())
      return invalid_argument("--instruction: this device has none named " + words[0]);
    report["problem"] = one->run();
  } else if (what == "--layer") {
    NVFP4_MOE_ASSIGN(const Layer layer, layer_of(words));
    run_layer(layer, facts, report);
  } else {
    return invalid_argument("expected --list, --instruction NAME or --layer ...");
  }
  report["waits"] = waits_json(*waits);
  return {};
}

}  // namespace
}  // namespace nvfp4_moe::internal::ladder

int main(int argc, char** argv) {
  using nvfp4_moe::internal::Json;
  Json report = Json::object();
  report["problem"] = "";
  const auto status =
      nvfp4_moe::internal::ladder::run(std::vector<std::string>(argv + 1, argv + argc), report);
  if (!status.ok()) report["problem"] = status.message();
  std::printf("\n%s\n", report.dump().c_str());
  std::fflush(stdout);
  // After a trap no memory of the device can be freed.
  std::_Exit(report["problem"] == "" ? 0 : 1);
}
