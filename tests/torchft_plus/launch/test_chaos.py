from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchft_plus.config import Chaos
from torchft_plus.launch.chaos import ChaosSchedule, Injection
from torchft_plus.launch.event_follower import Event

ALL = ["replica_0", "replica_1", "replica_2"]


def commit(step: int, replica_id: str = "replica_0") -> Event:
    return Event(replica_id, 0, float(step), "commit", fields={"step": step})


def test_at_step_fires_once_when_anybody_commits_it() -> None:
    schedule = ChaosSchedule([Chaos(at_step=12, kill="replica_1")], 0.0)
    schedule.feed(commit(11), 11.0)
    assert schedule.tick(11.0, ALL) == []
    schedule.feed(commit(13, "replica_2"), 13.0)  # 12 may never be seen: logs are read in batches
    assert schedule.tick(13.0, ALL) == [Injection("kill", "replica_1", None, 13)]
    schedule.feed(commit(14), 14.0)
    assert schedule.tick(99.0, ALL) == []


def test_at_step_counts_inner_steps_where_commits_are_syncs() -> None:
    schedule = ChaosSchedule([Chaos(at_step=41, kill="replica_1")], 0.0, steps_per_commit=20)
    schedule.feed(commit(2), 2.0)
    assert schedule.tick(2.0, ALL) == []
    schedule.feed(commit(3), 3.0)
    assert schedule.tick(3.0, ALL) == [Injection("kill", "replica_1", None, 3)]


def test_two_entries_of_one_step_fire_together() -> None:
    entries = [Chaos(at_step=3, kill="lighthouse"), Chaos(at_step=3, kill="replica_0.1")]
    schedule = ChaosSchedule(entries, 0.0)
    schedule.feed(commit(3), 3.0)
    assert [i.target for i in schedule.tick(3.0, ALL)] == ["lighthouse", "replica_0.1"]


def test_a_frozen_target_is_woken() -> None:
    schedule = ChaosSchedule([Chaos(at_step=3, stop="replica_1.0", resume_after_s=2.0)], 0.0)
    schedule.feed(commit(3), 3.0)
    assert schedule.tick(3.0, ALL) == [Injection("stop", "replica_1", 0, 3)]
    assert schedule.tick(4.9, ALL) == []
    assert schedule.tick(5.0, ALL) == [Injection("resume", "replica_1", 0, 3)]
    assert schedule.tick(50.0, ALL) == []


def test_at_event_watches_the_targets_own_log() -> None:
    schedule = ChaosSchedule([Chaos(at_event="fetch_started", kill="replica_1")], 0.0)
    schedule.feed(Event("replica_2", 0, 1.0, "fetch_started"), 1.0)
    assert schedule.tick(1.0, ALL) == []
    schedule.feed(Event("replica_1", 1, 2.0, "fetch_started"), 2.0)
    assert schedule.tick(2.0, ALL) == [Injection("kill", "replica_1", None, 0)]


@given(seed=st.integers(0, 1000), every_s=st.floats(0.1, 10), times=st.integers(1, 20))
def test_random_faults_keep_their_pace_and_leave_somebody(seed: int, every_s: float, times: int) -> None:
    def run() -> list[tuple[float, str]]:
        schedule = ChaosSchedule([Chaos(every_s=every_s, kill="random", times=times, seed=seed)], 0.0)
        seen: list[tuple[float, str]] = []
        for tick in range(2000):
            now = tick * every_s / 20
            training = ALL[: 1 + tick // 100 % 3]  # now and then only one is left
            for injection in schedule.tick(now, training):
                assert len(training) > 1 and injection.replica_id in training
                seen.append((now, injection.replica_id))
        return seen

    seen = run()
    assert len(seen) == times
    assert seen == run()  # by its seed
    assert seen[0][0] >= 0.5 * every_s


def test_two_random_faults_at_once_never_take_the_last_two() -> None:
    entries = [Chaos(at_step=1, kill="random", seed=seed) for seed in range(3)]
    schedule = ChaosSchedule(entries, 0.0)
    schedule.feed(commit(1), 1.0)
    hit = {injection.replica_id for injection in schedule.tick(1.0, ALL)}
    assert len(hit) == 2
