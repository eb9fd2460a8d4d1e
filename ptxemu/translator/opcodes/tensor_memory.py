"""tcgen05: allocation, copies, products, loads and stores of tensor memory."""

from ..errors import TranslationError
from . import effects, form

GROUPS = (("1", "false"), ("2", "true"))
SHAPE = r"\.(?P<shape>32x32b|16x64b|16x32bx2|16x128b|16x256b)\.x(?P<count>1|2|4|8|16|32|64|128)"
REGISTERS_PER_REPEAT = {"16x128b": 2, "16x256b": 4}
COLLECTOR = r"(\.collector::a::(discard|lastuse|fill|use))?"
COMMIT = r"\.mbarrier::arrive::one(?P<space>\.shared::cluster)?"

for group, pair in GROUPS:
    group = rf"\.cta_group::{group}"
    effects(
        *(
            ("tcgen05", f"{before}{group}{after}", f"{call.replace('(T', f'(T,{pair}', 1)};")
            for before, after, call in (
                (r"\.alloc", r"\.sync\.aligned(?P<space>\.shared::cta)?\.b32", "tensor_alloc(T,{0:shared},{1:32})"),
                (r"\.dealloc", r"\.sync\.aligned\.b32", "tensor_dealloc(T,{0:32},{1:32})"),
                (r"\.relinquish_alloc_permit", r"\.sync\.aligned", "tensor_relinquish(T)"),
                (r"\.commit", COMMIT + r"\.b64", "tensor_commit(T,{0:shared},false,0)"),
                (r"\.commit", COMMIT + r"\.multicast::cluster\.b64", "tensor_commit(T,{0:shared},true,{1:16})"),
                *(
                    (r"\.cp", shape, f"tensor_copy(T,TensorCopy::k{name},{{0:address}},{{1:64}})")
                    for shape, name in (
                        (r"\.128x256b", "128x256b"),
                        (r"\.4x256b", "4x256b"),
                        (r"\.128x128b", "128x128b"),
                        (r"\.64x128b\.warpx2::02_13", "64x128b02"),
                        (r"\.64x128b\.warpx2::01_23", "64x128b01"),
                        (r"\.32x128b\.warpx4", "32x128b"),
                    )
                ),
            )
        )
    )
effects(
    ("tcgen05", r"\.fence::before_thread_sync", "on_fence_tensor(T,false);"),
    ("tcgen05", r"\.fence::after_thread_sync", "on_fence_tensor(T,true);"),
    ("tcgen05", r"\.wait::ld\.sync\.aligned", "tensor_wait_load(T);"),
    ("tcgen05", r"\.wait::st\.sync\.aligned", "tensor_wait_store(T);"),
)


def access(kernel, match, address, names, split):
    """A TensorAccess. Only 16x32bx2 has the distance of its two halves as an operand."""
    shape = match["shape"]
    if len(split) != (shape == "16x32bx2"):
        return None
    if len(names) != int(match["count"]) * REGISTERS_PER_REPEAT.get(shape, 1):
        raise TranslationError("this shape has another number of registers")
    packed = "true" if match["packed"] else "false"
    columns = kernel.get(split[0], 32) if split else "0"
    return f"TensorAccess{{TensorShape::k{shape},{packed},{columns},{kernel.address(address)}}},{len(names)}"


@form("tcgen05", r"\.ld\.sync\.aligned" + SHAPE + r"(?P<packed>\.pack::16b)?\.b32")
def load(kernel, match, operands):
    names = kernel.vector(operands[0])
    registers = ",".join(f"&{kernel.register(name)[1]}" for name in names)
    place = access(kernel, match, operands[1], names, operands[2:])
    return place and f"uint32_t* const to[{len(names)}]={{{registers}}}; tensor_load_registers(T,{place},to);"


@form("tcgen05", r"\.st\.sync\.aligned" + SHAPE + r"(?P<packed>\.unpack::16b)?\.b32")
def store(kernel, match, operands):
    names = kernel.vector(operands[-1])
    place = access(kernel, match, operands[0], names, operands[1:-1])
    return place and f"{kernel.array('stored', names)} tensor_store_registers(T,{place},stored);"


def product(kernel, match, operands, kind, blocks, scales):
    d, a, b, descriptor, accumulate = operands
    if a.startswith("["):
        raise TranslationError("A in tensor memory is not supported")
    pair = "true" if match["group"] == "2" else "false"
    values = [kernel.address(d), kernel.get(a, 64), kernel.get(b, 64), kernel.get(descriptor, 32)]
    values += [kernel.predicate(accumulate), blocks, *(map(kernel.address, scales) if scales else "00")]
    return f"tensor_multiply(T,{{TensorKind::k{kind},{pair},{','.join(map(str, values))}}});"


MMA = r"\.mma\.cta_group::(?P<group>[12])\.kind::"
# How many scales a row has, by the kind and the two names that each number has.
SCALES = {
    "mxf8f6f4": {None: 1, "scale_vec::1X": 1, "block32": 1},
    "mxf4": {None: 2, "scale_vec::2X": 2, "block32": 2},
    "mxf4nvf4": {"scale_vec::2X": 2, "block32": 2, "scale_vec::4X": 4, "block16": 4},
}


@form(
    "tcgen05",
    MMA
    + r"(?P<kind>mxf8f6f4|mxf4|mxf4nvf4)\.block_scale(\.(?P<scales>scale_vec::[124]X|block16|block32))?"
    + COLLECTOR,
)
def mma_block_scaled(kernel, match, operands):
    """Operands: d, a, b, descriptor, scales of a, of b, accumulate."""
    blocks = SCALES[match["kind"]].get(match["scales"])
    if blocks is None:
        raise TranslationError("this kind takes other scales")
    if len(operands) != 7:
        return None
    return product(kernel, match, operands[:4] + operands[6:], match["kind"].capitalize(), blocks, operands[4:6])


@form("tcgen05", MMA + r"(?P<kind>f16|tf32|f8f6f4|i8)" + COLLECTOR)
def mma(kernel, match, operands):
    """Operands: d, a, b, descriptor, [disable-output-lane,] accumulate."""
    lanes = ""
    if len(operands) == 6:
        masks = kernel.vector(operands.pop(4))
        if any(mask != "0" for mask in masks) and not all(mask.startswith("%") for mask in masks):
            raise TranslationError("disabled output lanes are not supported")
        lanes = f"require_no_lane_mask(T,{'|'.join(kernel.get(mask, 32) for mask in masks)}); "
    if len(operands) != 5:
        return None
    return lanes + product(kernel, match, operands, match["kind"].capitalize(), 0, None)
