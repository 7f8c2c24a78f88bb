"""What is saved on disk, and what is counted."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from lighthouse.messages import Head
from torchft_plus.titan.checkpoint import KEY, OUTER, CommittedCheckpoints, SavedHead
from torchft_plus.titan.metrics import FaultToleranceMetrics
from torchft_plus.titan.outer_state import OuterState


def test_saved_head_survives_its_text() -> None:
    saved = SavedHead(7, (3 << 32) | 5, 4, {"0": 7, "1": 6}, 20)
    assert SavedHead.from_text(saved.to_text()) == saved


def test_positions_of_another_cut_of_the_data_are_dropped_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved = SavedHead(7, 5, 4, {"0": 7})
    assert saved.for_shares(4) == saved
    with caplog.at_level(logging.WARNING):
        assert saved.for_shares(8) == SavedHead(7, 5, 8, {})
    assert "every group reads its share from the beginning" in caplog.text


def test_a_head_in_other_units_is_the_last_one_that_is_not_ahead() -> None:
    saved = SavedHead(7, 5, 4, {"0": 7}, 20)
    assert saved.for_steps_per_commit(20) == saved
    assert saved.for_steps_per_commit(1) == SavedHead(140, 5, 4, {"0": 7}, 1)
    assert saved.for_steps_per_commit(50) == SavedHead(2, 5, 4, {"0": 7}, 50)


def missing(key: str) -> CheckpointException:
    return CheckpointException(
        "plan", {0: (RuntimeError(f"Missing key in checkpoint state_dict: {key}."), None)}
    )  # type: ignore[dict-item]


def test_a_checkpoint_of_the_stock_trainer_is_loaded_without_our_entry() -> None:
    checkpoints = CommittedCheckpoints(
        SimpleNamespace(states={"dataloader": 1}, exclude_from_loading=["dataloader"])
    )
    asked: list[bool] = []

    def stock_load(step: int) -> bool:
        asked.append(checkpoints.expects_head)
        if checkpoints.expects_head:
            raise missing(f"train_state.{KEY}")
        return True

    assert checkpoints.load(stock_load, 4)
    assert asked == [True, False]
    assert checkpoints.expects_head


def test_a_checkpoint_without_outer_state_is_loaded_without_it() -> None:
    states: dict[str, Any] = {}
    checkpoints = CommittedCheckpoints(SimpleNamespace(states=states))
    checkpoints.outer = OuterState([])
    asked: list[tuple[bool, bool]] = []

    def stock_load(step: int) -> bool:
        asked.append((checkpoints.expects_head, OUTER in states))
        if OUTER in states:
            raise missing(f"{OUTER}.global.norm.weight")
        if checkpoints.expects_head:
            raise missing(f"train_state.{KEY}")
        return True

    assert checkpoints.load(stock_load, 4)
    assert asked == [(True, True), (True, False), (False, False)]
    assert checkpoints.expects_head and states == {OUTER: checkpoints.outer}, "it is saved again"


def test_any_other_failure_to_load_is_raised() -> None:
    checkpoints = CommittedCheckpoints(SimpleNamespace())

    def stock_load(step: int) -> bool:
        raise missing("model.weight")

    with pytest.raises(CheckpointException):
        checkpoints.load(stock_load, 4)


def test_the_readers_state_of_one_group_is_not_saved_for_all() -> None:
    states: dict[str, Any] = {"dataloader": 1, "model": 2}
    excluded = ["dataloader", "lr_scheduler"]
    CommittedCheckpoints(SimpleNamespace(states=states, exclude_from_loading=excluded))
    assert states == {"model": 2}
    assert excluded == ["lr_scheduler"]


def test_a_head_counts_as_saved_only_when_all_of_it_is_on_disk() -> None:
    upload: Future[None] = Future()
    checkpointer = SimpleNamespace(save_future=None)
    checkpoints = CommittedCheckpoints(checkpointer)
    done: list[Head] = []

    def stock_save(step: int, last_step: bool) -> None:
        checkpointer.save_future = upload
        checkpoints.note_saved()

    checkpoints.save(stock_save, 2, False, None, done.append)
    assert checkpointer.save_future is None, "another group writes"
    checkpoints.save(stock_save, 2, False, Head(2, 9), done.append)
    assert done == []
    upload.set_result(None)
    assert done == [Head(2, 9)]


def test_a_failed_upload_saves_no_head() -> None:
    upload: Future[None] = Future()
    checkpoints = CommittedCheckpoints(SimpleNamespace(save_future=upload))
    done: list[Head] = []
    checkpoints.save(lambda step, last_step: checkpoints.note_saved(), 2, False, Head(2, 9), done.append)
    upload.set_exception(OSError("disk full"))
    assert done == []


def test_no_head_is_saved_when_no_checkpoint_was_due() -> None:
    checkpoints = CommittedCheckpoints(SimpleNamespace(save_future=None))
    done: list[Head] = []
    checkpoints.save(lambda step, last_step: None, 3, False, Head(3, 9), done.append)
    assert done == []


def outcome(refused: bool) -> Any:
    return SimpleNamespace(refused=refused, contributors=3, head=Head(9, 2))


def test_metrics_count_commits_refusals_and_the_time_of_healing() -> None:
    metrics = FaultToleranceMetrics()
    metrics.started(True, 10.0)
    metrics.finished(outcome(refused=True), 1)
    metrics.started(True, 11.0)
    metrics.finished(outcome(refused=False), 2)
    metrics.started(False, 14.5)
    metrics.finished(outcome(refused=False), 2)
    assert metrics.values() == {
        "ft/participants": 3,
        "ft/quorum_id": 2,
        "ft/commits": 2,
        "ft/refusals": 1,
        "ft/heal_seconds": 4.5,
    }


def test_metrics_of_windows_count_the_syncs_of_the_run() -> None:
    metrics = FaultToleranceMetrics(synchronises=True)
    metrics.finished(outcome(refused=False), 2)
    assert (metrics.values()["ft/commits"], metrics.values()["ft/syncs"]) == (1, 9)
