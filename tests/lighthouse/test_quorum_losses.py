"""Who is lost, and what goes on without them (rules L2, L4 to L6): the quorum core by hand."""

from __future__ import annotations

import pytest
from core_driver import START, Driver, process, trio

from lighthouse.messages import Head, Position

# --- L2, L4, L6: a crash ---------------------------------------------------------------------------------------


def test_a_broken_stream_is_a_loss_after_the_grace_and_the_others_go_on() -> None:
    driver = trio()
    driver.disconnect("c")
    driver.wait(99)
    assert driver.words("a") == [], "it may come back"
    driver.wait(1)
    assert driver.revocations("a") == [(driver.quorum.id, True)]
    driver.ask_fenced("a")
    driver.ask_fenced("b")
    assert driver.members == "a b"
    assert driver.quorum.base == START
    assert "c is lost" in driver.quorum.reason


def test_a_heartbeat_that_was_on_its_way_does_not_take_a_fault_back() -> None:
    driver = trio()
    driver.fault("a", "b")
    driver.beat("b", 8)
    driver.disconnect("b")
    driver.ask_fenced("a c")
    assert driver.members == "a c"


def test_a_loss_named_by_a_fault_costs_no_grace() -> None:
    driver = trio()
    driver.fault("a", "c")
    driver.ask_fenced("a")
    assert driver.revocations("b") == [(driver.quorum.id, True)]
    driver.ask_fenced("b")
    assert driver.members == "a b c", "not yet: the stream of c is still open"
    driver.disconnect("c")
    assert driver.members == "a b"


def test_an_exit_that_the_launcher_saw_costs_no_grace_and_no_wait_for_sockets() -> None:
    driver = trio()
    driver.exit_seen("c")
    driver.ask_fenced("a b")
    assert driver.members == "a b"


def test_a_stream_that_is_back_within_the_grace_is_no_loss() -> None:
    driver = trio()
    quorum = driver.quorum
    driver.disconnect("c")
    driver.wait(60)
    driver.connect("c", quorum)
    driver.wait(1_000, beats="a b c")
    assert driver.quorum == quorum
    assert driver.words("a") == driver.words("c") == []


@pytest.mark.parametrize("greeting", ["hello", "hello, ask"])
def test_a_connection_that_came_too_late_for_its_process_is_no_loss(greeting: str) -> None:
    """After an outage: the process has given up waiting for it, and opens another one."""
    driver = trio()
    driver.disconnect("b")
    driver.try_to_connect("b", driver.quorum)
    if "ask" in greeting:
        driver.ask_fenced("b")
        driver.ask_fenced("a")
    driver.disconnect("b")
    driver.wait(2_999, beats="a c")
    driver.connect("b", driver.quorum)
    if "ask" in greeting:
        driver.ask_fenced("b c")
    driver.wait(60_000, beats="a b c")
    assert driver.members == "a b c"
    assert not [line for line in driver.core.story() if "b is lost" in line]


def test_who_is_not_back_after_a_connection_that_came_too_late_is_lost() -> None:
    driver = trio()
    driver.disconnect("b")
    driver.try_to_connect("b", driver.quorum)
    driver.disconnect("b")
    driver.wait(3_000, beats="a c")
    driver.ask_fenced("a c")
    assert driver.members == "a c"
    assert "b is lost: silent, and not back within 3000 ms" in driver.quorum.reason


def test_who_gives_up_one_stream_after_the_other_is_not_awaited_for_longer() -> None:
    """It can speak and cannot read: each try would renew the grace."""
    driver = trio()
    driver.disconnect("b")
    for _ in range(3):
        driver.try_to_connect("b", driver.quorum)
        driver.ask_fenced("b")
        driver.disconnect("b")
        driver.wait(1_000, beats="a c")
    driver.ask_fenced("a c")
    assert driver.members == "a c"


def test_a_fault_that_names_a_dead_process_counts_though_its_last_stream_is_read_after_it() -> None:
    driver = trio()
    driver.disconnect("b")
    driver.fault("a", "b")
    driver.try_to_connect("b", driver.quorum)
    driver.disconnect("b")
    driver.ask_fenced("a c")
    assert driver.members == "a c"


def test_a_new_incarnation_that_waited_for_its_place_was_answered_meanwhile() -> None:
    driver = trio()
    driver.connect("b2")
    driver.ask("b2")
    driver.wait(5_000, beats="a c b2")
    driver.ask_fenced("a c")
    assert driver.members == "a c b2"
    driver.words("a")
    driver.disconnect("b2")
    driver.wait(100, beats="a c")
    assert driver.revocations("a") == [(driver.quorum.id, True)]


