"""What the simulator found in the Lighthouse, each as the shortest schedule that shows it."""

from __future__ import annotations

import asyncio

import pytest

from lighthouse import wire
from lighthouse.core.clock import RunningClock, tick_and_gap_ms
from lighthouse.core.quorum_core import QuorumCore
from lighthouse.core.words import (
    Connected,
    CoreConfig,
    Disconnected,
    Effect,
    Event,
    ExitSeen,
    Ponged,
    Received,
    Resumed,
    Send,
    SendPing,
)
from lighthouse.events import EventLog
from lighthouse.job import Job, Session, Superseded
from lighthouse.messages import (
    Ask,
    Beat,
    Form,
    Head,
    Hello,
    Position,
    Process,
    Progress,
    Quorum,
    Retired,
    Revoke,
)
from lighthouse.storage import MemoryStorage
from lighthouse.timeouts import Timeouts

START = Head(0, 0, "digest")
A, B, C = Process("a", "1"), Process("b", "1"), Process("c", "1")
A2, B2 = Process("a", "2"), Process("b", "2")
TIMEOUTS = Timeouts(12_000, 60_000)
"""Heartbeats: silent after 1,000 ms."""


class Lighthouse:
    """A core and what it said."""

    def __init__(self, **config: int) -> None:
        self.core = QuorumCore(CoreConfig(timeouts=TIMEOUTS, **config), None, 1_000, 0)  # type: ignore[arg-type]
        self.sent: list[tuple[Process, object]] = []
        self.pings: list[tuple[Process, int]] = []
        self._take(self.core.start())

    def connect(
        self, process: Process, session: int, position: Position, now_ms: int, quorum: Quorum | None = None
    ) -> None:
        """It opens a stream and beats once it has heard the answer."""
        self._take(self.core.handle(Connected(process, session, Hello(position, "x:1", 1, quorum)), now_ms))
        self._take(self.core.handle(Received(process, session, Beat(position.progress, quiet=True)), now_ms))

    def ask(self, process: Process, session: int, position: Position, now_ms: int) -> None:
        self._take(self.core.handle(Received(process, session, Ask(position)), now_ms))

    def event(self, event: Event, now_ms: int) -> None:
        self._take(self.core.handle(event, now_ms))

    def tick(self, now_ms: int) -> None:
        self._take(self.core.tick(now_ms))

    def quorums(self) -> list[Quorum]:
        found: dict[int, Quorum] = {}
        for _, message in self.sent:
            if isinstance(message, Form):
                found[message.quorum.id] = message.quorum
        return list(found.values())

    def retired(self) -> list[Process]:
        return [process for process, message in self.sent if isinstance(message, Retired)]

    def _take(self, effects: list[Effect]) -> None:
        self.core.validate()
        for effect in effects:
            if isinstance(effect, Send):
                self.sent.append((effect.process, effect.message))
            elif isinstance(effect, SendPing):
                self.pings.append((effect.process, effect.session))


def fresh() -> Position:
    return Position(0, START, level=True)


def two_members(**config: int) -> tuple[Lighthouse, Quorum]:
    lighthouse = Lighthouse(**{"min_replicas": 1, "expected_replicas": 2, **config})
    for process in (A, B):
        lighthouse.connect(process, 1, fresh(), 0)
        lighthouse.ask(process, 1, fresh(), 0)
    (quorum,) = lighthouse.quorums()
    return lighthouse, quorum


def test_a_repeated_old_ask_does_not_start_the_clock_of_the_next_round() -> None:
    """Seed 331, crash: a member was left out because the other's ask of the round before counted as the first one."""
    lighthouse, quorum = two_members(join_timeout_ms=500)
    lighthouse.ask(A, 1, fresh(), 10)  # sent twice, read after the quorum was formed
    lighthouse.connect(C, 1, fresh(), 900)
    lighthouse.ask(C, 1, fresh(), 900)
    at_boundary = Position(quorum.id, Head(1, quorum.id), level=True)
    lighthouse.ask(A, 1, at_boundary, 950)
    assert lighthouse.quorums() == [quorum], "b has 500 ms to ask too"
    lighthouse.ask(B, 1, at_boundary, 952)
    assert len(lighthouse.quorums()[-1].members) == 3


