"""A group that has finished leaves although the Lighthouse has just put it into another quorum."""

from __future__ import annotations

from lighthouse.messages import Ask, Head, Member, Process, Quorum
from lighthouse.timeouts import Timeouts
from torchft_plus.manager.effects import Effect, SendUp, Tell
from torchft_plus.manager.step_core import GroupInfo, StepCore

ME, OTHER = Process("a", "1"), Process("b", "1")
START = Head(0, 0, "digest")


def asks(effects: list[Effect]) -> list[Ask]:
    return [e.message for e in effects if isinstance(e, SendUp) and isinstance(e.message, Ask)]


def words(effects: list[Effect]) -> list[str]:
    return [str(e.word.WhichOneof("body")) for e in effects if isinstance(e, Tell)]


def quorum(number: int, *members: Process) -> Quorum:
    return Quorum(number, tuple(Member(process, "127.0.0.1:1", True) for process in members), START)


def core_in(number: int) -> StepCore:
    core = StepCore(GroupInfo(ME, "job", "127.0.0.1:1", 1), Timeouts(), START)
    core.start()
    core.form(quorum(number, ME, OTHER), 0)
    return core


def test_idle_leaves_at_once() -> None:
    (ask,) = asks(core_in(1).leave_wanted(idle=True))
    assert ask.leaving and ask.position.floor == 1


def test_an_ask_that_came_too_late_is_said_again() -> None:
    core = core_in(1)
    core.revoke(1, now=True, reason="b wants to leave")
    core.leave_wanted(idle=True)
    (ask,) = asks(core.form(quorum(2, ME), 0))
    assert ask.leaving and ask.position.floor == 2
    assert not core.in_force()


def test_who_does_not_step_is_not_kept_for_ever() -> None:
    core = core_in(1)
    core.leave_wanted(idle=True)
    core.form(quorum(2, ME, OTHER), 0)
    assert "left" in words(core.form(quorum(3, ME, OTHER), 0))
    assert core.ended is not None


def test_between_steps_it_waits_for_the_boundary() -> None:
    core = core_in(1)
    assert asks(core.leave_wanted(idle=False)) == []
    assert core.in_force()
