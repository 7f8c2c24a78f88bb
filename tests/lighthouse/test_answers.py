"""What a member and the Lighthouse conclude from answers, and from streams that end before one was read. Over real gRPC."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from fake_member import START, FakeMember, start, until_status

from lighthouse import wire
from lighthouse.client import ANSWER_EVERY, fetch_status, report_exit
from lighthouse.messages import Ask, Beat, Form, Hello, Position, Process, Progress, Quorum, Retired
from lighthouse.rpc import SERVICE, SESSION, target_of
from lighthouse.server import LighthouseServer
from lighthouse.timeouts import Timeouts

LOOPBACK = "127.0.0.1:0"
POSITION = Position(0, START, level=True)


class RawStream:
    """A stream of replica ``name`` that says and reads only what the test wants."""

    def __init__(self, channel: grpc.Channel, name: str, session: int, quorum: Quorum | None = None) -> None:
        self._words: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call = channel.stream_stream(SESSION)(iter(self._words.get, None), timeout=30)
        self.send(wire.Open("job", Process(name, "1"), session, Hello(POSITION, "h:1", 1, quorum)))

    def send(self, message: wire.SessionUp) -> None:
        self._words.put(wire.encode_up(message))

    def read(self) -> object:
        return wire.decode_down(next(self._call))

    def read_quorum(self) -> Quorum:
        while not isinstance(message := self.read(), Form):
            continue
        return message.quorum

    def close(self) -> None:
        self._call.cancel()
        self._words.put(None)


def test_a_stream_that_ends_before_its_process_has_read_anything_is_no_death() -> None:
    """After an outage a connection may come about just when its process has given up waiting for it."""
    with (
        LighthouseServer(LOOPBACK, expected_replicas=2) as server,
        grpc.insecure_channel(target_of(server.address())) as channel,
    ):
        streams = [RawStream(channel, name, session=1) for name in "ab"]
        for stream in streams:
            stream.read()
            stream.send(Beat(Progress()))
            stream.send(Ask(POSITION))
        quorum, _ = [stream.read_quorum() for stream in streams]
        late = RawStream(channel, "b", session=2, quorum=quorum)
        late.read()
        late.close()
        # longer than reconnect_grace
        until_status(server.address(), "b", lambda peer: not peer.connected and peer.silent_ms >= 500)
        back = RawStream(channel, "b", session=3, quorum=quorum)
        assert back.read() == wire.BeatAnswer()
        [status] = fetch_status(server.address(), "job").jobs
        assert status.quorum.id == quorum.id
        assert not status.round
        for stream in (*streams, back):
            stream.close()


class SilentLighthouse:
    """Takes streams and hands over what comes, but answers when the test says so."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[wire.SessionUp] = queue.SimpleQueue()
        self.may_answer = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(4))
        session = grpc.stream_stream_rpc_method_handler(self._session)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Session": session}),)
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port(LOOPBACK)}"
        self._server.start()

    def close(self) -> None:
        self.may_answer.set()
        self._server.stop(None).wait(10)

    def _session(self, requests: Iterator[bytes], _context: grpc.ServicerContext) -> Iterator[bytes]:
        self.heard.put(wire.decode_up(next(requests)))
        reader = threading.Thread(target=self._read, args=(requests,))
        reader.start()
        self.may_answer.wait(30)
        yield wire.encode_down(wire.BeatAnswer())
        reader.join(30)

    def _read(self, requests: Iterator[bytes]) -> None:
        with contextlib.suppress(grpc.RpcError):
            for data in requests:
                self.heard.put(wire.decode_up(data))


def test_a_member_is_silent_until_it_was_answered_and_then_beats_at_once(members: list[FakeMember]) -> None:
    lighthouse = SilentLighthouse()
    try:
        members.append(FakeMember(lighthouse.address, "a"))
        assert isinstance(lighthouse.heard.get(timeout=20), wire.Open)
        assert isinstance(lighthouse.heard.get(timeout=20), Ask)
        beats_s = 2 * Timeouts().heartbeat_interval_ms / 1000
        with pytest.raises(queue.Empty):
            lighthouse.heard.get(timeout=beats_s)
        lighthouse.may_answer.set()
        assert lighthouse.heard.get(timeout=20) == Beat(Progress(counter=1), quiet=True)
    finally:
        for member in members:
            member.close()
        lighthouse.close()


def test_a_quiet_heartbeat_gets_no_answer_and_an_answer_tells_when_it_was_asked_for() -> None:
    with LighthouseServer(LOOPBACK) as server, grpc.insecure_channel(target_of(server.address())) as channel:
        stream = RawStream(channel, "a", session=1)
        for counter, quiet in enumerate((True, False, True, False)):
            stream.send(Beat(Progress(counter=counter), quiet))
        answers = [stream.read() for _ in range(3)]  # to open and to two of the four heartbeats
        report_exit(server.address(), "job", Process("a", "1"))
        after = stream.read()
        stream.close()
    assert answers == [wire.BeatAnswer()] * 3
    assert isinstance(after, Retired)


def test_the_client_knows_until_when_it_was_heard(members: list[FakeMember]) -> None:
    with LighthouseServer(LOOPBACK, expected_replicas=1) as server:
        started_at = time.monotonic()
        [a] = start(members, server.address(), "a")
        answered = a.client.last_answered
        assert started_at <= answered <= time.monotonic()
        interval_s = Timeouts().heartbeat_interval_ms / 1000
        end = time.monotonic() + 10
        while a.client.last_answered < answered + ANSWER_EVERY * interval_s / 2 and time.monotonic() < end:
            time.sleep(0.05)
        now = time.monotonic()
        assert answered + ANSWER_EVERY * interval_s / 2 < a.client.last_answered <= now
        assert now - a.client.last_answered < 3, "the newest word that was answered, not an older one"