def test_after_a_pause_of_the_lighthouse_a_stream_that_was_given_up_gets_the_time_anew() -> None:
    driver = trio()
    driver.disconnect("b")
    driver.try_to_connect("b", driver.quorum)
    driver.disconnect("b")
    driver.wait(2_900, beats="a c")
    driver.resume()
    driver.wait(2_999, beats="a c")
    driver.connect("b", driver.quorum)
    driver.wait(10_000, beats="a b c")
    assert len(driver.quorums) == 1
    assert driver.words("a") == []


def test_a_pong_shows_too_that_a_connection_is_in_use() -> None:
    driver = trio()
    driver.disconnect("b")
    driver.try_to_connect("b", driver.quorum)
    driver.connect("b2")
    driver.pong("b")
    driver.disconnect("b")
    driver.wait(100, beats="a c")
    assert driver.revocations("a") == [(driver.quorum.id, True)]


def test_a_new_session_may_come_before_the_end_of_the_old_one() -> None:
    driver = trio()
    who = process("c")
    driver.connect("c", driver.quorum)
    assert (who, 1) in driver.closed
    driver.sessions[who] = 1
    driver.disconnect("c")
    driver.sessions[who] = 2
    driver.wait(1_000, beats="a b c")
    assert driver.members == "a b c"
    assert driver.words("a") == []


def test_an_older_session_is_refused() -> None:
    driver = trio()
    driver.connect("c", driver.quorum, session=5)
    driver.connect("c", driver.quorum, session=4)
    assert (process("c"), 4) in driver.closed
    driver.sessions[process("c")] = 4
    driver.ask_fenced("c")
    assert driver.words("a") == [], "a word of an older session is ignored"


def test_a_frozen_process_is_lost_after_the_heartbeat_limit_and_joins_again_when_it_wakes() -> None:
    driver = trio()
    driver.wait(5_001, beats="a b")
    assert driver.revocations("a") == [(driver.quorum.id, True)]
    assert (process("c"), 1) in driver.closed
    driver.ask_fenced("a b")
    assert driver.members == "a b"
    old = driver.quorums[0]
    driver.connect("c", old)
    assert driver.revocations("c") == [(driver.quorum.id, True)], (
        "it must give up the quorum that goes on without it"
    )
    driver.ask("c", Position(old.id, START, level=True))
    assert driver.members == "a b", "its floor does not cover the last quorum"
    driver.words("a")
    driver.ask("c", Position(driver.quorum.id, START, level=True))
    assert driver.revocations("a") == [(driver.quorum.id, False)]


def test_join_timeout_does_not_delay_survivors_and_a_newcomer_that_has_not_asked_is_not_awaited() -> None:
    driver = trio()
    driver.connect("d")
    driver.exit_seen("c")
    driver.ask_fenced("a b")
    assert driver.members == "a b"


def test_a_member_that_never_asks_is_awaited_for_join_timeout_at_most() -> None:
    driver = trio(join_timeout_ms=3_000)
    driver.exit_seen("c")
    driver.ask_fenced("a")
    driver.wait(2_999, beats="a b")
    assert driver.members == "a b c"
    driver.wait(1, beats="a b")
    assert driver.members == "a"
    assert (driver.quorum.id, True) in driver.revocations("b"), (
        "who is left out has to give up what it was in"
    )


def test_two_of_three_at_once() -> None:
    driver = trio()
    driver.disconnect("a")
    driver.disconnect("c")
    driver.wait(100)
    driver.ask_fenced("b")
    assert driver.members == "b"


def test_fewer_than_min_replicas_wait_and_say_so() -> None:
    driver = Driver(min_replicas=2, expected_replicas=2)
    driver.form("a b")
    driver.exit_seen("b")
    driver.ask_fenced("a")
    assert driver.members == "a b"
    driver.wait(6_000, beats="a")
    assert "min_replicas" in driver.announcements("a")
    driver.connect("b2")
    driver.ask("b2", Position(0, Head(0, 0, "other"), level=True))
    assert driver.members == "a (b2)"


# --- L5: total loss ---------------------------------------------------------------------------------------------


def test_total_loss_goes_on_from_the_newest_checkpoint_and_is_announced_with_its_size() -> None:
    driver = trio()
    quorum = driver.quorum
    for name in "abc":
        driver.connect(name, quorum, Position(0, Head(40, quorum.id), level=True))
        driver.exit_seen(name)
    for name, step in (("a2", 30), ("b2", 36), ("c2", 30)):
        disk = Head(step, quorum.id)
        driver.connect(name, position=Position(0, disk, level=True, disk_head=disk))
        driver.ask(name, Position(0, disk, level=True, disk_head=disk))
    assert driver.members == "b2 (a2) (c2)"
    assert driver.quorum.reload
    assert driver.quorum.base == Head(36, quorum.id)
    assert "4 steps are lost" in driver.announcements("a2")
    assert driver.quorum.id > quorum.id


