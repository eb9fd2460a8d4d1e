"""mbarrier objects: phases, pending arrivals and bytes still to come (tx-count)."""

from . import effects, form, values

SHARED = r"(?P<space>\.shared(::cta|::cluster)?)?\.b64"
ORDER = r"(\.(?P<order>release|relaxed|acquire))?(\.(cta|cluster))?"
BYTES = r"(\.relaxed)?(\.(cta|cluster))?"

effects(
    ("mbarrier", r"\.init" + SHARED, "mbarrier_init(T,{0:shared},{1:32});"),
    ("mbarrier", r"\.inval" + SHARED, "mbarrier_invalidate(T,{0:shared});"),
    ("mbarrier", r"\.expect_tx" + BYTES + SHARED, "mbarrier_expect(T,{0:shared},{1:32});"),
    ("mbarrier", r"\.complete_tx" + BYTES + SHARED, "mbarrier_complete(T,{0:shared},{1:32});"),
    # In CUTLASS's order, which ptxas takes.
    (
        "mbarrier",
        r"\.complete_tx(?P<space>\.shared::cluster)\.relaxed\.cluster\.b64",
        "mbarrier_complete(T,{0:shared},{1:32});",
    ),
)
values(("mbarrier", r"\.pending_count\.b64", "mbarrier_pending({1:64})"))


def place(kernel, match, operand):
    """A generic address names shared memory too."""
    address = kernel.address(operand)
    return address if match["space"] else f"generic_to_shared({address})"


def ordered(match):
    """Arrivals release and waits acquire unless they are relaxed."""
    return "false" if match["order"] == "relaxed" else "true"


@form("mbarrier", r"\.(?P<what>arrive|arrive_drop)(?P<tx>\.expect_tx)?(\.noComplete)?" + ORDER + SHARED)
def arrive(kernel, match, operands):
    state = "_" if operands[0].startswith("[") else operands.pop(0)
    address = place(kernel, match, operands[0])
    drop = "true" if match["what"] == "arrive_drop" else "false"
    expect, count = "", "1"
    if match["tx"]:
        expect = f"mbarrier_expect(T,{address},{kernel.get(operands[1], 32)}); "
    elif len(operands) > 1:
        count = kernel.get(operands[1], 32)
    return (
        f"{expect}uint64_t state=mbarrier_arrive(T,{address},{count},{drop},{ordered(match)}); "
        f"{kernel.put(state, 'state')}"
    )


@form("mbarrier", r"\.(?P<what>try_wait|test_wait)(?P<parity>\.parity)?" + ORDER + SHARED)
def wait(kernel, match, operands):
    address = place(kernel, match, operands[1])
    blocking = "true" if match["what"] == "try_wait" else "false"
    if match["parity"]:
        phase = f"{kernel.get(operands[2], 32)}&1"
    else:
        phase = f"(uint32_t)({kernel.get(operands[2], 64)}>>63)"
    return kernel.put(operands[0], f"mbarrier_wait(T,{address},{phase},{blocking},{ordered(match)})")
