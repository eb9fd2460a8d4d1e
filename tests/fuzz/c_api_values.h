// Calls of the C interface on arrays of values, without a layer: quantizers, layouts, routers.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "fuzz/c_api_arguments.h"
#include "fuzz/require.h"
#include "nvfp4_moe/nvfp4_moe.h"

namespace nvfp4_moe::internal::fuzz {

// Whether the call succeeded. A failure has a known code and a text of one line.
inline bool check(nvfp4_moe_status code) {
  REQUIRE(code >= NVFP4_MOE_STATUS_OK && code <= NVFP4_MOE_STATUS_CANCELLED);
  REQUIRE(code != NVFP4_MOE_STATUS_INTERNAL && code != NVFP4_MOE_STATUS_OUT_OF_MEMORY);
  if (code == NVFP4_MOE_STATUS_OK) return true;
  const char* text = nvfp4_moe_last_error();
  REQUIRE(text != nullptr && text[0] != '\0');
  for (; *text != '\0'; ++text) REQUIRE(*text != '\n');
  return false;
}

class Values {
 public:
  explicit Values(Arguments& a) : a_(a) {}
  void play() {
    switch (a_.pick(4)) {
      case 0: return quantize();
      case 1: return convert();
      case 2: return select_experts();
      default: return router_gemm();
    }
  }

 private:
  void quantize() {
    const int64_t rows = a_.in(0, 5);
    const int64_t cols = 16 * a_.in(0, 4);
    const int64_t said_rows = a_.rarely()    ? -a_.in(1, 9)
                              : a_.rarely(5) ? std::numeric_limits<int64_t>::max()
                                             : rows;
    const int64_t said_cols = a_.rarely()    ? -a_.in(1, 99)
                              : a_.rarely(5) ? a_.in(1, 15) + cols - 16
                                             : cols;
    const int32_t dtype = a_.enumerator(6);
    const void* x = a_.maybe(a_.bytes(rows * cols * 8));
    uint8_t* codes = a_.maybe(a_.zeros(rows * cols / 2));
    uint8_t* scales = a_.maybe(a_.zeros(rows * cols / 16));
    nvfp4_moe_quantize_counts* counts = a_.structure(nvfp4_moe_quantize_counts{});
    switch (a_.pick(6)) {
      case 0: {
        float tensor_scale = a_.pick(2) == 0 ? 0.0f : a_.scale();
        check(nvfp4_moe_quantize(x, dtype, said_rows, said_cols, a_.enumerator(2),
                                 a_.maybe(&tensor_scale), codes, scales, counts));
        break;
      }
      case 1:
        check(nvfp4_moe_quantize_dynamic_token(x, dtype, said_rows, said_cols, codes, scales,
                                               a_.maybe(a_.floats(rows)), counts));
        break;
      case 2:
        check(nvfp4_moe_quantize_static(x, dtype, said_rows, said_cols, a_.maybe(a_.floats(1)),
                                        codes, scales, counts));
        break;
      case 3:
        check(nvfp4_moe_quantize_vllm_order(x, dtype, said_rows, said_cols, a_.scale(), codes,
                                            scales, counts));
        break;
      case 4:
        check(nvfp4_moe_quantize_int8_block(
            x, dtype, said_rows, said_cols,
            reinterpret_cast<int8_t*>(a_.maybe(a_.zeros(rows * cols))),
            a_.maybe(a_.floats(rows * cols / 16)), counts));
        break;
      default:
        check(nvfp4_moe_dequantize(codes, scales, a_.scale(), said_rows, said_cols, dtype,
                                   a_.maybe(a_.zeros(rows * cols * 8))));
    }
  }

