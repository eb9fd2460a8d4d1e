"""Barriers of warps, ctas and clusters, and fences."""

from . import effects, values

# bar is barrier for all threads of a warp.
for word, aligned in (("bar", ""), ("barrier", r"(\.aligned)?")):
    start = r"(\.cta)?"
    effects(
        (word, start + r"\.sync" + aligned, "barrier_sync(T,{0:32},0);"),
        (word, start + r"\.sync" + aligned, "barrier_sync(T,{0:32},{1:32});"),
        (word, start + r"\.arrive" + aligned, "barrier_arrive(T,{0:32},{1:32});"),
    )
    for op, kind in ((r"(?P<op>popc)", "u32"), (r"(?P<op>and|or)", "pred")):
        pattern = rf"{start}\.red\.{op}{aligned}\.{kind}"
        values(
            (word, pattern, "barrier_reduce(T,{1:32},0,{2:p},BarrierReduction::k{op:kind})"),
            (word, pattern, "barrier_reduce(T,{1:32},{2:32},{3:p},BarrierReduction::k{op:kind})"),
        )

SCOPE = r"\.(?P<scope>cta|cluster|gpu|sys)"
ASYNC = r"\.proxy\.async(\.(global|shared::(cta|cluster)))?"
effects(
    ("bar", r"\.warp\.sync", "warp_sync(T,{0:32});"),
    ("barrier", r"\.cluster\.arrive(\.release)?(\.aligned)?", "cluster_arrive(T,true);"),
    ("barrier", r"\.cluster\.arrive\.relaxed(\.aligned)?", "cluster_arrive(T,false);"),
    ("barrier", r"\.cluster\.wait(\.acquire)?(\.aligned)?", "cluster_wait(T);"),
    ("membar", r"\.(?P<scope>cta|gl|sys)", "on_fence(T,Scope::{scope:scope});"),
    ("fence", r"(\.(sc|acq_rel|acquire|release))?" + SCOPE, "on_fence(T,Scope::{scope:scope});"),
    ("fence", r"\.mbarrier_init\.release\.cluster", "on_fence_mbarrier_init(T);"),
    ("fence", r"\.acquire\.sync_restrict::shared::cluster\.cluster", "on_fence(T,Scope::kCluster);"),
    ("fence", r"\.release\.sync_restrict::shared::cta\.cluster", "on_fence(T,Scope::kCluster);"),
    ("fence", r"\.proxy\.alias", ";"),
    ("membar", r"\.proxy\.alias", ";"),
    ("fence", ASYNC, "on_fence_proxy(T);"),
    ("membar", ASYNC, "on_fence_proxy(T);"),
    (
        "fence",
        r"\.proxy\.async::generic\.(acquire|release)\.sync_restrict::shared::(cta|cluster)\.cluster",
        "on_fence_proxy(T);",
    ),
    ("fence", r"\.proxy\.tensormap::generic\.release" + SCOPE, "on_fence(T,Scope::{scope:scope});"),
    ("fence", r"\.proxy\.tensormap::generic\.acquire" + SCOPE, "on_fence(T,Scope::{scope:scope});", 2),
)
