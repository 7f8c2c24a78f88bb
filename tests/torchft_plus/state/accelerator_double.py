"""Host tensors that pass for an accelerator's: copies begin when they are told to and end late, on another thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Sequence

import pytest
import torch

from torchft_plus.state.staging import CopyStream

LATE_S = 0.002


class Accelerator:
    """Which memory is the accelerator's, and what its streams were told.

    Args:
        patch: of the test.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._spans: list[tuple[int, int]] = []
        self.followed: list[object] = []
        """Events that streams were told to follow."""
        self.copied_bytes = {"from": 0, "to": 0}
        """What streams have copied from and to the accelerator."""
        self._streams: list[_LateStream] = []
        for module in ("staging", "version_memory"):
            patch.setattr(f"torchft_plus.state.{module}.lies_on_host", self._lies_on_host)
        patch.setattr("torchft_plus.state.staging.CopyStream", self._stream)

    def take(self, tensors: Iterable[torch.Tensor]) -> None:
        """The memory of ``tensors`` is the accelerator's from now on."""
        for tensor in tensors:
            start = tensor.data_ptr()
            self._spans.append((start, start + tensor.numel() * tensor.element_size()))

    def has(self, tensor: torch.Tensor) -> bool:
        """True if its memory is the accelerator's."""
        return any(start <= tensor.data_ptr() < end for start, end in self._spans)

    def close(self) -> None:
        """End the streams."""
        for stream in self._streams:
            stream.close()

    def _lies_on_host(self, tensor: torch.Tensor) -> bool:
        return not self.has(tensor)

    def _stream(self, device: torch.device) -> CopyStream:
        del device
        self._streams.append(_LateStream(self))
        return self._streams[-1]


class _LateStream(CopyStream):
    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._work: queue.Queue[tuple[torch.Tensor, torch.Tensor] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def follow(self, events: Sequence[object]) -> None:
        self._accelerator.followed += events

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self._accelerator.has(target) != self._accelerator.has(source), "one side is the host"
        self._work.put((target, source))

    def wait(self) -> None:
        self._work.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            threading.Event().wait(LATE_S)
            target, source = work
            target.copy_(source)
            way = "to" if self._accelerator.has(target) else "from"
            self._accelerator.copied_bytes[way] += len(target)
            self._work.task_done()

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(10)
