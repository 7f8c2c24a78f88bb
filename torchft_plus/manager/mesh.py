"""The leaders' mesh: a TCP connection between every two leaders of a quorum, for control words and votes.

0.1 ms for 2-4 members against 0.6-2.4 ms for a gloo operation of a few bytes; it says who is missing, and a broken connection
is news at once. A mesh lives as long as its quorum.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from google.protobuf.message import Message

from lighthouse.messages import Process, Quorum
from lighthouse.security import WRONG_TOKEN, Security
from torchft_plus.manager.transport import (
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    FrameConnection,
    PeerRefused,
    connect,
    join_address,
    listen,
)
from torchft_plus.pb import peer_pb2 as pb

logger = logging.getLogger(__name__)

MAX_WAITING = 4096
"""Connections for quorums that have not been adopted here yet."""


class MeshError(RuntimeError):
    """The mesh of a quorum could not be built; ``peer_rank`` is who was missing, where known.

    ``refused``: token or TLS settings do not fit, so that trying again cannot help.
    """

    def __init__(self, message: str, peer_rank: int | None, refused: bool = False) -> None:
        super().__init__(message)
        self.peer_rank = peer_rank
        self.refused = refused


class PeerService:
    """Accepts connections of other leaders and keeps them until their quorum is adopted here.

    Args:
        job_id: hellos of other jobs are refused.
        keep_ms: so long.
        silence_limit_ms: see ``FrameConnection``.
        security: what other leaders must show.
    """

    def __init__(
        self, job_id: str, keep_ms: int, silence_limit_ms: int | None = None, security: Security | None = None
    ) -> None:
        self._silence_limit_ms = silence_limit_ms
        self._job_id = job_id
        self._security = security or Security()
        self._keep_ms = keep_ms
        self._server: asyncio.Server | None = None
        self._waiting: dict[tuple[int, Process], FrameConnection] = {}
        self._hellos: dict[tuple[int, Process], pb.PeerHello] = {}
        self._arrivals: dict[tuple[int, Process], asyncio.Future[None]] = {}
        self._new: set[FrameConnection] = set()

    async def listen(self, host: str) -> str:
        """Listen on any free port of ``host``; returns the address."""
        self._server = await listen(self._connection, host, self._security)
        return join_address(host, self._server.sockets[0].getsockname()[1])

    async def take(self, quorum_id: int, process: Process) -> tuple[FrameConnection, pb.PeerHello]:
        """Wait for ``process`` to connect for ``quorum_id``. The caller brings the deadline."""
        key = (quorum_id, process)
        if key not in self._waiting:
            self._arrivals[key] = asyncio.get_running_loop().create_future()
            try:
                await self._arrivals[key]
            finally:
                del self._arrivals[key]
        return self._waiting.pop(key), self._hellos.pop(key)

    def close(self) -> None:
        """Stop listening and drop who waits."""
        if self._server is not None:
            self._server.close()
        for connection in [*self._waiting.values(), *self._new]:
            connection.close()
        self._waiting.clear()
        self._new.clear()

    def _connection(self) -> FrameConnection:
        connection = FrameConnection(pb.PeerFrame.FromString, self._hello, self._lost, self._silence_limit_ms)
        connection.max_frame_bytes = MAX_HELLO_BYTES
        if len(self._waiting) + len(self._new) >= MAX_WAITING:
            asyncio.get_running_loop().call_soon(connection.close)
            return connection
        self._new.add(connection)
        asyncio.get_running_loop().call_later(self._keep_ms / 1000, self._expire, connection)
        return connection

    def _hello(self, connection: FrameConnection, message: Message) -> None:
        frame = cast(pb.PeerFrame, message)
        hello = frame.hello
        self._new.discard(connection)
        if frame.WhichOneof("body") != "hello" or hello.job_id != self._job_id:
            connection.close()
            return
        key = (hello.quorum_id, Process(hello.replica_id, hello.incarnation))
        arrival = self._arrivals.get(key)
        if not self._security.accepts(hello.token):
            logger.warning("leader %.64r was refused: %s", hello.replica_id, WRONG_TOKEN)
            connection.send(pb.PeerFrame(refused=pb.Refused(reason=WRONG_TOKEN)))
            connection.close()
            if arrival is not None and not arrival.done():
                arrival.set_exception(PeerRefused(WRONG_TOKEN))
            return
        hello.ClearField("token")
        connection.max_frame_bytes = MAX_FRAME_BYTES
        connection.keep_early()
        self._waiting[key], self._hellos[key] = connection, hello
        if arrival is not None and not arrival.done():
            arrival.set_result(None)

    def _lost(self, connection: FrameConnection, reason: str) -> None:
        if connection.refused:
            logger.warning("a leader was refused: %s", reason)
        self._forget(connection)

    def _forget(self, connection: FrameConnection) -> None:
        self._new.discard(connection)
        for key in [key for key, value in self._waiting.items() if value is connection]:
            del self._waiting[key], self._hellos[key]

    def _expire(self, connection: FrameConnection) -> None:
        if connection in self._new or connection in self._waiting.values():
            self._forget(connection)
            connection.close()


class Mesh:
    """Connections of this leader to the others of one quorum.

    Args:
        on_frame: ``(quorum_id, replica_rank, frame)``.
        on_lost: ``(quorum_id, replica_rank, reason)``: a connection broke.
        silence_limit_ms: see ``FrameConnection``.
        security: as that of the ``PeerService``.
    """

    def __init__(
        self,
        quorum: Quorum,
        rank: int,
        on_frame: Callable[[int, int, pb.PeerFrame], None],
        on_lost: Callable[[int, int, str], None],
        silence_limit_ms: int | None = None,
        security: Security | None = None,
    ) -> None:
        self._silence_limit_ms = silence_limit_ms
        self.quorum = quorum
        self._security = security or Security()
        self._rank = rank
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._connections: dict[int, FrameConnection] = {}
        self._ranks: dict[FrameConnection, int] = {}
        self._closed = False

    async def connect(
        self, service: PeerService, hello: pb.PeerHello, timeout_ms: int
    ) -> dict[int, pb.PeerHello]:
        """Connect to all: this leader calls lower ranks and is called by higher ones. Returns all hellos by rank.

        Raises:
            MeshError: somebody refused or did not come within ``timeout_ms``.
        """
        hellos = {self._rank: hello}
        tasks = {
            rank: asyncio.create_task(
                self._call(rank, hello) if rank < self._rank else self._answer(rank, service, hello)
            )
            for rank in range(len(self.quorum.members))
            if rank != self._rank
        }
        if tasks:
            done, pending = await asyncio.wait(
                tasks.values(), timeout=timeout_ms / 1000, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in pending:
                task.cancel()
            # All of them are looked at: an exception that nobody takes would end the agent.
            errors = {rank: task.exception() for rank, task in tasks.items() if task in done}
            for rank, error in errors.items():
                if error is not None:
                    refused = isinstance(error, PeerRefused)
                    raise MeshError(f"no connection to {self._name(rank)}: {error}", rank, refused)
            for rank, task in tasks.items():
                if task in pending:
                    raise MeshError(f"{self._name(rank)} did not connect within {timeout_ms} ms", rank)
                hellos[rank] = task.result()
        return hellos

    def send(self, frame: pb.PeerFrame) -> None:
        """To all others."""
        for connection in self._connections.values():
            connection.send(frame)

    def close(self) -> None:
        """End all connections, after what is queued has been sent."""
        self._closed = True
        for connection in self._connections.values():
            connection.close()

    async def _call(self, rank: int, hello: pb.PeerHello) -> pb.PeerHello:
        answer: asyncio.Future[pb.PeerHello] = asyncio.get_running_loop().create_future()

        def first(connection: FrameConnection, message: Message) -> None:
            self._check_hello(rank, cast(pb.PeerFrame, message), answer)
            connection.on_frame = self._frame

        def lost(connection: FrameConnection, reason: str) -> None:
            if not answer.done():
                answer.set_exception((PeerRefused if connection.refused else ConnectionError)(reason))
            self._lost(connection, reason)

        connection = await connect(
            lambda: FrameConnection(pb.PeerFrame.FromString, first, lost, self._silence_limit_ms),
            self.quorum.members[rank].address,
            self._security,
        )
        self._add(rank, connection)
        self._greet(connection, hello)
        return await answer

    async def _answer(self, rank: int, service: PeerService, hello: pb.PeerHello) -> pb.PeerHello:
        connection, theirs = await service.take(self.quorum.id, self.quorum.members[rank].process)
        connection.on_frame, connection.on_lost = self._frame, self._lost
        self._add(rank, connection)
        self._greet(connection, hello)
        for message in connection.take_early():
            self._frame(connection, message)
        return theirs

    def _greet(self, connection: FrameConnection, hello: pb.PeerHello) -> None:
        frame = pb.PeerFrame(hello=hello)
        frame.hello.token = self._security.token
        connection.send(frame)

    def _check_hello(self, rank: int, frame: pb.PeerFrame, answer: asyncio.Future[pb.PeerHello]) -> None:
        process = Process(frame.hello.replica_id, frame.hello.incarnation)
        if frame.WhichOneof("body") == "refused":
            answer.set_exception(PeerRefused(f"it refuses this process: {frame.refused.reason[:400]}"))
        elif not self._security.accepts(frame.hello.token):
            answer.set_exception(PeerRefused(WRONG_TOKEN))
        elif frame.WhichOneof("body") == "hello" and process == self.quorum.members[rank].process:
            frame.hello.ClearField("token")
            answer.set_result(frame.hello)
        else:
            answer.set_exception(ConnectionError(f"another process answers there ({process})"))

    def _add(self, rank: int, connection: FrameConnection) -> None:
        if self._closed:
            connection.close()
            return
        self._connections[rank] = connection
        self._ranks[connection] = rank

    def _frame(self, connection: FrameConnection, message: Message) -> None:
        if not self._closed:
            self._on_frame(self.quorum.id, self._ranks[connection], cast(pb.PeerFrame, message))

    def _lost(self, connection: FrameConnection, reason: str) -> None:
        rank = self._ranks.get(connection)
        if rank is not None and not self._closed:
            self._on_lost(self.quorum.id, rank, reason)

    def _name(self, rank: int) -> str:
        return self.quorum.members[rank].process.replica_id
