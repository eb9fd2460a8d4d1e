// Every entry point of the library with one failing memory request, or all failing from one on:
// kOutOfMemory or success, no leak, no crash. Tries the first requests of each operation and then
// every n-th; the long tier tries all.
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <fstream>
#include <thread>

#include "core/buffer.h"
#include "io/files.h"
#include "memory/operations.h"
#include "memory/tool_sweep.h"
#include "moe/c_layer.h"
#include "moe/linear.h"
#include "safetensors/plan.h"
#include "safetensors/safetensors.h"
#include "support/backends.h"
#include "support/checkpoint_builder.h"

namespace nvfp4_moe::internal::test {
namespace {

// A block that is leaked, an end that is no error, and another error than that memory is missing:
// of a block, of a mapping, and of a thread.
TEST(Memory, TheToolSeesWhatItIsFor) {
  if (!kFailingMemory) GTEST_SKIP() << "a sanitizer owns malloc";
  const auto faults_of = [](const std::function<Status()>& run) {
    return sweep({"planted", run, {}}, Failing::kOne, {}).faults;
  };
  EXPECT_THAT(
      faults_of([] {
        auto* a = new std::string;
        auto b = std::make_unique<std::string>(100, 'b');
        delete a;
        return Status();
      }),
      ElementsAre("request 2: blocks not given back: 1", "request 3: blocks not given back: 1"));
  EXPECT_THAT(faults_of([] {
                auto a = std::make_unique<std::string>();
                [&]() noexcept { a = std::make_unique<std::string>(); }();
                return Status();
              }),
              ElementsAre("request 2: ends by Aborted"));
  EXPECT_THAT(faults_of([]() -> Status {
                void* map = mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
                if (map == MAP_FAILED) return errno_status("map", "cannot map", errno);
                munmap(map, 4096);
                try {
                  std::thread([] {}).join();  // its state is request 2, the thread is request 3
                } catch (const std::system_error&) {
                  return io_error("no thread");
                }
                return {};
              }),
              ElementsAre("request 3: input/output error: no thread"));
}

// A process that may use 64 MB of address space more than it has, as under `ulimit -v` or in a
// small container.
std::string under_a_limit() {
  long pages = 0;
  std::FILE* statm = std::fopen("/proc/self/statm", "r");
  if (statm == nullptr || std::fscanf(statm, "%ld", &pages) != 1) return "no /proc/self/statm";
  std::fclose(statm);
  const rlim_t bytes =
      static_cast<rlim_t>(pages) * static_cast<rlim_t>(sysconf(_SC_PAGESIZE)) + (64 << 20);
  const rlimit limit{bytes, bytes};
  if (setrlimit(RLIMIT_AS, &limit) != 0) return "no limit";

  const auto pool = make_thread_pool(64);  // stacks of 8 MB
  if (pool->threads() >= 64 || pool->threads() < 1)
    return "a pool of " + std::to_string(pool->threads()) + " threads";
  std::atomic<int64_t> sum{0};
  pool->parallel_for(1000, 1, [&](int64_t begin, int64_t end) { sum.fetch_add(end - begin); });
  if (sum.load() != 1000) return "a loop of " + std::to_string(sum.load());

  const Status pages_status = allocate_pages(size_t{1} << 40, "packed weights").status();
  if (pages_status.code() != Code::kOutOfMemory ||
      pages_status.message().find("packed weights: expected 1099511627776 bytes on cpu, ") != 0)
    return pages_status.message();

  // Reading a file of any size takes only the memory of the bytes that are read.
  const TempDir dir;
  const std::string path = dir.file("large.safetensors");
  std::vector<TensorInfo> tensors = {
      {.name = "a", .dtype = DType::kU8, .shape = {int64_t{1} << 40}}};
  if (const Status status = assign_offsets(tensors); !status.ok()) return status.message();
  const std::string header = header_bytes(tensors, {}).value();
  std::ofstream(path) << header;
  if (truncate(path.c_str(), static_cast<off_t>(header.size()) + (off_t{1} << 40)) != 0)
    return "no sparse file";
  const Result<SafetensorsFile> file = SafetensorsFile::open(path);
  if (!file.ok()) return file.status().message();
  uint8_t last = 1;
  const Status read = file->read(file->size_bytes() - 1, &last, 1);
  if (!read.ok()) return read.message();
  return last == 0 ? "" : "a byte that is not the file's";
}

ATTACK_TEST(kAllocations, Memory, ALimitOfTheSystemIsOutOfMemoryOrFewerThreads) {
  if (!kFailingMemory) GTEST_SKIP() << "a sanitizer reserves terabytes";
  attacked();
  EXPECT_EXIT(
      {
        const std::string fault = under_a_limit();
        std::fprintf(stderr, "%s\n", fault.c_str());
        _exit(fault.empty() ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

// The requests of a call. All of them fail.
int64_t requests_of(const std::function<Status()>& call) {
  fail_memory(1, Failing::kAllFrom);
  const Status status = call();
  const MemoryRequests requests = stop_failing();
  EXPECT_OK(status);
  return requests.asked;
}

// Runs request nothing from malloc or from the system, from the very first one on. Neither do runs
// through C, a linear's runs, and replacements.
TEST(Memory, ARunAsksForNothing) {
  if (!kFailingMemory) GTEST_SKIP() << "a sanitizer owns malloc";
  const auto threads = make_thread_pool(2);
  for (const ActivationFormat format : kActivationFormats) {
    MoeOptions moe_options = tiny_options();
    moe_options.activation_format = format;
    moe_options.shared_intermediate_size = 32;
    const TinyLayer tiny(moe_options);
    const Matrix& matrix = tiny.experts[0].gate;
    for (const Backend* backend : runnable_backends()) {
      for (Executor* executor : {&serial_executor(), threads.get()}) {
        SCOPED_TRACE(std::string(backend->name) + " " + to_string(format) + " " +
                     std::to_string(executor->threads()));
        LayerOptions options = tiny_layer_options();
        options.executor = executor;
        const auto layer = open_tiny(tiny, options, backend);
        const Buffer workspace = workspace_of(*layer);
        TinyBatch batch(tiny.options, 9), starved(tiny.options, 9);
        const Batch call = starved.batch();
        EXPECT_EQ(requests_of([&] { return run_in(workspace, *layer, call); }), 0);
        ASSERT_OK(run_in(workspace, *layer, batch.batch()));
        EXPECT_TRUE(same_bits(batch.out, starved.out));
        const ExpertSource source = tiny.experts[3].source();
        EXPECT_EQ(requests_of([&] { return layer->replace_expert(0, source); }), 0);

        const auto linear = must(NvfpLinear::open(matrix.view(), {.backend = backend->name,
                                                                  .activation_format = format,
                                                                  .max_tokens = 4,
                                                                  .executor = executor}));
        const Buffer space = allocate_pages((*linear)->workspace_bytes()).value();
        std::vector<float> out(static_cast<size_t>(4 * matrix.rows));
        const LinearBatch of_linear{4, batch.hidden.data(), DType::kBf16, out.data(), DType::kF32};
        EXPECT_EQ(requests_of(
                      [&] { return (*linear)->run(of_linear, space.data(), space.size_bytes()); }),
                  0);
      }
    }
  }
  const CLayer c;
  const nvfp4_moe::Layer layer = c.open();
  const nvfp4_moe::Workspace workspace(layer.workspace_bytes(2));
  TinyBatch batch(c.tiny.options, 2);
  EXPECT_EQ(requests_of([&] {
              layer.run(c_batch(batch), workspace);
              return Status();
            }),
            0);
}

// Each expert reuses the memory of the one before: two are never loaded at once.
TEST(Memory, LoadingACheckpointHoldsOneExpertAtATime) {
  if (!kFailingMemory) GTEST_SKIP() << "a sanitizer owns malloc";
  const TempDir dir;
  CheckpointBuilder builder({.model_type = "qwen3_moe",
                             .layers = 1,
                             .num_experts = 6,
                             .hidden_size = 512,
                             .intermediate_size = 512,
                             .random_codes = true});
  ASSERT_OK(builder.write(dir.path().string()));
  const int64_t expert_bytes = 3 * 512 * 512 / 16 * 9;
  for (const Backend* backend : runnable_backends()) {
    const auto checkpoint = must(Checkpoint::open(dir.path().string()));
    const auto config = must(MoeConfig::make(*must(checkpoint->layer_options(0))));
    const auto source = must(layer_source(*checkpoint, 0));
    const int64_t before = start_peak();
    ASSERT_OK(MoeLayer::open_on(*backend, *config, *source, tiny_layer_options()));
    // The packed bytes have their own pages. In addition to one expert there is room for names and
    // the plan.
    EXPECT_LT(peak_bytes() - before, expert_bytes * 3 / 2) << backend->name;
    EXPECT_GE(peak_bytes() - before, expert_bytes) << backend->name;
  }
}

class MemorySweep : public testing::TestWithParam<size_t> {};

ATTACK_TEST_P(kAllocations, MemorySweep, EndsWellWhateverFails) {
  expect_clean_sweeps(GetParam(), {.every_to = 60, .step = 41});
}

INSTANTIATE_TEST_SUITE_P(Operations, MemorySweep, testing::Range<size_t>(0, operation_count()),
                         operation_name_of);

#ifdef NVFP4_MOE_TOOL
ATTACK_TEST_P(kAllocations, ToolMemory, SaysThatMemoryRanOut) { sweep(251); }

INSTANTIATE_TEST_SUITE_P(Verbs, ToolMemory, testing::Range<size_t>(0, std::size(kVerbs)),
                         verb_name);
#endif

}  // namespace
}  // namespace nvfp4_moe::internal::test
