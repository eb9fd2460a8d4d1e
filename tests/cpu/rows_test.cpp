// The functions of rows.h give the same bits with every instruction set as with portable.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "backend/cpu/kernels.h"
#include "core/float_formats.h"
#include "core/quantize.h"
#include "support/backends.h"
#include "support/support.h"

namespace nvfp4_moe::internal::cpu {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBf16, DType::kF16};
constexpr int64_t kRowSizes[] = {16, 48, 256, 272, 1040};

// A row of `dtype`: elements within a few binades of each other, mixed with zeros, ties and the
// smallest numbers.
struct Row {
  std::vector<std::byte> bytes;
  Row(DType dtype, int64_t k, std::mt19937& random) : bytes(static_cast<size_t>(4 * k)) {
    for (int64_t i = 0; i < k; ++i) {
      const uint32_t draw = static_cast<uint32_t>(random());
      float value =
          std::ldexp(static_cast<float>(draw >> 16) - 32768.0f, -12 - static_cast<int>(draw % 8));
      if (draw % 31 == 0) value = std::ldexp(value, -30);
      if (draw % 37 == 0) value = static_cast<float>(draw % 16) * 0.25f;
      if (draw % 41 == 0) value = -0.0f;
      std::byte* at = bytes.data() + i * (dtype == DType::kF32 ? 4 : 2);
      const uint16_t half = dtype == DType::kBf16 ? bf16_from_float(value) : fp16_from_float(value);
      if (dtype == DType::kF32)
        std::memcpy(at, &value, sizeof value);
      else
        std::memcpy(at, &half, sizeof half);
    }
  }
  const void* data() const { return bytes.data(); }
};

std::vector<float> magnitudes(int64_t count, std::mt19937& random, int least, int binades) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) {
    const uint32_t draw = static_cast<uint32_t>(random());
    const int exponent = least + static_cast<int>(draw % static_cast<uint32_t>(binades));
    value = std::ldexp(1.0f + static_cast<float>(draw >> 9 & 0x3FFFFF) * 0x1p-22f, exponent) *
            (draw >> 31 ? -1 : 1);
  }
  return values;
}

// `kernels` writes the same bytes as portable: run(kernels, out) fills out, `bytes` long.
template <class Run>
void expect_portables(const Kernels& kernels, int64_t bytes, const Run& run) {
  std::vector<std::byte> expected(static_cast<size_t>(bytes), std::byte{0xA5}), actual = expected;
  run(kPortableKernels, expected.data());
  run(kernels, actual.data());
  ASSERT_EQ(std::mismatch(actual.begin(), actual.end(), expected.begin()).first - actual.begin(),
            bytes)
      << "bytes that agree";
}

class RowsOf : public test::KernelsTest {};
INSTANTIATE_TEST_SUITE_P(Cpu, RowsOf, ::testing::ValuesIn(test::instruction_sets()),
                         test::hardware_test_name<Kernels>);

// Calls body(dtype, k, row).
template <class Body>
void for_rows(const Body& body) {
  std::mt19937 random(20);
  for (const DType dtype : kDTypes) {
    for (const int64_t k : kRowSizes) {
      for (int round = 0; round < 4; ++round) {
        SCOPED_TRACE(testing::Message() << to_string(dtype) << " K " << k << " round " << round);
        body(dtype, k, Row(dtype, k, random));
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(RowsOf, QuantizersHavePortablesBits) {
  for_rows([&](DType dtype, int64_t k, const Row& row) {
    const float amax = kPortableKernels.amax(row.data(), dtype, k);
    ASSERT_EQ(kernels().amax(row.data(), dtype, k), amax);
    const auto counted = [](const RowCounts& counts, std::byte* out) {
      const uint64_t all[] = {counts.blocks, counts.saturated, counts.zeroed,
                              std::bit_cast<uint32_t>(counts.row_scale)};
      std::memcpy(out, all, sizeof all);
    };
    for (const bool vllm_order : {false, true}) {
      // The row's own scale, scales that saturate blocks, and scales that round block scales to 0.
      for (const float factor : {1.0f, 0x1p-6f, 0x1p9f}) {
        const float scale = (vllm_order ? 2688.0f / amax : dynamic_token_scale(amax)) * factor;
        expect_portables(kernels(), k / 2 + k / 16 + 64, [&](const Kernels& of, std::byte* out) {
          auto* codes = reinterpret_cast<uint8_t*>(out) + 64;
          counted(of.quantize({.x = row.data(),
                               .dtype = dtype,
                               .k = k,
                               .scale = scale,
                               .vllm_order = vllm_order,
                               .codes = codes,
                               .block_scales = codes + k / 2}),
                  out);
        });
      }
    }
    expect_portables(kernels(), k + k / 4 + 64, [&](const Kernels& of, std::byte* out) {
      counted(of.quantize_int8(row.data(), dtype, k, reinterpret_cast<int8_t*>(out + 64 + k / 4),
                               reinterpret_cast<float*>(out + 64)),
              out);
    });
    for (const float factor : {1.0f, 0x1p-3f, 0x1p12f}) {
      expect_portables(kernels(), k + 64, [&](const Kernels& of, std::byte* out) {
        counted(of.quantize_fp8(row.data(), dtype, k, fp8_token_scale(amax) * factor,
                                reinterpret_cast<uint8_t*>(out + 64)),
                out);
      });
    }
  });
}

// All 65536 numbers of bf16 and of fp16 except NaNs, through fp32.
TEST_P(RowsOf, EveryHalfHasPortablesBits) {
  for (const DType dtype : {DType::kBf16, DType::kF16}) {
    std::vector<uint16_t> halves;
    for (uint32_t bits = 0; bits < 0x10000; ++bits)
      if (!std::isnan(dtype == DType::kBf16 ? bf16_to_float(static_cast<uint16_t>(bits))
                                            : fp16_to_float(static_cast<uint16_t>(bits))))
        halves.push_back(static_cast<uint16_t>(bits));
    halves.resize((halves.size() + 15) / 16 * 16, 0);
    const auto k = static_cast<int64_t>(halves.size());
    expect_portables(kernels(), 2 * k, [&](const Kernels& of, std::byte* out) {
      of.to_bf16(halves.data(), dtype, k, reinterpret_cast<uint16_t*>(out));
    });
    for (const float weight : {1.5f, -0x1.02p-9f, 1e30f})
      expect_portables(kernels(), 2 * k, [&](const Kernels& of, std::byte* out) {
        of.scale_hidden(halves.data(), dtype, k, weight, out);
      });
  }
}

TEST_P(RowsOf, EpiloguesHavePortablesBits) {
  constexpr int64_t kCount = 512;  // bf16 hides most last bits of fp32
  std::mt19937 random(21);
  const std::vector<float> acc = magnitudes(kCount * kStripRows, random, -20, 30);
  const std::vector<float> alpha = magnitudes(kCount, random, -4, 8),
                           weight = magnitudes(kCount, random, -3, 3);
  const std::vector<float> bias = magnitudes(kStripRows, random, -3, 6);
  for (const bool biased : {false, true}) {
    for (const bool weighted : {false, true}) {
      for (const Activation activation :
           {Activation::kSwiglu, Activation::kSwigluClamped, Activation::kSwigluStep,
            Activation::kSwigluOai, Activation::kGelu, Activation::kGeluTanh, Activation::kSitu}) {
        MoeOptions options;
        options.activation = activation;
        options.swiglu_limit = 7.0f;
        options.situ_gate_limit = 4.0f;
        options.situ_up_limit = 25.0f;
        expect_portables(kernels(), kCount * 32, [&](const Kernels& of, std::byte* out) {
          of.swiglu(options, {.acc = acc.data(),
                              .count = kCount,
                              .gate_alpha = alpha.data(),
                              .up_alpha = alpha.data(),
                              .gate_bias = biased ? bias.data() : nullptr,
                              .up_bias = biased ? bias.data() + kPanelRows : nullptr,
                              .weight = weighted ? weight.data() : nullptr,
                              .out = reinterpret_cast<uint16_t*>(out),
                              .stride = 16});
        });
      }
      for (const DType dtype : kDTypes) {
        for (const bool relu2 : {false, true}) {
          for (const int64_t channels : {32, 16, 23}) {
            if (biased && channels % 16 != 0) continue;
            expect_portables(kernels(), kCount * kStripRows * 4,
                             [&](const Kernels& of, std::byte* out) {
                               of.round({.acc = acc.data(),
                                         .acc_stride = kStripRows,
                                         .count = kCount,
                                         .channels = channels,
                                         .alpha = alpha.data(),
                                         .bias = biased ? bias.data() : nullptr,
                                         .relu2 = relu2,
                                         .weight = weighted ? weight.data() : nullptr,
                                         .out = out,
                                         .dtype = dtype,
                                         .stride = kStripRows});
                             });
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal::cpu
