"""Unmodified torchft scripts under the alias: real processes, one is killed, comes back and is equal again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
SCRIPTS = Path(__file__).with_name("torchft_scripts")
GROUPS = ["script_0", "script_1"]


class TorchftCluster(Cluster):
    """Runs a script that imports torchft under the alias, with the environment of torchft's examples."""

    @property
    def stop(self) -> Path:
        return self.folder / "stop"

    def environment(self, **more: str) -> dict[str, str]:
        group = more.get("REPLICA_ID", "script_0").rpartition("_")[2]
        return super().environment(**more, REPLICA_GROUP_ID=group, SCRIPT_STOP=str(self.stop))

    def words(self) -> list[str]:
        return ["-m", "torchft_plus.compat", *super().words()]

    def results(self, group: str) -> list[str]:
        """A line of each rank, in order of rank."""
        lines = (self.folder / f"{group}.0.log").read_text().splitlines()
        return sorted(line for line in lines if line.startswith("result "))

    def stop_at(self, step: int) -> None:
        self.stop.with_suffix(".new").write_text(str(step))
        self.stop.with_suffix(".new").rename(self.stop)


class Torchrun(TorchftCluster):
    """The same, each group of two ranks, started by ``torchrun``."""

    def words(self) -> list[str]:
        port = f"--master_port={free_port()}"
        return ["-m", "torch.distributed.run", "--nproc_per_node=2", port, *super().words()]

    def kill_rank(self, group: str, rank: int) -> float:
        """torchrun ends the group's other ranks, and itself; returns when the kill was."""
        os.kill(self.events(group, "start", rank)[-1]["pid"], signal.SIGKILL)
        when = time.time()
        assert self.wait(group, 60) != 0
        return when

    def close(self) -> None:
        for process in (process for group in self.processes.values() for process in group):
            process.terminate()  # it ends its ranks; killed at once, it would leave them
        try:
            for group in self.processes:
                self.wait(group, 60)
        finally:
            super().close()


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TorchftCluster]:
    made = TorchftCluster(tmp_path / "cluster", expected=2, script=SCRIPTS / request.param)
    made.start_lighthouse()
    yield made
    made.close()
    print(made.logs())


@pytest.mark.parametrize(
    ("cluster", "steps"), [("train_ddp.py", 20), ("train_diloco.py", 4)], indirect=["cluster"]
)
def test_a_killed_group_heals(cluster: TorchftCluster, steps: int) -> None:
    for group in GROUPS:
        cluster.start(group)
    for group in GROUPS:
        cluster.until_step(group, steps)
    when = cluster.kill("script_1")
    cluster.until_step("script_0", cluster.step("script_0") + 2)
    cluster.start("script_1")
    cluster.until_event("script_1", "level", after=when)
    last = cluster.step("script_0") + steps
    cluster.stop_at(last)
    for group in GROUPS:
        assert cluster.wait(group, 60) == 0, cluster.logs()
    assert len(cluster.results("script_0")) == 1
    assert cluster.results("script_0") == cluster.results("script_1")
    assert cluster.step("script_0") == last
    cluster.assert_no_step_lost("script_0")


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Torchrun]:
    made = Torchrun(tmp_path / "cluster", expected=2, script=SCRIPTS / "train_ddp.py")
    made.start_lighthouse()
    yield made
    made.close()
    print(made.logs())


def test_a_group_of_two_ranks_under_torchrun_loses_one_and_heals(torchrun: Torchrun) -> None:
    for group in GROUPS:
        torchrun.start(group)
    for group in GROUPS:
        torchrun.until_step(group, 10)
    when = torchrun.kill_rank("script_1", 1)
    torchrun.until_step("script_0", torchrun.step("script_0") + 2)
    torchrun.start("script_1")
    torchrun.until_event("script_1", "level", after=when)
    last = torchrun.step("script_0") + 20
    torchrun.stop_at(last)
    for group in GROUPS:
        assert torchrun.wait(group, 60) == 0, torchrun.logs()
    results = torchrun.results("script_0")
    assert results == torchrun.results("script_1")
    assert len({line.split()[3] for line in results}) == 2, "each rank has a model of its own"
    torchrun.assert_no_step_lost("script_0")
