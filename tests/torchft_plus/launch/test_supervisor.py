"""The launcher with real processes that die, freeze, refuse to end and leave children."""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from pathlib import Path

from launching import eventually, launch


def test_a_killed_group_comes_back_alone_and_the_run_is_good(tmp_path: Path) -> None:
    run = launch(tmp_path, more='[[chaos]]\nat_step = 6\nkill = "replica_1"', FAKE_STEPS="40")
    status, output = run.finish()
    assert status == 0, output
    spawned = [event["replica_id"] for event in run.events("spawn")]
    assert sorted(spawned) == ["replica_0", "replica_1", "replica_1"]
    summary = run.summary()
    (failure,) = summary["failures"]
    assert (failure["replica_id"], failure["injected"], failure["healed"]) == ("replica_1", True, True)
    moments = {moment["name"]: moment["after_s"] for moment in failure["moments"]}
    assert (
        moments["detected"] < moments["restarted"] < moments["program up"] < moments["joiner's first commit"]
    )
    assert moments["detected"] < 0.5
    assert (summary["steps"], summary["loss"], summary["lost_steps"]) == (40, 3.0, [])
    assert summary["digests"]["compared"] > 10 and summary["digests"]["unequal"] == 0
    assert "replica_1 killed after step" in output
    assert not run.left_behind()


def test_a_rank_that_dies_takes_its_group_with_it(tmp_path: Path) -> None:
    run = launch(tmp_path, table="replicas = 2\nranks_per_replica = 2", plan={"replica_0.1": "die_at_5@1"})
    status, output = run.finish()
    assert status == 0, output
    exits = [e for e in run.events("exit") if e["signal"] == "SIGKILL"]
    assert sorted((e["replica_id"], e["rank"], e["first"]) for e in exits) == [
        ("replica_0", 0, False),
        ("replica_0", 1, True),
    ]
    assert "replica_0.1 died (SIGKILL)" in output
    assert "last lines of replica_0.1" in output


def test_one_rank_can_be_frozen_and_woken(tmp_path: Path) -> None:
    chaos = '[[chaos]]\nat_event = "commit"\nstop = "replica_1.0"\nresume_after_s = 0.5'
    run = launch(tmp_path, more=chaos, FAKE_STEPS="60")
    status, output = run.finish()
    assert status == 0, output
    assert [(e["action"], e["target"]) for e in run.events("chaos")] == [
        ("stop", "replica_1.0"),
        ("resume", "replica_1.0"),
    ]
    steps = [e for e in run.events("commit") if e["process"] == "replica_1.0"]
    assert max(b["time"] - a["time"] for a, b in pairwise(steps)) > 0.4
    (failure,) = run.summary()["failures"]
    assert failure["what"] == "replica_1.0 frozen" and failure["healed"]


def test_a_group_that_always_crashes_is_given_up(tmp_path: Path) -> None:
    table = "max_restarts = 2\nrestart_delay_ms = 20"
    plan = {"replica_1": "crash_at_start"}
    run = launch(tmp_path, table=table, plan=plan, FAKE_TOGETHER="0", FAKE_STEPS="120")
    status, output = run.finish()
    assert status == 1
    assert "replica_1 failed 3 times in a row without a committed step" in output
    assert "ValueError: the data is not there" in output
    assert len([e for e in run.events("spawn") if e["replica_id"] == "replica_1"]) == 3
    assert run.summary()["steps"] == 120  # the other one went on to its end


def test_a_trainer_that_finds_its_configuration_wrong_ends_the_run(tmp_path: Path) -> None:
    run = launch(tmp_path, plan={"*": "refuse"})
    assert run.finish()[0] == 2
    assert len(run.events("spawn")) == 2


def test_unequal_digests_are_loud(tmp_path: Path) -> None:
    run = launch(tmp_path, plan={"replica_1": "other_digest"})
    status, output = run.finish()
    assert status == 3
    assert "REPLICAS DIFFER" in output and "first at step 6" in output


def test_lost_steps_are_an_exit_status(tmp_path: Path) -> None:
    run = launch(tmp_path, plan={"replica_1": "refused_step"})
    status, output = run.finish()
    assert status == 4
    assert "replica_1, step 6: because the plan says so" in output


def test_a_group_that_leaves_before_the_end_is_restarted(tmp_path: Path) -> None:
    run = launch(tmp_path, plan={"replica_1": "exit_0_at_5@1"})
    status, output = run.finish()
    assert status == 0, output
    assert len([e for e in run.events("spawn") if e["replica_id"] == "replica_1"]) == 2


def test_a_late_comer_does_not_start_the_training_anew(tmp_path: Path) -> None:
    chaos = '[[chaos]]\nat_step = 18\nkill = "replica_1"'
    run = launch(tmp_path, more=chaos, FAKE_START_S="600", table="stop_grace_s = 1")
    status, output = run.finish()
    assert status == 0, output
    assert "it had not contributed again when the run ended" in output


def test_a_terminated_group_is_not_taken_for_finished(tmp_path: Path) -> None:
    run = launch(tmp_path, more='[[chaos]]\nat_step = 5\nterminate = "replica_0"')
    status, output = run.finish()
    assert status == 0, output
    assert len([e for e in run.events("spawn") if e["replica_id"] == "replica_0"]) == 2
    assert run.summary()["failures"][0]["what"] == "replica_0 told to leave"


def test_sigterm_ends_everything_even_what_ignores_it(tmp_path: Path) -> None:
    plan = {"replica_0": "ignore_sigterm", "replica_1": "grandchild"}
    run = launch(tmp_path, table="stop_grace_s = 3", plan=plan, FAKE_STEPS="100000")
    eventually(lambda: len(run.events("commit")) > 4)
    assert len(run.left_behind()) >= 3
    run.process.send_signal(signal.SIGTERM)
    status, output = run.finish()
    assert status == 128 + signal.SIGTERM, output
    assert not run.left_behind()
    assert "NOT FINISHED (SIGTERM" in output
    assert {e["process"] for e in run.events("left")} == {"replica_1.0"}


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    run = launch(tmp_path, table="replicas = 2\nranks_per_replica = 2", FAKE_STEPS="100000")
    eventually(lambda: len(run.events("commit")) > 2)
    assert len(run.left_behind()) == 4
    os.kill(run.process.pid, signal.SIGKILL)
    run.finish()
    eventually(lambda: not run.left_behind(), 10)


def test_the_deadline_of_the_run(tmp_path: Path) -> None:
    run = launch(tmp_path, table="deadline_s = 1.5", FAKE_STEPS="100000")
    status, output = run.finish()
    assert status == 1
    assert "launch.deadline_s = 1.5" in output
    assert not run.left_behind()


def test_a_program_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    status, output = launch(tmp_path, program="no-such-program").finish()
    assert status == 2
    assert "no-such-program cannot be run" in output


def test_without_a_known_number_of_steps_a_frozen_group_can_still_finish(tmp_path: Path) -> None:
    chaos = '[[chaos]]\nat_event = "commit"\nstop = "replica_0"\nresume_after_s = 0.2'
    run = launch(tmp_path, table="replicas = 1", more=chaos, known_steps=False)
    status, output = run.finish()
    assert status == 0, output
    assert len([e for e in run.events("spawn") if e["replica_id"] == "replica_0"]) == 1
