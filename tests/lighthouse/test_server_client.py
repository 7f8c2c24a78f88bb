"""Daemon and client over real gRPC: crashes of real processes, restarts, addresses, jobs, bad messages."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from fake_member import START, FakeMember, start, until_status
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lighthouse import wire
from lighthouse.client import LighthouseUnreachable, fetch_status, report_exit
from lighthouse.core.words import CoreConfig
from lighthouse.daemon import LighthouseDaemon
from lighthouse.events import EventLog
from lighthouse.messages import Hello, Position, Process
from lighthouse.rpc import SESSION, parse_address, target_of
from lighthouse.server import LighthouseServer
from lighthouse.storage import MemoryStorage

LOOPBACK = "127.0.0.1:0"
FAKE_MEMBER = Path(__file__).parent / "fake_member.py"


def settle(members: list[FakeMember], names: str) -> None:
    for member in members:
        member.wait_for(lambda m: m.members() == list(names))


def test_members_form_a_quorum_lose_one_and_take_it_back(members: list[FakeMember]) -> None:
    with LighthouseServer(LOOPBACK, expected_replicas=3) as server:
        a, b, c = start(members, server.address(), "abc")
        settle([a, b, c], "abc")
        assert a.quorum == b.quorum == c.quorum
        lost_at = time.monotonic()
        c.close()
        settle([a, b], "ab")
        assert a.formed_at() - lost_at < 1.0
        c2 = FakeMember(server.address(), "c", "2")
        members.append(c2)
        settle([a, b, c2], "abc")
        assert c2.quorum is not None
        assert c2.quorum.members[2].process == Process("c", "2")


def test_kill_of_a_real_process_is_news_at_once(members: list[FakeMember]) -> None:
    with LighthouseServer(LOOPBACK, expected_replicas=3) as server:
        command = [sys.executable, str(FAKE_MEMBER), server.address(), "c", "1"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            a, b = start(members, server.address(), "ab")
            assert child.stdout is not None
            assert child.stdout.readline() == b"in\n"
            settle([a, b], "abc")
            until_status(server.address(), "c", lambda peer: peer.position.progress.counter > 0)
            killed_at = time.monotonic()
            child.send_signal(signal.SIGKILL)
            settle([a, b], "ab")
            assert max(a.formed_at(), b.formed_at()) - killed_at < 1.0, (
                "a heartbeat limit of 5 s is not what it costs"
            )
        finally:
            child.kill()
            child.communicate()


def test_a_frozen_process_is_left_out_and_finds_its_way_back(members: list[FakeMember]) -> None:
    with LighthouseServer(LOOPBACK, expected_replicas=2, heartbeat_timeout_ms=1_500) as server:
        command = [sys.executable, str(FAKE_MEMBER), server.address(), "b", "1"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            [a] = start(members, server.address(), "a")
            settle([a], "ab")
            child.send_signal(signal.SIGSTOP)
            settle([a], "a")
            assert a.quorum is not None
            assert "silent" in a.quorum.reason
            child.send_signal(signal.SIGCONT)
            settle([a], "ab")
            assert a.quorum is not None
            assert a.quorum.members[1].process == Process("b", "1")
        finally:
            child.kill()
            child.communicate()


def test_an_exit_that_is_reported_needs_no_broken_stream(members: list[FakeMember]) -> None:
    with LighthouseServer(LOOPBACK, expected_replicas=2) as server:
        a, b = start(members, server.address(), "ab")
        assert report_exit(server.address(), "job", Process("b", "1"))
        settle([a], "a")
        b.wait_for(lambda m: m.retired())
        assert not report_exit(server.address(), "job", Process("nobody", "1"))
        assert not report_exit(server.address(), "no such job", Process("a", "1"))
        with pytest.raises(ValueError, match=r"process\.replica_id"):
            report_exit(server.address(), "job", Process("", "1"))


def test_a_leaver_is_told_that_it_may_go(members: list[FakeMember]) -> None:
    with LighthouseServer(LOOPBACK, expected_replicas=2) as server:
        a, b = start(members, server.address(), "ab")
        b.leave()
        b.wait_for(lambda m: m.retired())
        retired = b.retired()
        assert retired is not None
        assert retired.left
        settle([a], "a")


def test_a_duplicate_is_refused_and_the_healthy_one_trains_on(members: list[FakeMember]) -> None:
    with LighthouseServer(LOOPBACK, expected_replicas=2) as server:
        a, b = start(members, server.address(), "ab")
        twin = FakeMember(server.address(), "b", "2")
        members.append(twin)
        twin.wait_for(lambda m: m.retired())
        assert "in use" in str(twin.retired())
        assert a.members() == b.members() == ["a", "b"]
        assert len(b.words) == 1


@pytest.mark.parametrize("keep_store", [True, False], ids=["store", "no-store"])
def test_a_restarted_lighthouse_takes_up_the_running_quorum(
    members: list[FakeMember], tmp_path: Path, keep_store: bool
) -> None:
    store = tmp_path / "lighthouse.sqlite"
    first = LighthouseServer(LOOPBACK, expected_replicas=2, store=store)
    address = first.address()
    a, b = start(members, address, "ab")
    settle([a, b], "ab")
    quorum = a.quorum
    first.shutdown()
    for member in (a, b):
        member.wait_for(lambda m: m.connections[-1:] == [False])
    if not keep_store:
        store.unlink()
    with LighthouseServer(target_of(address), store=store) as second:
        for member in (a, b):
            member.wait_for(lambda m: m.connections[-1:] == [True])
        wait_until(lambda: fetch_status(address).jobs[0].HasField("quorum"))
        assert a.quorum == b.quorum == quorum
        assert len(a.words) == len(b.words) == 1, "nobody was revoked, no round"
        c = start(members, second.address(), "c")[0]
        settle([a, b, c], "abc")
        assert c.quorum is not None
        assert quorum is not None
        assert c.quorum.id > quorum.id


def wait_until(what: object, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline
        pause.wait(0.05)


def test_of_two_lighthouses_on_one_store_the_older_one_stops(
    members: list[FakeMember], tmp_path: Path
) -> None:
    store = tmp_path / "lighthouse.sqlite"
    older = LighthouseServer(LOOPBACK, expected_replicas=1, store=store)
    start(members, older.address(), "a")
    with LighthouseServer(LOOPBACK, expected_replicas=1, store=store) as newer:
        start(members, newer.address(), "b", job_id="other")
        members.append(FakeMember(newer.address(), "x"))  # the newer one claims the job
        members[-1].wait_for(lambda m: m.connections)
        members.append(FakeMember(older.address(), "c"))  # the older one has to form a quorum
        wait_until(lambda: not older._thread.is_alive())
    older.shutdown()


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_ipv6_and_both(members: list[FakeMember]) -> None:
    with LighthouseServer("[::1]:0", expected_replicas=2) as server:
        assert server.address().startswith("http://[::1]:")
        start(members, server.address(), "ab")
    with LighthouseServer("[::]:0", expected_replicas=2, min_replicas=2) as server:
        _, port = parse_address(server.address())
        members.append(FakeMember(f"[::1]:{port}", "c"))
        start(members, f"127.0.0.1:{port}", "d")
        settle(members[-2:], "cd")


def test_jobs_do_not_see_one_another(members: list[FakeMember]) -> None:
    with LighthouseServer(LOOPBACK, expected_replicas=2) as server:
        one = start(members, server.address(), "ab", job_id="one")
        two = start(members, server.address(), "abc"[:2], job_id="two")
        one[1].close()
        settle(one[:1], "a")
        settle(two, "ab")
        assert all(len(m.words) == 1 for m in two)
        assert {j.job_id for j in fetch_status(server.address()).jobs} == {"one", "two"}
        [job] = fetch_status(server.address(), "two").jobs
        assert [m.process.replica_id for m in job.quorum.members] == ["a", "b"]
        assert {p.state for p in job.peers} == {"member"}


def test_health_service_and_event_log(members: list[FakeMember], tmp_path: Path) -> None:
    log = EventLog(tmp_path / "lighthouse.jsonl", "lighthouse")
    with LighthouseServer(LOOPBACK, expected_replicas=1, events=log) as server:
        start(members, server.address(), "a")
        with grpc.insecure_channel(target_of(server.address())) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=5)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        members[0].close()
        wait_until(lambda: "lost" in (tmp_path / "lighthouse.jsonl").read_text())
    log.close()
    events = [json.loads(line) for line in (tmp_path / "lighthouse.jsonl").read_text().splitlines()]
    assert [e["kind"] for e in events] == ["listening", "connected", "formed", "lost", "revoke"]
    assert events[2]["members"] == ["a"]
    assert events[2]["base_step"] == 0
    assert events[0]["address"] == target_of(server.address())


def opened(replica_id: str = "a") -> bytes:
    hello = Hello(Position(0, START, level=True), "127.0.0.1:9", 1)
    return wire.encode_up(wire.Open("job", Process(replica_id, "1"), 1, hello))


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([b"\xff\xff\xff"], "no valid SessionUp"),
        ([wire.encode_up(wire.Pong())], "must be `open`"),
        ([opened("")], "process.replica_id"),
        ([opened(), b"\xff\xff\xff"], "no valid SessionUp"),
        ([opened(), opened()], "opened once"),
    ],
)
def test_a_bad_message_ends_its_stream_with_a_sentence(messages: list[bytes], sentence: str) -> None:
    with (
        LighthouseServer(LOOPBACK, expected_replicas=1) as server,
        grpc.insecure_channel(target_of(server.address())) as channel,
    ):
        done = threading.Event()

        def requests() -> Iterator[bytes]:
            yield from messages
            done.wait(20)

        call = channel.stream_stream(SESSION)(requests(), timeout=20)
        with pytest.raises(grpc.RpcError) as error:
            list(call)
        done.set()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert sentence in error.value.details()
        assert fetch_status(server.address()) is not None, "the Lighthouse lives on"


def test_nobody_there_is_said_in_time() -> None:
    started = time.monotonic()
    with pytest.raises(LighthouseUnreachable, match=r"127\.0\.0\.1:1 did not answer within 0\.3 s"):
        fetch_status("127.0.0.1:1", timeout_s=0.3)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    "bad", ["", "host", "host:", "host:http", "::1:80", "a b:1", "http://h:99999", "h:0"]
)
def test_a_bad_address_gets_a_sentence(bad: str) -> None:
    with pytest.raises(ValueError, match="give"):
        target_of(bad)


def test_addresses_in_all_forms() -> None:
    assert target_of("h:1") == "h:1"
    assert target_of("http://h:1/") == "h:1"
    assert target_of("[::1]:80") == "[::1]:80"
    assert target_of("http://[fe80::1]:80") == "[fe80::1]:80"


def test_a_port_in_use_is_said_and_not_shared() -> None:
    with LighthouseServer(LOOPBACK) as server, pytest.raises(RuntimeError, match="cannot listen on"):
        LighthouseServer(target_of(server.address()))


# --- command line ---------------------------------------------------------------------------------------------


def run_cli(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lighthouse", *arguments],
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        (["--min_replicas", "0"], {}, "min_replicas is 0"),
        (["--min-replicas", "x"], {}, "'x' is no whole number"),
        ([], {"TORCHFT_LIGHTHOUSE_MIN_REPLICAS": "many"}, "'many' is no whole number"),
        (["--min_replicas", "4", "--expected_replicas", "2"], {}, "less than min_replicas"),
        (["--bind", "nowhere"], {}, "'nowhere' is no address"),
        (["--timeout_ms", "10"], {}, "timeout_ms is 10"),
        (["--heartbeat_timeout_ms", "1"], {}, "heartbeat_timeout_ms is 1"),
        (["--quorum_tick_ms", "0"], {}, "quorum_tick_ms is 0"),
        (["--log_level", "loud"], {}, "log_level"),
        (["--unknown"], {}, "unrecognized arguments: --unknown"),
        (["status", "--address", "x"], {}, "'x' is no address"),
    ],
)
def test_bad_use_gets_one_sentence_and_exit_2(
    arguments: list[str], environment: dict[str, str], sentence: str
) -> None:
    result = run_cli(*arguments, environment=environment)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_daemon_starts_fast_serves_and_ends_on_sigterm(members: list[FakeMember], tmp_path: Path) -> None:
    environment = os.environ | {"TORCHFT_LIGHTHOUSE_EXPECTED_REPLICAS": "2", "XDG_STATE_HOME": str(tmp_path)}
    command = [
        sys.executable,
        "-m",
        "lighthouse",
        "--bind",
        LOOPBACK,
        "--store",
        str(tmp_path / "s" / "q.sqlite"),
    ]
    daemon = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert daemon.stdout is not None
        line = daemon.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:")
        address = line.split()[-1]
        start(members, address, "ab")
        status = run_cli("status", "--story", "--address", address)
        assert status.returncode == 0
        assert "a, b; base step 0" in status.stdout
        assert "formed" in status.stdout
        gone = run_cli("gone", "--address", address, "job", "b")
        assert gone.stdout == "noted\n"
        settle(members[:1], "a")
        daemon.send_signal(signal.SIGTERM)
        _, errors = daemon.communicate(timeout=10)
        assert daemon.returncode == 0, errors
        assert "formed: a, b; first quorum" in errors
        assert (tmp_path / "s" / "q.sqlite").exists()
    finally:
        daemon.kill()
        daemon.communicate()


def test_a_lighthouse_that_was_frozen_itself_loses_nobody(members: list[FakeMember]) -> None:
    command = [sys.executable, "-m", "lighthouse", "--bind", LOOPBACK, "--expected_replicas", "2"]
    command += ["--heartbeat_timeout_ms", "1500", "--store", "memory"]
    daemon = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert daemon.stdout is not None
        address = daemon.stdout.readline().split()[-1]
        a, b = start(members, address, "ab")
        daemon.send_signal(signal.SIGSTOP)
        for member in (a, b):
            member.wait_for(lambda m: False in m.connections)
        daemon.send_signal(signal.SIGCONT)
        for member in (a, b):
            member.wait_for(lambda m: m.connections[-1:] == [True])
        heard = [len(member.words) for member in (a, b)]
        start(members, address, "c")
        settle([a, b], "abc")
        assert heard == [1, 1], "nobody was revoked"
        assert a.quorum is not None
        assert a.quorum.reason.startswith("c wants to join")
    finally:
        daemon.kill()
        daemon.communicate()


def test_the_lighthouse_imports_neither_torch_nor_torchft_plus() -> None:
    code = (
        "import sys, lighthouse.cli, lighthouse.server\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'torchft_plus', 'numpy')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert result.stdout == "[]\n"


class _BrokenStream:
    """A stream whose writes fail, but only after the call was cancelled twice, as gRPC does at times."""

    def __init__(self) -> None:
        self.written_to = asyncio.Event()
        self.broken = asyncio.Event()
        opening = wire.Open("job", Process("a", "1"), 1, Hello(Position(0, START), "h:1", 1))
        self._words = [wire.encode_up(opening)]

    async def read(self) -> bytes:
        if not self._words:
            await asyncio.Event().wait()
        return self._words.pop()

    async def write(self, _data: bytes) -> None:
        self.written_to.set()
        while not self.broken.is_set():
            try:
                await self.broken.wait()
            except asyncio.CancelledError:
                continue  # a write that is under way
        raise RuntimeError("the stream is broken")


def test_a_stream_that_breaks_while_it_is_written_to_makes_no_noise() -> None:
    complaints: list[str] = []

    async def break_it() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what["message"]))
        daemon = LighthouseDaemon(CoreConfig(), MemoryStorage(), EventLog(None, "lighthouse"))
        stream = _BrokenStream()
        call = asyncio.create_task(daemon._session(None, stream))  # type: ignore[arg-type]
        await stream.written_to.wait()
        for _ in range(2):
            call.cancel()
            await asyncio.sleep(0)
        stream.broken.set()
        await asyncio.wait([call])
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)

    asyncio.run(break_it())
    gc.collect()
    assert complaints == []
