"""Real processes on hosts of their own: what a cut, broken, lossy or slow network may cost, and whom."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator

import pytest
from cluster import Cluster, MakeCluster, finish, started, until
from netns import Network, why_impossible

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
GROUPS = ["replica_0", "replica_1", "replica_2"]
LIGHTHOUSE = "lighthouse"
TIMEOUT_MS = 12_000
HEARTBEAT_S = TIMEOUT_MS / 12 / 1000
SLACK_S = 4.0
"""How much longer than its limit something may take on a busy machine."""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if reason := why_impossible():
        pytest.skip(reason)
    network = Network([LIGHTHOUSE, *GROUPS])
    yield network
    network.close()


@pytest.fixture(scope="module")
def clusters(network: Network) -> Iterator[list[Cluster]]:
    """The clusters of this module; the last one may be in use. (Its processes end before the network does.)"""
    made: list[Cluster] = []
    yield made
    for cluster in made:
        cluster.close()


@pytest.fixture
def cluster(
    network: Network,
    clusters: list[Cluster],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Cluster]:
    """Three groups and the Lighthouse, each on a host of its own, level and training together.

    They are taken over from the test before, if it went well: to start them costs more than most tests.
    """

    def make(**options: object) -> Cluster:
        cluster = Cluster(tmp_path_factory.mktemp("network"), **options)  # type: ignore[arg-type]
        clusters.append(cluster)
        cluster.start_lighthouse()
        return cluster

    if not clusters or clusters[-1].lighthouse is None:
        started(make, GROUPS, network=network, timeout_ms=TIMEOUT_MS, state_mb=8, catch_up_max_steps=1_000)
    cluster = clusters[-1]
    failures = request.session.testsfailed
    yield cluster
    network.heal()
    if request.session.testsfailed > failures:
        print(cluster.logs())
        cluster.close()
        cluster.lighthouse = None  # not to be used again


def others(group: str) -> list[str]:
    return [other for other in GROUPS if other != group]


def advance(cluster: Cluster, groups: list[str], steps: int, timeout_s: float = 30) -> None:
    """From now on each of ``groups`` commits so many steps more."""
    goals = {group: cluster.step(group) + steps for group in groups}
    for group, goal in goals.items():
        cluster.until_step(group, goal, timeout_s)


def assert_all_is_well(cluster: Cluster, since: float, survivors: list[str]) -> None:
    """All train together again, without a restart; ``survivors`` have lost nothing, and nobody has ever differed."""
    goal = max(cluster.step(group) for group in GROUPS) + 5
    for group in GROUPS:
        cluster.until_step(group, goal)
        assert cluster.processes[group][0].poll() is None, f"{group} has died\n{cluster.logs()}"
    members = {group: cluster.events(group, "quorum")[-1]["members"] for group in GROUPS}
    assert all(sorted(those) == GROUPS for those in members.values()), members
    for survivor in survivors:
        cluster.assert_no_step_lost(survivor, since)
    cluster.assert_digests_equal(GROUPS, at_least=5)


def test_cut_from_everybody(cluster: Cluster, network: Network) -> None:
    """Left behind within the heartbeat limit; level again when the cut heals."""
    victim, survivors = "replica_1", others("replica_1")
    network.unplug(victim)
    cut = time.time()
    advance(cluster, survivors, 3, HEARTBEAT_S + 2 * SLACK_S)
    gaps = [cluster.longest_gap(survivor, cut, cut + 1) for survivor in survivors]
    assert max(gaps) < HEARTBEAT_S + SLACK_S, gaps
    stranded = cluster.step(victim)
    advance(cluster, survivors, 20)
    assert cluster.step(victim) == stranded, "it goes on alone"
    network.heal()
    cluster.until_event(victim, "level", after=cut)
    assert_all_is_well(cluster, cut, survivors)


def test_cut_from_the_others_but_not_from_the_lighthouse(cluster: Cluster, network: Network) -> None:
    """The Lighthouse hears it, so that only its peers can tell: they miss its acknowledgements after the heartbeat limit. Two
    more quorums cannot be built with it, then the blame finds out whom to leave out."""
    victim = cluster.events("replica_0", "quorum")[-1]["members"][0]
    survivors = others(victim)
    network.cut(victim, survivors)
    cut = time.time()
    advance(cluster, survivors, 10, 2 * HEARTBEAT_S + 2 * TIMEOUT_MS / 4 / 1000 + 2 * SLACK_S)
    faults = [event for group in GROUPS for event in cluster.events(group, "fault") if event["time"] > cut]
    assert min(fault["time"] for fault in faults) < cut + 2 * HEARTBEAT_S + SLACK_S, faults
    texts = [event["text"] for event in cluster.lighthouse_events("announce") if event["time"] > cut]
    assert any(f"{victim} is left out" in text for text in texts), texts
    network.heal()
    cluster.until_event(victim, "level", after=cut)
    assert_all_is_well(cluster, cut, survivors)


def test_one_cut_from_the_lighthouse_but_not_from_the_others(cluster: Cluster, network: Network) -> None:
    """The Lighthouse cannot know that it lives: it is left out by a round, which costs nobody else a step."""
    victim, survivors = "replica_0", others("replica_0")
    network.cut(victim, [LIGHTHOUSE])
    cut = time.time()
    for survivor in survivors:
        cluster.until_event(survivor, "quorum", HEARTBEAT_S + 2 * SLACK_S, after=cut)
    advance(cluster, survivors, 10)
    gaps = [cluster.longest_gap(survivor, cut, time.time()) for survivor in survivors]
    assert max(gaps) < HEARTBEAT_S, f"{gaps}: its mates trained on while it was silent"
    network.heal()
    cluster.until_event(victim, "level", after=cut)
    assert_all_is_well(cluster, cut, survivors)


def test_all_cut_from_the_lighthouse(cluster: Cluster, network: Network) -> None:
    """Training does not even pause, and nobody notices when the Lighthouse is back: no round, no step lost (P3, P7)."""
    quorum_ids = {group: cluster.events(group, "quorum")[-1]["quorum_id"] for group in GROUPS}
    network.unplug(LIGHTHOUSE)
    cut = time.time()
    advance(cluster, GROUPS, 20)
    until(lambda: time.time() > cut + 3 * HEARTBEAT_S, 10, "time stands still")
    advance(cluster, GROUPS, 10)
    gaps = [cluster.longest_gap(group, cut, time.time()) for group in GROUPS]
    assert max(gaps) < HEARTBEAT_S, gaps
    network.heal()
    healed = time.time()

    def back() -> int:
        return len({e["replica_id"] for e in cluster.lighthouse_events("connected") if e["time"] > healed})

    until(lambda: back() == len(GROUPS), 20, "not all came back", cluster)
    until(lambda: time.time() > healed + 5, 10, "time stands still")  # longer than any grace
    advance(cluster, GROUPS, 20)
    assert_all_is_well(cluster, cut, GROUPS)
    assert {group: cluster.events(group, "quorum")[-1]["quorum_id"] for group in GROUPS} == quorum_ids


def test_connections_are_reset(cluster: Cluster, network: Network) -> None:
    """Between one group and all others, the Lighthouse among them; nobody has to be restarted."""
    victim = "replica_1"
    network.reset(victim, [LIGHTHOUSE, *others(victim)])
    reset = time.time()
    for survivor in others(victim):
        cluster.until_event(survivor, "quorum", 2 * SLACK_S, after=reset)
    network.heal()
    advance(cluster, others(victim), 5)
    cluster.until_event(victim, "quorum", after=reset)
    advance(cluster, GROUPS, 5)
    assert_all_is_well(cluster, reset, others(victim))


def test_thirty_percent_loss(cluster: Cluster, network: Network) -> None:
    """Slow, perhaps without the group at times, but never wrong."""
    victim = "replica_1"
    lossy = time.time()
    network.lose(victim, 0.3)
    advance(cluster, others(victim), 20, 90)
    network.heal()
    advance(cluster, GROUPS, 5, 60)
    assert_all_is_well(cluster, lossy, others(victim))


def test_a_joiner_behind_a_slow_link(cluster: Cluster, network: Network) -> None:
    """8 MB at 1 MB/s: the others train on during the download (P4)."""
    joiner, survivors = "replica_2", others("replica_2")
    when = cluster.kill(joiner)
    network.limit(joiner, 1_000_000)
    cluster.start(joiner)
    begin = cluster.until_event(joiner, "fetch_started", after=when)["time"]
    end = cluster.until_event(joiner, "fetched", after=begin)["time"]
    assert end - begin > 6, "the link is not slow"
    for survivor in survivors:
        steps = [event for event in cluster.events(survivor, "commit") if begin < event["time"] < end]
        assert len(steps) > 2 * (end - begin), f"{survivor}: {len(steps)} steps in {end - begin:.1f} s"
        assert cluster.longest_gap(survivor, begin, end) < HEARTBEAT_S + SLACK_S
    cluster.until_event(joiner, "level", after=begin)
    network.heal()
    assert_all_is_well(cluster, when, survivors)


def test_the_rendezvous_host_dies_while_a_quorum_is_built(cluster: Cluster) -> None:
    """The group in whose store the lanes meet is killed when the others learn of their quorum: one that loses a member,
    and one that gets it back."""
    first, survivor, last = cluster.events("replica_0", "quorum")[-1]["members"]
    quorum_id = cluster.events(survivor, "quorum")[-1]["quorum_id"]
    when = cluster.kill(last)
    assert kill_first_of_next_quorum(cluster, survivor, quorum_id) == first
    advance(cluster, [survivor], 5)
    cluster.assert_no_step_lost(survivor, when)
    for group in (first, last):
        cluster.start(group)
    for group in (first, last):
        cluster.until_event(group, "level", after=when)
    advance(cluster, GROUPS, 3)

    first, *rest = cluster.events(survivor, "quorum")[-1]["members"]
    when = cluster.kill(rest[-1])
    advance(cluster, [first, rest[0]], 3)
    quorum_id = cluster.events(rest[0], "quorum")[-1]["quorum_id"]
    cluster.start(rest[-1])
    assert kill_first_of_next_quorum(cluster, rest[0], quorum_id) == first
    advance(cluster, [rest[0]], 5)
    cluster.start(first)
    for group in (first, rest[-1]):
        cluster.until_event(group, "level", after=when)
    assert_all_is_well(cluster, when, [rest[0]])


def kill_first_of_next_quorum(cluster: Cluster, observer: str, quorum_id: int) -> str:
    """Kill the first member of the next quorum as soon as ``observer`` adopts it; returns who that was."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        quorum = cluster.events(observer, "quorum")[-1]
        if quorum["quorum_id"] > quorum_id:
            cluster.kill(quorum["members"][0])
            return quorum["members"][0]
    raise AssertionError(f"{observer} adopted no new quorum")


