// Every entry point of the library with one failing memory request, or all failing from one on:
// kOutOfMemory or success, no leak, no crash. Tries the first requests of each operation and then
// every n-th; the long tier tries all.
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>

#include "core/buffer.h"
#include "memory/sweeps.h"
#include "moe/tiny.h"
#include "safetensors/plan.h"
#include "safetensors/safetensors.h"
#include "support/attack.h"
#include "support/backends.h"

namespace nvfp4_moe::internal::test {
namespace {

TEST(Memory, TheToolSeesWhatItIsFor) {
  if (!kFailingMemory) GTEST_SKIP() << "a sanitizer owns malloc";
  const auto result = [](const std::function<Status()>& run) {
    return sweep({"planted", run, {}}, Failing::kOne, {});
  };
  // Two requests, both handled.
  const SweepResult good = result([] {
    auto a = std::make_unique<std::string>(100, 'a');
    return a->empty() ? io_error("") : Status();
  });
  EXPECT_EQ(good.tried, 2);
  EXPECT_EQ(good.out_of_memory, 2);
  EXPECT_EQ(good.requests, 2);
  EXPECT_THAT(good.faults, testing::IsEmpty());
  // The second request fails in a function that may not throw.
  EXPECT_THAT(result([] {
                auto a = std::make_unique<std::string>(100, 'a');
                [&]() noexcept { a = std::make_unique<std::string>(); }();
                return Status();
              }).faults,
              testing::ElementsAre("request 3: ends by Aborted"));
  // A block is leaked if the second request fails.
  EXPECT_THAT(result([] {
                auto* a = new std::string;
                auto b = std::make_unique<std::string>(100, 'b');
                delete a;
                return Status();
              }).faults,
              testing::ElementsAre("request 2: blocks not given back: 1",
                                   "request 3: blocks not given back: 1"));
  // Missing memory is reported as another error.
  EXPECT_THAT(result([] {
                try {
                  const std::string text(100, 'a');
                  return text.empty() ? io_error("") : Status();
                } catch (const std::bad_alloc&) {
                  return io_error("wrong");
                }
              }).faults,
              testing::ElementsAre("request 1: input/output error: wrong"));
  // A mapping that fails, and a thread: its state is request 2, the thread itself request 3.
  const auto map_and_thread = [](bool handled) -> Status {
    void* map = mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) return errno_status("map", "cannot map", errno);
    munmap(map, 4096);
    try {
      std::thread([] {}).join();
    } catch (const std::system_error&) {
      if (handled) throw;
      return io_error("no thread");
    }
    return {};
  };
  EXPECT_THAT(result([&] { return map_and_thread(true); }).faults, testing::IsEmpty());
  EXPECT_THAT(result([&] { return map_and_thread(false); }).faults,
              testing::ElementsAre("request 3: input/output error: no thread"));
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

// Every request fails, from the very first run on. A run still gives the same bits: it requests
// nothing from malloc or from the system.
TEST(Memory, ARunAsksForNothing) {
  if (!kFailingMemory) GTEST_SKIP() << "a sanitizer owns malloc";
  const auto threads = make_thread_pool(2);
  for (const ActivationFormat format : kActivationFormats) {
    MoeOptions moe_options = tiny_options();
    moe_options.activation_format = format;
    moe_options.shared_intermediate_size = 32;
    const TinyLayer tiny(moe_options);
    for (const Backend* backend : runnable_backends()) {
      for (const bool pool : {false, true}) {
        LayerOptions options = tiny_layer_options();
        if (pool) options.executor = threads.get();
        const auto layer = open_tiny(tiny, options, backend);
        const Buffer workspace = workspace_of(*layer);
        TinyBatch batch(tiny.options, 9), starved(tiny.options, 9);
        const Batch call = starved.batch();
        fail_memory(1, Failing::kAllFrom);
        const Status status = run_in(workspace, *layer, call);
        const MemoryRequests requests = stop_failing();
        EXPECT_OK(status);
        EXPECT_EQ(requests.asked, 0)
            << backend->name << " " << to_string(format) << (pool ? " pool" : " serial");
        ASSERT_OK(run_in(workspace, *layer, batch.batch()));
        EXPECT_TRUE(same_bits(batch.out, starved.out)) << backend->name;
      }
    }
  }
}

class MemorySweep : public testing::TestWithParam<size_t> {};

ATTACK_TEST_P(kAllocations, MemorySweep, EndsWellWhateverFails) {
  expect_clean_sweeps(GetParam(), {.every_to = 60, .step = 41});
}

INSTANTIATE_TEST_SUITE_P(Operations, MemorySweep, testing::Range<size_t>(0, operation_count()),
                         operation_name_of);

}  // namespace
}  // namespace nvfp4_moe::internal::test
