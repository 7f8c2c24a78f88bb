"""The first quorum, ids, bases, joiners and leavers, settings: the quorum core by hand."""

from __future__ import annotations

import pytest
from core_driver import CLOCK_SECONDS, START, Driver, process, trio

from lighthouse.core.quorum_core import COUNTER_BITS, EPOCHS_PER_S
from lighthouse.core.words import CoreConfig, Record
from lighthouse.messages import Form, Head, Member, Position, Quorum, Vote
from lighthouse.timeouts import Timeouts

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