def test_a_gil_deadlock_looks_dead(cluster: Cluster) -> None:
    """Its sockets are open and its native threads live, but no heartbeat comes."""
    victim, survivors = "replica_1", others("replica_1")
    begin = cluster.kill(victim)
    cluster.start(victim, gil_deadlock_after=30)
    level = cluster.until_event(victim, "level", after=begin)["time"]
    for survivor in survivors:
        cluster.until_event(survivor, "quorum", 20, after=level)
    advance(cluster, survivors, 5)
    gaps = [cluster.longest_gap(survivor, level, time.time()) for survivor in survivors]
    assert HEARTBEAT_S / 2 < max(gaps) < HEARTBEAT_S + SLACK_S, gaps
    assert cluster.processes[victim][0].poll() is None
    when = cluster.kill(victim)
    cluster.start(victim)
    cluster.until_event(victim, "level", after=when)
    assert_all_is_well(cluster, begin, survivors)


@pytest.mark.parametrize("freezes", [3, pytest.param(40, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
def test_frozen_in_any_phase(make_cluster: MakeCluster, freezes: int) -> None:
    """SIGSTOP at random moments of a step (computing, reducing, voting), for shorter and longer than the limit."""
    cluster = started(make_cluster, GROUPS, timeout_ms=TIMEOUT_MS, step_ms=10, width=512)
    chance = random.Random(freezes)
    for number in range(freezes):
        victim = chance.choice(GROUPS)
        delay_s = chance.uniform(0, 0.06)
        step = cluster.step(victim)
        cluster.until_step(victim, step + 1)
        time.sleep(delay_s)  # not to wait for something: it chooses the phase
        when = cluster.signal(victim, signal.SIGSTOP)
        long = number % 3 != 2
        if long:
            advance(cluster, others(victim), 5, HEARTBEAT_S + 3 * SLACK_S)
        else:
            time.sleep(chance.uniform(0, HEARTBEAT_S / 2))
        cluster.signal(victim, signal.SIGCONT)
        if long:
            cluster.until_event(victim, "level", after=when)
        advance(cluster, GROUPS, 3)
    finish(cluster, GROUPS, [])
