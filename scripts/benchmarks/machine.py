"""How much of the machine others used while something was measured (Linux)."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def busy_s() -> float:
    """CPU seconds spent by everybody since boot, without idling and waiting for disks."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle, iowait = fields[3], fields[4]
    return (sum(fields) - idle - iowait) / _TICKS_PER_S


def process_s(pid: int) -> float:
    """CPU seconds of a process, all threads; with those of the children that it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS_PER_S


def own_s(pids: list[int]) -> float:
    """CPU seconds of this process and ``pids``, some of which may have ended."""
    total_s = 0.0
    for pid in [*pids, os.getpid()]:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total_s += process_s(pid)
    return total_s


def others_s(own: list[int]) -> float:
    """CPU seconds spent since boot by processes other than this one and ``own``."""
    return busy_s() - own_s(own)


class OtherLoad:
    """Counts from its creation what processes other than ``own`` and this one use.

    Args:
        own: process ids whose load is part of the measurement; they live until ``cores`` is called.
    """

    def __init__(self, own: list[int]) -> None:
        self._own = own
        self._start, self._busy = time.monotonic(), others_s(own)

    def cores(self) -> float:
        """Cores used by others, in the mean."""
        return max(0.0, (others_s(self._own) - self._busy) / (time.monotonic() - self._start))