def test_a_total_loss_waits_for_whoever_is_here_with_more() -> None:
    """Seeds 29, outage, and 182, names: its ask was still on the way."""
    lighthouse, quorum = two_members(restart_timeout_ms=100, join_timeout_ms=500, reconnect_grace_ms=0)
    lighthouse.event(Disconnected(A, 1), 10)
    lighthouse.event(Disconnected(B, 1), 10)
    lighthouse.connect(C, 1, fresh(), 20)
    lighthouse.ask(C, 1, fresh(), 20)
    lighthouse.connect(Process("d", "1"), 1, Position(0, Head(7, 5), level=True), 20)
    lighthouse.tick(70_000)  # a and b are silent for longer than the outage limit...
    assert lighthouse.quorums() == [quorum]
    # ...and c and d were too; both come back, d says what it has before it asks
    lighthouse.connect(C, 2, fresh(), 70_010)
    lighthouse.connect(Process("d", "1"), 2, Position(0, Head(7, 5), level=True), 70_010)
    lighthouse.ask(C, 2, fresh(), 70_020)
    lighthouse.tick(70_500)
    assert lighthouse.quorums() == [quorum], "d brings step 7"
    lighthouse.ask(Process("d", "1"), 2, Position(0, Head(7, 5), level=True), 70_510)
    assert lighthouse.quorums()[-1].base == Head(7, 5)


def test_an_abandoned_session_does_not_displace_the_newer_one_of_a_newcomer() -> None:
    """Seed 927: the newcomer's second stream was read first; it was never answered again."""
    lighthouse, _ = two_members()
    lighthouse.connect(A2, 2, fresh(), 10)
    lighthouse.connect(A2, 1, fresh(), 11)
    lighthouse.event(Disconnected(A2, 1), 12)
    lighthouse.ask(A2, 2, fresh(), 13)
    lighthouse.event(Disconnected(A, 1), 20)
    lighthouse.tick(200)
    assert [view.state for view in lighthouse.core.view(200).peers if view.process == A2] == ["joiner"]


def test_a_process_that_reconnects_is_pinged_again() -> None:
    """Seed 297, names: the ping was lost with the old stream, and the healthy process was replaced."""
    lighthouse, _ = two_members()
    lighthouse.event(Resumed(), 5)
    lighthouse.connect(A2, 1, fresh(), 10)
    assert lighthouse.pings == [(A, 1)]
    lighthouse.event(Disconnected(A, 1), 20)
    lighthouse.connect(A, 2, fresh(), 40)
    assert lighthouse.pings[-1] == (A, 2)
    lighthouse.event(Ponged(A, 2), 60)
    assert lighthouse.retired() == [A2]


def test_after_a_pause_of_its_own_everybody_is_given_time_to_speak() -> None:
    """Seeds 108 and 20082, names: silence and pings ran on through the pause."""
    lighthouse, _ = two_members()
    lighthouse.connect(A2, 1, fresh(), 10)
    lighthouse.event(Resumed(), 1_005)
    lighthouse.tick(1_500)
    assert lighthouse.retired() == []
    lighthouse.event(Ponged(A, 1), 1_600)
    assert lighthouse.retired() == [A2]


def test_a_lighthouse_that_was_replaced_notices_without_storing_anything(tmp_path: object) -> None:
    """Seeds 226 and 275: it went on answering heartbeats of members that the newer one counted as gone."""
    del tmp_path
    storage, events, config = MemoryStorage(), EventLog(None, "lighthouse"), CoreConfig(timeouts=TIMEOUTS)
    old = Job("job", QuorumCore(config, storage.load("job"), 1_000, 0), storage, events)
    old.start()
    old.check_owner()
    new = Job("job", QuorumCore(config, storage.load("job"), 1_000, 0), storage, events)
    new.start()
    new.check_owner()
    with pytest.raises(Superseded):
        old.check_owner()


def test_the_announced_size_of_a_total_loss_is_that_of_this_one() -> None:
    """Seed 4, crash: each total loss was announced with the steps that the ones before had given up, too."""
    lighthouse = Lighthouse(expected_replicas=1, restart_timeout_ms=0)
    said: list[str] = []
    for life, steps in enumerate((10, 3, 5)):
        process = Process("a", str(life))
        lighthouse.connect(process, 1, fresh(), 10 * life)
        lighthouse.ask(process, 1, fresh(), 10 * life)
        quorum = lighthouse.quorums()[-1]
        said.append(quorum.reason)
        lighthouse.event(Received(process, 1, Beat(Progress(steps))), 10 * life + 5)
        lighthouse.event(ExitSeen(process), 10 * life + 6)
    assert "10 steps are lost" in said[1]
    assert " 3 steps are lost" in said[2]


