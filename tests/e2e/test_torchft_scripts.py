"""Unmodified torchft scripts under the alias: real processes, one is killed, comes back and is equal again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster

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

    def result(self, group: str) -> list[str]:
        lines = (self.folder / f"{group}.0.log").read_text().splitlines()
        return next(line for line in lines if line.startswith("result ")).split()


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
    cluster.stop.with_suffix(".new").write_text(str(last))
    cluster.stop.with_suffix(".new").rename(cluster.stop)
    for group in GROUPS:
        assert cluster.wait(group, 60) == 0, cluster.logs()
    assert cluster.result("script_0") == cluster.result("script_1")
    assert cluster.step("script_0") == last
    cluster.assert_no_step_lost("script_0")