def test_after_restart_timeout_it_goes_on_with_whom_is_back() -> None:
    driver = trio(restart_timeout_ms=10_000)
    for name in "abc":
        driver.exit_seen(name)
    driver.connect("a2")
    driver.ask("a2")
    driver.wait(9_000, beats="a2")
    assert driver.members == "a b c"
    assert "b, c to restart" in driver.waiting
    driver.wait(1_000, beats="a2")
    assert driver.members == "a2"


def test_while_one_may_hold_the_state_nobody_goes_on_without_it() -> None:
    driver = trio(restart_timeout_ms=1_000)
    driver.exit_seen("a")
    driver.exit_seen("b")
    driver.disconnect("c")
    driver.connect("a2")
    driver.ask("a2")
    driver.wait(100_000, beats="a2")
    assert driver.members == "a b c"
    assert "c/1 (lost, but not certainly gone)" in driver.announcements("a2")
    driver.exit_seen("c")
    driver.wait(1_000, beats="a2")
    assert driver.members == "a2"


def test_silence_beyond_the_outage_limit_is_certain_too() -> None:
    driver = Driver(expected_replicas=2, restart_timeout_ms=1_000)
    driver.form("a b")
    driver.exit_seen("a")
    driver.disconnect("b")
    driver.connect("a2")
    driver.ask("a2")
    driver.wait(3_600_000, beats="a2")
    assert driver.members == "a b"
    driver.wait(40_000, beats="a2")
    assert driver.members == "a2"


def test_a_joiner_is_evidence_but_does_not_hold_the_state() -> None:
    driver = Driver(expected_replicas=2, restart_timeout_ms=1_000)
    driver.connect("a")
    driver.ask("a")
    driver.connect("j", position=Position(0, Head(0, 0, "other"), level=True))
    driver.ask("j", Position(0, Head(0, 0, "other"), level=True))
    base = driver.quorum.base
    driver.disconnect("a")
    driver.wait(200, beats="j")
    driver.ask("j", Position(driver.quorum.id, base, level=False))
    driver.wait(5_000, beats="j")
    assert driver.members == "a (j)"
    assert "a/1" in driver.waiting
    fresh = Position(0, Head(0, 0, "d1"), level=True)
    driver.connect("a2", position=fresh)
    driver.ask("a2", fresh)
    assert driver.members == "a2 (j)"
    assert driver.quorum.reload


def test_nobody_starts_over_while_a_new_process_waits_for_the_place_of_its_predecessor() -> None:
    driver = Driver(expected_replicas=2, restart_timeout_ms=50)
    other = Position(0, Head(0, 0, "other"), level=True)
    driver.connect("a")
    driver.connect("j", position=other)
    driver.ask("a")
    driver.ask("j", other)
    base = driver.quorum.base
    driver.exit_seen("a")
    driver.connect("a2", position=other)
    driver.disconnect("a2")
    driver.connect("a3", position=other)
    driver.ask("a3", other)
    driver.ask("j", Position(driver.quorum.id, base, level=False))
    driver.wait(99, beats="j a3")
    assert driver.retired("j") == []
    driver.wait(1, beats="j a3")
    assert driver.members == "a3 (j)"


def test_the_steps_that_a_joiner_did_on_a_chain_that_was_given_up_are_not_lost_again() -> None:
    driver = Driver(expected_replicas=2, restart_timeout_ms=1_000)
    driver.form("a b")
    quorum, disk = driver.quorum, Head(9, driver.quorum.id)
    driver.steps[process("a")] = 12
    driver.wait(1_000, beats="a b")
    driver.exit_seen("a")
    driver.exit_seen("b")
    driver.connect("a2", position=Position(0, disk, level=True, disk_head=disk))
    driver.ask("a2", Position(0, disk, level=True, disk_head=disk))
    late = Position(quorum.id, Head(12, quorum.id), level=True)
    driver.wait(1_000, beats="a2")
    assert "3 steps are lost" in driver.announcements("a2")
    driver.connect("c", quorum, late)
    driver.ask("c", Position(driver.quorum.id, late.head, level=True))
    driver.ask_fenced("a2", head=disk)
    assert driver.members == "a2 (c)"
    driver.ask("c", Position(driver.quorum.id, disk, level=False))
    driver.steps[process("c")] = 12
    driver.wait(1_000, beats="a2 c")
    driver.exit_seen("a2")
    older = Head(7, quorum.id)
    driver.connect("a3", position=Position(0, older, level=True, disk_head=older))
    driver.ask("a3", Position(0, older, level=True, disk_head=older))
    driver.wait(1_000, beats="a3 c")
    assert "2 steps are lost" in driver.announcements("a3")
