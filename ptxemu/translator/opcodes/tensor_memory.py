"""tcgen05: allocation, copies, products, loads and stores of tensor memory."""

from ..errors import TranslationError
from . import form

GROUP = r"\.cta_group::(?P<group>[12])"


def pair(match):
    return "true" if match["group"] == "2" else "false"


@form("tcgen05", r"\.alloc" + GROUP + r"\.sync\.aligned(?P<space>\.shared::cta)?\.b32")
def alloc(kernel, match, operands):
    address = kernel.address(operands[0])
    address = address if match["space"] else f"generic_to_shared({address})"
    return f"tensor_alloc(T,{pair(match)},{address},{kernel.get(operands[1], 32)});"


@form("tcgen05", r"\.dealloc" + GROUP + r"\.sync\.aligned\.b32")
def dealloc(kernel, match, operands):
    return f"tensor_dealloc(T,{pair(match)},{kernel.get(operands[0], 32)},{kernel.get(operands[1], 32)});"


@form("tcgen05", r"\.relinquish_alloc_permit" + GROUP + r"\.sync\.aligned")
def relinquish(kernel, match, operands):
    return f"tensor_relinquish(T,{pair(match)});"


@form("tcgen05", r"\.fence::(?P<side>before|after)_thread_sync")
def fence(kernel, match, operands):
    return f"on_fence_tensor(T,{'true' if match['side'] == 'after' else 'false'});"


@form("tcgen05", r"\.wait::(?P<what>ld|st)\.sync\.aligned")
def wait(kernel, match, operands):
    return "tensor_wait_load(T);" if match["what"] == "ld" else "tensor_wait_store(T);"


@form(
    "tcgen05",
    r"\.commit"
    + GROUP
    + r"\.mbarrier::arrive::one(?P<space>\.shared::cluster)?(?P<multicast>\.multicast::cluster)?\.b64",
)
def commit(kernel, match, operands):
    address = kernel.address(operands[0])
    address = address if match["space"] else f"generic_to_shared({address})"
    multicast = "true" if match["multicast"] else "false"
    mask = kernel.get(operands[1], 16) if match["multicast"] else "0"
    return f"tensor_commit(T,{pair(match)},{address},{multicast},{mask});"


@form("tcgen05", r"\.cp" + GROUP + r"\.32x128b\.warpx4")
def copy(kernel, match, operands):
    return f"tensor_copy(T,{pair(match)},{kernel.address(operands[0])},{kernel.get(operands[1], 64)});"


SHAPE = r"\.(?P<shape>32x32b|16x128b|16x256b)\.x(1|2|4|8|16|32|64|128)\.b32"


def shape(match):
    return f"TensorShape::k{match['shape']}"


@form("tcgen05", r"\.ld\.sync\.aligned" + SHAPE)
def load(kernel, match, operands):
    names = kernel.vector(operands[0])
    registers = ",".join(f"&{kernel.register(name)[1]}" for name in names)
    call = f"tensor_load_registers(T,{shape(match)},{len(names)},{kernel.address(operands[1])},to);"
    return f"uint32_t* const to[{len(names)}]={{{registers}}}; {call}"


@form("tcgen05", r"\.st\.sync\.aligned" + SHAPE)
def store(kernel, match, operands):
    names = kernel.vector(operands[1])
    address = kernel.address(operands[0])
    return f"{kernel.array('stored', names)} tensor_store_registers(T,{shape(match)},{len(names)},{address},stored);"


@form(
    "tcgen05",
    r"\.mma"
    + GROUP
    + r"\.kind::mxf4nvf4\.block_scale(\.block16|\.scale_vec::4X)(\.collector::a::(discard|lastuse|fill|use))?",
)
def mma_block_scaled(kernel, match, operands):
    d, a, b, kind, scale_a, scale_b, accumulate = operands
    if a.startswith("["):
        raise TranslationError("A in tensor memory is not supported")
    values = [kernel.address(d), kernel.get(a, 64), kernel.get(b, 64), kernel.get(kind, 32)]
    values += [kernel.address(scale_a), kernel.address(scale_b), kernel.predicate(accumulate)]
    return f"tensor_multiply_block_scaled(T,{pair(match)},{','.join(values)});"


@form("tcgen05", r"\.mma" + GROUP + r"\.kind::f16(\.collector::a::(discard|lastuse|fill|use))?")
def mma_halves(kernel, match, operands):
    d, a, b, kind, *rest = operands
    if a.startswith("["):
        raise TranslationError("A in tensor memory is not supported")
    if len(rest) > 1 and rest[0].startswith("{"):  # disable-output-lane
        masks = kernel.vector(rest[0])
        if any(mask.strip() not in ("0",) for mask in masks) and not all(mask.startswith("%") for mask in masks):
            raise TranslationError("disabled output lanes are not supported")
    values = [kernel.address(d), kernel.get(a, 64), kernel.get(b, 64), kernel.get(kind, 32), kernel.predicate(rest[-1])]
    lanes = ""
    if len(rest) > 1:
        lanes = f"require_no_lane_mask(T,{'|'.join(kernel.get(mask, 32) for mask in kernel.vector(rest[0]))}); "
    return f"{lanes}tensor_multiply_halves(T,{pair(match)},{','.join(values)});"
