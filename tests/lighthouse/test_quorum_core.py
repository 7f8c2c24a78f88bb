"""The rules L1-L8 and R1-R4 one by one, as short stories."""

from __future__ import annotations

import pytest
from core_driver import CLOCK_SECONDS, START, Driver, process

from lighthouse.core.quorum_core import COUNTER_BITS, EPOCHS_PER_S
from lighthouse.core.words import CoreConfig, Record
from lighthouse.messages import Fault, Form, Head, Member, Position, Progress, Quorum, Revoke, Vote
from lighthouse.timeouts import Timeouts


def trio(**config: int) -> Driver:
    driver = Driver(min_replicas=1, expected_replicas=3, **config)
    driver.form("a b c")
    for name in "abc":
        driver.words(name)
    return driver


# --- R3: the first quorum -------------------------------------------------------------------------------------


def test_first_quorum_forms_at_once_when_the_expected_number_has_asked() -> None:
    driver = Driver(expected_replicas=2)
    driver.connect("a")
    driver.ask("a")
    assert driver.core.q_last is None
    driver.connect("b")
    driver.ask("b")
    assert driver.members == "a b"
    assert driver.quorum.base == START
    assert [type(w) for w in driver.words("a")] == [Form]


def test_first_quorum_forms_after_join_timeout_with_whom_is_there() -> None:
    driver = Driver(expected_replicas=3, join_timeout_ms=2_000)
    driver.connect("a")
    driver.ask("a")
    driver.wait(1_999, beats="a")
    assert driver.core.q_last is None
    assert "expected_replicas" in driver.waiting
    driver.wait(1, beats="a")
    assert driver.members == "a"


def test_without_expected_number_min_replicas_says_what_is_enough_but_who_is_there_is_awaited() -> None:
    driver = Driver(min_replicas=2)
    for name in "abc":
        driver.connect(name)
    driver.ask("a")
    driver.ask("b")
    assert driver.core.q_last is None, "c is connected and may be about to ask"
    driver.ask("c")
    assert driver.members == "a b c"


def test_the_first_to_arrive_does_not_train_alone_from_its_own_seed() -> None:
    driver = Driver(min_replicas=1, join_timeout_ms=5_000)
    driver.connect("a")
    driver.ask("a")
    driver.wait(4_000, beats="a")
    assert driver.core.q_last is None


def test_of_different_initial_states_that_of_the_first_member_counts() -> None:
    driver = Driver(expected_replicas=3)
    for name, digest in (("c", "other"), ("a", "d0"), ("b", "d0")):
        driver.connect(name, position=Position(0, Head(0, 0, digest), level=True))
        driver.ask(name, Position(0, Head(0, 0, digest), level=True))
    assert driver.members == "a b (c)"
    assert driver.quorum.base == START


def test_replica_ranks_follow_numbers_in_names() -> None:
    driver = Driver(expected_replicas=3)
    for name in ("r_10x", "r_9x", "r_1x"):
        driver.connect(name)
        driver.ask(name)
    assert [m.process.replica_id for m in driver.quorum.members] == ["r_1x", "r_9x", "r_10x"]


def test_a_job_that_restarts_from_checkpoints_goes_on_from_the_newest() -> None:
    driver = Driver(expected_replicas=2)
    old, new = Head(10, 7), Head(12, 7)
    driver.connect("a", position=Position(0, old, level=True, disk_head=old))
    driver.connect("b", position=Position(0, new, level=True, disk_head=new))
    driver.ask("a", Position(0, old, level=True, disk_head=old))
    driver.ask("b", Position(0, new, level=True, disk_head=new))
    assert driver.members == "b (a)"
    assert driver.quorum.base == new
    assert driver.quorum.id > 7
    assert "nothing is stored of this job: training goes on from step 12" in driver.announcements("a")


# --- L1: ids and the store ------------------------------------------------------------------------------------


def test_the_epoch_is_claimed_at_start_and_ids_grow_across_restarts() -> None:
    first = trio()
    assert first.quorum.id == (CLOCK_SECONDS * EPOCHS_PER_S + 1) << COUNTER_BITS | 1
    second = Driver(first.record, clock_seconds=1)
    assert second.record is not None
    assert second.record.epoch == CLOCK_SECONDS * EPOCHS_PER_S + 2
    assert second.record.q_last == first.quorum


