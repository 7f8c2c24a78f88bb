"""The leaders' mesh over real sockets: who connects, who is missing, what a broken connection says."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import struct
from collections.abc import Awaitable, Callable

import pytest

from lighthouse.messages import Head, Member, Process, Quorum
from lighthouse.security import Security
from torchft_plus.manager.mesh import Mesh, MeshError, PeerService
from torchft_plus.manager.transport import MAX_FRAME_BYTES, split_address
from torchft_plus.pb import peer_pb2 as pb

JOB = "job"
SILENCE_MS = 7_000


class Leader:
    """One leader with its service and what its mesh told it."""

    def __init__(self, name: str, security: Security | None = None) -> None:
        self.security = security
        self.process = Process(name, f"incarnation-of-{name}")
        self.service = PeerService(JOB, 2_000, SILENCE_MS, security)
        self.frames: list[tuple[int, pb.PeerFrame]] = []
        self.lost: list[tuple[int, str]] = []
        self.changed = asyncio.Event()
        self.address = ""

    async def listen(self) -> None:
        self.address = await self.service.listen("127.0.0.1")

    def mesh(self, quorum: Quorum) -> Mesh:
        rank = quorum.rank_of(self.process)
        assert rank is not None
        return Mesh(quorum, rank, self._on_frame, self._on_lost, SILENCE_MS, self.security)

    def hello(self, quorum_id: int) -> pb.PeerHello:
        return pb.PeerHello(
            job_id=JOB,
            quorum_id=quorum_id,
            replica_id=self.process.replica_id,
            incarnation=self.process.incarnation,
            layout_digest="same",
        )

    def _on_frame(self, quorum_id: int, rank: int, frame: pb.PeerFrame) -> None:
        self.frames.append((rank, frame))
        self.changed.set()

    def _on_lost(self, quorum_id: int, rank: int, reason: str) -> None:
        self.lost.append((rank, reason))
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await self.changed.wait()
                self.changed.clear()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(bounded())


async def leaders(count: int) -> list[Leader]:
    made = [Leader(f"r{index}") for index in range(count)]
    for leader in made:
        await leader.listen()
    return made


def quorum_of(members: list[Leader], quorum_id: int = 7) -> Quorum:
    return Quorum(quorum_id, tuple(Member(m.process, m.address, True) for m in members), Head())


async def connected(members: list[Leader], quorum: Quorum) -> list[Mesh]:
    meshes = [member.mesh(quorum) for member in members]
    hellos = await asyncio.gather(
        *(
            mesh.connect(member.service, member.hello(quorum.id), 10_000)
            for mesh, member in zip(meshes, members, strict=True)
        )
    )
    for found in hellos:
        assert sorted(found) == list(range(len(members)))
        assert [found[rank].replica_id for rank in sorted(found)] == [m.process.replica_id for m in members]
    return meshes


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_leader_hears_every_other(count: int) -> None:
    async def test() -> None:
        members = await leaders(count)
        meshes = await connected(members, quorum_of(members))
        for rank, mesh in enumerate(meshes):
            mesh.send(pb.PeerFrame(vote=pb.PeerVote(quorum_id=7, step=rank + 1)))
        for rank, member in enumerate(members):
            await member.until(lambda member=member: len(member.frames) == count - 1)
            assert sorted(peer for peer, _ in member.frames) == [
                peer for peer in range(count) if peer != rank
            ]
            assert all(frame.vote.step == peer + 1 for peer, frame in member.frames)

    run(test)


def test_frames_sent_before_the_other_side_adopted_are_kept() -> None:
    async def test() -> None:
        members = await leaders(2)
        quorum = quorum_of(members)
        late, early = members[0].mesh(quorum), members[1].mesh(quorum)
        calling = asyncio.create_task(early.connect(members[1].service, members[1].hello(7), 10_000))
        while not early._connections:  # pyright: ignore[reportPrivateUsage]
            await asyncio.sleep(0)
        early.send(pb.PeerFrame(vote=pb.PeerVote(quorum_id=7, step=1)))
        await late.connect(members[0].service, members[0].hello(7), 10_000)
        await calling
        await members[0].until(lambda: len(members[0].frames) == 1)

    run(test)


def test_a_leader_that_never_comes_is_named() -> None:
    async def test() -> None:
        members = await leaders(3)
        quorum = quorum_of(members)
        with pytest.raises(MeshError, match="r2 did not connect within 300 ms") as caught:
            one = asyncio.create_task(
                members[1].mesh(quorum).connect(members[1].service, members[1].hello(7), 5_000)
            )
            try:
                await members[0].mesh(quorum).connect(members[0].service, members[0].hello(7), 300)
            finally:
                one.cancel()
        assert caught.value.peer_rank == 2

    run(test)


def test_two_dead_leaders_at_once_leave_no_exception_behind() -> None:
    async def test() -> None:
        unhandled: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        members = await leaders(3)
        quorum = quorum_of(members)
        for member in members[:2]:
            member.service.close()
        with pytest.raises(MeshError, match="no connection to r0"):
            await members[2].mesh(quorum).connect(members[2].service, members[2].hello(7), 5_000)
        gc.collect()
        await asyncio.sleep(0)
        assert unhandled == []

    run(test)


def test_a_dead_leader_is_refused_at_once() -> None:
    async def test() -> None:
        members = await leaders(2)
        members[0].service.close()
        started = asyncio.get_running_loop().time()
        with pytest.raises(MeshError, match="no connection to r0") as caught:
            await members[1].mesh(quorum_of(members)).connect(members[1].service, members[1].hello(7), 20_000)
        assert caught.value.peer_rank == 0
        assert asyncio.get_running_loop().time() - started < 10

    run(test)


def test_another_incarnation_at_the_same_address_is_refused() -> None:
    async def test() -> None:
        members = await leaders(2)
        quorum = quorum_of(members)
        members[1].process = Process("r1", "newer")
        stranger = Mesh(quorum, 1, lambda *_: None, lambda *_: None)
        calling = asyncio.create_task(stranger.connect(members[1].service, members[1].hello(7), 2_000))
        with pytest.raises(MeshError, match="r1 did not connect"):
            await members[0].mesh(quorum).connect(members[0].service, members[0].hello(7), 500)
        calling.cancel()

    run(test)


def test_a_broken_connection_is_news() -> None:
    async def test() -> None:
        members = await leaders(3)
        meshes = await connected(members, quorum_of(members))
        meshes[1].close()
        for rank in (0, 2):
            await members[rank].until(lambda rank=rank: bool(members[rank].lost))
            assert [peer for peer, _ in members[rank].lost] == [1]
        assert members[1].lost == []

    run(test)


def test_the_kernel_watches_the_silence_of_peers() -> None:
    """What a cut link costs is shown in tests/e2e/test_network.py; here, that both ends of every connection are watched."""

    async def test() -> None:
        members = await leaders(2)
        meshes = await connected(members, quorum_of(members))
        for mesh in meshes:
            for connection in mesh._connections.values():
                assert connection._transport is not None
                sock = connection._transport.get_extra_info("socket")
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                if hasattr(socket, "TCP_USER_TIMEOUT"):
                    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == SILENCE_MS
                    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1

    run(test)


def test_a_forked_child_does_not_hide_its_parents_death() -> None:
    """A data loader's worker outlives its killed trainer for a while; the peers must notice all the same."""

    async def test() -> None:
        members = await leaders(2)
        meshes = await connected(members, quorum_of(members))
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        try:
            meshes[0].close()
            await members[1].until(lambda: bool(members[1].lost))
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    run(test)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 4,
        struct.pack(">I", MAX_FRAME_BYTES + 1),
        struct.pack(">I", 3) + b"\xff\xff\xff",
        b"",
    ],
)
def test_garbage_at_the_door_harms_nobody(garbage: bytes) -> None:
    async def test() -> None:
        members = await leaders(2)
        host, port = split_address(members[0].address)
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(garbage)
        if garbage:
            assert await asyncio.wait_for(reader.read(), 10) == b""
        await connected(members, quorum_of(members))
        writer.close()

    run(test)