def test_an_ask_with_an_older_progress_is_no_movement() -> None:
    """Seed 26, pause: an ask says what the greeting said, and a group that hangs was let into each new quorum."""
    lighthouse, quorum = two_members(join_timeout_ms=0)
    for counter in (3, 4):
        lighthouse.event(Received(A, 1, Beat(Progress(1, "reduce", counter))), 10 * counter)
        lighthouse.event(Received(B, 1, Beat(Progress(1, "compute", counter))), 10 * counter)
    for now_ms in range(500, 13_000, 500):
        lighthouse.event(Received(A, 1, Beat(Progress(1, "reduce", 4))), now_ms)
        lighthouse.event(Received(B, 1, Beat(Progress(1, "compute", 4))), now_ms)
        lighthouse.tick(now_ms)
    fenced = Position(quorum.id, START, level=True)  # and progress as at the start
    lighthouse.ask(B, 1, fenced, 13_010)
    lighthouse.event(Received(B, 1, Beat(Progress(1, "compute", 4))), 13_020)
    lighthouse.ask(A, 1, fenced, 13_030)
    assert [m.process for m in lighthouse.quorums()[-1].members] == [A]


def test_no_total_loss_while_a_group_that_stands_still_holds_more() -> None:
    """Seed 463, pause: overdue, it was no member of the last quorum; when that died, 16 steps were given up."""
    lighthouse, quorum = two_members(join_timeout_ms=0, restart_timeout_ms=0)
    for now_ms in range(500, 13_500, 500):
        lighthouse.event(Received(A, 1, Beat(Progress(1, "reduce", 4))), now_ms)
        lighthouse.event(Received(B, 1, Beat(Progress(1, "compute", 4))), now_ms)
        lighthouse.tick(now_ms)
    at_16 = Position(quorum.id, Head(16, quorum.id), level=True)
    lighthouse.ask(B, 1, at_16, 13_510)
    lighthouse.ask(A, 1, at_16, 13_520)
    alone = lighthouse.quorums()[-1]
    assert [m.process for m in alone.members] == [A]
    lighthouse.event(ExitSeen(A), 13_530)
    lighthouse.connect(A2, 1, fresh(), 13_540)
    lighthouse.ask(A2, 1, fresh(), 13_540)
    assert lighthouse.quorums()[-1] == alone, "b holds step 16"
    lighthouse.event(Received(B, 1, Beat(Progress(1, "compute", 5))), 13_550)
    lighthouse.tick(13_560)
    lighthouse.ask(B, 1, Position(alone.id, Head(16, quorum.id), level=True), 13_570)
    assert lighthouse.quorums()[-1].base == Head(16, quorum.id)


def test_nobody_starts_over_while_the_ask_of_one_with_a_state_is_on_the_way() -> None:
    """Seed 116, link: all were told to restart, and one who was here held the initial state of all."""
    lighthouse = Lighthouse(expected_replicas=1, restart_timeout_ms=0)
    lighthouse.connect(A, 1, fresh(), 0)
    lighthouse.ask(A, 1, fresh(), 0)
    first = lighthouse.quorums()[-1]
    behind = Position(0, START, level=False)
    lighthouse.connect(C, 1, behind, 10)
    lighthouse.ask(C, 1, behind, 10)
    lighthouse.ask(A, 1, Position(first.id, START, level=True), 11)
    last = lighthouse.quorums()[-1]
    lighthouse.connect(B, 1, Position(first.id, START, level=True), 20)
    lighthouse.event(ExitSeen(A), 30)
    lighthouse.ask(C, 1, Position(last.id, START, level=False), 31)
    lighthouse.tick(40)
    assert C not in lighthouse.retired()
    lighthouse.ask(B, 1, Position(last.id, START, level=True), 50)
    assert {m.process for m in lighthouse.quorums()[-1].members} == {B, C}


