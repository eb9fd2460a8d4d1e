#include "c_api/common.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <utility>

#include "moe/env.h"
#include "moe/layer.h"

namespace nvfp4_moe::internal::c_api {
namespace {

// The C statuses equal the library's codes, checked at compile time.
static_assert(NVFP4_MOE_STATUS_OK == static_cast<int>(Code::kOk));
static_assert(NVFP4_MOE_STATUS_CHECK_FAILED == static_cast<int>(Code::kCheckFailed));
static_assert(NVFP4_MOE_STATUS_INVALID_ARGUMENT == static_cast<int>(Code::kInvalidArgument));
static_assert(NVFP4_MOE_STATUS_UNSUPPORTED == static_cast<int>(Code::kUnsupported));
static_assert(NVFP4_MOE_STATUS_BAD_INPUT == static_cast<int>(Code::kBadInput));
static_assert(NVFP4_MOE_STATUS_IO == static_cast<int>(Code::kIo));
static_assert(NVFP4_MOE_STATUS_OUT_OF_MEMORY == static_cast<int>(Code::kOutOfMemory));
static_assert(NVFP4_MOE_STATUS_BUSY == static_cast<int>(Code::kBusy));
static_assert(NVFP4_MOE_STATUS_INTERNAL == static_cast<int>(Code::kInternal));
static_assert(NVFP4_MOE_STATUS_CANCELLED == static_cast<int>(Code::kCancelled));

// Longer messages are cut.
thread_local char last_error[2048];

// A host's own threads as an Executor. Wrong ranges from the host are clamped to the loop, so a
// wrong host computes wrong values but writes nowhere else. An exception of a body does not pass
// through the host's frames, which may be C. An exception of the host is rethrown once no body
// runs. A body that begins after that, or that a longjmp leaves running, would use a stack frame
// that no longer exists; the header forbids both.
class HostExecutor : public Executor {
 public:
  HostExecutor(nvfp4_moe_parallel_for parallel_for, void* user, int threads)
      : parallel_for_(parallel_for), user_(user), threads_(threads) {}

  void parallel_for(int64_t count, int64_t grain, const Body& body) override {
    if (count <= 0) return;
    Call call{&body, count};
    try {
      parallel_for_(count, std::max<int64_t>(grain, 1), run_range, &call, user_);
    } catch (...) {
      call.ended.store(true, std::memory_order_seq_cst);
      call.wait();
      throw;
    }
    if (call.failed.load(std::memory_order_acquire)) {
      call.wait();
      std::rethrow_exception(std::move(call.failure));
    }
  }
  int threads() const override { return threads_; }

 private:
  struct Call {
    const Body* body;
    int64_t count;
    std::atomic<int> running{0};
    std::atomic<bool> ended{false};  // no further body begins
    std::atomic<bool> failed{false};
    // the first; written before `failed`, by the thread that set `failing`
    std::exception_ptr failure = nullptr;
    std::atomic<bool> failing{false};

    void wait() const {
      while (running.load(std::memory_order_seq_cst) != 0) std::this_thread::yield();
    }
  };

  static void run_range(void* context, int64_t begin, int64_t end) {
    Call& loop = *static_cast<Call*>(context);
    begin = std::max<int64_t>(begin, 0);
    end = std::min(end, loop.count);
    if (begin >= end) return;
    loop.running.fetch_add(1, std::memory_order_seq_cst);
    if (!loop.ended.load(std::memory_order_seq_cst)) {
      try {
        (*loop.body)(begin, end);
      } catch (...) {
        loop.ended.store(true, std::memory_order_relaxed);
        if (!loop.failing.exchange(true, std::memory_order_relaxed)) {
          loop.failure = std::current_exception();
          loop.failed.store(true, std::memory_order_release);
        }
      }
    }
    loop.running.fetch_sub(1, std::memory_order_seq_cst);
  }

  nvfp4_moe_parallel_for parallel_for_;
  void* user_;
  int threads_;
};

}  // namespace

nvfp4_moe_status fail(Code code, const char* message) noexcept {
  const size_t length = std::min(std::strlen(message), sizeof(last_error) - 1);
  // A message may quote a caller's string (a backend's name, a path). It must still be one line.
  for (size_t i = 0; i < length; ++i) {
    const auto byte = static_cast<unsigned char>(message[i]);
    last_error[i] = byte < 0x20 || byte == 0x7F ? '?' : message[i];
  }
  last_error[length] = '\0';
  return static_cast<nvfp4_moe_status>(code);
}

Result<int> read_gpu(const char* device) {
  NVFP4_MOE_TRY(check_pointer("device", device));
  const std::optional<int> index = gpu_index(device);
  if (!index) return invalid_argument("device: expected cuda:N, got " + std::string(device));
  return *index;
}

Result<DType> read_dtype(const char* name, nvfp4_moe_dtype value, DType fallback) {
  switch (value) {
    case NVFP4_MOE_DTYPE_DEFAULT: return fallback;
    case NVFP4_MOE_DTYPE_BF16: return DType::kBf16;
    case NVFP4_MOE_DTYPE_F16: return DType::kF16;
    case NVFP4_MOE_DTYPE_F32: return DType::kF32;
    case NVFP4_MOE_DTYPE_I32: return DType::kI32;
    case NVFP4_MOE_DTYPE_I64: return DType::kI64;
    default:
      return invalid_argument(std::string(name) + ": expected 0 to 5, got " +
                              std::to_string(value));
  }
}

Status write_text(const std::string& text, char** out) {
  char* copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy == nullptr)
    return Status(Code::kOutOfMemory,
                  "memory: expected " + std::to_string(text.size() + 1) + " bytes, got none");
  std::memcpy(copy, text.c_str(), text.size() + 1);
  *out = copy;
  return {};
}

Result<std::unique_ptr<Executor>> make_executor(nvfp4_moe_parallel_for parallel_for, void* user,
                                                int32_t threads) {
  if (threads < 0 || threads > 4096)
    return invalid_argument("threads: expected 0 to 4096, got " + std::to_string(threads));
  if (parallel_for != nullptr)
    return std::unique_ptr<Executor>(new HostExecutor(parallel_for, user, std::max(threads, 1)));
  if (threads > 0) return make_thread_pool(threads);
  return std::unique_ptr<Executor>();
}

}  // namespace nvfp4_moe::internal::c_api

using nvfp4_moe::internal::Code;
namespace moe = nvfp4_moe::internal;

extern "C" {

const char* nvfp4_moe_version(void) { return NVFP4_MOE_VERSION; }

int32_t nvfp4_moe_abi_version(void) { return NVFP4_MOE_ABI_VERSION; }

const char* nvfp4_moe_last_error(void) { return moe::c_api::last_error; }

const char* nvfp4_moe_status_name(nvfp4_moe_status status) {
  return status < 0 || status > NVFP4_MOE_STATUS_CANCELLED
             ? "unknown"
             : moe::to_string(static_cast<Code>(status));
}

void nvfp4_moe_text_free(char* text) { std::free(text); }

void nvfp4_moe_set_log_callback(nvfp4_moe_log_fn callback, void* user) {
  moe::c_api::guarded([&] {
    moe::set_log_callback(callback, user);
    return moe::Status();
  });
}

}  // extern "C"
