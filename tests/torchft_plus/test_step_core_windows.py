"""The step core of a semi-synchronous run: what happens between two syncs."""

from __future__ import annotations

from typing import Any, cast

import pytest

from lighthouse.messages import Ask, Head, Member, Process, Quorum
from lighthouse.timeouts import Timeouts
from torchft_plus.manager.control_words import from_head
from torchft_plus.manager.effects import Effect, SendUp, Tell
from torchft_plus.manager.mailbox import Mailbox
from torchft_plus.manager.outcome import ManagerError
from torchft_plus.manager.step_core import GroupInfo, StepCore
from torchft_plus.manager.step_loop import StepLoop
from torchft_plus.pb import peer_pb2 as pb

ME = Process("a", "1")
BASE = Head(3, 5)


def core_in_quorum(level: bool = True, windowed: bool = True, ranks: int = 1) -> StepCore:
    """In quorum 7, with base step 3, beside "b", which is level."""
    core = StepCore(
        GroupInfo(ME, "job", "here:1", ranks, windowed=windowed),
        Timeouts(60_000, 60_000),
        Head(0, 0, "start"),
    )
    core.start()
    if level:
        core.head = BASE
        core._attempt.step = BASE.step + 1
    members = (Member(Process("b", "1"), "there:1", True), Member(ME, "here:1", level))
    core.form(Quorum(7, members, BASE), 0)
    core.mesh_ready(7, {0: pb.PeerHello(), 1: pb.PeerHello()}, "")
    return core


def asks(effects: list[Effect]) -> int:
    return sum(isinstance(e, SendUp) and isinstance(e.message, Ask) for e in effects)


def words(effects: list[Effect], body: str) -> list[pb.Word]:
    return [e.word for e in effects if isinstance(e, Tell) and e.word.WhichOneof("body") == body]


def boundary(core: StepCore, visit: int, fetched: bool, rank: int = 0) -> list[bool]:
    report = pb.RankBoundary(fetched=fetched, epoch=1, step=BASE.step, patient=True, visit=visit)
    return [word.boundary.replay for word in words(core.rank_boundary(rank, report), "boundary")]


def peer_posts(core: StepCore, rank: int = 0, now_ms: int = 0) -> list[Effect]:
    block = pb.ControlBlock(quorum_id=7, step=4, head=from_head(BASE), finite=True, weight=1.0)
    return core.peer_frame(7, rank, pb.PeerFrame(block=block), now_ms)


def test_a_change_of_membership_does_not_wait_for_the_end_of_a_window() -> None:
    assert asks(core_in_quorum().revoke(7, False, "c wants to join")) == 1


def test_but_not_in_a_sync() -> None:
    core = core_in_quorum()
    core.rank_posted(0, pb.RankPosted(attempt=pb.Attempt(quorum_id=7, step=4), finite=True, weight=1.0), 0)
    assert asks(core.revoke(7, False, "c wants to join")) == 0


def test_and_not_where_every_step_is_a_sync() -> None:
    assert asks(core_in_quorum(windowed=False).revoke(7, False, "c wants to join")) == 0


def test_a_patient_joiner_stays_until_its_state_is_there() -> None:
    core = core_in_quorum(level=False)
    assert boundary(core, 1, fetched=False) == []
    assert boundary(core, 1, fetched=True) == [True] and core.level


def test_a_patient_joiner_takes_part_when_the_others_come_to_their_sync() -> None:
    core = core_in_quorum(level=False)
    assert boundary(core, 1, fetched=False) == []
    assert [word.boundary.replay for word in words(peer_posts(core), "boundary")] == [False]


def test_a_report_that_crosses_the_answer_is_not_taken_for_the_next_boundary() -> None:
    """Found by the simulator: such a group was level for its leader, and behind for itself, for ever."""
    core = core_in_quorum(level=False)
    boundary(core, 1, fetched=False)
    peer_posts(core)
    assert boundary(core, 1, fetched=True) == [] and not core.level
    assert boundary(core, 2, fetched=True) == [True]


def test_all_ranks_of_a_group_end_a_window_after_the_same_inner_step() -> None:
    core = core_in_quorum(ranks=2)
    assert words(core.rank_poll(0, pb.RankPoll(count=1), 0), "poll") == []
    assert [w.poll.due for w in words(core.rank_poll(1, pb.RankPoll(count=1), 0), "poll")] == [False]
    core.rank_poll(0, pb.RankPoll(count=2), 0)
    peer_posts(core)
    assert [w.poll.due for w in words(core.rank_poll(1, pb.RankPoll(count=2), 0), "poll")] == [True]


def test_a_window_ends_for_all_ranks_when_one_wants_it() -> None:
    core = core_in_quorum(ranks=2)
    core.rank_poll(0, pb.RankPoll(count=1, ready=True), 0)
    assert [w.poll.due for w in words(core.rank_poll(1, pb.RankPoll(count=1), 0), "poll")] == [True]


def test_a_minimum_quorum_waits_for_its_grace_before_it_ends_the_windows_of_others() -> None:
    core = core_in_quorum()

    def due(now_ms: int) -> bool:
        poll = pb.RankPoll(count=now_ms, least_peers=2, grace_ms=100)
        return words(core.rank_poll(0, poll, now_ms), "poll")[0].poll.due

    peer_posts(core, rank=0, now_ms=10)
    assert not due(1_000)
    peer_posts(core, rank=2, now_ms=1_010)
    peer_posts(core, rank=2, now_ms=1_050)  # the same one once more
    assert not due(1_109)
    assert due(1_110)


class SilentAgent:
    """Takes reports; its group's other ranks say nothing."""

    alive = True

    def report(self, frame: pb.RankFrame) -> None: ...


def test_a_rank_does_not_wait_for_ever_for_the_others_between_two_inner_steps() -> None:
    nobody = cast(Any, None)
    loop = StepLoop(cast(Any, SilentAgent()), Mailbox(), nobody, nobody, nobody, nobody)
    with pytest.raises(ManagerError, match="inner step 3 within 50 ms"):
        loop.poll(3, False, least_peers=1, grace_ms=0, timeout_ms=50)
