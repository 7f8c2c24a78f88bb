"""Promises P1-P3 and liveness under arbitrary schedules: crashes, broken streams, duplicates, Lighthouse restarts."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from quorum_world import Node, World

numbers = st.integers(0, 9)


class Schedule(RuleBasedStateMachine):
    """Each rule is one thing that may happen next; numbers choose to whom."""

    world: World

    @initialize(names=st.sampled_from(["ab", "abc", "abcd"]), min_replicas=st.sampled_from([1, 1, 2]))
    def begin(self, names: str, min_replicas: int) -> None:
        self.world = World(names, min_replicas)
        if min_replicas == 1 or len(names) > 2:
            self.run_on(3)

    def pick(self, number: int) -> Node:
        alive = [n for n in self.world.nodes if n.alive] or self.world.nodes
        return alive[number % len(alive)]

    def run_on(self, rounds: int) -> None:
        for _ in range(rounds):
            self.world.exchange_all()
            self.world.step_together()

    @rule(number=numbers, which=st.booleans())
    def deliver_up(self, number: int, which: bool) -> None:
        nodes = [n for n in self.world.nodes if any(n.up.values())]
        if nodes:
            node = nodes[number % len(nodes)]
            sessions = sorted(s for s in node.up if node.up[s])
            self.world.deliver_up(node, sessions[0 if which else -1])

    @rule(number=numbers)
    def deliver_down(self, number: int) -> None:
        nodes = [n for n in self.world.nodes if n.down]
        if nodes:
            self.world.deliver_down(nodes[number % len(nodes)])

    @rule()
    def deliver_all(self) -> None:
        self.world.exchange_all()

    @rule(ms=st.sampled_from([1, 60, 150, 250, 1_000, 3_100, 5_100]))
    def tick(self, ms: int) -> None:
        self.world.tick(ms)

    @rule(number=numbers)
    def post(self, number: int) -> None:
        self.world.post(self.pick(number))

    @rule()
    def all_post(self) -> None:
        for node in self.world.nodes:
            self.world.post(node)

    @rule(number=numbers)
    def vote(self, number: int) -> None:
        self.world.vote(self.pick(number))

    @rule(number=numbers)
    def commit(self, number: int) -> None:
        self.world.commit(self.pick(number))

    @rule(number=numbers)
    def heal(self, number: int) -> None:
        self.world.heal(self.pick(number))

    @rule(number=numbers)
    def save(self, number: int) -> None:
        self.world.save(self.pick(number))

    @rule(number=numbers, peer=numbers, named=st.booleans())
    def fail(self, number: int, peer: int, named: bool) -> None:
        self.world.fail(self.pick(number), self.pick(peer).who.replica_id if named else None)

    @rule(number=numbers, keep=st.booleans())
    def break_stream(self, number: int, keep: bool) -> None:
        self.world.break_stream(self.pick(number), keep)

    @rule(number=numbers)
    def connect(self, number: int) -> None:
        self.world.connect(self.pick(number))

    @rule(number=numbers, seen=st.booleans())
    def crash(self, number: int, seen: bool) -> None:
        node = self.pick(number)
        if node.alive:
            self.world.crash(node, seen)

    @rule(number=numbers, by_name=st.booleans())
    def report_exit(self, number: int, by_name: bool) -> None:
        """Late, or again; of a living one it says nothing."""
        self.world.report_exit(self.world.nodes[number % len(self.world.nodes)], by_name)

    @rule(number=numbers)
    def stand_still(self, number: int) -> None:
        """A pause of one training thread, long enough to be overdue."""
        self.world.stand_still(self.pick(number))

    @rule(number=numbers, streams=st.integers(0, 3), keep=st.booleans())
    def pause_lighthouse(self, number: int, streams: int, keep: bool) -> None:
        """Some of its streams may have broken meanwhile."""
        self.world.pause_lighthouse()
        for other in range(streams):
            self.world.break_stream(self.pick(number + other), keep)

    @rule(number=numbers)
    def start_again(self, number: int) -> None:
        """Also while the old one lives: duplicates happen."""
        if len(self.world.nodes) < 12:
            self.world.start(self.world.nodes[number % len(self.world.nodes)].who.replica_id)

    @rule(name=st.sampled_from("ef"))
    def join(self, name: str) -> None:
        if len(self.world.nodes) < 12:
            self.world.start(name)

    @rule(number=numbers)
    def leave(self, number: int) -> None:
        node = self.pick(number)
        if node.alive and number == 0:
            self.world.leave(node)

    @rule(keep_store=st.sampled_from([True, True, True, False]))
    def restart_lighthouse(self, keep_store: bool) -> None:
        self.world.restart_lighthouse(keep_store)

    @precondition(lambda self: self.world.effects_until_crash is None)
    @rule(effects=st.integers(0, 3))
    def lighthouse_dies_in_the_middle_of_its_next_words(self, effects: int) -> None:
        self.world.effects_until_crash = effects

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.calm_down()


Schedule.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_schedules = Schedule.TestCase
"""unittest.TestCase, collected by pytest."""


FAULTS: list[Callable[[Schedule, int, int, bool], None]] = [
    lambda machine, n, m, yes: machine.fail(n, m, yes),
    lambda machine, n, _, yes: machine.break_stream(n, yes),
    lambda machine, n, *_: machine.connect(n),
    lambda machine, n, _, yes: machine.crash(n, yes),
    lambda machine, n, *_: machine.start_again(n),
    lambda machine, n, *_: machine.join("ef"[n % 2]),
    lambda machine, n, *_: machine.leave(n),
    lambda machine, n, *_: machine.save(n),
    lambda machine, n, *_: machine.restart_lighthouse(n > 1),
    lambda machine, n, _, yes: machine.report_exit(n, yes),
    lambda machine, n, *_: machine.stand_still(n),
    lambda machine, n, m, yes: machine.pause_lighthouse(n, m % 4, yes),
    lambda machine, n, *_: machine.lighthouse_dies_in_the_middle_of_its_next_words(n % 4),
]


def run_schedule(seed: int, steps: int) -> None:
    """The same machine under a plain random scheduler, biased towards getting work done between faults."""
    rng = random.Random(seed)
    machine = Schedule()
    machine.begin(names=rng.choice(["ab", "abc", "abcd"]), min_replicas=rng.choice([1, 1, 2]))
    usual = [machine.deliver_all, machine.all_post]
    for _ in range(steps):
        kind = rng.random()
        n, m, yes = rng.randrange(10), rng.randrange(10), rng.random() < 0.5
        if kind < 0.3:
            machine.deliver_up(n, yes)
            machine.deliver_down(m)
        elif kind < 0.42:
            rng.choice(usual)()
        elif kind < 0.72:
            rng.choice(
                [machine.post, machine.vote, machine.commit, machine.vote, machine.commit, machine.heal]
            )(n)
        elif kind < 0.82:
            machine.tick(rng.choice([1, 60, 150, 250, 1_000, 3_100, 5_100]))
        else:
            rng.choice(FAULTS)(machine, n, m, yes)
    machine.world.calm_down()


@pytest.mark.parametrize("block", range(4))
def test_random_schedules(block: int) -> None:
    """A failing seed is named and replays with run_schedule(seed, 120)."""
    for seed in range(block * 100, block * 100 + 100):
        try:
            run_schedule(seed, 120)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
