"""Other threads can run Python while a layer or an exchange is destroyed, which may have to wait for them.

Objects are destroyed inside list.clear(), a single call during which the interpreter does not switch threads by itself.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable

import numpy as np
import nvfp4_moe as nv
import pytest


def layer() -> nv.MoeLayer:
    stack = (np.ones((2, 64, 32), np.uint8), np.full((2, 64, 4), 0x38, np.uint8), 1.0)
    return nv.MoeLayer.from_tensors(nv.MoeConfig(2, 2, 64, 64), gate=stack, up=stack, down=stack, max_tokens=8)


def exchange() -> nv.Exchange:
    return nv.ThreadGroup(1).join(0)


class Marker:
    """An object whose destruction can be observed."""


@pytest.mark.parametrize(("make", "expected"), [(layer, True), (exchange, True), (Marker, False)])
def test_others_run_while_it_ends(make: Callable[[], object], expected: bool) -> None:
    first, last = Marker(), Marker()
    first_to_go, last_to_go = weakref.ref(first), weakref.ref(last)
    # list.clear() begins at the end. Destroying the tuples takes time, in which the other thread requests the lock.
    several = [last]
    for _ in range(8):
        several += [make(), [(i,) for i in range(100_000)]]
    several.append(first)
    del first, last
    in_the_middle = []

    def other() -> None:
        while True:
            begun = first_to_go() is None
            if last_to_go() is None:
                return
            if begun:
                in_the_middle.append(True)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        thread = threading.Thread(target=other)
        thread.start()
        several.clear()
        thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not thread.is_alive()
    assert bool(in_the_middle) == expected
