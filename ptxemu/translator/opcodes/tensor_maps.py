"""tensormap.replace and its fence, and clusterlaunchcontrol."""

from ..types import BITS
from . import Group, effects, form, values

FIELDS = r"(?P<field>global_address|global_dim|global_stride|box_dim|element_stride|rank)"
SCOPE = r"\.(cta|cluster|gpu|sys)"
CANCEL = r"\.try_cancel\.async(\.shared::cta)?\.mbarrier::complete_tx::bytes"
QUERY = r"\.query_cancel\."

effects(
    (
        "tensormap",
        r"\.cp_fenceproxy\.global\.shared::cta\.tensormap::generic\.release" + SCOPE + r"\.sync\.aligned",
        "tensor_map_copy(T,{0:address},{1:address});",
        1,
    ),
    ("clusterlaunchcontrol", CANCEL + r"\.b128", "cancel_cluster(T,{0:address},{1:address},false);"),
    (
        "clusterlaunchcontrol",
        CANCEL + r"\.multicast::cluster::all\.b128",
        "cancel_cluster(T,{0:address},{1:address},true);",
    ),
)
values(("clusterlaunchcontrol", QUERY + r"is_canceled\.pred\.b128", "was_canceled({1:128})"))
for axis, letter in enumerate("xyz"):
    pattern = QUERY + rf"get_first_ctaid::{letter}\.b32\.b128"
    values(("clusterlaunchcontrol", pattern, f"canceled_ctaid({{1:128}},{axis})"))


@form("tensormap", r"\.replace\.tile\." + FIELDS + r"\.(?P<space>global|shared::cta)\.b1024\.(?P<type>b32|b64)")
def replace(kernel, match, operands):
    pointer = kernel.pointer(match["space"], operands[0], 128)
    ordinal = kernel.get(operands[1], 32) if len(operands) == 3 else "0"
    value = kernel.get(operands[-1], BITS[match["type"]])
    field = f"TensorMapField::k{Group(match['field']):kind}"
    return f"tensor_map_replace(T,{pointer},{field},{ordinal},{value});"


@form("clusterlaunchcontrol", QUERY + r"get_first_ctaid\.v4\.b32\.b128")
def first_ctaids(kernel, match, operands):
    names = enumerate(kernel.vector(operands[0]))
    puts = [kernel.put(name, f"canceled_ctaid(answer,{i})") for i, name in names if name != "_"]
    return f"u128 answer={kernel.get(operands[1], 128)}; " + " ".join(puts)
