"""The store and the time base."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse import wire
from lighthouse.core.clock import RunningClock
from lighthouse.core.words import Record
from lighthouse.messages import Head, Member, Process, Quorum
from lighthouse.storage import MemoryStorage, SqliteStorage, Storage, StorageError, default_path

QUORUM = Quorum(
    (1 << 62) + 5,
    (Member(Process("a", "1"), "[::1]:9", True), Member(Process("b", "2"), "h:1", False)),
    Head(7, (1 << 62) + 4),
    reload=True,
    reason="b wants to join",
)


@pytest.fixture(params=["memory", "sqlite"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Storage]:
    """Opens the same store again (the one in memory cannot be closed and opened)."""
    memory = MemoryStorage()
    return lambda: memory if request.param == "memory" else SqliteStorage(tmp_path / "deep" / "q.sqlite")


def test_a_record_comes_back_as_it_was(reopen: Callable[[], Storage]) -> None:
    store = reopen()
    assert store.load("job") is None
    assert store.store("job", None, Record(5, None))
    assert store.load("job") == Record(5, None)
    assert store.store("job", 5, Record(6, QUORUM, ended=True))
    assert store.load("other") is None
    store.close()
    again = reopen()
    assert again.load("job") == Record(6, QUORUM, ended=True)
    assert (again.epoch("job"), again.epoch("other")) == (6, None)
    again.close()


def test_only_the_holder_of_the_epoch_may_write(reopen: Callable[[], Storage]) -> None:
    older, newer = reopen(), reopen()
    assert older.store("job", None, Record(5, None))
    assert newer.store("job", 5, Record(6, QUORUM))
    assert not older.store("job", 5, Record(5, None))
    assert not older.store("job", None, Record(9, None))
    assert newer.load("job") == Record(6, QUORUM)
    assert newer.store("job", 6, Record(6, None))
    older.close()
    newer.close()


def test_a_store_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "q.sqlite"
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 7")
    database.close()
    with pytest.raises(StorageError, match="has version 7, this Lighthouse knows 3"):
        SqliteStorage(path)


def test_a_store_without_those_who_are_gone_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "q.sqlite"
    database = sqlite3.connect(path)
    database.executescript(
        "CREATE TABLE job (job_id TEXT PRIMARY KEY, epoch INTEGER NOT NULL, quorum BLOB, ended INTEGER NOT NULL);"
        "PRAGMA user_version = 2"
    )
    row = ("job", 1_796_000_000, wire.quorum_out(QUORUM).SerializeToString(), 0)
    database.execute("INSERT INTO job VALUES (?, ?, ?, ?)", row)
    database.commit()
    database.close()
    for _ in range(2):
        store = SqliteStorage(path)
        assert store.load("job") == Record(1_796_000_000, QUORUM)
        store.close()
    store = SqliteStorage(path)
    assert store.store("job", 1_796_000_000, Record(5, QUORUM, gone=((Process("b", "2"), "its exit"),)))
    assert store.load("job") == Record(5, QUORUM, gone=((Process("b", "2"), "its exit"),))
    store.close()


def test_a_file_that_is_no_store_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "q.sqlite"
    path.write_bytes(b"certainly no database, but long enough to look like one" * 100)
    with pytest.raises(StorageError, match="cannot be opened"):
        SqliteStorage(path)
    with pytest.raises(StorageError, match="cannot be opened"):
        SqliteStorage(path / "below-a-file")


def test_a_damaged_record_is_said(tmp_path: Path) -> None:
    path = tmp_path / "q.sqlite"
    store = SqliteStorage(path)
    store.store("job", None, Record(5, QUORUM))
    database = sqlite3.connect(path)
    database.execute("UPDATE job SET quorum = ?", (b"\x00\xff",))
    database.commit()
    database.close()
    with pytest.raises(StorageError, match="cannot be read"):
        store.load("job")
    store.close()


def test_the_default_store_is_one_for_each_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_path(29510) == tmp_path / "torchft_plus" / "lighthouse-29510.sqlite"


@given(st.lists(st.integers(-10, 5_000), max_size=50))
def test_the_clock_counts_only_time_in_which_the_lighthouse_ran(gaps: list[int]) -> None:
    clock = RunningClock(max_gap_ms=200)
    now = 1_000.0
    assert clock.read(now) == (0, False)
    expected = 0
    for gap in gaps:
        now += gap
        expected += min(max(gap, 0), 200)
        assert clock.read(now) == (expected, gap > 200)