  void convert() {
    const int64_t rows = a_.in(0, 150);
    const int64_t cols = a_.in(0, 9);
    const int64_t said = a_.rarely() ? -a_.in(1, 9) : rows;
    const int which = a_.pick(5);
    if (which == 0) {
      const int64_t bytes = nvfp4_moe_swizzled_bytes(rows, cols);
      REQUIRE(bytes >= rows * cols);
      check(nvfp4_moe_swizzle_scales(a_.maybe(a_.bytes(rows * cols)), said, cols,
                                     a_.maybe(a_.zeros(bytes))));
    } else if (which == 1) {
      const int64_t bytes = nvfp4_moe_swizzled_bytes(rows, cols);
      check(nvfp4_moe_unswizzle_scales(a_.maybe(a_.bytes(bytes)), said, cols,
                                       a_.maybe(a_.zeros(rows * cols))));
    } else if (which == 2) {
      check(nvfp4_moe_pack_codes(a_.maybe(a_.bytes(rows, a_.pick(2) == 0 ? 0x0F : 0x1F)), said,
                                 a_.maybe(a_.zeros(rows / 2))));
      check(nvfp4_moe_unpack_codes(a_.maybe(a_.bytes(rows / 2)), said, a_.maybe(a_.zeros(rows))));
    } else if (which == 3) {
      const int64_t k = 16 * cols;
      const int64_t block_rows = a_.rarely(2) ? a_.in(-1, 200) : 0;
      const int64_t block_cols = a_.rarely(2) ? a_.in(-1, 200) : 0;
      const int64_t count = nvfp4_moe_fp8_scale_count(rows, k, block_rows, block_cols);
      check(nvfp4_moe_convert_to_fp8(a_.maybe(a_.bytes(rows * k / 2)),
                                     a_.maybe(a_.block_scales(rows * k / 16)), a_.scale(), said, k,
                                     block_rows, block_cols, a_.maybe(a_.zeros(rows * k)),
                                     a_.maybe(a_.floats(std::max<int64_t>(count, 0)))));
    } else {  // only numbers go in
      const auto any = [&] { return a_.rarely(1) ? a_.bad_size() : a_.any_int64(); };
      const int64_t p = any();
      const int64_t q = any();
      REQUIRE(nvfp4_moe_swizzled_bytes(p, q) >= -1);
      REQUIRE(nvfp4_moe_fp8_scale_count(p, q, any(), any()) >= -1);
      REQUIRE(nvfp4_moe_status_name(static_cast<int32_t>(p))[0] != '\0');
    }
  }

  // Indices from -1 to count, one beyond the legal ones at either end, rarely anything.
  uint8_t* indices(int64_t size, int64_t count, nvfp4_moe_dtype dtype) {
    const int64_t first = a_.in(0, 200), step = a_.in(0, 9);
    return a_.indices(size, dtype == NVFP4_MOE_DTYPE_I32, [&](int64_t i) {
      return a_.rarely(7) ? a_.any_int64() : (first + step * i) % (count + 2) - 1;
    });
  }

  void router_gemm() {
    nvfp4_moe_router_gemm_call c{};
    const int64_t tokens = a_.in(0, 3), experts = a_.in(1, 5), size = 8 * a_.in(1, 3);
    c.tokens = tokens;
    c.num_experts = experts;
    c.hidden_size = a_.rarely() ? size - a_.in(0, 30) : size;
    c.hidden_stride = a_.pick(2) == 0 ? 0 : 24 - (a_.rarely() ? a_.in(0, 40) : 0);
    c.logits_dtype = a_.enumerator(4);
    c.hidden = a_.maybe(a_.bytes(tokens * 24 * 2));
    c.weight = a_.maybe(a_.bytes(experts * size * 2));
    c.logits = a_.maybe(a_.zeros(tokens * experts * 4));
    if (a_.rarely()) c.tokens = a_.rarely(1) ? -1 : int64_t{1} << a_.in(31, 62);
    const nvfp4_moe_router_gemm_call* call = a_.structure(c);
    check(a_.rarely(5) ? nvfp4_moe_device_router_gemm(a_.device(), call, nullptr)
                       : nvfp4_moe_router_gemm(call));
  }

