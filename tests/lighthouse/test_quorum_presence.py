"""Who is there, stands still, is silent, is who he says he is, or cannot work with another (L6 to L8): the quorum core by hand."""

from __future__ import annotations

import pytest
from core_driver import START, Driver, process, trio

from lighthouse.messages import Fault, Head, Position, Progress

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
