"""tcgen05: allocation, copies, products, loads and stores of tensor memory."""

from ..errors import TranslationError
from . import effects, form

GROUPS = (("1", "false"), ("2", "true"))
SHAPE = r"\.(?P<shape>32x32b|16x128b|16x256b)\.x(1|2|4|8|16|32|64|128)\.b32"
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
                (r"\.cp", r"\.32x128b\.warpx4", "tensor_copy(T,{0:address},{1:64})"),
            )
        )
    )
effects(
    ("tcgen05", r"\.fence::before_thread_sync", "on_fence_tensor(T,false);"),
    ("tcgen05", r"\.fence::after_thread_sync", "on_fence_tensor(T,true);"),
    ("tcgen05", r"\.wait::ld\.sync\.aligned", "tensor_wait_load(T);"),
    ("tcgen05", r"\.wait::st\.sync\.aligned", "tensor_wait_store(T);"),
)


@form("tcgen05", r"\.ld\.sync\.aligned" + SHAPE)
def load(kernel, match, operands):
    names = kernel.vector(operands[0])
    registers = ",".join(f"&{kernel.register(name)[1]}" for name in names)
    place = f"TensorShape::k{match['shape']},{len(names)},{kernel.address(operands[1])}"
    return f"uint32_t* const to[{len(names)}]={{{registers}}}; tensor_load_registers(T,{place},to);"


@form("tcgen05", r"\.st\.sync\.aligned" + SHAPE)
def store(kernel, match, operands):
    names = kernel.vector(operands[1])
    place = f"TensorShape::k{match['shape']},{len(names)},{kernel.address(operands[0])}"
    return f"{kernel.array('stored', names)} tensor_store_registers(T,{place},stored);"


def product(kernel, match, operands, name):
    d, a, b, kind, *scales, accumulate = operands
    if a.startswith("["):
        raise TranslationError("A in tensor memory is not supported")
    pair = "true" if match["group"] == "2" else "false"
    values = [kernel.address(d), kernel.get(a, 64), kernel.get(b, 64), kernel.get(kind, 32)]
    values += [*map(kernel.address, scales), kernel.predicate(accumulate)]
    return f"{name}(T,{pair},{','.join(values)});"


@form(
    "tcgen05",
    r"\.mma\.cta_group::(?P<group>[12])\.kind::mxf4nvf4\.block_scale(\.block16|\.scale_vec::4X)" + COLLECTOR,
)
def mma_block_scaled(kernel, match, operands):
    if len(operands) != 7:
        return None
    return product(kernel, match, operands, "tensor_multiply_block_scaled")


@form("tcgen05", r"\.mma\.cta_group::(?P<group>[12])\.kind::f16" + COLLECTOR)
def mma_halves(kernel, match, operands):
    """Operands: d, a, b, kind, [disable-output-lane,] accumulate."""
    lanes = ""
    if len(operands) == 6:
        masks = kernel.vector(operands.pop(4))
        if any(mask != "0" for mask in masks) and not all(mask.startswith("%") for mask in masks):
            raise TranslationError("disabled output lanes are not supported")
        lanes = f"require_no_lane_mask(T,{'|'.join(kernel.get(mask, 32) for mask in masks)}); "
    if len(operands) != 5:
        return None
    return lanes + product(kernel, match, operands, "tensor_multiply_halves")