  void select_experts() {
    nvfp4_moe_router_config c{};
    c.num_experts = a_.in(1, 40);
    c.top_k = a_.in(1, std::min<int64_t>(c.num_experts, 8));
    if (a_.pick(2) == 0) {
      c.num_expert_group = a_.in(1, 4);
      c.num_experts *= c.num_expert_group;
      c.topk_group = a_.in(0, c.num_expert_group);
    }
    c.scoring = a_.enumerator(3);
    c.group_score = a_.enumerator(2);
    c.renormalize = a_.enumerator(2);
    if (a_.rarely(2)) c.renormalize_epsilon = a_.number();
    if (a_.rarely(2)) c.routed_scaling_factor = a_.number();
    c.correction_bias = a_.pick(2);
    c.hash_routing = a_.pick(3) == 0 ? 1 : 0;
    if (c.hash_routing == 1 && !a_.rarely(2))
      c.correction_bias = 0, c.num_expert_group = 0, c.scoring = 1;
    c.expert_scale = a_.rarely(6) ? 2 : a_.pick(2);
    const nvfp4_moe_router_config* given = a_.structure(c);
    const nvfp4_moe_router_config read = Arguments::as_read(given, c);  // the arrays fit this

    nvfp4_moe_router_batch b{};
    const int64_t tokens = a_.in(0, 4), experts = read.num_experts,
                  k = std::max<int64_t>(read.top_k, 0);
    b.tokens = tokens;
    b.logits_stride = a_.pick(2) == 0 ? 0 : experts + a_.in(0, 3);
    b.logits_dtype = a_.enumerator(4);
    b.logits = a_.maybe(a_.bytes(tokens * (experts + 3) * 8));
    if (read.correction_bias == 1 || a_.rarely()) b.correction_bias = a_.maybe(a_.floats(experts));
    if (read.expert_scale == 1 || a_.rarely()) b.expert_scale = a_.maybe(a_.floats(experts));
    b.vocab_size = a_.in(0, 6);
    b.token_ids_dtype = a_.pick(2) == 0 ? NVFP4_MOE_DTYPE_I32 : a_.enumerator(6);
    b.hash_table_dtype = a_.pick(2) == 0 ? NVFP4_MOE_DTYPE_I32 : a_.enumerator(6);
    if (read.hash_routing == 1 || a_.rarely()) {
      b.token_ids = a_.maybe(indices(tokens, b.vocab_size, b.token_ids_dtype));
      b.hash_table = a_.maybe(indices(b.vocab_size * k, experts, b.hash_table_dtype));
    }
    b.ids_dtype = a_.pick(2) == 0 ? NVFP4_MOE_DTYPE_I32 : a_.enumerator(6);
    uint8_t* ids = a_.zeros(tokens * k * 8);
    b.topk_ids = a_.maybe(ids);
    b.topk_weights = a_.maybe(reinterpret_cast<float*>(a_.zeros(tokens * k * 4)));
    uint64_t bad_ids = 0;
    b.bad_ids = a_.maybe(&bad_ids);
    if (a_.rarely()) b.tokens = a_.rarely(1) ? -1 : int64_t{1} << a_.in(31, 62);
    if (a_.rarely(5)) b.logits_stride = -a_.in(1, 9);
    const nvfp4_moe_router_batch* batch = a_.structure(b);
    const bool done =
        check(a_.rarely(5) ? nvfp4_moe_device_select_experts(a_.device(), given, batch, nullptr)
                           : nvfp4_moe_select_experts(given, batch));
    if (!done || batch == nullptr) return;
    const nvfp4_moe_router_batch seen = Arguments::as_read(batch, b);
    for (int64_t i = 0; i < seen.tokens * k; ++i) {
      int64_t id = 0;
      int32_t narrow = 0;
      std::memcpy(&narrow, ids + 4 * i, 4);
      std::memcpy(&id, ids + 8 * i, 8);
      if (seen.ids_dtype != NVFP4_MOE_DTYPE_I64) id = narrow;
      REQUIRE(id >= (read.hash_routing == 1 ? -1 : 0) && id < experts);
    }
  }

  Arguments& a_;
};

}  // namespace nvfp4_moe::internal::fuzz
