"""Barriers of warps, ctas and clusters, and fences."""

from . import form
from .loads import SCOPES

CTA = r"(\.cta)?(\.aligned)?"


@form("bar", r"\.warp\.sync")
def warp_sync(kernel, match, operands):
    return f"warp_sync(T,{kernel.get(operands[0], 32)});"


@form("bar", r"(\.cta)?\.sync")
@form("barrier", r"(\.cta)?\.sync(\.aligned)?")
def sync(kernel, match, operands):
    count = kernel.get(operands[1], 32) if len(operands) > 1 else "0"
    return f"barrier_sync(T,{kernel.get(operands[0], 32)},{count});"


@form("bar", r"(\.cta)?\.arrive")
@form("barrier", r"(\.cta)?\.arrive(\.aligned)?")
def arrive(kernel, match, operands):
    return f"barrier_arrive(T,{kernel.get(operands[0], 32)},{kernel.get(operands[1], 32)});"


@form("bar", r"(\.cta)?\.red\.(?P<op>popc)\.u32")
@form("bar", r"(\.cta)?\.red\.(?P<op>and|or)\.pred")
@form("barrier", r"(\.cta)?\.red\.(?P<op>popc)(\.aligned)?\.u32")
@form("barrier", r"(\.cta)?\.red\.(?P<op>and|or)(\.aligned)?\.pred")
def reduce(kernel, match, operands):
    count = kernel.get(operands[2], 32) if len(operands) > 3 else "0"
    values = f"{kernel.get(operands[1], 32)},{count},{kernel.predicate(operands[-1])}"
    return kernel.put(operands[0], f"barrier_reduce(T,{values},BarrierReduction::k{match['op'].capitalize()})")


@form("barrier", r"\.cluster\.arrive(\.(?P<order>release|relaxed))?(\.aligned)?")
def cluster_arrive(kernel, match, operands):
    return f"cluster_arrive(T,{'false' if match['order'] == 'relaxed' else 'true'});"


@form("barrier", r"\.cluster\.wait(\.acquire)?(\.aligned)?")
def cluster_wait(kernel, match, operands):
    return "cluster_wait(T);"


@form("membar", r"\.(?P<scope>cta|gl|sys)")
@form("fence", r"(\.(sc|acq_rel|acquire|release))?\.(?P<scope>cta|cluster|gpu|sys)")
def fence(kernel, match, operands):
    return f"on_fence(T,Scope::{(SCOPES | {'gl': 'kGpu'})[match['scope']]});"


@form("fence", r"\.mbarrier_init\.release\.cluster")
def fence_mbarrier_init(kernel, match, operands):
    return "on_fence_mbarrier_init(T);"


@form("fence", r"\.(acquire\.sync_restrict::shared::cluster|release\.sync_restrict::shared::cta)\.cluster")
def fence_of_shared(kernel, match, operands):
    return "on_fence(T,Scope::kCluster);"


@form("fence", r"\.proxy\.alias")
@form("membar", r"\.proxy\.alias")
def fence_alias(kernel, match, operands):
    return ";"


@form("fence", r"\.proxy\.async(\.(global|shared::(cta|cluster)))?")
@form("membar", r"\.proxy\.async(\.(global|shared::(cta|cluster)))?")
@form("fence", r"\.proxy\.async::generic\.(acquire|release)\.sync_restrict::shared::(cta|cluster)\.cluster")
def fence_proxy(kernel, match, operands):
    return "on_fence_proxy(T);"


@form("fence", r"\.proxy\.tensormap::generic\.(?P<order>acquire|release)\.(?P<scope>cta|cluster|gpu|sys)")
def fence_tensor_map(kernel, match, operands):
    return f"on_fence(T,Scope::{SCOPES[match['scope']]});"
