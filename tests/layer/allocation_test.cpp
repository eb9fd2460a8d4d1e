// run never allocates: every operator new of this executable is counted while a layer runs.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#include "backend/layer_steps.h"
#include "cases/cases.h"
#include "core/executor.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/support.h"

namespace {
std::atomic<int64_t> allocations{0};
}

// Not inlined: otherwise the compiler would see malloc paired with delete and free paired with new,
// and warn of a mismatch.
[[gnu::noinline]] void* operator new(size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* p = std::malloc(size != 0 ? size : 1)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace nvfp4_moe::internal {
namespace {

class Allocation : public test::BackendTest {};

TEST_P(Allocation, NoneInsideARun) {
  const auto pool = make_thread_pool(3);
  for (const Case& spec : case_table()) {
    if (spec.tokens != 24 && spec.tokens != 10) continue;
    SCOPED_TRACE(spec.name);
    const auto data = make_case(spec);
    ASSERT_OK(data);
    if (test::declines(backend(), data->config)) continue;
    test::CaseRun host(backend(), *data);
    std::vector<uint8_t> out(data->out_bytes());
    const Batch batch = host.place(data->batch(out.data()));
    if (backend().memory != nullptr)
      EXPECT_OK(host.run_into(batch, serial_executor()));  // a driver's first launch
    for (Executor* executor : {&serial_executor(), pool.get()}) {
      const int64_t before = allocations.load();
      const Status status = host.run_into(batch, *executor);
      const int64_t after = allocations.load();
      EXPECT_OK(status);
      EXPECT_EQ(after - before, 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Allocation, ::testing::ValuesIn(test::step_backends()),
                         test::hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal
