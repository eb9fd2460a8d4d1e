#include "moe/layer_debug.h"

#include <unistd.h>

#include <atomic>
#include <filesystem>

#include "judge/judge.h"
#include "moe/registry.h"
#include "moe/repro.h"

namespace nvfp4_moe::internal {
namespace {

// Keeps a forgotten NVFP4_MOE_DUMP from filling a disk: each file contains a layer's local experts.
constexpr int kMaxDumps = 32;

// The path of this process's next dump, or empty after kMaxDumps. An earlier process with the same
// pid may have left dumps (common for the first process of a container). They are kept, and the
// numbering continues after them.
std::string next_dump(const std::string& directory) {
  static std::atomic<int> dumps{0};
  static std::atomic<int64_t> numbers{0};
  if (dumps.fetch_add(1, std::memory_order_relaxed) >= kMaxDumps) return "";
  for (;;) {
    const int64_t number = numbers.fetch_add(1, std::memory_order_relaxed);
    const std::string path = directory + "/repro-" + std::to_string(getpid()) + "-" +
                             std::to_string(number) + ".safetensors";
    std::error_code error;
    if (std::filesystem::symlink_status(path, error).type() !=
            std::filesystem::file_type::not_found &&
        !error)
      continue;
    return path;
  }
}

Status check_against(const MoeLayer& reference, const Batch& batch, const char* backend) {
  NVFP4_MOE_ASSIGN(const Buffer workspace,
                   allocate_pages(reference.workspace_bytes(), "reference for NVFP4_MOE_CHECK"));
  const int64_t values = batch.tokens * reference.config()->hidden_size;
  std::vector<std::byte> expected(static_cast<size_t>(values) *
                                  static_cast<size_t>(bits(batch.out_dtype) / 8));
  Batch again = batch;
  again.out = expected.data();
  NVFP4_MOE_TRY(
      reference.run(again, workspace.data(), workspace.size_bytes()).in("check: reference"));

  std::vector<float> expected_values(static_cast<size_t>(values)),
      actual_values(static_cast<size_t>(values));
  to_floats(expected.data(), batch.out_dtype, values, expected_values.data());
  to_floats(batch.out, batch.out_dtype, values, actual_values.data());
  const Comparison comparison = compare(expected_values.data(), actual_values.data(), batch.tokens,
                                        reference.config()->hidden_size);
  const std::string broken = broken_limit(comparison, layer_limits(reference.config()));
  if (broken.empty()) return {};
  Status status = check_failed(std::string("NVFP4_MOE_CHECK: backend ") + backend + ": " + broken);
  log_line(LogLevel::kError, status.message());
  return status;
}

}  // namespace

Status LayerDebug::run(const MoeLayer& layer, const Batch& batch, std::byte* workspace,
                       const RunContext& context) const {
  if (rows != nullptr) {
    NVFP4_MOE_TRY(rows->failure());
    NVFP4_MOE_TRY(layer.backend().run(layer.weights(), layer.plan(), batch, workspace, context));
    return batch.tokens > 0 ? rows->sample(batch, context.stream) : Status();
  }
  // without tokens there is nothing to replay
  const bool dumped = !dump_directory.empty() && batch.tokens > 0;
  const std::string dump = dumped ? next_dump(dump_directory) : "";
  if (!dump.empty()) {  // before the call, so that it exists even after a crash
    NVFP4_MOE_TRY(write_repro(dump, layer, batch, /*with_output=*/false).in("NVFP4_MOE_DUMP"));
    log_line(LogLevel::kInfo, "NVFP4_MOE_DUMP: wrote " + dump);
  }
  NVFP4_MOE_TRY(layer.backend().run(layer.weights(), layer.plan(), batch, workspace, context));
  if (!dump.empty())
    NVFP4_MOE_TRY(write_repro(dump, layer, batch, /*with_output=*/true).in("NVFP4_MOE_DUMP"));
  if (reference != nullptr && batch.tokens > 0)
    NVFP4_MOE_TRY(check_against(*reference, batch, layer.backend().name));
  return {};
}

Status MoeLayer::attach_debug(const Env& env, const LayerOptions& options,
                              const std::string& name) {
  const bool check = env.check && backend_ != &kReferenceBackend;
  if (!check && env.dump_directory.empty()) return {};
  if (backend_->memory != nullptr) {
    if (!env.dump_directory.empty())
      return unsupported(
          std::string("NVFP4_MOE_DUMP: expected a backend with batches in host memory, got ") +
          backend_->name + "; on a device only NVFP4_MOE_CHECK works");
    auto debug = std::make_unique<LayerDebug>();
    NVFP4_MOE_ASSIGN(debug->rows, RowCheck::open(*backend_, *weights_, plan_.device.kind, name));
    debug_ = std::move(debug);
    return {};
  }
  std::error_code error;
  if (!env.dump_directory.empty() && !std::filesystem::is_directory(env.dump_directory, error))
    return invalid_argument("environment NVFP4_MOE_DUMP: expected a directory, got \"" +
                            env.dump_directory + "\"");

  auto debug = std::make_unique<LayerDebug>();
  debug->dump_directory = env.dump_directory;
  if (check) {
    LayerOptions same = options;
    same.range = weights_->range;
    same.executor = executor_;
    const LayerSource source = unpacked_source(*this);
    NVFP4_MOE_ASSIGN(debug->reference,
                     prepare(kReferenceBackend, weights_->config, source.scales, same, env));
    NVFP4_MOE_TRY(debug->reference->pack(source, {}).in("NVFP4_MOE_CHECK: reference"));
  }
  debug_ = std::move(debug);
  return {};
}

}  // namespace nvfp4_moe::internal
