"""PTX's special registers, as expressions over the thread that runs (runtime/machine.h)."""

SPECIAL = {
    "%laneid": "T->lane",
    "%warpid": "T->warp->index",
    "%nwarpid": "T->cta->warp_count",
    "%smid": "T->cta->sm",
    "%nsmid": "T->cta->sm_count",
    "%cluster_ctarank": "T->cta->rank",
    "%cluster_nctarank": "T->cta->cluster_size",
    "%clock": "clock_now()",
    "%clock_hi": "(clock_now()>>32)",
    "%clock64": "clock_now()",
    "%globaltimer": "global_timer()",
    "%globaltimer_lo": "global_timer()",
    "%globaltimer_hi": "(global_timer()>>32)",
    "%lanemask_eq": "(1u<<T->lane)",
    "%lanemask_lt": "((1u<<T->lane)-1)",
    "%lanemask_le": "(uint32_t)((2ull<<T->lane)-1)",
    "%lanemask_gt": "(uint32_t)~((2ull<<T->lane)-1)",
    "%lanemask_ge": "~((1u<<T->lane)-1)",
    "%dynamic_smem_size": "T->cta->dynamic_shared_bytes",
    "%total_smem_size": "T->cta->shared_bytes",
    "%is_explicit_cluster": "T->cta->explicit_cluster",
}
for axis, letter in enumerate("xyz"):
    SPECIAL |= {
        f"%tid.{letter}": f"T->tid[{axis}]",
        f"%ntid.{letter}": f"T->cta->ntid[{axis}]",
        f"%ctaid.{letter}": f"T->cta->ctaid[{axis}]",
        f"%nctaid.{letter}": f"T->cta->nctaid[{axis}]",
        f"%clusterid.{letter}": f"T->cta->clusterid[{axis}]",
        f"%nclusterid.{letter}": f"T->cta->nclusterid[{axis}]",
        f"%cluster_ctaid.{letter}": f"T->cta->cluster_ctaid[{axis}]",
        f"%cluster_nctaid.{letter}": f"T->cta->cluster_nctaid[{axis}]",
    }
