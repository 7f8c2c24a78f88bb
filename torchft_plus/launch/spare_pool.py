"""Keeps warm spares ready and hands them out."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchft_plus.launch.process import ChildProcess

_FIRST_DELAY_S, _LONGEST_DELAY_S = 1.0, 60.0


class SparePool:
    """Spares for ``python -m MODULE ARGUMENT...``.

    Args:
        size: how many to keep ready; 0: none.
        module: what they will run.
        arguments: its command line, the same for every rank.
        environment: what all ranks have in common; the rest comes with the order.
        log: file of their output until they become a rank.
    """

    def __init__(
        self, size: int, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self._size = size
        self._command = [sys.executable, "-m", "torchft_plus.launch.spare", module, *arguments]
        self._environment = dict(environment)
        self._log = log
        self._ready: list[ChildProcess] = []
        self._dying: list[ChildProcess] = []
        self._refill_at = 0.0
        self._delay_s = _FIRST_DELAY_S

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def pids(self) -> list[int]:
        """Process ids of the spares that are ready or importing."""
        return [spare.pid for spare in self._ready]

    def take(self, environment: Mapping[str, str], log: Path) -> ChildProcess | None:
        """Turn a spare into a rank.

        Args:
            environment: the whole environment of the rank.
            log: file that its output is appended to.

        Returns:
            The process, or None if no spare is left.
        """
        difference = {
            name: value for name, value in environment.items() if self._environment.get(name) != value
        }
        order = json.dumps({"environment": difference, "log": str(log)})
        while self._ready:
            spare = self._ready.pop(0)
            if spare.exit_status() is None and spare.tell(order):
                spare.log = log
                return spare
            self._dying.append(spare)
        return None

    def refill(self, now: float, *, calm: bool) -> None:
        """Start what is missing, one after the other.

        Args:
            now: seconds.
            calm: all groups train. A spare's imports must not slow down a group that comes back.
        """
        for spare in [spare for spare in self._ready if spare.exit_status() is not None]:
            self._ready.remove(spare)
            self._dying.append(spare)
            self._refill_at = now + self._delay_s
            self._delay_s = min(2 * self._delay_s, _LONGEST_DELAY_S)
        self._dying = [spare for spare in self._dying if not spare.reap()]
        if calm and len(self._ready) < self._size and now >= self._refill_at:
            self._ready.append(ChildProcess(self._command, self._environment, self._log, listens=True))

    def close(self) -> bool:
        """Kill all; True once they are gone."""
        self._size = 0
        for spare in self._ready:
            spare.signal(signal.SIGKILL)
        self._dying, self._ready = [s for s in self._dying + self._ready if not s.reap()], []
        return not self._dying
