"""The policies' arithmetic against hand-computed cases; the recovery times come from the real cores."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lighthouse.timeouts import Timeouts
from torchft_plus.goodput.failures import Failure, failures_of
from torchft_plus.goodput.ledger import Account
from torchft_plus.goodput.rounds import QuietLauncher, Recovery, measure
from torchft_plus.goodput.scenario import POLICIES, Scenario
from torchft_plus.goodput.study import run_policy, run_study
from torchft_plus.testing.simulation import Simulation
from torchft_plus.testing.world import Settings

PLAIN = Scenario(
    replicas=4,
    hours=1_000 / 3_600,
    mtbf_s=math.inf,
    step_s=10.0,
    restart_s=95.0,
    state_gb=25.0,
    bandwidth_gbps=10.0,  # 20 s
    checkpoint_minutes=5.0,
    reconfigure_s=0.0,
    silent_share=0.0,
)
FIXED = Recovery((0.5,), (5.0,), (0.5,))


def play(policy: str, failures: list[Failure], **changes: Any) -> Account:
    return run_policy(policy, replace(PLAIN, **changes), failures, FIXED, 0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("changes", [{}, {"step_s": 0.3}, {"hours": 1_007 / 3_600}])
def test_without_failures_nothing_is_lost(policy: str, changes: dict[str, float]) -> None:
    account = play(policy, [], **changes)
    assert account.goodput == 1.0
    assert account.lost_steps == 0 and account.stall_s < 0.01
    assert account.seconds_with[4] == pytest.approx(replace(PLAIN, **changes).duration_s)


def test_ours_by_hand() -> None:
    """Death at 203 in step 21: it goes on with 3. Up at 298, asks; a member at 300; the state is there at 319; the
    replay of 2 steps takes 0.4 s; contributes from step 33 on. Steps 21 to 32 have 3 contributors, step 100 does not fit."""
    account = play("ours", [Failure(203.0, 2)], state_gb=24.0)
    assert account.lost_steps == 0 and account.steps == 99
    assert account.goodput == (20 * 4 + 12 * 3 + 67 * 4) / 400
    assert account.stall_s == pytest.approx(0.4)
    assert account.seconds_with[3] == pytest.approx(320 - 203)


def test_ours_in_the_reduction_and_in_silence() -> None:
    """At 209.5 the reduction runs: its 1 s begins again 0.5 s later, so step 21 ends at 211 and not at 210."""
    assert play("ours", [Failure(209.5, 2)], restart_s=5_000.0).stall_s == pytest.approx(1.0)
    assert play("ours", [Failure(203.0, 2, silent=True)], restart_s=5_000.0).stall_s == 0
    assert play("ours", [Failure(208.0, 2, silent=True)], restart_s=5_000.0).stall_s == pytest.approx(4.0)


def test_torchft_by_hand() -> None:
    """Step 21 is lost, the next begins at 210 (default: the silence ends at 208). Rejoins at 300: 20 s of download, of
    which 9 s are hidden; contributes from the step that begins at 321 on. 990 s of steps fit in what is left."""
    account = play("torchft", [Failure(203.0, 2)])
    assert account.lost_steps == 1 and account.stall_s == pytest.approx(11.0)
    assert account.steps == 97
    assert account.goodput == (20 * 4 + 10 * 3 + 67 * 4) / 400
    late = play("torchft", [Failure(209.0, 2)], restart_s=5_000.0)
    assert late.stall_s == pytest.approx(4.0)
    assert play("torchft-tuned", [Failure(209.0, 2)], restart_s=5_000.0).stall_s == 0


def test_torchft_loses_the_window() -> None:
    lost = play("torchft", [Failure(203.0, 2)], sync_every=5, restart_s=5_000.0)
    assert lost.lost_steps == 5 and lost.steps == 95
    kept = play("torchft", [Failure(203.0, 2)], sync_every=5, restart_s=5_000.0, window_loss="sync")
    assert kept.lost_steps == 0 and kept.stall_s == 0 and kept.steps == 100
    in_sync = play("torchft", [Failure(249.5, 2)], sync_every=5, restart_s=5_000.0, window_loss="sync")
    assert in_sync.lost_steps == 5


def test_checkpoint_by_hand() -> None:
    """Step 31 is under way at 405 with a checkpoint at step 30: 10.5 steps are lost; goes on at 405 + 95 + 20 = 520."""
    account = play("checkpoint", [Failure(405.0, 2)])
    assert account.lost_steps == 10.5 and account.stall_s == 115.0
    assert account.steps == 30 + 48
    assert account.goodput == 78 / 100
    twice = play("checkpoint", [Failure(405.0, 2), Failure(450.0, 1)])
    assert twice.stall_s == 160.0 and twice.lost_steps == 10.5 and twice.steps == 30 + 43


def test_a_lighthouse_that_dies() -> None:
    """Ours trains on. torchft ends its step at 210, waits 60 s, and all die: up and loaded at 270 + 95 + 20; from step 0."""
    died = [Failure(203.0, None)]
    ours = play("ours", died)
    assert ours.goodput == 1.0 and ours.stall_s == 0
    torchft = play("torchft", died)
    assert torchft.total_losses == 1 and torchft.lost_steps == 21
    tuned = play("torchft-tuned", died)
    assert tuned.lost_steps == 0 and tuned.stall_s == pytest.approx(203 + 30 + 1.9 - 210)
    at_once = play("ours", [*died, Failure(204.0, 1)], restart_s=5_000.0)
    assert at_once.stall_s == pytest.approx(233.5 - 209), "a membership change waits for the Lighthouse"


@pytest.mark.parametrize("policy", ["ours", "torchft"])
def test_the_loss_of_all_groups_goes_back_to_a_checkpoint(policy: str) -> None:
    account = play(policy, [Failure(405.0 + group, group) for group in range(4)])
    assert account.total_losses == 1
    # The last of them dies in step 41; the first is up at 500, has loaded at 520 and goes on from step 30.
    assert 30 + 40 < account.steps <= 30 + 48
    assert account.seconds_with[0] == pytest.approx(520 - 408)


@settings(deadline=None, max_examples=120)
@given(
    st.lists(st.tuples(st.floats(0, 999), st.sampled_from([0, 1, 2, 3, None]), st.booleans()), max_size=25),
    st.sampled_from([1, 3]),
    st.sampled_from(POLICIES),
)
def test_every_second_is_accounted_for(
    raw: list[tuple[float, int | None, bool]], window: int, policy: str
) -> None:
    failures = [Failure(*values) for values in sorted(raw, key=lambda values: values[0])]
    account = play(policy, failures, sync_every=window)
    assert 0 <= account.goodput <= 1 and account.lost_steps >= 0 and account.stall_s >= 0
    assert sum(account.seconds_with) == pytest.approx(1_000)
    rest_s = 1_000 - (account.steps + account.lost_steps) * 10 - account.stall_s
    assert -1e-6 <= rest_s <= 10 * window + 1e-6, "what is left is one unit under way"
    if policy == "ours" and account.total_losses == 0:
        assert account.lost_steps == 0


def test_goodput_rises_with_the_time_between_failures() -> None:
    goodputs: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for mtbf_s in (120.0, 600.0, 3_000.0, 15_000.0):
        scenario = replace(PLAIN, hours=12.0, mtbf_s=mtbf_s)
        for policy in POLICIES:
            runs = [run_policy(policy, scenario, failures_of(scenario, s), FIXED, s) for s in range(10)]
            goodputs[policy].append(sum(run.goodput for run in runs))
    for policy, values in goodputs.items():
        assert values == sorted(values) and values[0] < values[-1], policy
    for ours, torchft, checkpoint in zip(
        goodputs["ours"], goodputs["torchft"], goodputs["checkpoint"], strict=True
    ):
        assert ours > torchft > checkpoint


def test_failures_come_at_their_rate() -> None:
    scenario = replace(PLAIN, hours=100.0, mtbf_s=360.0, silent_share=0.25, lighthouse_mtbf_s=36_000.0)
    found = [failure for seed in range(20) for failure in failures_of(scenario, seed)]
    groups = [failure for failure in found if failure.group is not None]
    assert len(groups) / 20 == pytest.approx(1_000, rel=0.05)
    assert sum(failure.silent for failure in groups) / len(groups) == pytest.approx(0.25, abs=0.02)
    assert (len(found) - len(groups)) / 20 == pytest.approx(10, abs=3)
    regular = failures_of(replace(scenario, regular=True, lighthouse_mtbf_s=math.inf), 3)
    assert len(regular) == 1_000
    assert regular[1].at_s - regular[0].at_s == pytest.approx(360.0)


def test_recovery_is_played_through_the_real_cores() -> None:
    recovery = measure(3, 2, 0)
    assert all(0 < seconds < 1.0 for seconds in [*recovery.death_s, *recovery.join_s])
    assert all(4.0 < seconds < 7.0 for seconds in recovery.silent_s), "the heartbeat limit is 5 s"
    assert len(recovery.death_s) == len(recovery.silent_s) == 2 and len(recovery.join_s) == 4


def test_a_study_depends_on_its_seeds_only() -> None:
    scenario = replace(PLAIN, replicas=3, hours=2.0, mtbf_s=600.0)
    first = run_study(scenario, POLICIES, 3, trials=1)
    assert first == run_study(scenario, POLICIES, 3, trials=1)
    later = run_study(scenario, ["torchft"], 1, first_seed=2)
    assert later.accounts["torchft"][0] == first.accounts["torchft"][2]
    assert first.accounts["ours"][0] != first.accounts["ours"][1]


def test_the_arithmetic_agrees_with_the_whole_protocol() -> None:
    """Every step of 100 s played for real, with four deaths, beside the same run counted by arithmetic."""
    scenario = Scenario(
        replicas=3,
        hours=100 / 3_600,
        mtbf_s=math.inf,
        step_s=0.5,
        restart_s=4.0,
        state_gb=1.0,
        bandwidth_gbps=8.0,  # 1 s
        reconfigure_s=0.0,
        reduce_share=0.02,
        apply_share=0.0,
    )
    failures = [Failure(at_s, group) for at_s, group in ((10.1, 0), (30.3, 1), (31.7, 2), (70.2, 1))]
    expected = run_policy("ours", scenario, failures, measure(3, 3, 0), 0)
    simulated, contributions = play_every_step(scenario, failures)
    assert simulated.oracle.lost_gradients == 0 and simulated.oracle.total_losses == 0
    assert contributions == pytest.approx(expected.goodput * 600, rel=0.03)
    assert expected.goodput < 0.95


def play_every_step(scenario: Scenario, failures: list[Failure]) -> tuple[Simulation, int]:
    """The simulator, with steps, restarts and transfers of these lengths; returns steps x contributors."""
    compute_ms = round(scenario.step_s * 1_000) - 8  # reduction and votes take about 8 ms
    values = Settings(
        seed=1,
        groups=scenario.replicas,
        expected_replicas=scenario.replicas,
        timeouts=Timeouts(),
        join_timeout_ms=60_000,
        compute_ms=(compute_ms, compute_ms),
        apply_ms=(0, 0),
        transfer_ms=(1_000, 1_000),
        delay_ms=(0, 2),
        slow_message_chance=0.0,
        profile="crash",
        faults=0,
    )
    simulation = Simulation(values)
    world, launcher = simulation.world, QuietLauncher(simulation)
    world.calm = True
    simulation.launcher, simulation.oracle.groups = launcher, launcher.all
    simulation.start_lighthouse()
    for group in range(scenario.replicas):
        launcher.start(f"replica_{group}")
    assert world.scheduler.run(5_000, lambda: simulation.oracle.calm_steps == 1)
    begin_ms, before = world.now_ms, set(simulation.oracle.commits)
    for failure in failures:
        world.scheduler.run(begin_ms + round(failure.at_s * 1_000))
        name = f"replica_{failure.group}"
        launcher.groups[name].end(-9, "killed")
        world.scheduler.after(scenario.restart_s * 1_000, launcher.start, name)
    world.scheduler.run(begin_ms + round(scenario.duration_s * 1_000))
    commits = simulation.oracle.commits
    return simulation, sum(len(commits[key].contributions) for key in commits if key not in before)