def test_many_starts_within_a_second_do_not_outrun_the_clock_that_replaces_a_lost_store() -> None:
    """A start takes 100 ms at least; the disk is lost, and nobody reports what the last one had formed."""
    clock_seconds, record, ids = float(CLOCK_SECONDS), None, list[int]()
    for number in range(30):
        driver = Driver(record if number % 5 else None, clock_seconds, min_replicas=1, expected_replicas=1)
        if driver.core.q_last is not None:
            driver.exit_seen(f"a{(number - 1) % 10}")
        driver.connect(f"a{number % 10}")
        driver.ask(f"a{number % 10}")
        ids.append(driver.quorum.id)
        record, clock_seconds = driver.record, clock_seconds + 0.1
    assert ids == sorted(set(ids))


def test_ids_go_on_from_those_whose_epochs_were_seconds_and_stay_below_the_limit_of_the_wire() -> None:
    seconds = 1_796_000_000
    old = Quorum((seconds << 32) | 7, (Member(process("a"), "h:1", True),), Head(5, (seconds << 32) | 6))
    driver = Driver(Record(seconds, old), seconds + 1)
    driver.connect("a", old, Position(old.id, old.base, level=True))
    driver.ask("a", Position(old.id, old.base, level=True))
    assert old.id < driver.quorum.id < (seconds + 2) << 32
    much_later = Driver(None, seconds + 10 * 365 * 86_400, expected_replicas=1)
    much_later.connect("a")
    much_later.ask("a")
    assert much_later.quorum.id < 2**63


def test_the_exit_of_a_member_is_still_known_after_a_restart_of_the_lighthouse() -> None:
    before = trio(restart_timeout_ms=1_000)
    for name in "abc":
        before.exit_seen(name)
    driver = Driver(before.record, restart_timeout_ms=1_000)
    driver.connect("x")
    driver.ask("x")
    driver.wait(1_000, beats="x")
    assert driver.members == "x", "nobody is awaited who cannot come"
    assert "total loss" in driver.quorum.reason


def test_a_new_id_is_above_every_id_that_anybody_reports() -> None:
    driver = Driver(expected_replicas=1)
    far = (CLOCK_SECONDS + 50) << 32
    assert far >> COUNTER_BITS > CLOCK_SECONDS * EPOCHS_PER_S
    driver.connect("a", position=Position(far, START, level=True))
    driver.ask("a", Position(far, START, level=True))
    assert driver.quorum.id > far


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


# --- L4: the base ----------------------------------------------------------------------------------------------


def test_a_step_for_which_all_that_are_left_voted_is_rolled_forward() -> None:
    driver = trio()
    vote = Vote(1, driver.quorum.id)
    head = Head(1, driver.quorum.id)
    driver.exit_seen("c")
    driver.ask_fenced("a b", voted=vote)
    assert driver.quorum.base == head
    assert driver.members == "a b"
    assert "rolled forward" in driver.quorum.reason


def test_one_that_did_not_vote_proves_that_nobody_committed() -> None:
    driver = trio()
    driver.exit_seen("c")
    driver.ask_fenced("a", voted=Vote(1, driver.quorum.id))
    driver.ask_fenced("b")
    assert driver.quorum.base == START


def test_who_committed_is_followed_by_who_had_voted() -> None:
    driver = trio()
    quorum = driver.quorum
    driver.exit_seen("c")
    driver.ask_fenced("a", head=Head(1, quorum.id))
    driver.ask_fenced("b", voted=Vote(1, quorum.id))
    assert driver.quorum.base == Head(1, quorum.id)
    assert driver.members == "a b", "who voted holds the averages"


def test_a_vote_of_another_quorum_is_no_evidence() -> None:
    driver = trio()
    driver.exit_seen("c")
    driver.ask_fenced("a b", voted=Vote(1, driver.quorum.id - 1))
    assert driver.quorum.base == START


def test_same_step_of_another_quorum_is_not_the_same_head() -> None:
    driver = trio()
    first = driver.quorum.id
    driver.exit_seen("c")
    driver.ask_fenced("a b", voted=Vote(1, first))
    second = driver.quorum.id
    driver.connect("c2", position=Position(0, Head(1, first + 99), level=True))
    driver.ask("c2", Position(0, Head(1, first + 99), level=True))
    driver.ask("a", Position(second, Head(1, first), level=True))
    driver.ask("b", Position(second, Head(1, first), level=True))
    assert driver.members == "a b (c2)"


