"""tools/check/check_boundaries.py: a function of the C interface that could throw is named."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "check" / "check_boundaries.py"
spec = importlib.util.spec_from_file_location("check_boundaries", SCRIPT)
check_boundaries = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_boundaries)

GOOD = """
nvfp4_moe_status nvfp4_moe_one(int64_t a,
                             int64_t b) {
  return api::guarded([&] { return work(a, b); });
}
nvfp4_moe_status nvfp4_moe_two(char** json) {
  return api::guarded([&]() -> Status {
    NVFP4_MOE_TRY(work());
    return {};
  });
}
"""


def test_the_library_is_clean():
    assert check_boundaries.main() == 0


def test_guarded_bodies_are_accepted():
    assert check_boundaries.unguarded(GOOD) == []


def test_a_function_without_it_is_named():
    assert check_boundaries.unguarded(GOOD.replace("api::guarded([&] { return work(a, b); })", "work(a, b)")) == [
        "nvfp4_moe_one"
    ]


def test_a_statement_before_it_is_named():
    assert check_boundaries.unguarded(
        GOOD.replace("{\n  return api::guarded([&]()", "{\n  work();\n  return api::guarded([&]()")
    ) == ["nvfp4_moe_two"]
