"""Asynchronous copies: cp.async, bulk and tensor copies, and their groups."""

import re

from ..errors import TranslationError
from . import form
from .mbarriers import place

HINT = r"(?P<hint>\.L2::cache_hint)?"
BYTES = r"\.mbarrier::complete_tx::bytes"


@form("cp", r"\.async\.(ca|cg)\.shared(::cta)?\.global" + HINT + r"(\.L2::(64B|128B|256B))?")
def cp_async(kernel, match, operands):
    size = kernel.get(operands[2], 32)
    rest = operands[3 : -1 if match["hint"] else None]
    source = size
    if rest:
        # A predicate that says "write zeros", or the number of bytes to read.
        found = kernel.scope.find(rest[0])
        source = f"({kernel.predicate(rest[0])}?0u:{size})" if found and found[0] == "pred" else kernel.get(rest[0], 32)
    return f"copy_async(T,{kernel.address(operands[0])},{kernel.address(operands[1])},{size},{source});"


@form("cp", r"\.async\.commit_group")
def cp_commit(kernel, match, operands):
    return "copy_async_commit(T);"


@form("cp", r"\.async\.wait_group")
def cp_wait(kernel, match, operands):
    return f"copy_async_wait(T,{kernel.get(operands[0], 32)});"


@form("cp", r"\.async\.wait_all")
def cp_wait_all(kernel, match, operands):
    return "copy_async_wait_all(T);"


@form("cp", r"\.async\.mbarrier\.arrive(?P<noinc>\.noinc)?(?P<space>\.shared(::cta)?)?\.b64")
def cp_arrive(kernel, match, operands):
    counted = "false" if match["noinc"] else "true"
    return f"copy_async_arrive(T,{place(kernel, match, operands[0])},{counted});"


@form("cp", r"\.async\.bulk\.commit_group")
def bulk_commit(kernel, match, operands):
    return "bulk_commit(T);"


@form("cp", r"\.async\.bulk\.wait_group(?P<read>\.read)?")
def bulk_wait(kernel, match, operands):
    return f"bulk_wait(T,{kernel.get(operands[0], 32)},{'true' if match['read'] else 'false'});"


@form("cp", r"\.async\.bulk\.prefetch(\.tensor\.[1-5]d)?\.L2\.global(\.tile(::gather4)?)?(\.L2::cache_hint)?")
def bulk_prefetch(kernel, match, operands):
    return ";"


@form("cp", r"\.async\.bulk\.shared::(cta|cluster)\.global" + BYTES + r"(?P<multicast>\.multicast::cluster)?" + HINT)
def bulk_load(kernel, match, operands):
    to, source, size, barrier, *rest = operands
    mask = kernel.get(rest[0], 16) if match["multicast"] else "0"
    return (
        f"bulk_load(T,{kernel.address(to)},{kernel.address(source)},{kernel.get(size, 32)},{kernel.address(barrier)},"
        f"{flag(match['multicast'])},{mask});"
    )


@form("cp", r"\.async\.bulk\.global\.shared::cta\.bulk_group" + HINT)
def bulk_store(kernel, match, operands):
    to, source, size = operands[:3]
    return f"bulk_store(T,{kernel.address(to)},{kernel.address(source)},{kernel.get(size, 32)});"


@form("cp", r"\.async\.bulk\.shared::cluster\.shared::cta" + BYTES)
def bulk_exchange(kernel, match, operands):
    to, source, size, barrier = operands
    return f"bulk_exchange(T,{kernel.address(to)},{kernel.address(source)},{kernel.get(size, 32)},{kernel.address(barrier)});"


@form("cp", r"\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group\.add" + HINT + r"\.(?P<type>f32|u32|s32)")
def bulk_reduce(kernel, match, operands):
    to, source, size = operands[:3]
    kind = "float" if match["type"] == "f32" else "uint32_t"
    return f"bulk_reduce<{kind}>(T,{kernel.address(to)},{kernel.address(source)},{kernel.get(size, 32)});"


def flag(found):
    return "true" if found else "false"


def tensor(kernel, operand, rank):
    """The map's address and the coordinates of [map, {x, y, ...}]."""
    match = re.fullmatch(r"\[(.*?),\s*\{(.*)\}\s*\]", operand.strip())
    coordinates = [name.strip() for name in match[2].split(",")] if match else []
    if len(coordinates) != rank:
        raise TranslationError(f"expected a tensor map and {rank} coordinates")
    values = ",".join(f"(int32_t){kernel.get(name, 32)}" for name in coordinates)
    return kernel.address(f"[{match[1]}]"), values


@form(
    "cp",
    r"\.async\.bulk\.tensor\.(?P<rank>[1-5])d(?P<early>\.cta_group::[12])?\.shared::(cta|cluster)\.global(\.tile)?"
    + BYTES
    + r"(?P<multicast>\.multicast::cluster)?(?P<pair>\.cta_group::[12])?"
    + HINT,
)
def tensor_load(kernel, match, operands):
    # ptxas takes the group behind the dimensions as well as at the end.
    pair = ".cta_group::2" in (match["early"], match["pair"])
    to, source, barrier, *rest = operands
    address, coordinates = tensor(kernel, source, int(match["rank"]))
    mask = kernel.get(rest[0], 16) if match["multicast"] else "0"
    return (
        f"const int32_t at[5]={{{coordinates}}}; tensor_load(T,{match['rank']},{kernel.address(to)},{address},at,"
        f"{kernel.address(barrier)},{flag(match['multicast'])},{mask},{flag(pair)});"
    )


@form("cp", r"\.async\.bulk\.tensor\.(?P<rank>[1-5])d\.global\.shared::cta(\.tile)?\.bulk_group" + HINT)
def tensor_store(kernel, match, operands):
    address, coordinates = tensor(kernel, operands[0], int(match["rank"]))
    source = kernel.address(operands[1])
    return f"const int32_t at[5]={{{coordinates}}}; tensor_store(T,{match['rank']},{address},at,{source});"