def test_an_ask_without_the_echo_of_the_last_id_does_not_count() -> None:
    driver = trio()
    quorum = driver.quorum
    driver.ask("a", Position(quorum.id - 1, START, level=True))
    assert driver.words("b") == []
    driver.exit_seen("c")
    driver.ask("b", Position(quorum.id - 1, START, level=True))
    driver.ask("a", Position(quorum.id - 1, START, level=True))
    assert driver.quorum == quorum


def test_an_ask_of_a_broken_session_does_not_count() -> None:
    driver = trio()
    driver.exit_seen("c")
    driver.ask_fenced("a")
    driver.disconnect("a")
    driver.ask_fenced("b")
    assert driver.members == "a b c"
    driver.connect("a", driver.quorum, Position(driver.quorum.id, START, level=True))
    driver.ask_fenced("a")
    assert driver.members == "a b"


def test_a_member_that_missed_the_quorum_gets_it_again() -> None:
    driver = trio()
    driver.disconnect("c")
    driver.connect("c", None)
    assert [type(w) for w in driver.words("c")] == [Form]
    driver.disconnect("c")
    driver.connect("c", driver.quorum)
    assert driver.words("c") == []


def test_a_member_that_comes_back_into_a_round_is_revoked() -> None:
    driver = trio()
    driver.exit_seen("b")
    driver.words("c")
    driver.disconnect("c")
    driver.connect("c", driver.quorum)
    assert driver.revocations("c") == [(driver.quorum.id, True)]


# --- joiners and leavers --------------------------------------------------------------------------------------


def test_a_joiner_waits_for_the_boundary_and_the_rest_are_hurried_after_the_first_ask() -> None:
    driver = trio()
    driver.connect("d")
    driver.ask("d", Position(0, Head(0, 0, "other"), level=True))
    for name in "abc":
        assert driver.revocations(name) == [(driver.quorum.id, False)]
    driver.wait(4_000, beats="a b c d")
    assert driver.words("a") == [], "a long step is not disturbed"
    driver.ask_fenced("a", head=Head(1, driver.quorum.id))
    driver.wait(199, beats="a b c d")
    assert driver.words("b") == []
    driver.wait(1, beats="a b c d")
    assert driver.revocations("b") == [(driver.quorum.id, True)]
    assert driver.revocations("a") == []
    first = driver.quorum.id
    driver.ask_fenced("b c", voted=Vote(1, first))
    assert driver.members == "a b c (d)"
    assert driver.quorum.base == Head(1, first)


def test_two_joiners_come_in_together() -> None:
    driver = trio()
    for name in "de":
        driver.connect(name)
        driver.ask(name)
    driver.ask_fenced("a b c", head=Head(1, driver.quorum.id))
    assert driver.members == "a b c (d) (e)"


def test_a_crash_turns_a_boundary_into_now() -> None:
    driver = trio()
    driver.connect("d")
    driver.ask("d")
    driver.words("a")
    driver.exit_seen("c")
    assert driver.revocations("a") == [(driver.quorum.id, True)]
    driver.ask_fenced("a b")
    assert driver.members == "a b d", "at step 0 an equal initial state is level"


def test_a_leaver_goes_in_good_order() -> None:
    driver = trio()
    quorum = driver.quorum
    driver.ask("c", Position(quorum.id, Head(1, quorum.id), level=True), leaving=True)
    assert driver.revocations("a") == [(quorum.id, False)]
    driver.ask_fenced("a b", head=Head(1, quorum.id))
    assert driver.members == "a b"
    assert [w.left for w in driver.retired("c")] == [True]
    assert driver.quorum.base == Head(1, quorum.id)


def test_the_last_ask_of_a_leaver_is_evidence() -> None:
    driver = trio()
    quorum = driver.quorum
    driver.ask("c", Position(quorum.id, START, None, level=True), leaving=True)
    driver.ask_fenced("a b", voted=Vote(1, quorum.id))
    assert driver.quorum.base == START, "c did not vote, so nobody has committed"


def test_the_only_one_that_is_level_stays_until_another_is() -> None:
    driver = Driver(expected_replicas=2)
    driver.connect("a")
    driver.ask("a")
    driver.connect("b", position=Position(0, Head(0, 0, "other"), level=True))
    driver.ask("b", Position(0, Head(0, 0, "other"), level=True))
    assert driver.members == "a (b)"
    base = driver.quorum.base
    driver.ask("a", Position(driver.quorum.id, base, level=True), leaving=True)
    driver.ask("b", Position(driver.quorum.id, base, level=False))
    assert driver.members == "a (b)"
    assert driver.retired("a") == []
    driver.ask("a", Position(driver.quorum.id, base, level=True), leaving=True)
    driver.ask("b", Position(driver.quorum.id, base, level=True))
    assert driver.members == "b"
    assert [w.left for w in driver.retired("a")] == [True]


def test_all_leave_at_the_end() -> None:
    driver = trio()
    quorum = driver.quorum
    for name in "abc":
        driver.ask(name, Position(quorum.id, Head(9, quorum.id), level=True), leaving=True)
    for name in "abc":
        assert [w.left for w in driver.retired(name)] == [True]
    assert driver.quorums == [quorum], "no quorum of nobody"


def test_after_a_good_end_the_next_run_waits_for_nobody_of_the_last_one() -> None:
    driver = trio()
    quorum = driver.quorum
    for name in "abc":
        driver.ask(name, Position(quorum.id, Head(9, quorum.id), level=True), leaving=True)
    assert driver.record is not None
    assert driver.record.ended
    again = Driver(driver.record, expected_replicas=1)
    disk = Head(9, quorum.id)
    again.connect("a2", position=Position(0, disk, level=True, disk_head=disk))
    again.ask("a2", Position(0, disk, level=True, disk_head=disk))
    assert again.members == "a2"
    assert again.quorum.base == disk
    assert again.quorum.id > quorum.id
    assert again.announcements("a2") == "", "nothing is lost"
    assert not Driver(again.record).core.validate()


def test_leavers_go_even_if_too_few_stay() -> None:
    driver = Driver(min_replicas=2, expected_replicas=2)
    driver.form("a b")
    driver.ask("a", Position(driver.quorum.id, START, level=True), leaving=True)
    driver.ask_fenced("b")
    assert [w.left for w in driver.retired("a")] == [True]
    assert "min_replicas" in driver.waiting


def test_one_that_was_never_in_a_quorum_leaves_at_once() -> None:
    driver = trio()
    driver.connect("d")
    driver.ask("d", leaving=True)
    assert [w.left for w in driver.retired("d")] == [True]
    assert driver.words("a") == []


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


# --- L6: overdue ------------------------------------------------------------------------------------------------


def test_a_member_that_stands_still_while_others_wait_is_overdue_until_it_moves() -> None:
    driver = trio()
    old = driver.quorum
    driver.beat("a", 5, "reduce")
    driver.beat("b", 5, "reduce")
    driver.beat("c", 5, "compute")

    def a_second() -> None:
        driver.wait(1_000)
        driver.beat("a", 5, "reduce")
        driver.beat("b", 5, "reduce")
        driver.beat("c", 5, "compute")

    for _ in range(59):
        a_second()
    assert driver.words("a") == []
    a_second()
    assert driver.revocations("a") == [(old.id, True)]
    still = Progress(0, "compute", 5)
    driver.ask("c", Position(old.id, START, level=True, progress=still))
    driver.ask_fenced("a b")
    assert driver.members == "a b", "its control thread asks, its training stands still"
    driver.ask("c", Position(driver.quorum.id, START, level=True, progress=still))
    driver.words("a")
    driver.beat("c", 5, "compute")
    assert driver.words("a") == []
    driver.beat("c", 6, "compute")
    assert driver.revocations("a") == [(driver.quorum.id, False)], "it moves and may join"


def test_nobody_is_overdue_while_nobody_waits() -> None:
    driver = trio()
    for _ in range(100):
        driver.wait(1_000)
        for name in "abc":
            driver.beat(name, 5, "compute")
    assert driver.words("a") == []


def test_who_waits_himself_is_not_overdue() -> None:
    driver = Driver(min_replicas=2, expected_replicas=2)
    driver.form("a b")
    driver.exit_seen("b")
    driver.ask_fenced("a")
    for _ in range(100):
        driver.wait(1_000)
        driver.beat("a", 5, "start")
    driver.connect("b2")
    driver.ask("b2")
    assert driver.members == "a b2"


# --- F22: our own pause -----------------------------------------------------------------------------------------


def test_after_a_pause_of_the_lighthouse_broken_streams_get_time() -> None:
    driver = trio()
    driver.resume()
    driver.disconnect("c")
    driver.wait(2_900, beats="a b")
    assert driver.words("a") == []
    driver.connect("c", driver.quorum)
    driver.wait(1_000, beats="a b c")
    assert driver.words("a") == []


# --- L6: nobody is heard -----------------------------------------------------------------------------------------


def test_who_hears_nobody_doubts_itself_and_gives_all_the_time_to_come_back() -> None:
    driver = trio()
    old = driver.quorum
    driver.wait(60_000)
    driver.connect("b", old)
    driver.wait(2_900, beats="b")
    driver.connect("a", old)
    driver.connect("c", old)
    driver.wait(60_000, beats="a b c")
    assert driver.quorum == old
    assert all(driver.words(name) == [] for name in "abc")


def test_after_nobody_was_heard_who_does_not_come_back_is_lost() -> None:
    driver = trio()
    driver.wait(10_000)
    driver.connect("a", driver.quorum)
    driver.connect("b", driver.quorum)
    driver.wait(2_999, beats="a b")
    assert driver.words("a") == []
    driver.wait(1, beats="a b")
    driver.ask_fenced("a b")
    assert driver.members == "a b"
    assert "silent, and not back within 3000 ms" in driver.quorum.reason


def test_the_grace_after_nobody_was_heard_is_given_once() -> None:
    driver = trio()
    driver.wait(10_000)
    driver.connect("a", driver.quorum)
    driver.wait(2_000, beats="a")
    driver.disconnect("a")
    driver.wait(999)
    assert driver.words("a") == []
    driver.connect("a", driver.quorum)
    driver.wait(1, beats="a")
    assert driver.revocations("a") == [(driver.quorum.id, True)]


def test_a_word_on_an_old_stream_ends_the_silence_too() -> None:
    """The cut was a little shorter than the limit; streams that members gave up meanwhile end only now."""
    driver = trio()
    driver.wait(4_500)
    driver.beat("a", 8)
    driver.disconnect("b")
    driver.wait(600, beats="a")
    assert driver.words("a") == [], "neither b, whose stream broke, nor c, silent for more than the limit"
    driver.connect("b", driver.quorum)
    driver.connect("c", driver.quorum)
    driver.wait(10_000, beats="a b c")
    assert driver.words("a") == driver.words("b") == driver.words("c") == []


def test_an_ask_that_stood_before_nobody_was_heard_does_not_form_a_quorum() -> None:
    driver = trio(join_timeout_ms=6_000)
    driver.fault("a")
    driver.ask_fenced("a b")
    driver.wait(60_000)
    assert len(driver.quorums) == 1


def test_of_two_that_are_not_heard_only_the_frozen_one_is_lost() -> None:
    driver = Driver(expected_replicas=2)
    driver.form("a b")
    driver.wait(5_001, beats="a")
    driver.ask_fenced("a")
    assert driver.members == "a"


def test_after_all_hosts_lost_power_their_new_processes_wait_a_grace_only() -> None:
    driver = trio()
    driver.wait(60_000)
    for name in ("a2", "b2", "c2"):
        driver.connect(name)
        driver.ask(name)
    driver.wait(2_999, beats="a2 b2 c2")
    assert driver.members == "a b c"
    driver.wait(1, beats="a2 b2 c2")
    assert driver.members == "a2 b2 c2"


def test_strangers_wait_until_members_that_nobody_hears_are_certainly_gone() -> None:
    driver = Driver(expected_replicas=1, restart_timeout_ms=1_000)
    driver.form("a")
    driver.wait(60_000)
    driver.connect("x")
    driver.ask("x")
    driver.wait(3_500_000, beats="x")
    assert driver.members == "a"
    driver.wait(80_000, beats="x")
    assert driver.members == "x"


# --- L7: incarnations -------------------------------------------------------------------------------------------


def test_a_new_incarnation_takes_over_when_the_old_stream_is_broken_for_the_grace() -> None:
    driver = trio()
    driver.disconnect("c")
    driver.connect("c2", position=Position(0, Head(0, 0, "other"), level=True))
    driver.ask("c2", Position(0, Head(0, 0, "other"), level=True))
    driver.wait(99)
    assert driver.words("a") == []
    driver.wait(1)
    driver.ask_fenced("a b")
    assert driver.members == "a b (c2)"
    driver.connect("c")
    assert [w.left for w in driver.retired("c")] == [False], "the old one is out for good"


def test_a_duplicate_does_not_kill_a_healthy_trainer() -> None:
    driver = trio()
    driver.connect("c2")
    assert driver.pings == [process("c")]
    driver.ask("c2")
    driver.pong("c")
    [refusal] = driver.retired("c2")
    assert "in use" in refusal.reason
    assert driver.words("a") == driver.words("c") == []
    assert driver.members == "a b c"


def test_a_duplicate_does_not_take_the_place_of_a_trainer_whose_stream_was_reset() -> None:
    driver = trio()
    quorum = driver.quorum
    driver.disconnect("c")
    driver.connect("c2")
    driver.ask("c2")
    driver.wait(60)
    driver.connect("c", quorum)
    assert driver.pings == [process("c")]
    driver.pong("c")
    assert "in use" in driver.retired("c2")[0].reason
    driver.wait(1_000, beats="a b c")
    assert driver.quorum == quorum
    assert driver.words("a") == driver.words("c") == []


def test_an_old_incarnation_that_does_not_answer_is_retired_and_the_ask_of_the_new_one_stands() -> None:
    driver = trio()
    driver.connect("c2")
    driver.ask("c2")
    driver.wait(4_999, beats="a b")
    assert driver.words("a") == []
    driver.wait(2, beats="a b")
    driver.ask_fenced("a b")
    assert driver.members == "a b c2"


def test_a_new_incarnation_waits_no_longer_than_until_the_old_stream_breaks() -> None:
    driver = trio()
    driver.connect("c2")
    driver.ask("c2")
    driver.disconnect("c")
    driver.wait(100)
    driver.ask_fenced("a b")
    assert driver.members == "a b c2"


def test_after_a_start_of_the_lighthouse_the_old_incarnation_gets_time_to_reconnect() -> None:
    before = trio()
    driver = Driver(before.record, expected_replicas=3)
    driver.connect("c2")
    driver.connect("a", before.quorum)
    driver.connect("b", before.quorum)
    driver.wait(1_000, beats="a b")
    driver.connect("c", before.quorum)
    driver.pong("c")
    assert driver.retired("c2")
    assert driver.words("a") == []
    assert driver.quorum == before.quorum


def test_who_is_in_a_later_quorum_has_replaced_the_other_and_a_third_process_is_answered() -> None:
    before = trio()
    driver = Driver(None, clock_seconds=5)
    driver.connect("c2")
    driver.connect("c3")
    driver.connect("c", before.quorum)
    assert "replaced by c/1" in driver.retired("c2")[0].reason
    driver.pong("c")
    assert "in use" in driver.retired("c3")[0].reason


# --- L8: members that cannot work together ------------------------------------------------------------------------


def test_a_pair_that_fails_twice_is_parted_and_gets_another_chance() -> None:
    driver = trio()
    for _ in range(2):
        driver.fault("b", "c")
        driver.fault("c", "b")
        driver.ask_fenced("a b c")
    assert driver.members == "a b"
    assert "b named c" in driver.announcements("a")
    driver.ask("c", Position(driver.quorum.id, START, level=True))
    driver.words("a")
    driver.wait(4_000, beats="a b c")
    assert driver.words("a") == []
    driver.wait(1_100, beats="a b c")
    assert driver.revocations("a") == [(driver.quorum.id, False)]
    driver.ask_fenced("a b", head=Head(1, driver.quorum.id))
    assert driver.members == "a b (c)"


def test_the_most_blamed_is_left_out() -> None:
    driver = trio()
    for _ in range(2):
        driver.fault("b", "a")
        driver.fault("c", "a")
        driver.fault("a", "b")
        driver.ask_fenced("a b c")
    assert driver.members == "b c"


@pytest.mark.parametrize("ends", ["ab", "bc", "ac"])
def test_of_a_cut_link_one_of_the_ends_is_left_out_and_not_the_innocent_third(ends: str) -> None:
    """The first fault of each quorum names nobody, and the third saw something break too; who knows more is late."""
    driver = trio()
    one, other = ends
    [third] = set("abc") - set(ends)
    for _ in range(2):
        driver.fault(third, one)
        driver.fault(one, third)
        driver.fault(one, third)
        old = driver.quorum.id
        driver.ask_fenced("a b c")
        if driver.quorum.id == old:
            break
        for reporter, peer in ((one, other), (other, one)):
            driver.up(reporter, Fault(old, peer, "late"))
            driver.up(reporter, Fault(old, peer, "again"))
    assert third in driver.members.split()
    assert len(driver.members.split()) == 2


