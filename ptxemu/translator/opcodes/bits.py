"""Logic, shifts and bit fields."""

from . import form, values

B16, B32 = r"\.(?P<type>b(16|32|64))", r"\.(?P<type>b(32|64))"

values(
    ("and", B16, "({type:U})({1}&{2})"),
    ("or", B16, "({type:U})({1}|{2})"),
    ("xor", B16, "({type:U})({1}^{2})"),
    ("not", B16, "({type:U})~{1}"),
    ("and", r"\.pred", "(bool)({1:p})&(bool)({2:p})"),
    ("or", r"\.pred", "(bool)({1:p})|(bool)({2:p})"),
    ("xor", r"\.pred", "(bool)({1:p})^(bool)({2:p})"),
    ("not", r"\.pred", "!{1:p}"),
    ("cnot", B16, "{1}==0"),
    ("shl", B16, "shift_left{type:bits}({1},{2:32})"),
    ("shr", r"\.(?P<type>[bu](16|32|64))", "shift_right{type:bits}({1},{2:32})"),
    ("shr", r"\.(?P<type>s(16|32|64))", "shift_right_signed{type:bits}({1},{2:32})"),
    ("shf", r"\.(?P<side>[lr])\.(?P<mode>wrap|clamp)\.b32", "funnel_{side}_{mode}({1:32},{2:32},{3:32})"),
    ("bfe", r"\.(?P<type>[us](32|64))", "extract_{type}({1},{2:32},{3:32})"),
    ("bfi", B32, "insert{type:bits}({1},{2},{3:32},{4:32})"),
    ("bmsk", r"\.(?P<mode>wrap|clamp)\.b32", "bit_mask_{mode}({1:32},{2:32})"),
    ("popc", B32, "__builtin_popcountll({1})"),
    ("clz", B32, "leading_zeros{type:bits}({1})"),
    ("brev", B32, "reverse{type:bits}({1})"),
    ("bfind", r"\.(?P<type>u(32|64))", "find_first{type:bits}({1})"),
    ("bfind", r"\.shiftamt\.(?P<type>u(32|64))", "find_first{type:bits}_shift({1})"),
    # For a negative number, the first bit that differs from the sign.
    ("bfind", r"\.(?P<type>s(32|64))", "find_first{type:bits}(magnitude_bits{type:bits}({1}))"),
    ("bfind", r"\.shiftamt\.(?P<type>s(32|64))", "find_first{type:bits}_shift(magnitude_bits{type:bits}({1}))"),
    ("fns", r"\.b32", "find_nth({1:32},{2:32},{3:32})"),
    ("prmt", r"\.b32", "permute({1:32},{2:32},{3:32})"),
    ("prmt", r"\.b32\.(?P<mode>f4e|b4e|rc8|ecl|ecr|rc16)", "permute_{mode}({1:32},{2:32},{3:32})"),
    ("lop3", r"\.b32", "logic3({1:32},{2:32},{3:32},{4:32})"),
)


@form("lop3", r"\.(?P<join>and|or)\.b32")
def lop3_predicate(kernel, match, operands):
    values = ",".join(kernel.get(operand, 32) for operand in operands[1:5])
    to, nonzero = (name.strip() for name in operands[0].split("|"))
    joined = f"(result!=0){'&&' if match['join'] == 'and' else '||'}{kernel.predicate(operands[5])}"
    return (
        f"uint32_t result=logic3({values}); bool joined={joined}; "
        f"{kernel.put(to, 'result')} {kernel.put(nonzero, 'joined')}"
    )
