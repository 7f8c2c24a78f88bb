"""Whole runs of torchtitan whose groups train by themselves and synchronise every so many steps."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("torchtitan") is None:  # importing it needs our preparations
    pytest.skip("needs torchtitan", allow_module_level=True)

from titan_runs import Runs

pytestmark = [pytest.mark.titan, pytest.mark.timeout(400)]
REPLICAS = ("replica_0", "replica_1")


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    started = Runs(tmp_path)
    yield started
    started.close()


def semi_sync(method: str, **keys: object) -> list[str]:
    return [
        f"--fault_tolerance.{key}={value}"
        for key, value in {"semi_sync_method": method, "min_replica_size": 2, **keys}.items()
    ]


def start(
    runs: Runs, steps: int, *arguments: str, replicas: tuple[str, ...] = REPLICAS, **more: str
) -> list[Any]:
    return [runs.start(r, steps, *arguments, groups=2, REPLICA_ID=r, **more) for r in replicas]


def compared_digests(runs: Runs) -> int:
    """Digests of what is shared are the same on all groups after each sync; returns how many were compared."""
    digests: dict[tuple[int, int], list[str]] = {}
    for replica in REPLICAS:
        for event in runs.events(replica, "digest"):
            digests.setdefault((event["step"], event["quorum_id"]), []).append(event["digest"])
    assert all(len(set(found)) == 1 for found in digests.values())
    return sum(len(found) > 1 for found in digests.values())


@pytest.mark.parametrize("moment", ["in a sync", pytest.param("between syncs", marks=pytest.mark.long)])
def test_a_killed_group_heals_and_the_survivor_loses_no_inner_step(runs: Runs, moment: str) -> None:
    """Two groups are needed for a sync, so the survivor waits in it for the one that was killed."""
    window, steps = 10, 80
    arguments = semi_sync("diloco", sync_steps=20, num_fragments=2, fragment_sync_delay=2)
    runs.start_lighthouse(expected=2)
    (survivor,) = start(runs, steps, *arguments, replicas=REPLICAS[:1])
    deadly = {"TITAN_DIE_IN_SYNC": "3"} if moment == "in a sync" else {"TITAN_DIE_IN_STEP": "27"}
    (victim,) = start(runs, steps, *arguments, replicas=REPLICAS[1:], **deadly)
    assert victim.wait(150) == -signal.SIGKILL, runs.tails()
    (again,) = start(runs, steps, *arguments, replicas=REPLICAS[1:])
    assert [survivor.wait(200), again.wait(60)] == [0, 0], runs.tails()
    commits = runs.events("replica_0", "commit")
    assert [event["step"] for event in commits] == list(range(1, steps // window + 1))
    assert all(event["contributed"] for event in commits), "the survivor lost inner steps"
    assert runs.events("replica_1", "level"), "the group that came back never was level"
    one, other = runs.result("replica_0"), runs.result("replica_1")
    assert one == other
    assert one["step"] == steps
    assert compared_digests(runs) >= 4
    # Batches of the window that the group came back in are read again; those of a second window that was too early for its
    # fragment count in the next sync.
    level = runs.events("replica_1", "level")[-1]["time"]
    counted = [event["contributed"] for event in runs.events("replica_1", "commit")]
    early = sum(not e["contributed"] and e["time"] > level for e in runs.events("replica_1", "commit"))
    assert 2 < sum(counted) < steps // window
    assert one["tokens"] == 32 * window * (steps // window + sum(counted) + max(0, early - 1))


def test_one_replica_that_takes_over_its_own_average_equals_the_stock_trainer(runs: Runs) -> None:
    """LocalSGD of one group is plain training, whatever its window; so is one with a stop between its windows."""
    alone = semi_sync("local_sgd", sync_steps=3, min_replica_size=1)
    disk = ("--checkpoint.enable", "--checkpoint.interval", "3", "--checkpoint.no_last_save_model_only")
    scheduled = ("--lr_scheduler.total_steps", "9")
    runs.start_lighthouse(expected=1)
    first = [
        runs.start("stock", 9, *scheduled, "--fault_tolerance.enable=false", TITAN_SAVE="1"),
        runs.start("half", 6, *scheduled, *alone, *disk),
    ]
    assert [process.wait(150) for process in first] == [0, 0], runs.tails()
    job = ("--fault_tolerance.job_id", "second")
    second = runs.start("whole", 9, *scheduled, *alone, *disk, *job, TITAN_SAVE="1")
    assert second.wait(150) == 0, runs.tails()
    stock, half, whole = map(runs.result, ("stock", "half", "whole"))
    assert [stock["plugin"], half["plugin"], whole["plugin"]] == [False, True, True]
    assert (half["step"], whole["step"]) == (6, 9)
    assert [whole[key] for key in ("tokens", "rates")] == [stock[key] for key in ("tokens", "rates")]
    # Not bit for bit: global - (global - local) is not local.
    theirs, ours = (torch.load(runs.folder / f"{name}.pt", weights_only=True) for name in ("stock", "whole"))
    differences = [(theirs[name] - ours[name]).abs() for name in theirs]
    assert sum(float(d.sum()) for d in differences) / sum(d.numel() for d in differences) < 1e-6


@pytest.mark.long
def test_all_go_on_from_the_global_copy_of_a_checkpoint_in_mid_window(runs: Runs) -> None:
    """Both groups end and start again: outer momentum and data are those of the last sync before the checkpoint."""
    arguments = semi_sync("diloco", sync_steps=4)
    disk = ("--checkpoint.enable", "--checkpoint.no_last_save_model_only", "--checkpoint.interval")
    runs.start_lighthouse(expected=2)
    first = start(runs, 12, *arguments, *disk, "6")
    assert [process.wait(150) for process in first] == [0, 0], runs.tails()
    straight = runs.result("replica_0")
    folders = sorted(path.name for path in (runs.folder / "dump" / "checkpoint").iterdir())
    assert folders == ["step-12", "step-6"]
    job = ("--fault_tolerance.job_id", "second", "--checkpoint.load_step", "6")
    second = start(runs, 12, *arguments, *disk, "100", *job)
    assert [process.wait(150) for process in second] == [0, 0], runs.tails()
    one, other = runs.result("replica_0"), runs.result("replica_1")
    assert one == other
    # Tokens agree as the second and third window are read again from their beginning; the parameters do not, as the inner
    # optimizer is that of the checkpoint, and was at its sixth step.
    assert (one["step"], one["tokens"], one["rates"]) == (12, straight["tokens"], straight["rates"])
