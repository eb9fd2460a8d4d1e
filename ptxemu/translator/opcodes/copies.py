"""Asynchronous copies: cp.async, bulk and tensor copies, and their groups."""

import re

from ..errors import TranslationError
from . import effects, form

SHARED = r"(?P<space>\.shared(::cta)?)?\.b64"
HINT = r"(\.L2::cache_hint)?"
BYTES = r"\.mbarrier::complete_tx::bytes"
BULK = r"\.async\.bulk"
MULTICAST = r"\.multicast::cluster"
LOAD = BULK + r"\.shared::(cta|cluster)\.global" + BYTES
ADD = r"\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group\.add" + HINT

effects(
    ("cp", r"\.async\.commit_group", "copy_async_commit(T);"),
    ("cp", r"\.async\.wait_group", "copy_async_wait(T,{0:32});"),
    ("cp", r"\.async\.wait_all", "copy_async_wait_all(T);"),
    ("cp", r"\.async\.mbarrier\.arrive" + SHARED, "copy_async_arrive(T,{0:shared},true);"),
    ("cp", r"\.async\.mbarrier\.arrive\.noinc" + SHARED, "copy_async_arrive(T,{0:shared},false);"),
    ("cp", BULK + r"\.commit_group", "bulk_commit(T);"),
    ("cp", BULK + r"\.wait_group", "bulk_wait(T,{0:32},false);"),
    ("cp", BULK + r"\.wait_group\.read", "bulk_wait(T,{0:32},true);"),
    ("cp", LOAD + HINT, "bulk_load(T,{0:address},{1:address},{2:32},{3:address},false,0);"),
    ("cp", LOAD + MULTICAST + HINT, "bulk_load(T,{0:address},{1:address},{2:32},{3:address},true,{4:16});"),
    ("cp", BULK + r"\.global\.shared::cta\.bulk_group" + HINT, "bulk_store(T,{0:address},{1:address},{2:32});"),
    (
        "cp",
        BULK + r"\.shared::cluster\.shared::cta" + BYTES,
        "bulk_exchange(T,{0:address},{1:address},{2:32},{3:address});",
    ),
    ("cp", ADD + r"\.f32", "bulk_reduce<float>(T,{0:address},{1:address},{2:32});"),
    ("cp", ADD + r"\.[us]32", "bulk_reduce<uint32_t>(T,{0:address},{1:address},{2:32});"),
)


@form("cp", r"\.async\.(ca|cg)\.shared(::cta)?\.global" + HINT + r"(\.L2::(64B|128B|256B))?")
def cp_async(kernel, match, operands):
    to, address, size, *rest = operands
    source = size = kernel.get(size, 32)
    if rest:
        # A predicate that asks for zeros, or the number of bytes to read.
        found = kernel.scope.find(rest[0])
        source = f"({kernel.predicate(rest[0])}?0u:{size})" if found and found[0] == "pred" else kernel.get(rest[0], 32)
    return f"copy_async(T,{kernel.address(to)},{kernel.address(address)},{size},{source});"


@form("cp", BULK + r"\.prefetch(\.tensor\.[1-5]d)?\.L2\.global(\.tile(::gather4)?)?" + HINT)
def bulk_prefetch(kernel, match, operands):
    return ";"


def tensor(kernel, operand, rank):
    """The map's address, and code that declares the coordinates of [map, {x, y, ...}]."""
    match = re.fullmatch(r"\[(.*?),\s*\{(.*)\}\s*\]", operand.strip())
    coordinates = [name.strip() for name in match[2].split(",")] if match else []
    if len(coordinates) != rank:
        raise TranslationError(f"expected a tensor map and {rank} coordinates")
    values = ",".join(f"(int32_t){kernel.get(name, 32)}" for name in coordinates)
    return kernel.address(f"[{match[1]}]"), f"const int32_t at[5]={{{values}}};"


@form(
    "cp",
    # ptxas accepts the group after the dimensions as well as at the end, there before .multicast too.
    BULK + r"\.tensor\.(?P<rank>[1-5])d(?P<early>\.cta_group::[12])?\.shared::(cta|cluster)\.global(\.tile)?" + BYTES
    + rf"(?P<pair1>\.cta_group::[12])?(?P<multicast>{MULTICAST})?(?P<pair2>\.cta_group::[12])?" + HINT,
)  # fmt: skip
def tensor_load(kernel, match, operands):
    pair = "true" if ".cta_group::2" in (match["early"], match["pair1"], match["pair2"]) else "false"
    to, source, barrier, *rest = operands
    address, at = tensor(kernel, source, int(match["rank"]))
    multicast = f"true,{kernel.get(rest[0], 16)}" if match["multicast"] else "false,0"
    place = f"{kernel.address(to)},{address},at,{kernel.address(barrier)}"
    return f"{at} tensor_load(T,{match['rank']},{place},{multicast},{pair});"


STORE = r"\.async\.bulk\.tensor\.(?P<rank>[1-5])d\.global\.shared::cta"


@form("cp", STORE + r"(\.tile)?\.bulk_group" + HINT)
@form("cp", r"\.reduce" + STORE + r"(?P<add>\.add)(\.tile)?\.bulk_group" + HINT)
def tensor_store(kernel, match, operands):
    address, at = tensor(kernel, operands[0], int(match["rank"]))
    add = "true" if match.get("add") else "false"
    return f"{at} tensor_store(T,{match['rank']},{address},at,{kernel.address(operands[1])},{add});"
