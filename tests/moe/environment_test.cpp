// Environment variables: each has its documented effect, and a bad value is an error that names it.
// Also the log.
#include <filesystem>
#include <string_view>

#include "moe/activation_choice.h"
#include "moe/repro.h"
#include "moe/tiny.h"
#include "safetensors/safetensors.h"
#include "support/backends.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;

using RunFunction = Status (*)(const PackedWeights& weights, const Plan& plan, const Batch& batch,
                               std::byte* workspace, const RunContext& context);

Backend like_reference(const char* name, RunFunction run = kReferenceBackend.run) {
  Backend backend = kReferenceBackend;
  backend.name = name;
  backend.run = run;
  return backend;
}

// Wrong results, and results of other weights than those that unpack.
TEST(Environment, CheckFindsAWrongKernelAndAWrongPacking) {
  const ScopedEnv check("NVFP4_MOE_CHECK", "1");
  const TinyLayer tiny;
  TinyBatch batch(tiny.options, 4);
  const RunFunction with_another_sign = [](const auto& weights, const auto& plan, const auto& batch,
                                           auto* workspace, const auto& context) -> Status {
    NVFP4_MOE_TRY(kReferenceBackend.run(weights, plan, batch, workspace, context));
    auto* out = static_cast<float*>(batch.out);
    for (int64_t i = 64; i < 128; ++i) out[i] = -out[i];  // token 1
    return {};
  };
  const RunFunction with_twice_down = [](const auto& weights, const auto& plan, const auto& batch,
                                         auto* workspace, const auto& context) -> Status {
    PackedWeights other{weights.config, weights.range, weights.scales, weights.tensor_scales,
                        Buffer(weights.bytes.data(), weights.bytes.size_bytes(), {})};
    for (auto& scales : other.tensor_scales) scales.down *= 2;
    return kReferenceBackend.run(other, plan, batch, workspace, context);
  };
  for (const RunFunction run : {with_another_sign, with_twice_down}) {
    const Backend wrong = like_reference("wrong", run);
    const auto layer = open_tiny(tiny, tiny_layer_options(), &wrong);
    EXPECT_THAT(run_in(workspace_of(*layer), *layer, batch.batch()),
                Refused(Code::kCheckFailed, "wrong"));
    EXPECT_THAT(layer->describe_json(), HasSubstr("NVFP4_MOE_CHECK"));
  }
  const Backend right = like_reference("right");
  const auto layer = open_tiny(tiny, tiny_layer_options(), &right);
  const Buffer workspace = workspace_of(*layer);
  EXPECT_OK(run_in(workspace, *layer, batch.batch()));
  EXPECT_OK(run_in(workspace, *layer, Batch{}));
  // A replaced expert is replaced in the reference too.
  EXPECT_OK(layer->replace_expert(0, tiny.experts[3].source()));
  EXPECT_OK(run_in(workspace, *layer, batch.batch()));
}

std::string dump_seen_by_run;  // the dump directory, for the fake below
TEST(Environment, DumpWritesBeforeTheCallAndAfterIt) {
  const TempDir directory;
  const ScopedEnv dump("NVFP4_MOE_DUMP", directory.path().string());
  dump_seen_by_run = directory.path().string();
  const TinyLayer tiny;
  const RunFunction counts_files = [](const auto& weights, const auto& plan, const auto& batch,
                                      auto* workspace, const auto& context) -> Status {
    int files = 0;
    for (const auto& entry : std::filesystem::directory_iterator(dump_seen_by_run)) {
      ++files;
      const auto file = must(SafetensorsFile::open(entry.path().string()));
      EXPECT_NE(file->find("hidden"), nullptr);
      EXPECT_EQ(file->find("output"), nullptr);
    }
    EXPECT_EQ(files, 1);
    return kReferenceBackend.run(weights, plan, batch, workspace, context);
  };
  const Backend backend = like_reference("dumping", counts_files);
  TinyBatch batch(tiny.options, 4);
  run_tiny(*open_tiny(tiny, tiny_layer_options(), &backend), batch);
  for (const auto& entry : std::filesystem::directory_iterator(directory.path())) {
    const auto report = must(replay(entry.path().string(), "reference", &serial_executor()));
    EXPECT_TRUE(report->same_bits.value());
    EXPECT_EQ(report->recorded_backend, "dumping");
  }
}

TEST(Environment, ChoosesBackendAndThreadsIfTheOptionsDoNot) {
  const TinyLayer tiny;
  const ScopedEnv forced("NVFP4_MOE_BACKEND", "reference"), threads("NVFP4_MOE_THREADS", "3");
  LayerOptions options = tiny_layer_options();
  EXPECT_STREQ(open_tiny(tiny, options)->backend().name, "reference");
  options.backend = runnable_backends().front()->name;
  EXPECT_STREQ(open_tiny(tiny, options)->backend().name, options.backend.c_str());
  options.executor = nullptr;
  EXPECT_EQ(open_tiny(tiny, options)->executor().threads(), 3);
}

TEST(Environment, BadValuesAreErrorsThatNameTheVariable) {
  const std::pair<const char*, const char*> cases[] = {
      {"NVFP4_MOE_THREADS", "0"},   {"NVFP4_MOE_THREADS", "-1"},     {"NVFP4_MOE_THREADS", "many"},
      {"NVFP4_MOE_THREADS", "2x"},  {"NVFP4_MOE_CHECK", "yes"},      {"NVFP4_MOE_ONE_LAUNCH", "2"},
      {"NVFP4_MOE_LOG", "loud"},    {"NVFP4_MOE_BACKEND", "faster"}, {"NVFP4_MOE_DUMP", "/no/such"},
      {"NVFP4_MOE_SELF_CHECK", "1"}};
  const TinyLayer tiny;
  for (const auto& [name, value] : cases) {
    const ScopedEnv variable(name, value);
    EXPECT_THAT(MoeLayer::open(tiny.config(), tiny.source(), tiny_layer_options()),
                Refused(Code::kInvalidArgument, name));
    if (name == std::string_view("NVFP4_MOE_DUMP")) continue;  // it matters only to an open layer
    EXPECT_THAT(with_chosen_format(tiny.options, tiny_layer_options()),
                Refused(Code::kInvalidArgument, name));
  }
}

TEST(Log, GoesToTheCallbackUpToTheLevel) {
  std::vector<std::string> lines;
  set_log_callback(
      [](int, const char* text, void* user) {
        static_cast<std::vector<std::string>*>(user)->push_back(text);
      },
      &lines);
  set_log_level(LogLevel::kWarning);
  log_line(LogLevel::kError, "one");
  log_line(LogLevel::kInfo, "two");
  set_log_level(LogLevel::kInfo);
  log_line(LogLevel::kInfo, "three");
  set_log_callback(nullptr, nullptr);
  log_line(LogLevel::kError, "four");
  EXPECT_THAT(lines, ElementsAre("one", "three"));
}

}  // namespace
}  // namespace nvfp4_moe::internal
