"""On which stream staging is packed: nothing to do on a CPU, a stream of its own on a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class Streams(Protocol):
    """What a reducer asks of its device."""

    def mark(self) -> Any:
        """Note that what the current stream has been given so far makes a gradient."""
        ...

    def packing(self, marks: list[Any]) -> AbstractContextManager[Any]:
        """Run the block's work after all ``marks``."""
        ...

    def begin(self) -> None:
        """A step starts: staging may be written when the current stream has read it."""
        ...

    def capturing(self) -> bool:
        """True while the current stream is captured into a graph: then nothing may be launched."""
        ...


class HostStreams:
    """A CPU does things when it is told."""

    def mark(self) -> Any:
        return None

    def packing(self, marks: list[Any]) -> AbstractContextManager[Any]:
        del marks
        return nullcontext()

    def begin(self) -> None:
        pass

    def capturing(self) -> bool:
        return False


class CudaStreams:
    """Hooks may run in streams that are not the caller's (FSDP2's post-reduce stream): events carry the order.

    ``.grad`` lives until the vote, which comes after the operations: no ``record_stream`` is needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def mark(self) -> Any:
        event = torch.cuda.Event()
        event.record()
        return event

    def packing(self, marks: list[Any]) -> AbstractContextManager[Any]:
        for event in marks:
            self._stream.wait_event(event)
        return torch.cuda.stream(self._stream)

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


def streams_for(device: torch.device) -> Streams:
    """The streams of ``device``."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
