"""Between the leader of a group and its other ranks: one TCP connection a rank, reports up, words down.

Both sides send beats. A rank whose connection breaks, or that is silent for the heartbeat limit, is lost, and a lost rank loses
its group (rule M7).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import cast

from google.protobuf.message import Message

from lighthouse.security import HANDSHAKE_DEADLINE_S, WRONG_TOKEN, Security
from torchft_plus.manager.transport import (
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    FrameConnection,
    connect,
    join_address,
    listen,
)
from torchft_plus.pb import peer_pb2 as pb

logger = logging.getLogger(__name__)


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
        security: what ranks must show.
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
        security: Security | None = None,
    ) -> None:
        self._security = security or Security()
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
        self._server = await listen(self._connection, host, self._security)
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

    def _connection(self) -> FrameConnection:
        connection = FrameConnection(pb.RankFrame.FromString, self._first, self._lost)
        connection.max_frame_bytes = MAX_HELLO_BYTES
        asyncio.get_running_loop().call_later(2 * HANDSHAKE_DEADLINE_S, self._expire, connection)
        return connection

    def _expire(self, connection: FrameConnection) -> None:
        if connection not in self._by_connection:
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
        allowed = self._security.accepts(hello.token)
        if known and not allowed:
            logger.warning("rank %d was refused: %s", hello.group_rank, WRONG_TOKEN)
            connection.send(pb.Word(refused=pb.Refused(reason=WRONG_TOKEN)))
        if not (known and allowed):
            connection.close()
            return
        connection.max_frame_bytes = MAX_FRAME_BYTES
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
        elif connection.refused:
            logger.warning("a rank was refused: %s", reason)


class RankLink:
    """The side of a rank that is not the leader.

    Args:
        on_word: every word of the leader.
        on_lost: the connection broke or the leader is silent.
        on_refused: token or TLS settings of the two sides do not fit.
        security: what this rank shows.
    """

    def __init__(
        self,
        hello: pb.RankHello,
        beat_interval_ms: int,
        silence_limit_ms: int,
        on_word: Callable[[pb.Word], None],
        on_lost: Callable[[str], None],
        on_refused: Callable[[str], None],
        security: Security | None = None,
    ) -> None:
        self._security = security or Security()
        self._on_refused = on_refused
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
            PeerRefused: the TLS settings of the two sides do not fit.
            OSError or TimeoutError: nobody answers at ``address``.
        """
        connection = self._connection = await asyncio.wait_for(
            connect(
                lambda: FrameConnection(pb.Word.FromString, self._frame, self._lost), address, self._security
            ),
            timeout_ms / 1000,
        )
        hello = pb.RankFrame(hello=self._hello)
        hello.hello.token = self._security.token
        connection.send(hello)
        beat = pb.RankFrame(beat=pb.RankBeat())
        self._watch = _Watch(connection, beat, self._beat_interval_ms, self._silence_limit_ms)
        self._task = asyncio.get_running_loop().create_task(self._run(self._watch))

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
        body = word.WhichOneof("body")
        if body == "refused":
            self._on_refused(word.refused.reason[:400])
        elif body != "beat":
            self._on_word(word)

    def _lost(self, connection: FrameConnection, reason: str) -> None:
        (self._on_refused if connection.refused else self._on_lost)(reason)
