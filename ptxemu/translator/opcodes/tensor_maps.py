"""tensormap.replace and its fence, and clusterlaunchcontrol."""

from ..types import BITS
from . import form

FIELDS = r"(?P<field>global_address|global_dim|global_stride|box_dim|element_stride|rank)"


@form("tensormap", r"\.replace\.tile\." + FIELDS + r"\.(?P<space>global|shared::cta)\.b1024\.(?P<type>b32|b64)")
def replace(kernel, match, operands):
    pointer = kernel.pointer(match["space"], operands[0], 128)
    ordinal = kernel.get(operands[1], 32) if len(operands) == 3 else "0"
    value = kernel.get(operands[-1], BITS[match["type"]])
    return f"tensor_map_replace(T,{pointer},TensorMapField::k{camel(match['field'])},{ordinal},{value});"


def camel(name):
    return "".join(word.capitalize() for word in name.split("_"))


@form(
    "tensormap",
    r"\.cp_fenceproxy\.global\.shared::cta\.tensormap::generic\.release\.(cta|cluster|gpu|sys)\.sync\.aligned",
)
def fenced_copy(kernel, match, operands):
    return f"tensor_map_copy(T,{kernel.address(operands[0])},{kernel.address(operands[1])});"


@form(
    "clusterlaunchcontrol",
    r"\.try_cancel\.async(\.shared::cta)?\.mbarrier::complete_tx::bytes(?P<all>\.multicast::cluster::all)?\.b128",
)
def try_cancel(kernel, match, operands):
    to, barrier = (kernel.address(operand) for operand in operands)
    return f"cancel_cluster(T,{to},{barrier},{'true' if match['all'] else 'false'});"


@form("clusterlaunchcontrol", r"\.query_cancel\.is_canceled\.pred\.b128")
def is_canceled(kernel, match, operands):
    return kernel.put(operands[0], f"was_canceled({kernel.get(operands[1], 128)})")


@form("clusterlaunchcontrol", r"\.query_cancel\.get_first_ctaid::(?P<axis>[xyz])\.b32\.b128")
def first_ctaid(kernel, match, operands):
    return kernel.put(operands[0], f"canceled_ctaid({kernel.get(operands[1], 128)},{'xyz'.index(match['axis'])})")


@form("clusterlaunchcontrol", r"\.query_cancel\.get_first_ctaid\.v4\.b32\.b128")
def first_ctaids(kernel, match, operands):
    puts = [
        kernel.put(name, f"canceled_ctaid(answer,{i})")
        for i, name in enumerate(kernel.vector(operands[0]))
        if name != "_"
    ]
    return f"u128 answer={kernel.get(operands[1], 128)}; " + " ".join(puts)
