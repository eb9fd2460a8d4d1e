"""Instructions that the lanes of a warp execute together."""

from . import form, pairs, put_two, values

B = r"\.(?P<type>b(32|64))"
MATCH_ALL = "bool equal; uint32_t lanes=match_all(T,{1},{2:32},equal); lanes, equal"

values(
    ("activemask", r"\.b32", "active_mask(T)"),
    ("vote", r"\.sync\.(?P<mode>all|any|uni)\.pred", "vote(T,Vote::k{mode:kind},{1:p},{2:32})"),
    ("vote", r"\.sync\.ballot\.b32", "vote(T,Vote::kBallot,{1:p},{2:32})"),
    ("vote", r"\.ballot\.sync\.b32", "vote(T,Vote::kBallot,{1:p},{2:32})"),  # as CUB has it, and ptxas takes it
    ("match", r"\.any\.sync" + B, "match_any(T,{1},{2:32})"),
    ("redux", r"\.sync\.add\.[us]32", "reduce(T,Reduction::kAdd,{1:32},{2:32})"),
    ("redux", r"\.sync\.(?P<op>and|or|xor)\.b32", "reduce(T,Reduction::k{op:kind},{1:32},{2:32})"),
    (
        "redux",
        r"\.sync\.(?P<op>min|max)(?P<abs>\.abs)?(?P<nan>\.NaN)?\.f32",
        "reduce_floats(T,Reduction::k{op:kind}F32,{abs:flag},{nan:flag},{1:32},{2:32})",
    ),
    (
        "redux",
        r"\.sync\.(?P<op>min|max)\.(?P<sign>[us])32",
        "reduce(T,Reduction::k{op:kind}{sign:kind}32,{1:32},{2:32})",
    ),
)
pairs(
    (
        "shfl",
        r"\.sync\.(?P<mode>idx|up|down|bfly)\.b32",
        "bool in_range; uint32_t value=shuffle(T,Shuffle::k{mode:kind},{1:32},{2:32},{3:32},{4:32},in_range); "
        "value, in_range",
    ),
    ("match", r"\.all\.sync" + B, MATCH_ALL),
)


@form("elect", r"\.sync")
def elect(kernel, match, operands):
    if len(operands) != 2 or "|" not in operands[0]:
        return None
    put = put_two(kernel, operands[0], "leader", "mine")
    return f"uint32_t leader; bool mine=elect(T,{kernel.get(operands[1], 32)},leader); {put}"
