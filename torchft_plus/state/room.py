"""Room for the copies of a version, whose memory is touched before they are made. No sockets.

The kernel zeroes each page when it is first written to, which takes five times as long as the copy itself. A donor knows some
time before an update that it will have to copy: from the moment when readers are announced.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from torchft_plus.state.manifest import TensorSpec

_MADV_POPULATE_WRITE = 23
"""Linux 5.14; Python has no name for it."""
_PART_BYTES = 1 << 20
"""So much at a time: a thread that maps memory waits for it, below a millisecond."""
LEAST_BYTES = 8 << 20
"""Less than this is copied in some milliseconds in any case."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the data of a version lie."""

    size_bytes: int
    host: tuple[tuple[int, int], ...]
    """Ranges of the data whose tensors lie on the host."""

    @classmethod
    def of(cls, specs: Sequence[TensorSpec]) -> Layout:
        """Of these tensors."""
        host: list[tuple[int, int]] = []
        for spec in specs:
            if spec.device != "cpu" or not spec.size_bytes:
                continue
            start = host.pop()[0] if host and host[-1][1] == spec.offset else spec.offset
            host.append((start, spec.end))
        return cls(specs[-1].end if specs else 0, tuple(host))

    @property
    def host_bytes(self) -> int:
        """Size of what lies on the host."""
        return sum(end - start for start, end in self.host)


class Room:
    """A block for the copies of one version.

    Args:
        layout: as the version's data are expected to lie.

    Raises:
        RuntimeError: there is no memory.
    """

    def __init__(self, layout: Layout) -> None:
        self.block = torch.empty(layout.size_bytes, dtype=torch.uint8)
        self._parts = _parts(layout)
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Leave it as it is. Any thread."""
        self._stopped.set()

    def make(self) -> None:
        """Touch the memory, from the end on like the copies, until all is done or ``stop`` is called. A thread of its own."""
        for start, end in self._parts:
            if self._stopped.is_set() or not _touch(self.block, start, end):
                return  # an older kernel, or no memory: the copies touch it themselves


def _parts(layout: Layout) -> Iterator[tuple[int, int]]:
    for start, end in reversed(layout.host):
        while end > start:
            first = max(start, end - _PART_BYTES)
            yield first, end
            end = first


def _touch(block: torch.Tensor, start: int, end: int) -> bool:
    """Have the kernel give memory to ``block[start:end]``, whose content stays; without the GIL. False if it does not."""
    madvise = _madvise()
    if madvise is None:
        return False
    address = block.data_ptr()
    first = (address + start) // mmap.PAGESIZE * mmap.PAGESIZE
    return madvise(first, address + end - first, _MADV_POPULATE_WRITE) == 0


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":  # the number means something else there
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise
