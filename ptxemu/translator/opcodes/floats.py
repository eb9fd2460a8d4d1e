"""f32, f32x2 and f64 arithmetic. `.approx` forms give the correctly rounded value; a chip's may differ by ulps."""

from . import values

FTZ, SAT = r"(?P<ftz>\.ftz)?", r"(?P<sat>\.sat)?"
DIRECTED = r"\.(?P<round>rz|rm|rp)" + FTZ + SAT + r"\.f32"


def floats(*rows):
    """Rows of an f32 result: flushed by .ftz, saturated by .sat, and with the one pattern of a NaN."""
    values(*rows, put=lambda kernel, match, to, value: kernel.put_f32(to, value, match.get("ftz"), match.get("sat")))


for word, symbol in (("add", "+"), ("sub", "-"), ("mul", "*")):
    floats(
        (word, r"(\.rn)?" + FTZ + SAT + r"\.f32", "{1:f}" + symbol + "{2:f}"),
        (word, DIRECTED, word + "_directed({1:f},{2:f},{round:mode})"),
    )
    values(
        (word, r"(\.rn)?\.f32x2", word + "_f32x2({1:64},{2:64})"),
        (word, r"(\.rn)?\.f64", "double_bits({1:d}" + symbol + "{2:d})"),
    )
for word in ("fma", "mad"):
    floats(
        (word, r"\.rn" + FTZ + SAT + r"\.f32", "__builtin_fmaf({1:f},{2:f},{3:f})"),
        (word, DIRECTED, "fma_directed({1:f},{2:f},{3:f},{round:mode})"),
    )
    values((word, r"\.rn\.f64", "double_bits(__builtin_fma({1:d},{2:d},{3:d}))"))

floats(
    ("div", r"\.(rn|full|approx)" + FTZ + r"\.f32", "{1:f}/{2:f}"),
    ("rcp", r"\.(approx|rn)" + FTZ + r"\.f32", "1.0f/({1:f})"),
    ("sqrt", r"\.(approx|rn)" + FTZ + r"\.f32", "__builtin_sqrtf({1:f})"),
    ("rsqrt", r"\.approx" + FTZ + r"\.f32", "(float)(1.0/__builtin_sqrt((double)({1:f})))"),
)
for word, function in (("ex2", "exp2"), ("lg2", "log2"), ("tanh", "tanh"), ("sin", "sin"), ("cos", "cos")):
    floats((word, r"\.approx" + FTZ + r"\.f32", f"(float)__builtin_{function}((double)({{1:f}}))"))
for word, name in (("min", "minimum"), ("max", "maximum")):
    for nan, function in (("", f"{name}_number"), (r"\.NaN", f"{name}_nan")):
        values(
            (word, FTZ + nan + r"\.f32", function + "({1:f},{2:f})"),
            (word, FTZ + nan + r"\.f32", function + "(" + function + "({1:f},{2:f}),{3:f})"),
            put=lambda kernel, match, to, value: kernel.put_f32(to, value),
        )
        values((word, FTZ + nan + r"\.xorsign\.abs\.f32", f"xorsign_abs({function}," + "{1:f},{2:f})"))
    values((word, r"\.f64", f"double_bits({name}_double(" + "{1:d},{2:d}))"))

values(
    ("fma", r"\.rn\.f32x2", "fma_f32x2({1:64},{2:64},{3:64})"),
    ("div", r"\.rn\.f64", "double_bits({1:d}/{2:d})"),
    ("rcp", r"\.rn\.f64", "double_bits(1.0/{1:d})"),
    # The low word of the result is zero, as documented.
    ("rcp", r"\.approx\.ftz\.f64", "double_bits(1.0/{1:d})&0xffffffff00000000ull"),
    ("sqrt", r"\.rn\.f64", "double_bits(__builtin_sqrt({1:d}))"),
    ("abs", FTZ + r"\.f32", "{1:flushed}&0x7fffffffu"),
    ("neg", FTZ + r"\.f32", "{1:flushed}^0x80000000u"),
    ("abs", r"\.f64", "{1:64}&0x7fffffffffffffffull"),
    ("neg", r"\.f64", "{1:64}^0x8000000000000000ull"),
    ("copysign", r"\.f32", "({1:32}&0x80000000u)|({2:32}&0x7fffffffu)"),
    ("copysign", r"\.f64", "({1:64}&(1ull<<63))|({2:64}&~(1ull<<63))"),
    ("testp", r"\.(?P<test>finite|infinite|number|notanumber|normal|subnormal)\.f32", "test_{test}({1:32})"),
)
