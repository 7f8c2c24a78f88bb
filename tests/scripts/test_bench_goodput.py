"""``scripts/bench goodput``: its account of commits and absences, its tables, and a short run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from benchmarks import goodput  # noqa: E402
from benchmarks.__main__ import main  # noqa: E402
from benchmarks.checkpoint_worker import Checkpoint  # noqa: E402
from benchmarks.goodput_account import (  # noqa: E402
    Absence,
    Committed,
    Part,
    committed_steps,
    corrected,
    schedule,
)
from benchmarks.goodput_jobs import TorchrunRanks  # noqa: E402
from benchmarks.recovery_log import Attempt  # noqa: E402
from benchmarks.workload import Workload  # noqa: E402

NAMES = ("a", "b", "c")


def test_schedule_is_that_of_the_seed_and_ends_with_the_run() -> None:
    strikes = schedule(NAMES, 300.0, 20.0, seed=3)
    assert strikes == schedule(NAMES, 300.0, 20.0, seed=3) != schedule(NAMES, 300.0, 20.0, seed=4)
    assert [int(strike.at_s) for strike in strikes] == [20 * number for number in range(1, 15)]
    assert {strike.order[0] for strike in strikes} == set(NAMES)
    assert all(sorted(strike.order) == list(NAMES) for strike in strikes)


def _attempt(at_s: float, step: int, participants: int, committed: bool = True) -> Attempt:
    return Attempt(at_s, step, committed, participants, None)


def test_a_step_counts_once_with_all_its_gradients() -> None:
    told = [
        _attempt(1.2, 1, 3),
        _attempt(1.0, 1, 3),
        _attempt(1.1, 1, 0),  # a group that joins: commits, but not its own
        _attempt(2.0, 1, 2, committed=False),
        _attempt(3.0, 2, 2),
        _attempt(3.1, 3, 0),
    ]
    assert committed_steps(told) == [Committed(1.0, 3), Committed(3.0, 2)]


def test_part_counts_what_falls_into_it() -> None:
    steps = [
        Committed(9.9, 3),
        Committed(10.0, 3),
        Committed(11.5, 2),
        Committed(12.02, 2),
        Committed(13.0, 3),
    ]
    part = Part(10.0, 12.05)
    assert part.batches(steps) == 7
    assert part.timeline(steps, tokens_per_batch=10) == [(0, 30), (1, 40)]


def test_absence_lasts_until_the_victim_is_back_or_the_end() -> None:
    part = Part(100.0, 200.0)
    absences = [Absence("a", 110.0, ready=114.0, level=115.0), Absence("b", 195.0, ready=199.0)]
    assert part.absent_s(absences, "ready") == pytest.approx(4 + 4)
    assert part.absent_s(absences, "level") == pytest.approx(5 + 5)
    assert part.absent_s([Absence("a", 150.0)], "ready") == pytest.approx(50)


def test_correction_asks_of_the_absent_nothing() -> None:
    # One of three groups was away for half of the time, the others did all that they could.
    assert corrected(5 / 6, absent_s=50.0, groups=3, seconds=100.0) == pytest.approx(1.0)
    assert corrected(0.5, absent_s=0.0, groups=3, seconds=100.0) == 0.5


def _row(name: str, **changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": name,
        "undisturbed_tokens_per_s": 400.0,
        "tokens_per_s": 360.0,
        "share_raw": 0.9,
        "share_corrected": 0.97,
        "share_corrected_restart": 0.96,
        "absences": [{"replica_id": "a", "killed": 10.0, "ready": 13.0, "level": 14.0}],
        "kills": 1,
        "kills_skipped": 0,
        "steps_lost": 0,
        "restarts": 1,
        "own_deaths": 0,
        "deaths": [],
        "total_losses": 0,
        "digests_differ": 0,
        "digests_compared": 9,
        "own_cores": [0.5, 0.9],
        "others_cores": [0.1, 0.2],
        "ended_early": "",
        "timeline": [[0, 400]],
    }
    return {**row, **changes}


def _outcome(system: str, **changes: Any) -> dict[str, Any]:
    outcome = {
        "scenario": "frozen",
        "system": system,
        "window_s": 30.0,
        "steps": 140,
        "share": 0.8,
        "longest_gap_s": 5.1,
        "steps_lost": 0,
        "survivors_died": 0,
        "went_on": True,
        "ended_s": None,
        "victim_back_s": 12.0,
        "digests_differ": 0,
        "error": "",
    }
    return {**outcome, **changes}


def _result(rows: list[dict[str, Any]], scenarios: list[dict[str, Any]]) -> dict[str, Any]:
    settings = {"groups": 3, "seconds": 300.0, "kill_every_s": 20.0, "state_bytes": 38e6}
    return {"settings": settings, "goodput": {"rows": rows}, "scenarios": scenarios}


def test_tables_tell_ratios_and_how_it_ended() -> None:
    rows = [
        _row("torchft_plus"),
        _row("checkpoint-restart", tokens_per_s=180.0, digests_compared=None, absences=[]),
        _row("torchft tuned", ended_early="it does not train"),
    ]
    scenarios = [_outcome("torchft_plus"), _outcome("torchft default", ended_s=60.2, longest_gap_s=None)]
    above, below = goodput.tables(_result(rows, scenarios))
    assert all(len(cells) == len(above[1]) for cells in above[2])
    assert [cells[above[1].index("of ours")] for cells in above[2][:2]] == ["1.00", "0.50"]
    assert above[2][0][above[1].index("level s")] == "4.0"
    assert above[2][0][above[1].index("CPU ms a batch")] == "40 / 80"
    assert above[2][2][:2] == ["torchft tuned", "it does not train"]
    assert all(len(cells) == len(below[1]) for cells in below[2])
    assert below[2][0][-1] == "went on; the group that was hit commits again after 12.0 s"
    assert below[2][1][-1] == "ended after 60.2 s"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"digests_differ": 1}, "parameters differ after 1 steps"),
        ({"digests_compared": 0}, "no digests could be compared"),
        ({"steps_lost": 2}, "2 batches of survivors were lost"),
        ({"deaths": ["replica_1 ended with status 1, see its.log"]}, "replica_1 ended with status 1"),
        ({"ended_early": "it does not train"}, "it does not train"),
    ],
)
def test_what_must_not_happen_to_ours_is_a_failure(changes: dict[str, Any], sentence: str) -> None:
    assert goodput.failures(_result([_row("torchft_plus")], [])) == []
    (failure,) = goodput.failures(_result([_row("torchft_plus", **changes)], []))
    assert sentence in failure


def test_torchft_may_lose_its_survivors_but_ours_may_not() -> None:
    rows = [_row("torchft default", own_deaths=2, deaths=["replica_1 ended"], steps_lost=9, digests_differ=1)]
    died = {"went_on": False, "survivors_died": 2, "ended_s": 60.0}
    assert goodput.failures(_result(rows, [_outcome("torchft default", **died)])) == []
    assert len(goodput.failures(_result([], [_outcome("torchft_plus", **died)]))) == 1


def test_a_checkpoint_is_replaced_as_a_whole(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "checkpoint.pt"
    assert Checkpoint(path).load() is None
    tensor, checkpoint = torch.zeros(3), Checkpoint(path)
    checkpoint.save({"model": {"w": tensor}, "step": 5})
    tensor += 1  # training goes on while the copy is written
    checkpoint.save({"model": {"w": tensor}, "step": 10})  # waits for the one before
    before = checkpoint.load()
    assert before is not None and before["step"] in (5, 10)
    assert bool((before["model"]["w"] == (0 if before["step"] == 5 else 1)).all())


def _until(condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_rolled_back_steps_do_not_count_until_they_are_done_again(tmp_path: Path) -> None:
    job = TorchrunRanks(tmp_path / "job", Workload())
    process = subprocess.Popen(["sleep", "60"])
    try:
        for rank in range(3):
            job._take({"rank": rank, "pid": process.pid, "ready": 1.0, "step": 0})
        for step in range(1, 8):
            job._take({"rank": 0, "time": float(step), "step": step, "participants": 3})
        assert job.level("rank_0") and not job.level("rank_1")
        job.kill("rank_0")
        process.wait(10)
        assert not job.level("rank_0")
        for rank in range(3):
            job._take({"rank": rank, "pid": os.getpid(), "ready": 1e12, "step": 5})
        assert [step.time for step in job.steps()] == [1, 2, 3, 4, 5]
        assert (job.batches_lost(), job.restarts, job.own_deaths) == (6, 3, 2)
        job._take({"rank": 1, "time": 20.0, "step": 6, "participants": 3})
        assert [step.time for step in job.steps()][-1] == 20.0
    finally:
        process.kill()
        process.wait()


def test_torchrun_starts_again_from_the_checkpoint(tmp_path: Path) -> None:
    """One real kill of one of its ranks."""
    with TorchrunRanks(tmp_path / "job", Workload()) as job:

        def level() -> bool:
            job.tend()
            return all(map(job.level, job.names)) and len(job.steps()) > 10

        _until(level)
        job.kill("rank_1")
        _until(lambda: not job.level("rank_1"))
        _until(lambda: level() and job.absences[0].level is not None)
        assert job.restarts == 3 and job.own_deaths == 2
        assert len(job.steps()) > 10  # it did not begin with step 0
        absence = job.absences[0]
        assert absence.ready is not None and absence.level is not None
        assert absence.killed < absence.ready < absence.level
        ranks = job.pids()[1:]
    _until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), 10)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_quick_goodput_run(tmp_path: Path) -> None:
    """Two kills, and a group that holds its GIL."""
    arguments = ["goodput", "--quick", "--systems", "torchft_plus", "--rows", "torchft_plus"]
    assert main([*arguments, "--scenarios", "gil", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "goodput.json").read_text())
    (row,) = result["goodput"]["rows"]
    assert row["kills"] + row["kills_skipped"] == 2
    assert row["digests_compared"] > 0 == row["digests_differ"]
    assert len(row["timeline"]) == 20 and sum(tokens for _, tokens in row["timeline"]) > 0
    (outcome,) = result["scenarios"]
    assert outcome["went_on"] and outcome["longest_gap_s"] > 1.0
