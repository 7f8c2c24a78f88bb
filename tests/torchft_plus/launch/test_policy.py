"""The restart policy against an honest little world: processes that take time to die, and many schedules."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from torchft_plus.launch.policy import (
    ENDED,
    KILL_DEADLINE_S,
    Effect,
    End,
    Kill,
    Limits,
    Phase,
    RestartPolicy,
    Say,
    Start,
    Terminate,
)

IDS = ("replica_0", "replica_1", "replica_2")


def policy(ranks: int = 1, **limits: float) -> RestartPolicy:
    made = RestartPolicy(IDS, ranks, Limits(**limits))  # type: ignore[arg-type]
    assert made.begin(0.0) == [Start(r) for r in IDS]
    return made


def die(
    made: RestartPolicy, replica_id: str, now: float, status: int = -9, injected: bool = False
) -> list[Effect]:
    effects = made.rank_exited(replica_id, 0, now, status=status, finished=False, injected=injected)
    return effects + made.group_gone(replica_id, now, injected=injected)


def test_a_dead_rank_takes_its_group_with_it_and_only_its_group() -> None:
    made = policy(ranks=2)
    assert made.rank_exited("replica_1", 1, 5.0, status=-9, finished=False, injected=False) == [
        Kill("replica_1")
    ]
    assert made.rank_exited("replica_1", 0, 5.0, status=-9, finished=False, injected=False) == []
    assert made.tick(6.0) == []  # not before the last rank is gone
    assert made.group_gone("replica_1", 7.0, injected=False) == []
    assert made.tick(7.05) == []
    assert made.next_deadline() == 7.1
    assert made.tick(7.1) == [Start("replica_1")]


def test_delays_double_and_progress_resets_them() -> None:
    made = policy(max_restarts=10, restart_delay_s=1.0, restart_delay_max_s=5.0)
    now, delays = 0.0, list[float]()
    for _ in range(5):
        die(made, "replica_0", now)
        deadline = made.next_deadline()
        assert deadline is not None
        delays.append(deadline - now)
        now = deadline
        made.tick(now)
    assert delays == [1.0, 2.0, 4.0, 5.0, 5.0]
    made.progressed("replica_0")
    die(made, "replica_0", now)
    assert made.next_deadline() == now + 1.0


def test_a_group_that_gets_nowhere_is_given_up_and_the_others_go_on() -> None:
    made = policy(max_restarts=2)
    effects: list[Effect] = []
    for now in (0.0, 10.0, 20.0):
        effects = die(made, "replica_2", now)
        made.tick(now + 9)
    (sentence,) = [e.text for e in effects if isinstance(e, Say)]
    assert "replica_2 failed 3 times" in sentence
    assert made.groups["replica_2"].phase is Phase.GIVEN_UP
    assert made.groups["replica_0"].phase is Phase.RUNNING


def test_too_few_groups_left_ends_the_run() -> None:
    made = policy(max_restarts=0, min_replicas=3)
    effects = die(made, "replica_2", 1.0)
    assert [e for e in effects if isinstance(e, Terminate)] == [
        Terminate("replica_0"),
        Terminate("replica_1"),
    ]


def test_injected_faults_do_not_count() -> None:
    made = policy(max_restarts=0)
    for now in range(0, 100, 10):
        die(made, "replica_1", float(now), injected=True)
        assert made.tick(now + 1.0) == [Start("replica_1")]


def test_a_wrong_configuration_is_not_tried_again() -> None:
    made = policy(max_restarts=5)
    effects = die(made, "replica_0", 1.0, status=2)
    assert Terminate("replica_1") in effects
    die(made, "replica_1", 1.1, status=2)
    *_, end = die(made, "replica_2", 1.1, status=-15)
    assert isinstance(end, End) and end.refused and not end.finished


def test_the_first_to_finish_ends_the_run_for_late_comers() -> None:
    made = policy()
    made.progressed("replica_0")
    made.progressed("replica_1")
    assert made.rank_exited("replica_0", 0, 50.0, status=0, finished=True, injected=False) == []
    assert made.group_gone("replica_0", 50.0, injected=False) == [
        Terminate("replica_2")
    ]  # had not come back yet
    assert made.rank_exited("replica_2", 0, 50.1, status=-15, finished=False, injected=False) == [
        Kill("replica_2")
    ]
    assert made.group_gone("replica_2", 50.2, injected=False) == []
    assert made.tick(60.0) == []
    assert made.tick(65.0) == [Terminate("replica_1")]
    assert made.rank_exited("replica_1", 0, 66.0, status=0, finished=True, injected=False) == []
    assert made.group_gone("replica_1", 66.0, injected=False) == [End(True, "all groups have ended")]


def test_a_group_that_leaves_early_comes_back() -> None:
    made = policy()
    made.progressed("replica_1")
    assert made.rank_exited("replica_1", 0, 5.0, status=0, finished=False, injected=False) == []
    assert made.group_gone("replica_1", 5.0, injected=False) == []
    assert made.tick(6.0) == [Start("replica_1")]


def test_a_rank_that_does_not_end_with_its_group_is_killed() -> None:
    made = policy(ranks=2, stop_grace_s=3.0)
    made.rank_exited("replica_0", 0, 5.0, status=0, finished=True, injected=False)
    say, kill = made.tick(8.0)
    assert isinstance(say, Say) and "rank 1" in say.text and kill == Kill("replica_0")


def test_stop_is_polite_first_and_then_forceful() -> None:
    made = policy(ranks=2, stop_grace_s=3.0)
    assert [e for e in made.stop(1.0, "Interrupted.") if not isinstance(e, Say)] == [
        Terminate(r) for r in IDS
    ]
    assert (
        made.rank_exited("replica_0", 0, 1.5, status=0, finished=False, injected=False) == []
    )  # rank 1 may end too
    made.rank_exited("replica_0", 1, 1.6, status=0, finished=False, injected=False)
    made.group_gone("replica_0", 1.6, injected=False)
    assert made.tick(4.0) == [Kill("replica_1"), Kill("replica_2")]
    made.group_gone("replica_1", 4.1, injected=False)
    assert made.group_gone("replica_2", 4.1, injected=False) == [End(False, "Interrupted.")]


def test_a_second_stop_does_not_wait() -> None:
    made = policy()
    made.stop(1.0, "Interrupted.")
    assert [e for e in made.stop(1.1, "Interrupted.") if not isinstance(e, Say)] == [Kill(r) for r in IDS]


def test_what_cannot_be_killed_is_given_up() -> None:
    made = policy()
    made.rank_exited("replica_0", 0, 1.0, status=-11, finished=False, injected=False)
    (say,) = made.tick(1.0 + KILL_DEADLINE_S)
    assert isinstance(say, Say) and "cannot be ended" in say.text


@dataclass
class World:
    """Groups of ranks that work, crash, ignore SIGTERM and take their time to die."""

    policy: RestartPolicy
    ranks: int
    draw: random.Random
    now: float = 0.0
    alive: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    dying: list[tuple[float, str, int, int]] = field(default_factory=list[tuple[float, str, int, int]])
    starts: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    end: End | None = None

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            assert self.end is None, "an effect after the end"
            match effect:
                case Start(replica_id):
                    assert not self.alive.get(replica_id), "started while a rank of its last life is left"
                    self.alive[replica_id] = set(range(self.ranks))
                    self.starts.setdefault(replica_id, []).append(self.now)
                case Kill(replica_id):
                    self._doom(replica_id, -9, 0.5)
                case Terminate(replica_id):
                    if self.draw.random() < 0.7:
                        self._doom(replica_id, self.draw.choice([0, -15]), 2.0)
                case Say(text):
                    assert text.endswith(".")
                case End():
                    self.end = effect

    def _doom(self, replica_id: str, status: int, within_s: float) -> None:
        for rank in self.alive.get(replica_id, set()):
            self.dying.append((self.now + self.draw.uniform(0, within_s), replica_id, rank, status))

    def crash(self, replica_id: str, rank: int, status: int) -> None:
        self.dying.append((self.now, replica_id, rank, status))

    def advance(self, until: float, finished: bool) -> None:
        while True:
            times = [d[0] for d in self.dying] + [t for t in [self.policy.next_deadline()] if t is not None]
            upcoming = min(times, default=until)
            if upcoming >= until or self.end:
                break
            self.now = max(self.now, upcoming)
            for death in sorted(d for d in self.dying if d[0] <= self.now):
                self.dying.remove(death)
                self._gone(*death[1:], finished)
            if not self.end:
                self.carry_out(self.policy.tick(self.now))
        self.now = until

    def _gone(self, replica_id: str, rank: int, status: int, finished: bool) -> None:
        ranks = self.alive.get(replica_id, set())
        if rank not in ranks or self.end:
            return
        ranks.discard(rank)
        others = {r for r, ranks_left in self.alive.items() if ranks_left and r != replica_id}
        running_before = {r for r in others if self.policy.groups[r].phase is Phase.RUNNING}
        effects = self.policy.rank_exited(
            replica_id, rank, self.now, status=status, finished=finished, injected=False
        )
        assert all(e.replica_id == replica_id for e in effects if isinstance(e, Kill | Terminate))
        assert running_before == {r for r in others if self.policy.groups[r].phase is Phase.RUNNING}
        self.carry_out(effects)
        if not ranks:
            self.dying = [d for d in self.dying if d[1] != replica_id]
            self.carry_out(self.policy.group_gone(replica_id, self.now, injected=False))


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    ranks=st.integers(1, 3),
    max_restarts=st.integers(0, 3),
    min_replicas=st.integers(1, 3),
    faults=st.lists(
        st.tuples(st.sampled_from(IDS), st.integers(0, 2), st.sampled_from([0, 1, -9, -11]), st.booleans()),
        max_size=25,
    ),
    last=st.sampled_from(["stop", "finish"]),
)
def test_any_schedule(
    seed: int,
    ranks: int,
    max_restarts: int,
    min_replicas: int,
    faults: list[tuple[str, int, int, bool]],
    last: str,
) -> None:
    limits = Limits(max_restarts, 0.5, 8.0, 5.0, min_replicas)
    made = RestartPolicy(IDS, ranks, limits)
    world = World(made, ranks, random.Random(seed))
    world.carry_out(made.begin(0.0))
    for replica_id, rank, status, progress in faults:
        if progress and world.alive.get(replica_id) and world.end is None:
            made.progressed(replica_id)
        world.crash(replica_id, rank % ranks, status)
        world.advance(world.now + world.draw.uniform(0, 4), finished=False)
        assert all(g.failures <= max_restarts + 1 for g in made.groups.values())
    if last == "stop" and world.end is None:
        world.carry_out(made.stop(world.now, "Interrupted."))
        started = sum(map(len, world.starts.values()))
        world.advance(world.now + 200, finished=False)
        assert sum(map(len, world.starts.values())) == started, "started after the stop"
    elif world.end is None:
        world.advance(world.now + 60, finished=False)  # those that wait come up
        for replica_id in IDS:
            for rank in range(ranks):
                world.crash(replica_id, rank, 0)
        world.advance(world.now + 200, finished=True)
    assert world.end is not None, "it never ended"
    assert all(g.phase in ENDED for g in made.groups.values())
    assert not any(world.alive.values())
    for times in world.starts.values():
        assert all(b - a >= limits.restart_delay_s for a, b in pairwise(times))
