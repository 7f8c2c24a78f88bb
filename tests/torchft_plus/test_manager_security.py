"""Token and TLS in the leaders' mesh and between the ranks of a group, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from pathlib import Path

import pytest
from run_security import OTHER_TOKEN, TOKEN, make_security, make_tls, mixed
from test_manager_group_link import Group
from test_manager_mesh import Leader, connected, quorum_of, run

from lighthouse.security import HANDSHAKE_DEADLINE_S, Security
from torchft_plus.manager.mesh import MeshError
from torchft_plus.manager.transport import MAX_HELLO_BYTES, PeerRefused, split_address
from torchft_plus.pb import peer_pb2 as pb

Cases = list[tuple[str, Security, Security, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def cases(folder: Path) -> Cases:
    """(name, the called one's, the caller's, what the caller is told)."""
    ours, theirs = make_tls(folder / "ours"), make_tls(folder / "theirs")
    odd = make_tls(folder / "odd", name="something-else")
    return [
        ("wrong token", Security(TOKEN), Security(OTHER_TOKEN), "TORCHFT_PLUS_TOKEN_FILE"),
        ("no token", Security(TOKEN), Security(), "TORCHFT_PLUS_TOKEN_FILE"),
        ("no TLS", Security(tls=ours), Security(), "wants TLS"),
        ("TLS to one without", Security(), Security(tls=ours), "speaks no TLS"),
        ("another authority", Security(tls=ours), Security(tls=theirs), "is not accepted"),
        (
            "certificate of another authority",
            Security(tls=ours),
            Security(tls=mixed(theirs, ours)),
            "accepted",
        ),
        ("another name", Security(tls=odd), Security(tls=odd), "carry the name"),
    ]


async def pair(one: Security, two: Security) -> list[Leader]:
    members = [Leader("r0", one), Leader("r1", two)]
    for member in members:
        await member.listen()
    return members


@pytest.mark.parametrize("count", [2, 4])
def test_a_mesh_with_token_and_tls(count: int, folder: Path) -> None:
    security = make_security(folder / f"mesh-{count}")

    async def test() -> None:
        members = [Leader(f"r{rank}", security) for rank in range(count)]
        for member in members:
            await member.listen()
        meshes = await connected(members, quorum_of(members))
        for mesh in meshes:
            mesh.send(pb.PeerFrame(vote=pb.PeerVote(quorum_id=7, step=1)))
        for member in members:
            await member.until(lambda member=member: len(member.frames) == count - 1)
        assert all(not frame.hello.token for member in members for _, frame in member.frames)
        meshes[0].close()
        await members[1].until(lambda: bool(members[1].lost))
        assert members[1].lost[0][0] == 0, "a broken connection is news"

    run(test)


def test_every_mismatch_of_leaders_is_told_to_both(cases: Cases, caplog: pytest.LogCaptureFixture) -> None:
    async def one(called: Security, caller: Security, words: str) -> None:
        members = await pair(called, caller)
        quorum = quorum_of(members)
        answering = asyncio.create_task(
            members[0].mesh(quorum).connect(members[0].service, members[0].hello(7), 10_000)
        )
        started = time.monotonic()
        with pytest.raises(MeshError, match=words) as caught:
            await members[1].mesh(quorum).connect(members[1].service, members[1].hello(7), 10_000)
        assert caught.value.refused, "trying again cannot help"
        assert caught.value.peer_rank == 0
        assert "TORCHFT_PLUS_" in str(caught.value)
        assert time.monotonic() - started < HANDSHAKE_DEADLINE_S, "nobody waited for a deadline"
        await asyncio.wait([answering], timeout=0.2)
        if (
            not answering.cancel()
        ):  # a wrong token is known to be that of this member; a failed handshake is nobody's
            error = answering.exception()
            assert isinstance(error, MeshError)
            assert error.refused

    for name, called, caller, words in cases:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            run(lambda: one(called, caller, words))  # noqa: B023
        told = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
        caller_found_it = name in (
            "another authority",
            "another name",
        )  # it hangs up: there is nothing to refuse
        assert len(told) == 1 or caller_found_it, (name, told)
        assert all("TORCHFT_PLUS_" in sentence for sentence in told)
        assert not any(OTHER_TOKEN in sentence or TOKEN in sentence for sentence in told)


def test_a_called_leader_without_the_token_is_refused_by_the_caller() -> None:
    async def test() -> None:
        members = await pair(Security(), Security(TOKEN))
        quorum = quorum_of(members)
        answering = asyncio.create_task(
            members[0].mesh(quorum).connect(members[0].service, members[0].hello(7), 5_000)
        )
        with pytest.raises(MeshError, match="TORCHFT_PLUS_TOKEN_FILE") as caught:
            await members[1].mesh(quorum).connect(members[1].service, members[1].hello(7), 5_000)
        assert caught.value.refused
        await answering

    run(test)


def test_silent_and_talkative_strangers_keep_no_leader_out(folder: Path) -> None:
    security = make_security(folder / "strangers")

    async def test() -> None:
        members = await pair(security, security)
        target = split_address(members[0].address)
        silent = [socket.create_connection(target) for _ in range(10)]
        for connection, data in zip(
            silent, (b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03\x01", b"\xff" * 500), strict=False
        ):
            connection.sendall(data)
        await connected(members, quorum_of(members))
        for connection in silent:
            connection.setblocking(False)
            async with asyncio.timeout(HANDSHAKE_DEADLINE_S + 5):
                while data := await asyncio.get_running_loop().sock_recv(connection, 100):
                    assert data[0] == 21, "at most an alert"
            connection.close()

    run(test)


def test_a_stranger_cannot_make_a_leader_keep_much() -> None:
    async def test() -> None:
        member = Leader("r0", Security(TOKEN))
        await member.listen()
        reader, writer = await asyncio.open_connection(*split_address(member.address))
        writer.write(struct.pack(">I", MAX_HELLO_BYTES + 1))
        assert await reader.read() == b""
        writer.close()

    run(test)


# --- ranks of a group ---------------------------------------------------------------------------------------------


async def link_as(group: Group, security: Security) -> str:
    """What the rank is told."""
    group.security = security
    try:
        await group.link(1, "r0")
    except PeerRefused as error:
        return str(error)
    await group.until(lambda: bool(group.refused or group.leader_lost))
    return group.refused[0][1] if group.refused else ""


def test_a_group_with_token_and_tls(folder: Path) -> None:
    async def test() -> None:
        group = Group(3, security=make_security(folder / "group"))
        await group.open([1, 2])
        assert await group.hub.wait_complete(5_000) == []
        group.hub.send(1, pb.Word(left=pb.WordLeft()))
        await group.until(lambda: bool(group.words[1]))

    run(test)


def test_every_mismatch_of_a_rank_is_told_to_it(cases: Cases) -> None:
    async def one(called: Security, caller: Security, words: str) -> None:
        group = Group(2, security=called)
        await group.open([])
        told = await link_as(group, caller)
        assert words in told, (words, told)
        assert await group.hub.wait_complete(50) == [1]

    for _, called, caller, words in cases:
        run(lambda: one(called, caller, words))  # noqa: B023
