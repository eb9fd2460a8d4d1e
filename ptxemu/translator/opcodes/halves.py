"""f16 and bf16 arithmetic, single and packed."""

from . import values

HALF = r"\.(?P<type>b?f16(x2)?)"
ONE, TWO = r"\.(?P<type>b?f16)", r"\.(?P<type>b?f16x2)"

for word in ("add", "sub", "mul"):
    values(
        (word, r"(\.rn)?" + HALF, word + "_{type}({1},{2})"),
        (word, r"(\.rn)?\.sat" + HALF, "saturate_{type}(" + word + "_{type}({1},{2}))"),
    )
for word in ("min", "max"):
    values(
        (word, HALF, word + "_{type}({1},{2})"),
        (word, r"\.NaN" + HALF, word + "_nan_{type}({1},{2})"),
    )
values(
    ("fma", r"\.rn" + HALF, "fma_{type}({1},{2},{3})"),
    ("fma", r"\.rn\.sat" + HALF, "saturate_{type}(fma_{type}({1},{2},{3}))"),
    ("fma", r"\.rn\.relu" + HALF, "relu_{type}(fma_{type}({1},{2},{3}))"),
    ("fma", r"\.rn" + HALF + r"\.relu", "relu_{type}(fma_{type}({1},{2},{3}))"),  # as CUTLASS has it
    ("tanh", r"\.approx" + HALF, "tanh_{type}({1})"),
    ("abs", ONE, "{1}&0x7fffu"),
    ("abs", TWO, "{1}&0x7fff7fffu"),
    ("neg", ONE, "{1}^0x8000u"),
    ("neg", TWO, "{1}^0x80008000u"),
)
