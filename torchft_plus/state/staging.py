"""Bytes of an accelerator on their way to and from a connection: through pinned host memory.

They are copied on streams of their own: what training has queued may take as long as a step, and no copy waits for it longer
than it must.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from torchft_plus.state.memory import lies_on_host


def pinned(size_bytes: int) -> torch.Tensor:
    """Host memory that an accelerator can reach by itself; ordinary memory where there is none of that."""
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # no allocator for it, or too much is locked already
        return torch.empty(size_bytes, dtype=torch.uint8)


class Bytes:
    """Memory of a tensor.

    Args:
        tensor: 1-D, uint8.
    """

    __slots__ = ("_address", "_view", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._view: memoryview | torch.Tensor = tensor
        self._address = -1

    def between(self, first: int, last: int) -> memoryview | torch.Tensor:
        """Bytes ``[first, last)`` where they lie now: a view of host memory, or a tensor on an accelerator. No copy."""
        address = self.tensor.data_ptr()
        if address != self._address:  # ``share_memory_`` moves a tensor's memory and frees where it was
            self._view = self.tensor.numpy().data if lies_on_host(self.tensor) else self.tensor
            self._address = address
        return self._view[first:last]


Span = tuple[Bytes, int, int]
"""Bytes of one tensor: its memory, the first one, and the one behind the last."""


class CopyStream:
    """A stream of an accelerator for copies from and to pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device)

    def follow(self, events: Sequence[torch.Event]) -> None:
        """What is copied from now on comes after ``events``."""
        for event in events:
            self._stream.wait_event(event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to copy bytes."""
        with self._stream:
            target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Until all copies are done."""
        self._stream.synchronize()


class _Buffer:
    """Pinned memory that tensors on accelerators are copied to or from, end to end. Used by one thread."""

    def __init__(self) -> None:
        self._host: torch.Tensor | None = None
        self._streams: dict[torch.device, CopyStream] = {}

    def room(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Host memory for each of the tensors, which is the last call's again."""
        size_bytes = sum(map(len, tensors))
        if self._host is None or len(self._host) < size_bytes:
            self._host = pinned(size_bytes)
        return list(self._host[:size_bytes].split([len(tensor) for tensor in tensors]))

    def stream(self, device: torch.device, after: Sequence[torch.Event]) -> CopyStream:
        """The stream for copies of one device; ``after`` is what the first of them comes after."""
        if device not in self._streams:
            self._streams[device] = CopyStream(device)
            self._streams[device].follow(after)
        return self._streams[device]

    def wait(self) -> None:
        """Until nothing is being copied."""
        for stream in self._streams.values():
            stream.wait()


class Departure:
    """Host memory for what a donor sends, one piece at a time. Used by one thread."""

    def __init__(self) -> None:
        self._buffer = _Buffer()

    def memory(self, spans: Sequence[Span], written: Sequence[torch.Event]) -> list[memoryview]:
        """The bytes of ``spans`` in order, valid until the next call.

        Args:
            spans: what is sent.
            written: when the accelerators have written it.
        """
        parts = [memory.between(first, last) for memory, first, last in spans]
        there = [part for part in parts if isinstance(part, torch.Tensor)]
        if not there:
            return [part for part in parts if isinstance(part, memoryview)]
        room = iter(self._buffer.room(there))
        views: list[memoryview] = []
        for part in parts:
            if isinstance(part, memoryview):
                views.append(part)
                continue
            stream, host = self._buffer.stream(part.device, ()), next(room)
            stream.follow(written)
            stream.copy(host, part)
            views.append(host.numpy().data)
        self._buffer.wait()
        return views


class Landing:
    """Where the pieces of one connection are received: host tensors directly, those of accelerators in pinned memory, from
    which they go on when the piece is verified. Used by one thread.

    Args:
        spans: gives the memory of data bytes from the first argument to the second, in order, without empty parts.
        ready: when the accelerators' memory may be written.
    """

    def __init__(
        self,
        spans: Callable[[int, int], list[Span]],
        ready: Sequence[torch.Event],
    ) -> None:
        self._spans = spans
        self._ready = ready
        self._free: deque[_Buffer] = deque()
        self._begun: deque[tuple[_Buffer | None, list[tuple[torch.Tensor, torch.Tensor]]]] = deque()
        """Pieces that are not settled: their buffer, and what goes where when they are."""

    def memory(self, start: int, end: int) -> list[memoryview]:
        """Where the piece of data bytes ``[start, end)`` is to be received."""
        parts = [memory.between(first, last) for memory, first, last in self._spans(start, end)]
        there = [part for part in parts if isinstance(part, torch.Tensor)]
        if not there:
            self._begun.append((None, []))
            return [part for part in parts if isinstance(part, memoryview)]
        buffer = self._free.popleft() if self._free else _Buffer()
        buffer.wait()
        room = buffer.room(there)
        self._begun.append((buffer, list(zip(there, room, strict=True))))
        rest = iter(room)
        return [part if isinstance(part, memoryview) else next(rest).numpy().data for part in parts]

    def settle(self, intact: bool) -> None:
        """The piece that was begun first has come; if it is ``intact`` it goes on to its place."""
        buffer, moves = self._begun.popleft()
        if buffer is None:
            return
        for target, host in moves if intact else ():
            buffer.stream(target.device, self._ready).copy(target, host)
        self._free.append(buffer)

    def abandon(self) -> None:
        """The pieces that are not settled do not come."""
        while self._begun:
            self.settle(intact=False)

    def finish(self) -> None:
        """Wait until all that was settled is in its place."""
        self.abandon()
        for buffer in self._free:
            buffer.wait()