def test_a_fault_of_a_quorum_before_the_previous_one_counts_for_nothing() -> None:
    driver = trio()
    first = driver.quorum.id
    for _ in range(2):
        driver.fault("b", "c")
        driver.ask_fenced("a b c", head=Head(driver.quorum.base.step + 1, driver.quorum.id))
    for reporter in "abc":
        driver.words(reporter)
    driver.up("a", Fault(first, "b", "very late"))
    driver.up("c", Fault(driver.quorums[1].id, "c", "itself"))
    assert all(driver.words(name) == [] for name in "abc")
    for _ in range(2):
        driver.fault("a")
        driver.ask_fenced("a b c")
    assert driver.members == "a b", "nobody was named, so that the last is left out"


def test_a_commit_between_clears_the_blame() -> None:
    driver = trio()
    for _ in range(3):
        driver.fault("b", "c")
        head = Head(driver.quorum.base.step + 1, driver.quorum.id)
        driver.ask_fenced("a b c", head=head)
    assert driver.members == "a b c"


def test_if_nobody_can_be_spared_the_link_is_named_and_the_next_try_waits() -> None:
    driver = Driver(min_replicas=2, expected_replicas=2)
    driver.form("a b")
    for _ in range(2):
        driver.fault("a", "b")
        driver.ask_fenced("a b")
    count = len(driver.quorums)
    assert "a named b in 2 faults: check the link" in driver.announcements("a")
    driver.wait(4_900, beats="a b")
    assert len(driver.quorums) == count
    driver.wait(200, beats="a b")
    assert len(driver.quorums) == count + 1


# --- R1, R2: restarts of the Lighthouse ----------------------------------------------------------------------------


def test_with_its_store_the_running_quorum_is_in_force_and_nobody_is_disturbed() -> None:
    before = trio()
    driver = Driver(before.record, clock_seconds=2_000)
    for name in "abc":
        driver.connect(name, before.quorum)
    driver.wait(10_000, beats="a b c")
    assert driver.quorum == before.quorum
    assert all(driver.words(name) == [] for name in "abc")


def test_with_its_store_a_member_that_does_not_come_back_is_lost() -> None:
    before = trio()
    driver = Driver(before.record)
    driver.connect("a", before.quorum)
    driver.connect("b", before.quorum)
    driver.wait(2_999, beats="a b")
    assert driver.words("a") == []
    driver.wait(1, beats="a b")
    driver.ask_fenced("a b", head=Head(5, before.quorum.id))
    assert driver.members == "a b"
    assert driver.quorum.id > before.quorum.id


def test_newcomers_do_not_found_a_second_run_while_the_first_is_out_of_sight() -> None:
    before = trio()
    driver = Driver(before.record, min_replicas=2)
    for name in "xy":
        driver.connect(name)
        driver.ask(name)
    driver.wait(100_000, beats="x y")
    assert driver.quorum == before.quorum
    assert "a/1" in driver.waiting


def test_without_store_the_reported_quorum_is_taken_up_when_all_are_there() -> None:
    before = trio()
    driver = Driver(None, clock_seconds=5, expected_replicas=3)
    driver.connect("d")
    driver.ask("d")
    driver.connect("a", before.quorum)
    driver.connect("b", before.quorum)
    driver.wait(10_000, beats="a b d")
    assert driver.core.q_last is None
    assert not any(isinstance(w, (Form, Revoke)) for w in driver.words("a"))
    driver.connect("c", before.quorum)
    assert driver.quorum == before.quorum
    assert driver.record is not None
    assert driver.record.q_last == before.quorum
    assert driver.revocations("a") == [(before.quorum.id, False)], "now d may join"
    driver.ask_fenced("a b c", head=Head(3, before.quorum.id))
    assert driver.members == "a b c (d)"
    assert driver.quorum.id > before.quorum.id


@pytest.mark.parametrize("how", ["exit", "incarnation"])
def test_without_store_a_member_that_is_certainly_gone_is_not_awaited(how: str) -> None:
    before = trio()
    driver = Driver(None, clock_seconds=5)
    driver.connect("a", before.quorum)
    driver.connect("b", before.quorum)
    if how == "exit":
        driver.exit_seen("c")
    else:
        driver.connect("c2")
    driver.wait(3_000, beats="a b c2")
    assert driver.quorum == before.quorum
    assert driver.revocations("a") == [(before.quorum.id, True)]
    driver.ask_fenced("a b", head=Head(3, before.quorum.id))
    assert driver.members == "a b"


