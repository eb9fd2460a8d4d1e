"""Allocating workspaces from torch, as far as testable without a GPU: the thread, and the error message."""

from __future__ import annotations

import contextlib
import threading

import pytest

torch = pytest.importorskip("torch")

from nvfp4_moe import _torch_memory  # noqa: E402


def test_kept_memory_is_asked_for_outside_the_callers_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def captured(size_bytes: int, device: int, stream: int) -> torch.Tensor:
        asked.append((size_bytes, device, stream, threading.get_ident()))
        return torch.empty(size_bytes, dtype=torch.uint8)

    monkeypatch.setattr(_torch_memory, "captured", captured)
    assert _torch_memory.kept(300, 1, 0x1000).shape == (300,)
    assert asked[0][:3] == (300, 1, 0x1000) and asked[0][3] != threading.get_ident()
    # At the interpreter's end no thread can be started, so the caller's thread must do.
    monkeypatch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("can't start")))
    assert _torch_memory.kept(10, 0, 0).shape == (10,) and asked[1][3] == threading.get_ident()


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
def test_what_fails_there_is_raised_here(monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]) -> None:
    def captured(size_bytes: int, device: int, stream: int) -> torch.Tensor:
        raise kind("no")

    monkeypatch.setattr(_torch_memory, "captured", captured)
    with pytest.raises(kind, match="no"):
        _torch_memory.kept(1, 0, 0)


def test_a_refusal_says_what_was_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*shape: object, **options: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory, in many lines")

    monkeypatch.setattr(_torch_memory, "stream_of", lambda device, stream: contextlib.nullcontext())
    monkeypatch.setattr(torch, "empty", refuse)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 40)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    expected = "expected 1000 bytes on cuda:3, got none from torch: 5 of 80 .*reserved 40 bytes and its tensors take 30"
    for function in (_torch_memory.captured, _torch_memory.kept):
        with pytest.raises(MemoryError, match=expected):
            function(1000, 3, 0)
