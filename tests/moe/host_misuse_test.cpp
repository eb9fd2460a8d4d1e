// A host with callbacks that throw, strides that leave the address space, and unaligned numbers.
#include <functional>
#include <stdexcept>
#include <thread>

#include "core/quantize.h"
#include "moe/c_layer.h"
#include "support/backends.h"

namespace nvfp4_moe::internal {
namespace {

using namespace test;

std::string last_error() { return nvfp4_moe_last_error(); }

// ---- callbacks that throw

TEST(ThrowingHost, AProgressCallbackEndsTheOpening) {
  CLayer c;
  c.options.progress = [](const nvfp4_moe_progress* progress, void*) -> int32_t {
    if (progress->done == 2) throw std::runtime_error("the host's own words");
    return 1;
  };
  EXPECT_EQ(c.try_open(), NVFP4_MOE_STATUS_INTERNAL);
  EXPECT_EQ(last_error(), "the host's own words");
  c.options.progress = nullptr;
  EXPECT_EQ(c.try_open(), kOk);
}

struct ThrowingThreads {
  int at_call = -1;     // the call that throws
  bool before = false;  // before any body has begun, or after two on other threads
  int calls = 0;

  static void run(int64_t count, int64_t grain, nvfp4_moe_parallel_body body, void* context,
                  void* user) {
    auto& self = *static_cast<ThrowingThreads*>(user);
    const bool throws = self.calls++ == self.at_call;
    if (throws && self.before) throw std::runtime_error("no threads");
    const auto range = [=](int64_t t) {
      if (t * grain < count) body(context, t * grain, std::min(count, (t + 1) * grain));
    };
    if (throws) {
      std::thread first(range, 0), second(range, 1);
      first.join();
      second.join();
      throw std::runtime_error("a thread died");
    }
    for (int64_t t = 0; t * grain < count; ++t) range(t);
  }
};

TEST(ThrowingHost, ARunWhoseThreadsThrowFailsAndTheLayerGoesOn) {
  for (const bool before : {true, false}) {
    for (int at_call = 0; at_call < 3; ++at_call) {
      CLayer c;
      ThrowingThreads threads;
      threads.before = before;
      c.options.parallel_for = ThrowingThreads::run;
      c.options.parallel_for_user = &threads;
      c.options.threads = 2;
      nvfp4_moe::Layer layer = c.open();
      TinyBatch batch(c.tiny.options, 9);
      const std::vector<float> expected = c.expected(batch);
      const Buffer workspace = allocate_pages(layer.workspace_bytes(9)).value();
      const nvfp4_moe_batch call = c_batch(batch);
      const auto run = [&] {
        return nvfp4_moe_layer_run(layer.get(), &call, workspace.data(), workspace.size_bytes(),
                                   nullptr);
      };
      threads.calls = 0;
      threads.at_call = at_call;
      EXPECT_EQ(run(), NVFP4_MOE_STATUS_INTERNAL);
      EXPECT_EQ(last_error(), before ? "no threads" : "a thread died");
      threads.at_call = -1;
      // Neither the weights nor the workspace are marked as in use any more.
      const nvfp4_moe_expert same = CLayer::expert(c.tiny.experts[0]);
      EXPECT_NO_THROW(layer.replace_expert(0, same)) << last_error();
      EXPECT_EQ(run(), kOk) << last_error();
      EXPECT_TRUE(same_bits(batch.out, expected));
    }
  }
}

// ---- strides

TEST(Strides, RowsThatLeaveTheAddressSpaceAreRefused) {
  const TinyLayer tiny;
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (const int64_t stride : {kMost, kMost / 40, int64_t{1} << 57}) {
    for (const bool codes : {true, false}) {
      LayerSource source = tiny.source();
      source.expert = [&](int64_t e) -> Result<LoadedExpert> {
        LoadedExpert loaded;
        loaded.source = tiny.experts[static_cast<size_t>(e)].source();
        Nvfp4View& down = loaded.source.down;
        // An address so high that its last row does not fit, although the distance to that row
        // does.
        if (stride == int64_t{1} << 57)
          (codes ? down.codes : down.block_scales) =
              reinterpret_cast<const uint8_t*>(~uintptr_t{0} << 58);
        (codes ? down.codes_stride : down.scales_stride) = stride;
        return loaded;
      };
      EXPECT_THAT(MoeLayer::open(tiny.config(), source, tiny_layer_options()),
                  Refused(Code::kInvalidArgument,
                          std::string("expert 0: down ") + (codes ? "codes" : "block scales") +
                              " stride: expected 64 rows inside the address space"));
    }
  }
}

TEST(Strides, ExpertsThatLeaveTheAddressSpaceAreRefused) {
  const struct {
    const char* name;
    int64_t nvfp4_moe_layer_tensors::*stride;
  } strides[] = {{"gate_up_codes_stride", &nvfp4_moe_layer_tensors::gate_up_codes_stride},
                 {"gate_up_scales_stride", &nvfp4_moe_layer_tensors::gate_up_scales_stride},
                 {"down_codes_stride", &nvfp4_moe_layer_tensors::down_codes_stride},
                 {"down_scales_stride", &nvfp4_moe_layer_tensors::down_scales_stride}};
  for (const auto& [name, stride] : strides) {
    for (const int64_t bytes :
         {std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::max() / 3 + 1}) {
      CLayer c;
      c.tensors.*stride = bytes;
      EXPECT_EQ(c.try_open(), kInvalid);
      EXPECT_EQ(last_error(), std::string(name) +
                                  ": expected 4 experts inside the address space, got " +
                                  std::to_string(bytes) + " bytes between them");
    }
  }
}

// ---- alignment (-fsanitize=alignment shows the effect of a wrong one)

// An array one byte off.
template <class T>
struct Crooked {
  explicit Crooked(size_t count) : bytes(count * sizeof(T) + 1) {}
  T* data() { return reinterpret_cast<T*>(bytes.data() + 1); }
  std::vector<std::byte> bytes;
};

TEST(Alignment, FormatFunctionsRefuseCrookedArrays) {
  std::vector<float> x(2 * 32, 1.0f);
  std::vector<uint8_t> codes(2 * 16), block_scales(2 * 2), fp8(2 * 32);
  std::vector<int8_t> int8(2 * 32);
  float scale = 1.0f;
  Crooked<float> crooked(2 * 32);
  float* const bad = crooked.data();
  std::memcpy(static_cast<void*>(bad), &scale, sizeof(scale));
  uint8_t *const c = codes.data(), *const b = block_scales.data();
  const std::pair<const char*, std::function<nvfp4_moe_status()>> calls[] = {
      {"x", [&] { return nvfp4_moe_quantize(bad, kF32, 2, 32, 0, &scale, c, b, nullptr); }},
      {"scales", [&] { return nvfp4_moe_quantize(x.data(), kF32, 2, 32, 0, bad, c, b, nullptr); }},
      {"scales",
       [&] { return nvfp4_moe_quantize_static(x.data(), kF32, 2, 32, bad, c, b, nullptr); }},
      {"scales",
       [&] { return nvfp4_moe_quantize_dynamic_token(x.data(), kF32, 2, 32, c, b, bad, nullptr); }},
      {"x", [&] { return nvfp4_moe_quantize_vllm_order(bad, kF32, 2, 32, 1.0f, c, b, nullptr); }},
      {"block_scales",
       [&] {
         return nvfp4_moe_quantize_int8_block(x.data(), kF32, 2, 32, int8.data(), bad, nullptr);
       }},
      {"out", [&] { return nvfp4_moe_dequantize(c, b, 1.0f, 2, 32, kF32, bad); }},
      {"scales",
       [&] { return nvfp4_moe_convert_to_fp8(c, b, 1.0f, 2, 32, 2, 16, fp8.data(), bad); }},
  };
  for (const auto& [name, call] : calls) {
    EXPECT_EQ(call(), kInvalid);
    EXPECT_THAT(last_error(),
                HasSubstr(std::string(name) + ": expected an address that is a multiple of 4"));
  }
}

TEST(Alignment, CrookedCountsAreReadAsBytes) {
  std::vector<float> x(2 * 32, 1.0f);
  std::vector<uint8_t> codes(2 * 16), block_scales(2 * 2);
  float scale = 0;
  Crooked<nvfp4_moe_quantize_counts> counts(1);
  nvfp4_moe_quantize_counts known{};
  known.struct_size = sizeof(known);
  std::memcpy(static_cast<void*>(counts.data()), &known, sizeof(known));
  ASSERT_EQ(nvfp4_moe_quantize(x.data(), NVFP4_MOE_DTYPE_F32, 2, 32, 0, &scale, codes.data(),
                               block_scales.data(), counts.data()),
            kOk)
      << last_error();
  std::memcpy(&known, static_cast<const void*>(counts.data()), sizeof(known));
  EXPECT_EQ(known.blocks, 4u);
}

TEST(Alignment, CrookedTensorScalesAreRefused) {
  for (const auto scales :
       {&nvfp4_moe_layer_tensors::gate_tensor_scales, &nvfp4_moe_layer_tensors::up_tensor_scales,
        &nvfp4_moe_layer_tensors::down_tensor_scales}) {
    CLayer c;
    Crooked<float> crooked(4);
    std::memcpy(static_cast<void*>(crooked.data()), c.tensors.*scales, 4 * sizeof(float));
    c.tensors.*scales = crooked.data();
    EXPECT_EQ(c.try_open(), kInvalid);
    EXPECT_THAT(last_error(),
                HasSubstr("tensor_scales: expected an address that is a multiple of 4"));
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal
