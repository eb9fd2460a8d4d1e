"""The formula by which GPUs compute gelu, gelu_tanh and situ, on the host.

The struct GeluOrSitu of src/backend/cuda/gemm/gated_activation.cuh is compiled with correctly rounded 2^x and 1/x in
place of the GPU's instructions, and compared with core/gelu_situ.h. docs/explanation/numerics.md, section 7, has the
limits.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "src/backend/cuda/gemm/gated_activation.cuh"
PROGRAM = r"""
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include "core/config.h"
#include "core/gelu_situ.h"
#define __device__
namespace nvfp4_moe::internal {
namespace ptx {
float min_nan(float x, float y) { return std::isnan(x) ? x : std::min(x, y); }
float max_nan(float x, float y) { return std::isnan(x) ? x : std::max(x, y); }
float rcp_approx(float x) { return static_cast<float>(1.0 / x); }
float ex2_approx(float x) { return static_cast<float>(std::exp2(double{x})); }
}  // namespace ptx
using std::fmaf;
GELU_OR_SITU
}  // namespace nvfp4_moe::internal
using namespace nvfp4_moe::internal;

constexpr float kB = 4.5f, kL = 7.0f;
float expected(Activation a, float g, float u) {
  return a == Activation::kGelu ? gelu(g, u) : a == Activation::kGeluTanh ? gelu_tanh(g, u) : situ(g, u, kB, kL);
}
int main() {
  MoeOptions options;
  options.num_experts = options.top_k = 1, options.hidden_size = options.intermediate_size = 16;
  for (Activation a : {Activation::kGelu, Activation::kGeluTanh, Activation::kSitu}) {
    GeluOrSitu function{};
    function.by_erf = a == Activation::kGelu, function.capped = a == Activation::kSitu;
    function.most_gate = 9 * kB, function.per_gate_limit = 1 / kB;
    function.most_up = 9 * kL, function.per_up_limit = 1 / kL;
    double relative[3] = {}, all = 0;  // from -3.5 on, from -4.5 on, from -9 on
    int other = 0;                     // NaN or Inf on one side only, or value<kPlain> differs
    const auto compare = [&](float g, float u) {
      const float h = expected(a, g, u), own = function.gated<false>(g, u);
      if (a != Activation::kSitu && !std::isnan(own)) other += function.gated<true>(g, u) != own;
      if (std::isnan(h) || std::isinf(h) || std::isnan(own) || std::isinf(own)) {
        other += std::isnan(h) ? !std::isnan(own) : h != own;
        return;
      }
      all = std::max(all, std::fabs(double{own} - h) / std::fabs(double{g} * u));
      const double error = std::fabs(own / double{h} - 1);
      for (int i = 0; i < 3; ++i)
        if (g >= (i == 0 ? -3.5f : i == 1 ? -4.5f : -9.0f)) relative[i] = std::max(relative[i], error);
    };
    for (int i = -100000; i <= 100000; ++i)
      if (i != 0)
        for (float u : {1.0f, -0.37f, 30.0f, 1e-5f})
          for (float step : {1.6e-4f, 1e-3f, 1e-9f}) compare(static_cast<float>(i) * step, u);
    const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
    for (float g : {-inf, inf, nan, 1e30f, 1.5f})
      for (float u : {-inf, inf, nan, 1e5f, 0.5f}) compare(g, u);
    for (float g : {-1e30f, -1e10f, -200.0f}) other += function.gated<false>(g, 3.0f) != 0.0f;
    std::printf("%s[%g, %g, %g, %g, %d]", a == Activation::kGelu ? "[" : ", ", relative[0], relative[1], relative[2],
                all, other);
  }
  std::printf("]\n");
}
"""


def test_the_formula_is_within_its_limits(tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no c++")
    struct = re.search(r"^struct GeluOrSitu \{.*?^\};", HEADER.read_text(), re.MULTILINE | re.DOTALL)
    assert struct is not None
    source = tmp_path / "formula.cpp"
    source.write_text(PROGRAM.replace("GELU_OR_SITU", struct.group(0)))
    flags = ["-std=c++20", "-O1", "-ffp-contract=off", f"-I{ROOT / 'src'}"]
    subprocess.run([compiler, *flags, source, "-o", tmp_path / "formula"], check=True)
    gelu, gelu_tanh, situ = json.loads(subprocess.check_output([tmp_path / "formula"], text=True))
    for values, near, far, farther in (
        (gelu, 2**-19.5, 2**-16.5, None),
        (gelu_tanh, 2**-19.5, 2**-18.9, 2**-16.5),
        (situ, 2**-20.8, 2**-19.5, 2**-19.5),
    ):
        *relative, of_product, other = values
        assert other == 0
        assert relative[0] <= near and relative[1] <= far, values
        assert farther is None or relative[2] <= farther, values
        assert of_product <= 2**-21.5, values
