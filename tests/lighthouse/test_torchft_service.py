"""torchft's LighthouseService over real gRPC, spoken by a plain client of our own: runs without torchft."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_member import FakeMember
from run_security import TOKEN

from lighthouse.client import fetch_status, report_exit
from lighthouse.messages import Process
from lighthouse.pb import torchft_pb2 as pb
from lighthouse.rpc import target_of
from lighthouse.security import Security
from lighthouse.server import LighthouseServer
from lighthouse.status import describe

LOOPBACK = "127.0.0.1:0"
DEADLINE_S = 20.0
CALLER = Path(__file__).parent / "torchft_caller.py"


class Caller:
    """What a torchft manager server does: beats for ever, and asks when it is told to."""

    def __init__(self, address: str, name: str, beat: bool = True) -> None:
        self.name = name
        self._channel = grpc.insecure_channel(
            target_of(address), options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self._quorum = self._channel.unary_unary("/torchft.LighthouseService/Quorum")
        self._heartbeat = self._channel.unary_unary("/torchft.LighthouseService/Heartbeat")
        self._over = threading.Event()
        self._threads = ThreadPoolExecutor(2)
        if beat:
            self._threads.submit(self._beat)

    def ask(self, step: int = 0, deadline_s: float | None = DEADLINE_S, **more: Any) -> Any:
        """A future of the quorum."""
        member = pb.QuorumMember(replica_id=self.name, address=f"http://{self.name}:9", step=step, **more)
        request = pb.LighthouseQuorumRequest(requester=member).SerializeToString()
        return self._quorum.future(request, timeout=deadline_s)

    def beat_once(self, deadline_s: float | None) -> float:
        """How long the answer took, in seconds."""
        started = time.monotonic()
        request = pb.LighthouseHeartbeatRequest(replica_id=self.name).SerializeToString()
        assert self._heartbeat(request, timeout=deadline_s) == b""
        return time.monotonic() - started

    def close(self) -> None:
        self._over.set()
        self._channel.close()
        self._threads.shutdown()

    def _beat(self) -> None:
        while True:
            with contextlib.suppress(grpc.RpcError, ValueError):  # ValueError: the channel is closed
                self.beat_once(None)
            if self._over.wait(0.1):
                return


def quorum_of(call: Any) -> pb.Quorum:
    return pb.LighthouseQuorumResponse.FromString(call.result(DEADLINE_S)).quorum


def names(quorum: pb.Quorum) -> list[str]:
    return [member.replica_id for member in quorum.participants]


def wait_for_round(address: str) -> None:
    """Until the Lighthouse has taken up that somebody wants to join."""
    end = time.monotonic() + DEADLINE_S
    while not any(job.round for job in fetch_status(address).jobs):
        assert time.monotonic() < end, "no round was opened"


@pytest.fixture
def callers() -> Iterator[list[Caller]]:
    """Callers put here are closed at the end."""
    started: list[Caller] = []
    yield started
    for caller in started:
        caller.close()


def start(callers: list[Caller], address: str, names: str) -> list[Caller]:
    new = [Caller(address, name) for name in names]
    callers.extend(new)
    return new


def test_replicas_step_together_lose_one_and_take_a_new_one(callers: list[Caller]) -> None:
    with LighthouseServer(LOOPBACK, min_replicas=2) as server:
        a, b = start(callers, server.address(), "ab")
        first = [
            quorum_of(call) for call in [a.ask(), b.ask(data='{"x": 1}', world_size=2, store_address="s:1")]
        ]
        assert first[0] == first[1]
        assert names(first[0]) == ["a", "b"]
        assert abs(first[0].created.ToNanoseconds() / 1e9 - time.time()) < 60
        told = first[0].participants[1]
        assert (told.data, told.world_size, told.store_address) == ('{"x": 1}', 2, "s:1")

        (c,) = start(callers, server.address(), "c")
        joined = c.ask()
        wait_for_round(server.address())
        both = [a.ask(1), b.ask(1)]
        second = [quorum_of(call) for call in [*both, joined]]
        assert names(second[0]) == ["a", "b", "c"]
        assert second[0].quorum_id == second[1].quorum_id == second[2].quorum_id > first[0].quorum_id
        assert [member.step for member in second[2].participants] == [1, 1, 0]

        third = [quorum_of(call) for call in [a.ask(2), b.ask(2), c.ask(2)]]
        assert {q.quorum_id for q in third} == {second[0].quorum_id}
        assert {q.created.ToNanoseconds() for q in third} == {second[0].created.ToNanoseconds()}

        waiting = [a.ask(3), b.ask(3)]
        lost_at = time.monotonic()
        c.close()
        assert names(quorum_of(waiting[0])) == names(quorum_of(waiting[1])) == ["a", "b"]
        assert time.monotonic() - lost_at < 4.5, (
            "a broken connection is known before the heartbeat limit of 5 s"
        )


def test_a_killed_process_is_lost_before_its_heartbeats_are_missed(callers: list[Caller]) -> None:
    with LighthouseServer(LOOPBACK, expected_replicas=3) as server:
        a, b = start(callers, server.address(), "ab")
        child = subprocess.Popen(
            [sys.executable, str(CALLER), server.address(), "z"],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(CALLER.parent), *sys.path])},
        )
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"asked\n"
            calls = [a.ask(), b.ask()]
            assert child.stdout.readline() == b"a b z\n"
            assert [names(quorum_of(call)) for call in calls] == [["a", "b", "z"]] * 2
            calls = [a.ask(1), b.ask(1)]
            killed_at = time.monotonic()
            child.send_signal(signal.SIGKILL)
            assert [names(quorum_of(call)) for call in calls] == [["a", "b"]] * 2
            assert time.monotonic() - killed_at < 4.5
        finally:
            child.kill()
            child.wait()


def test_a_heartbeat_with_a_deadline_is_answered_at_once(callers: list[Caller]) -> None:
    with LighthouseServer(LOOPBACK, heartbeat_timeout_ms=10_000) as server:
        caller = Caller(server.address(), "a", beat=False)
        callers.append(caller)
        held_s = caller.beat_once(None)
        assert 3.5 < held_s < 10, "two fifths of the limit"
        assert caller.beat_once(30) < held_s - 1


def test_a_question_whose_deadline_is_over_is_taken_back(callers: list[Caller]) -> None:
    with LighthouseServer(LOOPBACK, min_replicas=2) as server:
        a, b, c = start(callers, server.address(), "abc")
        with pytest.raises(grpc.RpcError) as refused:
            quorum_of(a.ask(deadline_s=0.3))
        assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # pyright: ignore
        calls = [b.ask(), c.ask()]
        late = a.ask()
        assert {tuple(names(quorum_of(call))) for call in [*calls, late]} == {("a", "b", "c")}


def test_the_quorum_outlives_the_lighthouse(callers: list[Caller], tmp_path: Path) -> None:
    store = tmp_path / "store.sqlite"
    with LighthouseServer(LOOPBACK, min_replicas=2, store=store) as server:
        port = server.address().rpartition(":")[2]
        a, b = start(callers, server.address(), "ab")
        first = [quorum_of(call) for call in [a.ask(), b.ask()]].pop()
        call = a.ask(1)
        server.shutdown()
        # On a machine that is too busy to answer within the grace of the end, gRPC cancels the call.
        ends = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert call.exception(DEADLINE_S).code() in ends
    with LighthouseServer(f"127.0.0.1:{port}", min_replicas=2, store=store) as server:
        a, b = start(callers, server.address(), "ab")
        assert [quorum_of(call).quorum_id for call in [a.ask(1), b.ask(1)]] == [first.quorum_id] * 2


def test_status_and_the_word_of_an_operator(callers: list[Caller]) -> None:
    with LighthouseServer(LOOPBACK, min_replicas=1) as server:
        (a,) = start(callers, server.address(), "a")
        assert names(quorum_of(a.ask(7))) == ["a"], "min_replicas is 1"
        (b,) = start(callers, server.address(), "b")
        joins = b.ask(8)
        wait_for_round(server.address())
        assert {tuple(names(quorum_of(call))) for call in [a.ask(8), joins]} == {("a", "b")}
        for call in [a.ask(9), b.ask(9)]:
            quorum_of(call)
        text = describe(fetch_status(server.address()))
        assert "job torchft (torchft's managers: they ask at every step)" in text
        assert "member    b at http://b:9: step 9, train" in text
        call = a.ask(10)
        assert report_exit(server.address(), "torchft", Process("b", ""))
        assert names(quorum_of(call)) == ["a"]
        with pytest.raises(grpc.RpcError) as refused:
            quorum_of(b.ask(10))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION  # pyright: ignore


def test_jobs_of_our_members_stay_apart(callers: list[Caller]) -> None:
    with LighthouseServer(LOOPBACK, min_replicas=1, join_timeout_ms=500) as server:
        (a,) = start(callers, server.address(), "a")
        assert names(quorum_of(a.ask())) == ["a"]
        member = FakeMember(server.address(), "ours")
        try:
            member.wait_for(lambda m: m.quorum)
            assert member.members() == ["ours"]
            assert names(quorum_of(a.ask(1))) == ["a"]
        finally:
            member.close()


def test_our_member_in_torchfts_job_is_turned_away_with_a_sentence() -> None:
    with LighthouseServer(LOOPBACK) as server:
        member = FakeMember(server.address(), "ours", job_id="torchft")
        try:
            member.wait_for(lambda m: m.retired())
            assert "that of torchft's managers" in str(member.retired())
        finally:
            member.close()
        assert not fetch_status(server.address()).jobs


@pytest.mark.parametrize(
    ("request_bytes", "text"),
    [
        (b"", "requester is missing"),
        (b"\xff", "no valid LighthouseQuorumRequest"),
        (
            pb.LighthouseQuorumRequest(requester=pb.QuorumMember(replica_id="")).SerializeToString(),
            "requester.replica_id",
        ),
        (
            pb.LighthouseQuorumRequest(
                requester=pb.QuorumMember(replica_id="a", step=-1)
            ).SerializeToString(),
            "requester.step is -1",
        ),
        (
            pb.LighthouseQuorumRequest(
                requester=pb.QuorumMember(replica_id="a", data="x" * 70_000)
            ).SerializeToString(),
            "requester.data has more than",
        ),
    ],
)
def test_bad_questions_name_the_field(request_bytes: bytes, text: str) -> None:
    with LighthouseServer(LOOPBACK) as server, grpc.insecure_channel(target_of(server.address())) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary("/torchft.LighthouseService/Quorum")(request_bytes, timeout=DEADLINE_S)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # pyright: ignore
        assert text in refused.value.details()  # pyright: ignore


def test_with_a_token_torchfts_managers_are_refused_and_told_why(caplog: pytest.LogCaptureFixture) -> None:
    security = Security(TOKEN)
    with caplog.at_level(logging.WARNING), LighthouseServer(LOOPBACK, security=security) as server:
        caller = Caller(server.address(), "a", beat=False)
        try:
            for _ in range(3):
                with pytest.raises(grpc.RpcError) as refused:
                    caller.beat_once(DEADLINE_S)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED  # pyright: ignore
                assert "torchft's managers can send none" in refused.value.details()  # pyright: ignore
        finally:
            caller.close()
    assert sum("torchft's managers" in record.getMessage() for record in caplog.records) == 1, "one sentence"
