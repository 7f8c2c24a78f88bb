"""Real processes for tests of lanes: one per replica rank, forked from a server that has torch imported."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from torchft_plus.process_group.gloo import GlooBackend
from torchft_plus.process_group.lane import Lane, LaneSpec, Operation

# torch's store looks up the names of addresses; a resolver that drops a query would cost 5 s each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch.distributed", "torch.distributed.fsdp", "torchft_plus.process_group.gloo"]
)


@dataclass
class Rank:
    """What a scenario gets in its process."""

    rank: int
    size: int
    port: int
    pipe: Connection

    def store(self, prefix: str) -> PrefixStore:
        tcp = TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=20))
        return PrefixStore(prefix, tcp)

    def lane(self, quorum_id: int = 1, timeout_ms: int = 20_000, **changes: Any) -> Lane:
        """A gloo lane; ``changes`` replace rank and world_size."""
        spec = LaneSpec(
            store=self.store(f"{quorum_id}/{changes.pop('prefix', '')}"),
            rank=changes.pop("rank", self.rank),
            world_size=changes.pop("world_size", self.size),
            quorum_id=quorum_id,
            timeout_ms=timeout_ms,
            **changes,
        )
        return GlooBackend().create(spec)

    def say(self, word: Any) -> None:
        self.pipe.send(("word", word))

    def hear(self, timeout_s: float = 30) -> Any:
        if not self.pipe.poll(timeout_s):
            raise TimeoutError(f"rank {self.rank} heard nothing")
        return self.pipe.recv()


def wait_ended(operations: Any, timeout_s: float = 30) -> None:
    """Poll until all operations have ended."""
    deadline = time.monotonic() + timeout_s
    pending: list[Operation] = list(operations)
    while not all(operation.poll() for operation in pending):
        if time.monotonic() > deadline:
            raise TimeoutError("an operation has not ended")
        time.sleep(0.0005)


def _main(scenario: Callable[..., Any], rank: Rank, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        rank.pipe.send(("result", scenario(rank, *arguments)))
    except BaseException:  # noqa: BLE001 - told to the test
        rank.pipe.send(("error", traceback.format_exc()))
    rank.pipe.close()


class Ranks:
    """The processes of one test."""

    def __init__(self, scenario: Callable[..., Any], size: int, arguments: tuple[Any, ...]) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.size = size
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for index in range(size):
            ours, theirs = _context.Pipe()
            rank = Rank(index, size, self._store.port, theirs)
            process = _context.Process(target=_main, args=(scenario, rank, arguments), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.processes[rank].pid, number)

    def tell(self, word: Any, *ranks: int) -> None:
        for rank in ranks or range(self.size):
            self.pipes[rank].send(word)

    def word(self, rank: int, timeout_s: float = 40) -> Any:
        return self._receive(rank, "word", timeout_s)

    def result(self, rank: int, timeout_s: float = 40) -> Any:
        return self._receive(rank, "result", timeout_s)

    def results(self, timeout_s: float = 40) -> list[Any]:
        return [self.result(rank, timeout_s) for rank in range(self.size)]

    def _receive(self, rank: int, expected: str, timeout_s: float) -> Any:
        assert self.pipes[rank].poll(timeout_s), f"rank {rank} said nothing within {timeout_s} s"
        kind, value = self.pipes[rank].recv()
        assert kind == expected, f"rank {rank}: {kind} {value}"
        return value

    def close(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join(10)


@contextmanager
def start_ranks(scenario: Callable[..., Any], size: int, *arguments: Any) -> Iterator[Ranks]:
    """Run ``scenario(rank, *arguments)`` in ``size`` processes; whatever is left is killed at the end."""
    ranks = Ranks(scenario, size, arguments)
    try:
        yield ranks
    finally:
        ranks.close()


def run_ranks(scenario: Callable[..., Any], size: int, *arguments: Any, timeout_s: float = 60) -> list[Any]:
    """Run the scenario in every process and return what each returned."""
    with start_ranks(scenario, size, *arguments) as ranks:
        return ranks.results(timeout_s)
