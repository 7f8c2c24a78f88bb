"""Real runs with a token and TLS: what they survive, and how a process ends that does not belong to them."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from cluster import MakeCluster, finish, started
from run_security import OTHER_TOKEN, TOKEN, make_security, make_tls

from lighthouse.security import Security

pytestmark = pytest.mark.e2e
GROUPS = ["replica_0", "replica_1"]


def test_a_run_with_token_and_tls_survives_a_kill_and_keeps_strangers_out(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    security = make_security(tmp_path / "tls")
    cluster = started(make_cluster, GROUPS, security=security, state_mb=16)
    when = cluster.kill("replica_1")
    step = cluster.step("replica_0")
    cluster.until_step("replica_0", step + 3)
    cluster.start("replica_1")
    cluster.until_event("replica_1", "level", after=when)
    strangers = {
        "wrong_token": (replace(security, token=OTHER_TOKEN), "TORCHFT_PLUS_TOKEN_FILE"),
        "wrong_authority": (Security(TOKEN, make_tls(tmp_path / "theirs")), "TORCHFT_PLUS_TLS_CA"),
    }
    for name, (wrong, setting) in strangers.items():
        cluster.start(name, security=wrong)
        assert cluster.wait(name, 60) == 2
        said = (cluster.folder / f"{name}.0.log").read_text()
        assert setting in said.splitlines()[-1], said
        assert "Traceback" not in said
        assert TOKEN not in said
        assert OTHER_TOKEN not in said
    finish(cluster, GROUPS, ["replica_0"])
    for path in [*cluster.folder.glob("*.log"), *cluster.events_folder.iterdir()]:
        assert TOKEN not in path.read_text(errors="replace"), path


def test_leaders_do_not_let_in_whom_an_open_lighthouse_did(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(expected=1)
    cluster.start("replica_0", security=Security(TOKEN))
    cluster.until_step("replica_0", 3, timeout_s=90)
    when = time.time()
    cluster.start("replica_1", security=Security(OTHER_TOKEN))
    assert cluster.wait("replica_1", 60) == 2
    assert "TORCHFT_PLUS_TOKEN_FILE" in (cluster.folder / "replica_1.0.log").read_text().splitlines()[-1]
    cluster.until_step("replica_0", cluster.step("replica_0") + 5)
    assert cluster.longest_gap("replica_0", when, time.time()) < cluster.timeout_ms / 1000
    assert not cluster.events("replica_0", "fatal")
