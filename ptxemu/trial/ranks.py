"""Ranks as host threads: a kernel with which each rank writes to all others, and their memory."""

import ctypes
import threading

import numpy as np

from trial.emulator import LaunchError, ptx

# Every rank writes a value and a flag to every rank, and adds up the values that it receives until its time (l, ns) is
# over. p: the ranks' memory. It has 64 bytes for each sender, twice (even and odd rounds), since a rank may write for
# the next round before another has read this round's. c: the rounds so far. o: the sum, and whether the time ran out.
EXCHANGE = """
	.reg .u32 %r_n; ld.global.u32 %r_n, [%rd_c]; add.u32 %r_n, %r_n, 1;
	mov.u32 %r1, %tid.x; mov.u32 %r9, 0; setp.ge.u32 %p1, %r1, %r_w; @%p1 bra joined;
	mul.wide.u32 %rd1, %r1, 8; add.s64 %rd2, %rd_p, %rd1; ld.global.u64 %rd3, [%rd2];
	and.b32 %r5, %r_n, 1; mul.lo.u32 %r5, %r5, %r_w; add.u32 %r6, %r5, %r_k;
	mul.wide.u32 %rd4, %r6, 64; add.s64 %rd5, %rd3, %rd4;
	mul.lo.u32 %r2, %r_n, 1000; add.u32 %r2, %r2, %r_k;
	st.global.u32 [%rd5+4], %r2;
	SIGNAL
	mul.wide.u32 %rd4, %r_k, 8; add.s64 %rd6, %rd_p, %rd4; ld.global.u64 %rd7, [%rd6];
	add.u32 %r7, %r5, %r1; mul.wide.u32 %rd8, %r7, 64; add.s64 %rd9, %rd7, %rd8;
	mov.u64 %rd20, %globaltimer;
again:
	WAIT
	setp.ge.u32 %p2, %r3, %r_n; @%p2 bra came;
	nanosleep.u32 100;
	mov.u64 %rd21, %globaltimer; sub.u64 %rd22, %rd21, %rd20; setp.lt.u64 %p3, %rd22, %rd_l; @%p3 bra again;
	mov.u32 %r9, 1; bra joined;
came:
	ld.global.u32 %r4, [%rd9+4];
	red.global.add.u32 [%rd_o], %r4;
joined:
	bar.sync 0;
	mov.u32 %r1, %tid.x; setp.ne.u32 %p4, %r1, 0; @%p4 bra late; st.global.u32 [%rd_c], %r_n;
late:
	setp.eq.u32 %p4, %r9, 0; @%p4 bra done; st.global.u32 [%rd_o+4], 1;
done:
"""
SIGNAL, WAIT = "st.release.sys.global.u32 [%rd5], %r_n;", "ld.acquire.sys.global.u32 %r3, [%rd9];"
PARAMETERS = ("p", "o", "w:u32", "k:u32", "c", "l")
SECOND = 1_000_000_000  # ns


class Ranks:
    """The memory of ranks, and their kernel."""

    def __init__(self, emulator, world, limit=3 * SECOND, signal=SIGNAL, wait=WAIT):
        self.emulator, self.world, self.limit = emulator, world, limit
        self.memory = [emulator.put(np.zeros(32 * world, np.uint32)) for _ in range(world)]
        self.peers = emulator.put(np.array([pointer.value for pointer in self.memory], np.uint64))
        self.rounds = [emulator.put(np.zeros(1, np.uint32)) for _ in range(world)]
        self.out = [emulator.put(np.zeros(2, np.uint32)) for _ in range(world)]
        self.text = ptx(EXCHANGE.replace("SIGNAL", signal).replace("WAIT", wait), PARAMETERS)
        self.kernel = emulator.kernel(self.text, "test")

    def arguments(self, rank):
        return [self.peers, self.out[rank], ctypes.c_uint32(self.world), ctypes.c_uint32(rank), self.rounds[rank],
                ctypes.c_uint64(self.limit)]  # fmt: skip

    def result(self, rank):
        """The sum of the values that a rank received, and whether its time ran out."""
        return self.emulator.get(self.out[rank], 2, np.uint32).tolist()

    def expected(self, rounds):
        return [sum(1000 * n * self.world + sum(range(self.world)) for n in range(1, rounds + 1)), 0]

    def run(self, rank, rounds):
        for number in range(1, rounds + 1):
            self.emulator.launch(self.kernel, self.arguments(rank))
            assert self.result(rank) == self.expected(number)


def together(calls):
    """Runs each call in a separate host thread. If several fail because of one launch, raises that launch's report."""
    failed = []

    def run(call):
        try:
            call()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a host thread hangs"
    if failed:
        raise max(failed, key=lambda error: (isinstance(error, LaunchError), len(str(error))))


# Waits for a word at a.
SPIN = "\nagain:\n\tld.acquire.sys.global.u32 %r1, [%rd_a]; SLEEP setp.eq.u32 %p1, %r1, 0; @%p1 bra again;"
