"""DiLoCo with real processes: a death costs no inner step of a survivor, and what is shared stays bit-identical."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from cluster import Cluster, MakeCluster, finish, started

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
SCRIPT = Path(__file__).with_name("diloco_trainer.py")
TWO = ["replica_0", "replica_1"]
FOUR = ["replica_0", "replica_1", "replica_2", "replica_3"]


def end_together(cluster: Cluster, groups: list[str], survivors: list[str], ranks: int = 1) -> None:
    """A few more syncs with everybody, then SIGTERM; checks what must hold."""
    finish(cluster, groups, survivors, ranks)
    for survivor in survivors:
        assert_no_inner_step_lost(cluster, survivor)


def assert_no_inner_step_lost(cluster: Cluster, survivor: str) -> None:
    """Each window has its full number of inner steps, and each sync of the group's life is one that it contributed to."""
    events = cluster.read(f"{survivor}.0.inner.jsonl")
    sync_every, fragments = (
        int(cluster.trainer.get(f"TRAINER_{name}", default))
        for name, default in (("SYNC_EVERY", 10), ("FRAGMENTS", 1))
    )
    window = sync_every // fragments
    for event in events:
        # The event after a sync has zero inner steps, and a head that is further by one.
        assert event["total"] == event["sync"] * window + event["inner_steps"], event


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fragments": 2, "delay": 2, "alpha_percent": 50},
    ],
    ids=["diloco", "streaming"],
)
def test_undisturbed_replicas_share_one_global_copy(
    make_cluster: MakeCluster, options: dict[str, int]
) -> None:
    cluster = started(make_cluster, TWO, script=SCRIPT, step_ms=3, syncs=12, **options)
    for group in TWO:
        assert cluster.wait(group, 60) == 0, cluster.logs()
        assert cluster.step(group) == 12
        assert_no_inner_step_lost(cluster, group)
    cluster.assert_digests_equal(TWO, at_least=11)
    assert not cluster.events("replica_0", "fault") and len(cluster.events("replica_0", "quorum")) == 1


@pytest.mark.parametrize("phase", ["launch", "finish", "apply"])
def test_one_of_two_dies_in_a_sync(make_cluster: MakeCluster, phase: str) -> None:
    more = {"codec": "int8"} if phase == "finish" else {}
    cluster = make_cluster(expected=2, script=SCRIPT, step_ms=10, fragments=2, delay=1, **more)
    cluster.start("replica_0")
    cluster.start("replica_1", die_in=phase, die_at=5)
    cluster.until_step("replica_0", 7)
    assert cluster.processes["replica_1"][0].wait(10) == -signal.SIGKILL
    cluster.start("replica_1")
    cluster.until_event("replica_1", "level")
    end_together(cluster, TWO, ["replica_0"])


@pytest.mark.long
@pytest.mark.parametrize("phase", ["launch", "finish", "apply"])
def test_two_of_four_die_in_a_sync(make_cluster: MakeCluster, phase: str) -> None:
    cluster = make_cluster(expected=4, script=SCRIPT, step_ms=10, fragments=2, delay=1)
    for group in ("replica_0", "replica_2"):
        cluster.start(group)
    for group in ("replica_1", "replica_3"):
        cluster.start(group, die_in=phase, die_at=5)
    for group in ("replica_0", "replica_2"):
        cluster.until_step(group, 7)
    for group in ("replica_1", "replica_3"):
        assert cluster.processes[group][0].wait(10) == -signal.SIGKILL
        cluster.start(group)
        cluster.until_event(group, "level")
    end_together(cluster, FOUR, ["replica_0", "replica_2"])


def test_two_of_four_die_between_syncs_and_nobody_notices_before_the_next(make_cluster: MakeCluster) -> None:
    cluster = started(make_cluster, FOUR, script=SCRIPT, step_ms=20, sync_every=20)
    cluster.kill("replica_1")
    cluster.kill("replica_3")
    step = cluster.step("replica_0")
    cluster.until_step("replica_0", step + 2)
    cluster.start("replica_1")
    cluster.start("replica_3")
    for group in ("replica_1", "replica_3"):
        cluster.until_event(group, "level")
    end_together(cluster, FOUR, ["replica_0", "replica_2"])


def test_a_joiner_is_level_between_two_syncs_and_counts_from_its_first_full_window(
    make_cluster: MakeCluster,
) -> None:
    """With windows of 4 s nobody could wait for a boundary: the quorum changes within the window."""
    cluster = started(make_cluster, TWO, script=SCRIPT, step_ms=40, sync_every=100)
    cluster.kill("replica_1")
    step = cluster.step("replica_0")
    cluster.until_step("replica_0", step + 1)
    cluster.start("replica_1")
    level = cluster.until_event("replica_1", "level")
    commits = cluster.events("replica_0", "commit")
    before = [event for event in commits if event["time"] < level["time"]][-1]
    cluster.until_step("replica_1", before["step"] + 2)
    # From when it came: on a slow machine that may be just before the others' sync, and it is level just behind it.
    behind = cluster.events("replica_1", "behind")[-1]
    mine = [event for event in cluster.events("replica_1", "commit") if event["time"] > behind["time"]]
    assert [event["contributed"] for event in mine[:2]] == [False, True]
    inner = [e for e in cluster.read("replica_1.0.inner.jsonl") if e["time"] > level["time"]]
    trained = [e for e in inner if e["sync"] == before["step"]]
    assert trained, "it trains on before the next sync of the others"
    end_together(cluster, TWO, ["replica_0"])


def test_a_group_of_two_ranks_with_fsdp_dies_and_returns(make_cluster: MakeCluster) -> None:
    cluster = started(make_cluster, TWO, ranks=2, script=SCRIPT, step_ms=5)
    cluster.kill("replica_1", rank=1)
    assert cluster.wait("replica_1", 20) != 0
    cluster.start("replica_1", ranks=2)
    cluster.until_event("replica_1", "level")
    end_together(cluster, TWO, ["replica_0"], ranks=2)


def test_groups_of_different_speed_synchronise_by_time(make_cluster: MakeCluster) -> None:
    """The slow group's windows are shorter in inner steps; nobody waits for a full number of them."""
    cluster = make_cluster(expected=2, script=SCRIPT, sync_every=1_000, sync_ms=400)
    cluster.start("replica_0", step_ms=10)
    cluster.start("replica_1", step_ms=60)
    for group in TWO:
        cluster.until_step(group, 6)
    fast, slow = (cluster.read(f"{group}.0.inner.jsonl")[-1]["total"] for group in TWO)
    assert fast > 2 * slow
    contributed = [event["contributed"] for group in TWO for event in cluster.events(group, "commit")]
    assert all(contributed)
    for group in TWO:
        cluster.signal(group, signal.SIGTERM)
        assert cluster.wait(group, 60) == 0
    cluster.assert_digests_equal(TWO, at_least=5)