def test_no_total_loss_while_who_waits_for_its_place_brings_more() -> None:
    """Seed 83, outage: a checkpoint of the new process was one step newer than what was gone on from."""
    lighthouse = Lighthouse(expected_replicas=1, restart_timeout_ms=0, restart_grace_ms=1_000)
    lighthouse.connect(A, 1, fresh(), 0)
    lighthouse.ask(A, 1, fresh(), 0)
    quorum = lighthouse.quorums()[-1]
    at_4 = Position(0, Head(4, quorum.id), level=True, disk_head=Head(4, quorum.id))
    lighthouse.connect(B, 1, fresh(), 10)
    lighthouse.event(Resumed(), 20)
    lighthouse.event(Disconnected(B, 1), 21)
    lighthouse.connect(B2, 1, at_4, 30)  # b/1 may reconnect
    lighthouse.ask(B2, 1, at_4, 30)
    lighthouse.event(ExitSeen(A), 40)
    lighthouse.connect(A2, 1, fresh(), 50)
    lighthouse.ask(A2, 1, fresh(), 50)
    assert lighthouse.quorums()[-1] == quorum
    lighthouse.event(ExitSeen(B), 60)
    assert lighthouse.quorums()[-1].base == at_4.head


@pytest.mark.parametrize("heartbeat_ms", [50, 83, 150, 400, 5_000, 60_000])
def test_a_pause_as_long_as_the_heartbeat_limit_is_seen_as_one(heartbeat_ms: int) -> None:
    """Seed 10244, pause: below 200 ms a shorter limit was taken for the silence of everybody."""
    tick_ms, gap_ms = tick_and_gap_ms(heartbeat_ms, 100)
    clock = RunningClock(gap_ms)
    clock.read(0)
    assert clock.read(tick_ms * 1.5) == (int(tick_ms * 1.5), False)
    running_ms, paused = clock.read(tick_ms * 1.5 + heartbeat_ms)
    assert paused and running_ms - tick_ms * 1.5 <= heartbeat_ms / 2 + 1


def test_who_wants_to_leave_may_go_while_the_restart_of_others_is_waited_for() -> None:
    """Seed 10344, all: it held no state, and the next quorum waited for its next life, for ever."""
    lighthouse = Lighthouse(expected_replicas=2, min_replicas=2, restart_timeout_ms=1_000)
    for process in (A, B):
        lighthouse.connect(process, 1, fresh(), 0)
        lighthouse.ask(process, 1, fresh(), 0)
    quorum = lighthouse.quorums()[-1]
    lighthouse.event(ExitSeen(A), 10)
    other = Position(0, Head(0, 0, "of another seed"), level=True)
    lighthouse.connect(A2, 1, other, 20)
    lighthouse.ask(A2, 1, other, 20)
    behind = Position(quorum.id, START, level=False)
    lighthouse.event(Received(B, 1, Ask(behind, leaving=True)), 30)
    assert B in lighthouse.retired()


def test_a_heartbeat_is_answered_after_the_revocation() -> None:
    """Profile outage, 20 of 300 seeds: the answer came first and ended the outage, and the member committed."""
    storage, events = MemoryStorage(), EventLog(None, "lighthouse")
    config = CoreConfig(expected_replicas=2, reconnect_grace_ms=0, timeouts=TIMEOUTS)
    job = Job("job", QuorumCore(config, None, 1_000, 0), storage, events)
    job.start()
    session = job.sessions[A, 1] = Session(A, 1)
    for process in (A, B):
        job.handle(Connected(process, 1, Hello(fresh(), "x:1", 1, None)), 0)
        job.handle(Received(process, 1, Ask(fresh())), 0)
        job.handle(Received(process, 1, Beat(Progress(), quiet=True)), 0)
    job.note(Disconnected(B, 1), 10)  # the next decision revokes the quorum
    job.note(Received(A, 1, Beat(Progress())), 10)
    job.answer(session)
    job.settle(11)
    written = [wire.decode_down(data) for data in drained(session)]
    assert [type(word) for word in written] == [Form, Revoke, wire.BeatAnswer]


def drained(session: Session) -> list[bytes]:
    """What is queued for a stream."""

    async def read() -> list[bytes]:
        session.end("the test has seen enough")
        data: list[bytes] = []
        while (item := await session.next()) is not None:
            data.append(item)
        return data

    return asyncio.run(read())