def test_a_store_that_is_older_than_a_report_yields() -> None:
    before = trio()
    stale = before.record
    before.exit_seen("c")
    before.ask_fenced("a b")
    driver = Driver(stale, clock_seconds=5)
    driver.connect("a", before.quorum)
    driver.connect("b", before.quorum)
    driver.wait(10_000, beats="a b")
    assert driver.quorum == before.quorum
    assert driver.words("a") == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_checkpoint_of_a_quorum_that_only_a_lost_store_knew_is_told(when: str) -> None:
    """a is in quorum 1; quorum 2 of b and c went on without it, they died, and b left a checkpoint."""
    before = trio()
    old = before.quorum
    before.exit_seen("a")
    before.ask_fenced("b c")
    disk = Head(40, before.quorum.id)
    restarted = Position(0, disk, level=True, disk_head=disk)
    driver = Driver(None, clock_seconds=2_000)
    if when == "before":
        driver.connect("b2", position=restarted)
    driver.connect("a", old)
    driver.exit_seen("b")
    driver.exit_seen("c")
    driver.wait(3_000, beats="a b2")
    assert driver.quorum == old
    if when == "after":
        assert "total loss" not in driver.announcements("a")
        driver.connect("b2", position=restarted)
    driver.ask("b2", restarted)
    driver.ask_fenced("a")
    assert driver.members == "a (b2)"
    assert f"total loss: there was a quorum {disk.quorum_id}" in driver.announcements("a")
    driver.ask_fenced("a b2")
    assert "total loss" not in driver.announcements("a"), "it is said once"


def test_a_round_that_was_open_goes_on_after_a_restart() -> None:
    before = trio()
    driver = Driver(before.record)
    fenced = Position(before.quorum.id, START, Vote(1, before.quorum.id), level=True)
    for name in "ab":
        driver.connect(name, before.quorum, fenced)
        driver.ask(name, fenced)
    driver.connect("c", before.quorum)
    assert driver.revocations("c") == [(before.quorum.id, True)]
    driver.ask("c", fenced)
    assert driver.members == "a b c"
    assert driver.quorum.base == Head(1, before.quorum.id)


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ({"min_replicas": 0}, "min_replicas is 0"),
        ({"min_replicas": 3, "expected_replicas": 2}, "less than min_replicas"),
        ({"join_timeout_ms": -1}, "join_timeout_ms is -1"),
    ],
)
def test_settings_that_make_no_sense_get_a_sentence(bad: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        CoreConfig(**bad)  # type: ignore[arg-type]


def test_the_heartbeat_limit_may_be_set_on_its_own() -> None:
    assert Timeouts().heartbeat_timeout_ms == 5_000
    assert Timeouts(heartbeat_override_ms=700).heartbeat_timeout_ms == 700
    with pytest.raises(ValueError, match="heartbeat_timeout_ms is 61000"):
        Timeouts(heartbeat_override_ms=61_000)


def test_the_story_and_the_view_explain() -> None:
    driver = trio()
    driver.exit_seen("c")
    driver.ask_fenced("a")
    view = driver.core.view(driver.now_ms)
    assert view.round.startswith("c is gone")
    assert view.waiting == "for b to ask"
    assert {p.process.replica_id: (p.state, p.asked) for p in view.peers} == {
        "a": ("member", True),
        "b": ("member", False),
    }
    assert any("formed" in line for line in driver.core.story())


def test_a_record_that_names_a_member_twice_is_never_made() -> None:
    quorum = Quorum(1, (Member(process("a"), "h:1", True),), START)
    driver = Driver(Record(1, quorum))
    driver.connect("a2")
    driver.wait(3_000)
    driver.ask("a2")
    assert driver.members == "a2"


def test_a_total_loss_waits_for_the_ask_of_whom_is_here_with_something_newer() -> None:
    driver = Driver(expected_replicas=1, restart_timeout_ms=1_000)
    driver.form("a")
    driver.exit_seen("a")
    newer = Position(0, Head(4, driver.quorum.id), level=True)
    driver.connect("b", position=newer)
    driver.connect("a2")
    driver.ask("a2")
    driver.wait(2_000, beats="a2 b")
    assert driver.members == "a"
    assert "b/1 to take part" in driver.waiting
    driver.ask("b", newer)
    assert driver.members == "b (a2)"
    assert driver.quorum.base == newer.head


def test_for_whom_a_round_waits_is_said_as_it_is_now() -> None:
    driver = trio()
    driver.fault("a")
    assert driver.waiting == "for a, b, c to ask"
    driver.ask_fenced("a")
    driver.ask_fenced("b")
    assert driver.waiting == "for c to ask"
