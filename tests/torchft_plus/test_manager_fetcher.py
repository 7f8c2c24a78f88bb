"""One fetch at a time: two would write into the same tensors."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from lighthouse.events import EventLog
from lighthouse.messages import Head
from torchft_plus.manager import fetcher
from torchft_plus.state import StateError, StateRegistry

STALL_MS = 100


class _Fetches:
    """In place of ``fetch_state``: each call waits for its word and ends as it says."""

    def __init__(self) -> None:
        self.begun: list[tuple[Head, tuple[str, ...]]] = []
        self.changed = threading.Condition()
        self.may_end = threading.Event()
        self.heeds_cancel = True

    def __call__(self, _registry: Any, head: Head, donors: list[str], **options: Any) -> Any:
        with self.changed:
            self.begun.append((head, tuple(donors)))
            self.changed.notify_all()
        while not self.may_end.wait(0.005):
            if self.heeds_cancel and options["cancel"].is_set():
                break
        raise StateError(f"step {head.step} is not to be had")

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.begun) >= count, 10)


@pytest.fixture(name="fetches")
def _fetches(monkeypatch: pytest.MonkeyPatch) -> _Fetches:
    fetches = _Fetches()
    monkeypatch.setattr(fetcher, "fetch_state", fetches)
    return fetches


class _Rank:
    def __init__(self, folder: Path) -> None:
        self.reasons: list[str] = []
        self.woken = threading.Semaphore(0)
        self.fetcher = fetcher.Fetcher(
            StateRegistry(),
            STALL_MS,
            EventLog(folder / "events", "a"),
            self.reasons.append,
            self.woken.release,
        )


def test_a_newer_head_is_fetched_when_the_fetch_before_has_ended(fetches: _Fetches, tmp_path: Path) -> None:
    rank = _Rank(tmp_path)
    rank.fetcher.start(Head(1, 1), ["a"])
    fetches.wait_for(1)
    rank.fetcher.start(Head(2, 2), ["b"])
    fetches.wait_for(2)
    fetches.may_end.set()
    assert rank.woken.acquire(timeout=10)
    assert rank.reasons == ["step 2 is not to be had"]
    assert [head.step for head, _ in fetches.begun] == [1, 2]
    rank.fetcher.close(1_000)


def test_a_fetch_that_does_not_end_is_told_and_nothing_begins_beside_it(
    fetches: _Fetches, tmp_path: Path
) -> None:
    fetches.heeds_cancel = False
    rank = _Rank(tmp_path)
    rank.fetcher.start(Head(1, 1), ["a"])
    fetches.wait_for(1)
    rank.fetcher.start(Head(2, 2), ["b"])
    assert rank.woken.acquire(timeout=10)
    assert rank.reasons == ["the fetch before this one does not end"]
    assert rank.fetcher.failed
    assert len(fetches.begun) == 1
    fetches.may_end.set()
    rank.fetcher.close(1_000)


def test_when_its_donors_fail_a_fetch_turns_to_the_new_ones(fetches: _Fetches, tmp_path: Path) -> None:
    rank = _Rank(tmp_path)
    rank.fetcher.start(Head(1, 1), ["a"])
    fetches.wait_for(1)
    rank.fetcher.start(Head(1, 1), ["b"])
    fetches.may_end.set()
    assert rank.woken.acquire(timeout=10)
    assert fetches.begun == [(Head(1, 1), ("a",)), (Head(1, 1), ("b",))]
    assert rank.reasons == ["step 1 is not to be had"]
    rank.fetcher.close(1_000)
