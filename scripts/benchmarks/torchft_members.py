"""Client process of ``bench lighthouse`` for torchft: members that speak with torchft's own ``LighthouseClient``.

Its calls block (without the GIL), so each member has a thread for quorums and one for heartbeats.
"""

from __future__ import annotations

import importlib
import os
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from benchmarks.channel import Channel

CALL_DEADLINE = timedelta(seconds=120)
HEARTBEAT_INTERVAL_S = 0.1
"""The default of torchft's Manager."""


class Member:
    """One replica: two connections, as a torchft replica has one for each purpose in its manager server."""

    def __init__(self, client_class: Callable[[str, timedelta], Any], address: str, index: int) -> None:
        self.name = f"group_{index}"
        self._calls = client_class(f"http://{address}", CALL_DEADLINE)
        self._beats = client_class(f"http://{address}", CALL_DEADLINE)
        self._dead = threading.Event()
        self._step = 0
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def quorum(self) -> float:
        """Ask for the next quorum; when it was here."""
        self._step += 1
        self._calls.quorum(self.name, CALL_DEADLINE, address="127.0.0.1:9", step=self._step, world_size=1)
        return time.perf_counter()

    def die(self) -> None:
        """No more heartbeats."""
        self._dead.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._dead.wait(HEARTBEAT_INTERVAL_S):
            self._beats.heartbeat(self.name, CALL_DEADLINE)


class Bench:
    """Carries out commands, as ``light_members.Bench`` does."""

    def __init__(self, address: str, count: int) -> None:
        coordination = importlib.import_module("torchft.coordination")
        self._make = lambda index: Member(coordination.LighthouseClient, address, index)
        self._members: list[Any] = []
        self._count = count
        self._pool = ThreadPoolExecutor(count)

    def connect(self) -> dict[str, float]:
        """All connect, and get a first quorum."""
        started = time.perf_counter()
        self._members = [self._make(index) for index in range(self._count)]
        threading.Event().wait(5 * HEARTBEAT_INTERVAL_S)  # all are known by their heartbeats
        self.round()
        return {"ms": 1000 * (time.perf_counter() - started)}

    def rest(self, seconds: float) -> dict[str, float]:
        """Nothing but heartbeats."""
        threading.Event().wait(seconds)
        return {"ms": 1000 * seconds}

    def round(self) -> dict[str, float]:
        """All ask at once; until everybody has the next quorum."""
        started = time.perf_counter()
        calls: list[Future[float]] = [self._pool.submit(member.quorum) for member in self._members]
        return {"ms": 1000 * (max(call.result() for call in calls) - started)}

    def loss(self, reported: bool) -> dict[str, float]:
        """One dies (there is no way to report that); until all others, who ask at once, have the next quorum."""
        assert not reported
        started = time.perf_counter()
        self._members.pop().die()
        lost = self.round()["ms"]
        return {"ms": 1000 * (time.perf_counter() - started), "ask_ms": lost}


def cpu_s() -> float:
    """CPU seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """The first command says where the Lighthouse is and how many members there are."""
    channel = Channel()
    options = channel.receive()
    assert options is not None
    bench = Bench(options["address"], options["count"])
    commands = {"connect": bench.connect, "rest": bench.rest, "round": bench.round, "loss": bench.loss}
    while (command := channel.receive()) is not None:
        name, before_s = command.pop("do"), cpu_s()
        answer = commands[name](**command)
        channel.send(**answer, cpu_s=cpu_s() - before_s)
    os._exit(0)  # hundreds of threads are in the middle of a heartbeat


if __name__ == "__main__":
    main()
