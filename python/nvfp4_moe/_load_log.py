"""Messages in an engine's log while layers load."""

from __future__ import annotations

import time
from collections.abc import Callable

from ._fused_experts import FusedExperts


class LoadLog:
    """Reports seconds and bytes at the first layer, every `every` layers or 30 seconds, and at the last planned layer.

    A reload packs the planned layers again and is reported in the same way.
    """

    def __init__(self, write: Callable[[str], None], every: int = 16, clock: Callable[[], float] = time.monotonic):
        self._write, self._every, self._clock = write, every, clock
        self._planned, self._written, self._is_complete = 0, 0.0, False
        self._start()

    def _start(self) -> None:
        self.layers, self.seconds, self.bytes = 0, 0.0, 0
        self._activations: set[str] = set()

    def plan(self) -> None:
        """Counts one more layer to pack. Once all planned layers are packed, it is the first of another model."""
        if self._is_complete:
            self._planned, self._is_complete = 0, False
        self._planned += 1

    def packed(self, name: str, experts: FusedExperts, seconds: float, activations: str = "") -> None:
        """Reports that one more layer is packed and warmed up. activations (format and reason) are logged once."""
        if activations and activations not in self._activations:
            layers = f", in layers such as {name}" if self._activations else ""
            self._write(f"activations: {activations}{layers}")
            self._activations.add(activations)
        self.layers += 1
        self.seconds += seconds
        self.bytes += experts.packed_bytes
        now = self._clock()
        if self.layers == 1:
            self._write(f"{name}: {experts.layer!r}")
            self._written = now
        elif self.layers % self._every == 0 or now - self._written >= 30 or self.layers == self._planned:
            self._write(f"packed {self.layers} of {self._planned} layers, {self.bytes:,} bytes, {self.seconds:.1f} s")
            self._written = now
        if self.layers == self._planned:
            self._is_complete = True
            self._start()
