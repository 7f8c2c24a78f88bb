"""Between the leader of a group and its other ranks: one TCP connection a rank, reports up, words down.

Both sides send beats. A rank whose connection breaks, or that is silent for the heartbeat limit, is lost, and a lost rank loses
its group (rule M7).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast

from google.protobuf.message import Message

from torchft_plus.manager.transport import FrameConnection, join_address, split_address
from torchft_plus.pb import peer_pb2 as pb


class _Watch:
    """Beats and silence of one connection."""

    def __init__(self, connection: FrameConnection, beat: Message, interval_ms: int, limit_ms: int) -> None:
        self._connection = connection
        self._beat = beat
        self._interval_ms = interval_ms
        self._limit_ms = limit_ms
        self._heard = time.monotonic()

    def heard(self) -> None:
        self._heard = time.monotonic()

    async def run(self) -> None:
        """Beat until the other side has been silent for too long. Own pauses do not count as its silence."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(self._interval_ms / 1000)
            self._connection.send(self._beat)
            overslept = time.monotonic() - before - self._interval_ms / 1000
            if overslept > self._limit_ms / 2000:
                self._heard = time.monotonic()
            if (time.monotonic() - self._heard) * 1000 > self._limit_ms:
                return


class LeaderHub:
    """The leader's side.

    Args:
        on_report: ``(group_rank, frame)`` of another rank.
        on_lost: ``(group_rank, reason)``.
    """

    def __init__(
        self,
        job_id: str,
        replica_id: str,
        group_world_size: int,
        beat_interval_ms: int,
        silence_limit_ms: int,
        on_report: Callable[[int, pb.RankFrame], None],
        on_lost: Callable[[int, str], None],
    ) -> None:
        self._job_id = job_id
        self._replica_id = replica_id
        self._group_world_size = group_world_size
        self._beat_interval_ms = beat_interval_ms
        self._silence_limit_ms = silence_limit_ms
        self._on_report = on_report
        self._on_lost = on_lost
        self._server: asyncio.Server | None = None
        self._ranks: dict[int, FrameConnection] = {}
        self._by_connection: dict[FrameConnection, int] = {}
        self._watches: dict[int, _Watch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._complete = asyncio.Event()
        if group_world_size == 1:
            self._complete.set()

    async def listen(self, host: str) -> str:
        """Listen on any free port of ``host``; returns the address."""
        self._server = await asyncio.get_running_loop().create_server(
            lambda: FrameConnection(pb.RankFrame.FromString, self._first, self._lost), host, 0
        )
        return join_address(host, self._server.sockets[0].getsockname()[1])

    async def wait_complete(self, timeout_ms: int) -> list[int]:
        """Wait until every rank has connected; returns the group ranks that did not come in time."""
        try:
            await asyncio.wait_for(self._complete.wait(), timeout_ms / 1000)
        except TimeoutError:
            return sorted(set(range(1, self._group_world_size)) - set(self._ranks))
        return []

    def send(self, group_rank: int, word: pb.Word) -> None:
        """To one rank, not the leader's own."""
        if group_rank in self._ranks:
            self._ranks[group_rank].send(word)

    def close(self) -> None:
        """End everything; what is queued is sent."""
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()
        for connection in self._ranks.values():
            connection.close()

    def _first(self, connection: FrameConnection, message: Message) -> None:
        frame = cast(pb.RankFrame, message)
        hello = frame.hello
        known = (
            frame.WhichOneof("body") == "hello"
            and (hello.job_id, hello.replica_id) == (self._job_id, self._replica_id)
            and hello.group_world_size == self._group_world_size
            and 0 < hello.group_rank < self._group_world_size
            and hello.group_rank not in self._ranks
        )
        if not known:
            connection.close()
            return
        rank = hello.group_rank
        self._ranks[rank], self._by_connection[connection] = connection, rank
        connection.on_frame = self._frame
        beat = pb.Word(beat=pb.RankBeat())
        self._watches[rank] = _Watch(connection, beat, self._beat_interval_ms, self._silence_limit_ms)
        task = asyncio.get_running_loop().create_task(self._watch(rank))
        self._tasks.add(task)
        if len(self._ranks) == self._group_world_size - 1:
            self._complete.set()

    async def _watch(self, rank: int) -> None:
        await self._watches[rank].run()
        self._on_lost(rank, f"silent for {self._silence_limit_ms} ms")

    def _frame(self, connection: FrameConnection, message: Message) -> None:
        frame = cast(pb.RankFrame, message)
        rank = self._by_connection[connection]
        self._watches[rank].heard()
        if frame.WhichOneof("body") != "beat":
            self._on_report(rank, frame)

    def _lost(self, connection: FrameConnection, reason: str) -> None:
        rank = self._by_connection.get(connection)
        if rank is not None:
            self._on_lost(rank, reason)


class RankLink:
    """The side of a rank that is not the leader.

    Args:
        on_word: every word of the leader.
        on_lost: the connection broke or the leader is silent.
    """

    def __init__(
        self,
        hello: pb.RankHello,
        beat_interval_ms: int,
        silence_limit_ms: int,
        on_word: Callable[[pb.Word], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._hello = hello
        self._beat_interval_ms = beat_interval_ms
        self._silence_limit_ms = silence_limit_ms
        self._on_word = on_word
        self._on_lost = on_lost
        self._connection: FrameConnection | None = None
        self._watch: _Watch | None = None
        self._task: asyncio.Task[None] | None = None

    async def connect(self, address: str, timeout_ms: int) -> None:
        """Connect to the leader.

        Raises:
            OSError or TimeoutError: nobody answers at ``address``.
        """
        host, port = split_address(address)
        loop = asyncio.get_running_loop()
        _, connection = await asyncio.wait_for(
            loop.create_connection(
                lambda: FrameConnection(
                    pb.Word.FromString, self._frame, lambda _, reason: self._on_lost(reason)
                ),
                host,
                port,
            ),
            timeout_ms / 1000,
        )
        self._connection = connection
        connection.send(pb.RankFrame(hello=self._hello))
        beat = pb.RankFrame(beat=pb.RankBeat())
        self._watch = _Watch(connection, beat, self._beat_interval_ms, self._silence_limit_ms)
        self._task = loop.create_task(self._run(self._watch))

    def send(self, frame: pb.RankFrame) -> None:
        """Report to the leader."""
        if self._connection is not None:
            self._connection.send(frame)

    def close(self) -> None:
        """End the link; what is queued is sent."""
        if self._task is not None:
            self._task.cancel()
        if self._connection is not None:
            self._connection.close()

    async def _run(self, watch: _Watch) -> None:
        await watch.run()
        self._on_lost(f"silent for {self._silence_limit_ms} ms")

    def _frame(self, connection: FrameConnection, message: Message) -> None:
        word = cast(pb.Word, message)
        if self._watch is not None:
            self._watch.heard()
        if word.WhichOneof("body") != "beat":
            self._on_word(word)
