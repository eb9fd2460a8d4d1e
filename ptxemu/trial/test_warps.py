"""Tests of instructions of whole warps: shuffles, votes, matches, reductions, elections."""

import numpy as np


def lanes(emulator, body, values, results=1, target="sm_90a"):
    """Runs body in one warp with %r1 = the lane's value, %r2 = the lane; stores %r10, %r11, ... of each lane."""
    stores = "\n".join(f"\tst.global.u32 [%rd3+{128 * i}], %r{10 + i};" for i in range(results))
    body = f"""
	mov.u32 %r2, %tid.x; mul.wide.u32 %rd1, %r2, 4; add.s64 %rd2, %rd_a, %rd1; ld.global.u32 %r1, [%rd2];
	{body}
	add.s64 %rd3, %rd_o, %rd1;
{stores}
"""
    return emulator.run(body, [np.asarray(values, np.uint32)], (results, 32), target=target)


VALUES = np.arange(32, dtype=np.uint32) * 7 + 100


def test_shuffles(emulator):
    body = """
	shfl.sync.idx.b32 %r10|%p1, %r1, 5, 31, -1;
	shfl.sync.up.b32 %r11, %r1, 3, 0, -1;
	shfl.sync.down.b32 %r12, %r1, 3, 31, -1;
	shfl.sync.bfly.b32 %r13, %r1, 6, 31, -1;
	shfl.sync.idx.b32 %r14, %r1, 1, 0x181f, -1;
	shfl.sync.down.b32 %r15|%p2, %r1, 5, 0x1807, -1; // segments of eight lanes
	selp.u32 %r16, 1, 0, %p2;
"""
    got = lanes(emulator, body, VALUES, 7)
    lane = np.arange(32)
    assert (got[0] == VALUES[5]).all()
    assert (got[1] == VALUES[np.where(lane >= 3, lane - 3, lane)]).all()
    assert (got[2] == VALUES[np.where(lane + 3 < 32, lane + 3, lane)]).all()
    assert (got[3] == VALUES[lane ^ 6]).all()
    assert (got[4] == VALUES[lane // 8 * 8 + 1]).all()
    inside = lane % 8 + 5 < 8
    assert (got[5] == VALUES[np.where(inside, lane + 5, lane)]).all()
    assert (got[6] == inside).all()


def test_votes_and_matches(emulator):
    body = """
	and.b32 %r3, %r1, 3; setp.eq.u32 %p1, %r3, 0;
	vote.sync.ballot.b32 %r10, %p1, -1;
	vote.sync.any.pred %p2, %p1, -1; selp.u32 %r11, 1, 0, %p2;
	vote.sync.all.pred %p3, %p1, -1; selp.u32 %r12, 1, 0, %p3;
	match.any.sync.b32 %r13, %r3, -1;
	elect.sync %r14|%p4, -1; selp.u32 %r15, 1, 0, %p4;
	match.all.sync.b32 %r16|%p5, %r3, -1; match.all.sync.b32 %r17|%p6, %r10, -1; selp.u32 %r18, 1, 0, %p6;
"""
    got = lanes(emulator, body, VALUES, 9)
    low = VALUES & 3
    ballot = int(sum(1 << i for i in range(32) if low[i] == 0))
    assert (got[0] == ballot).all() and (got[1] == 1).all() and (got[2] == 0).all()
    assert got[3].tolist() == [int(sum(1 << j for j in range(32) if low[j] == low[i])) for i in range(32)]
    assert (got[4] == 0).all() and got[5].tolist() == [1] + [0] * 31
    assert (got[6] == 0).all() and (got[7] == 0xFFFFFFFF).all() and (got[8] == 1).all()


def test_lane_registers(emulator):
    names = ("laneid", "lanemask_eq", "lanemask_lt", "lanemask_le", "lanemask_gt", "lanemask_ge")
    body = " ".join(f"mov.u32 %r{10 + i}, %{name};" for i, name in enumerate(names))
    got = lanes(emulator, body, VALUES, len(names)).T.tolist()
    whole = (1 << 32) - 1
    for i, row in enumerate(got):
        one = 1 << i
        assert row == [i, one, one - 1, 2 * one - 1, whole - (2 * one - 1), whole - (one - 1)]


def test_reductions(emulator):
    values = np.where(np.arange(32) % 3 == 0, -VALUES.astype(np.int64), VALUES).astype(np.int32)
    body = "\n".join(
        f"\tredux.sync.{op} %r{10 + i}, %r1, -1;"
        for i, op in enumerate(("add.s32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32"))
    )
    got = lanes(emulator, body, values.view(np.uint32), 6)
    unsigned = values.view(np.uint32)
    want = [int(values.sum()) & 0xFFFFFFFF, int(values.min()) & 0xFFFFFFFF, int(unsigned.max())]
    want += [int(f.reduce(unsigned)) for f in (np.bitwise_and, np.bitwise_or, np.bitwise_xor)]
    assert [set(row.tolist()) for row in got] == [{x} for x in want]


def test_reductions_of_floats(emulator):
    """.abs takes absolute values; without .NaN a NaN counts only if all are NaN (PTX ISA, redux.sync)."""
    forms = ("min.f32", "max.f32", "max.abs.f32", "max.abs.NaN.f32", "min.NaN.f32")
    body = "\n".join(f"\tredux.sync.{form} %r{10 + i}, %r1, -1;" for i, form in enumerate(forms))
    values = np.linspace(-31, 20, 32).astype(np.float32)
    for nan in (False, True):
        values[7] = np.nan if nan else 1
        got = lanes(emulator, body, values.view(np.uint32), len(forms), "sm_100a")
        want = [np.float32(x).view(np.uint32) for x in (-31, 20, 31, 31, -31)]
        want[3:] = [0x7FFFFFFF] * 2 if nan else want[3:]
        assert [set(row.tolist()) for row in got] == [{int(x)} for x in want]


def test_lanes_apart(emulator):
    """Two halves of a warp synchronize by their own masks, each in its own branch."""
    body = """
	setp.lt.u32 %p1, %r2, 16;
	@!%p1 bra upper;
	shfl.sync.bfly.b32 %r10, %r1, 1, 31, 0x0000ffff;
	bra done;
upper:
	shfl.sync.bfly.b32 %r10, %r1, 2, 31, 0xffff0000;
done:
	bar.warp.sync -1;
"""
    lane = np.arange(32)
    got = lanes(emulator, body, VALUES)
    assert (got[0] == VALUES[np.where(lane < 16, lane ^ 1, lane ^ 2)]).all()
