"""The Lighthouse of a local run: started first, restarted with the same port and store when it dies."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from lighthouse.rpc import join_address, parse_address
from torchft_plus.config import RunFile
from torchft_plus.launch.event_follower import Event
from torchft_plus.launch.process import ChildProcess

LISTEN_DEADLINE_S = 30.0
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.05, 5.0
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class LighthouseKeeper:
    """Owns the Lighthouse process.

    Training goes on without a Lighthouse, so one that dies is restarted for as long as the run lasts, with a
    delay that doubles until it listens again.

    Args:
        run: the run file.
        folder: run folder; store, log and events live there.
        environment: of the launcher.
    """

    def __init__(self, run: RunFile, folder: Path, environment: Mapping[str, str]) -> None:
        self._table = run.lighthouse
        self._fault_tolerance = run.fault_tolerance
        self._folder = folder
        self._environment = {**environment, "TORCHFT_PLUS_EVENTS": str(folder / "events")}
        self._bind = run.lighthouse.bind
        self._child: ChildProcess | None = None
        self._listening = False
        self._restart_at: float | None = None
        self._delay_s = _FIRST_DELAY_S
        self.address = ""
        """host:port for the members, once it listens."""

    @property
    def descriptors(self) -> list[int]:
        """pidfd, readable when it is gone."""
        return [self._child.pidfd] if self._child is not None and not self._child.reaped else []

    def start(self) -> int:
        """Start it; returns the process id."""
        self._listening = False
        self._restart_at = None
        log = self._folder / "logs" / "lighthouse.log"
        self._child = ChildProcess(self.command(), self._environment, log)
        return self._child.pid

    def command(self) -> list[str]:
        """The command line of the Lighthouse."""
        store = self._table.store or str(self._folder / "lighthouse.sqlite")
        least = self._table.min_replicas or self._fault_tolerance.min_replica_size
        return [
            *(sys.executable, "-m", "lighthouse"),
            *("--bind", self._bind),
            *("--store", store),
            *("--min_replicas", str(least)),
            *("--expected_replicas", str(self._fault_tolerance.group_size)),
            *("--join_timeout_ms", str(self._table.join_timeout_ms)),
            *("--restart_timeout_ms", str(self._table.restart_timeout_ms)),
            *("--timeout_ms", str(self._fault_tolerance.timeout_ms)),
            *("--outage_limit_ms", str(self._fault_tolerance.outage_limit_ms)),
        ]

    def feed(self, event: Event) -> None:
        """An event of the Lighthouse's log: learns the address from ``listening``."""
        if event.kind != "listening":
            return
        host, port = parse_address(event.text("address"))
        self.address = join_address(_WILDCARDS.get(host, host), port)
        self._bind = join_address(parse_address(self._bind)[0], port)  # a restart takes the same port
        self._listening = True
        self._delay_s = _FIRST_DELAY_S

    def poll(self, now: float) -> int | None:
        """Look after it; returns the status of an exit that was seen just now (negative: signal)."""
        if self._restart_at is not None and now >= self._restart_at:
            self.start()
        if self._child is None or self._restart_at is not None or not self._child.reap():
            return None
        self._restart_at = now + self._delay_s
        self._delay_s = min(2 * self._delay_s, _LONGEST_DELAY_S)
        return self._child.exit_status()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it."""
        if self._child is not None:
            self._child.signal(number)

    def stopped(self) -> bool:
        """It is gone."""
        return self._child is None or self._child.reap()

    def last_lines(self, count: int = 5) -> list[str]:
        """The end of its log."""
        return self._child.last_lines(count) if self._child is not None else []
