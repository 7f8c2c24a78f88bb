"""Restarts of the Lighthouse, with its store and without (R1, R2): the quorum core by hand."""

from __future__ import annotations

import pytest
from core_driver import START, Driver, trio

from lighthouse.messages import Form, Head, Position, Revoke, Vote

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
