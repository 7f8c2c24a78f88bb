"""Warm spares as real processes: a package whose preload is slow, and a pool that loses some."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from pathlib import Path

import pytest
from launching import ROOT, eventually, launch

from torchft_plus.launch.process import ChildProcess
from torchft_plus.launch.spare_pool import SparePool


def package(folder: Path, preload: str, main: str) -> dict[str, str]:
    """A package ``worker`` in ``folder``; gives the environment that finds it."""
    (folder / "worker").mkdir()
    (folder / "worker" / "__init__.py").write_text("")
    (folder / "worker" / "preload.py").write_text(preload)
    (folder / "worker" / "__main__.py").write_text(main)
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "COMMON": "1"}


def wait_gone(child: ChildProcess) -> None:
    poller = select.poll()
    poller.register(child.pidfd, select.POLLIN)
    assert poller.poll(30_000), "it did not end"


def test_a_spare_becomes_the_module_with_its_place(tmp_path: Path) -> None:
    environment = package(
        tmp_path,
        "print('preloaded', flush=True)",
        "import os, sys\nprint(__name__, sys.argv[1:], os.environ['RANK'], os.environ['COMMON'], sys.stdin.read() == '')\n"
        "sys.exit(3)",
    )
    pool = SparePool(1, "worker", ["--a", "b"], environment, tmp_path / "spares.log")
    pool.refill(0.0, calm=False)
    assert len(pool) == 0  # not while somebody comes back
    pool.refill(0.0, calm=True)
    pool.refill(0.0, calm=True)
    assert len(pool) == 1
    eventually((tmp_path / "spares.log").exists)
    eventually(lambda: "preloaded" in (tmp_path / "spares.log").read_text())
    child = pool.take({**environment, "RANK": "1"}, tmp_path / "rank.log")
    assert child is not None and len(pool) == 0
    wait_gone(child)
    assert child.reap() and child.exit_status() == 3
    assert child.last_lines() == ["__main__ ['--a', 'b'] 1 1 True"]
    assert pool.take(environment, tmp_path / "rank.log") is None
    assert pool.close()


def test_an_order_may_come_before_the_imports_are_done(tmp_path: Path) -> None:
    environment = package(tmp_path, "import time; time.sleep(0.5)", "print('done')")
    pool = SparePool(1, "worker", [], environment, tmp_path / "spares.log")
    pool.refill(0.0, calm=True)
    child = pool.take(environment, tmp_path / "rank.log")
    assert child is not None
    wait_gone(child)
    assert child.reap() and child.exit_status() == 0 and child.last_lines() == ["done"]


def test_dead_spares_are_not_handed_out_and_are_replaced_in_time(tmp_path: Path) -> None:
    environment = package(tmp_path, "", "")
    pool = SparePool(2, "worker", [], environment, tmp_path / "spares.log")
    pool.refill(0.0, calm=True)
    pool.refill(0.0, calm=True)
    first, second = pool.pids
    os.kill(first, signal.SIGKILL)
    eventually(lambda: Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    child = pool.take(environment, tmp_path / "rank.log")
    assert child is not None and child.pid == second
    pool.refill(1.0, calm=True)
    assert len(pool) == 1
    os.kill(pool.pids[0], signal.SIGKILL)
    deadline = time.monotonic() + 20
    while len(pool):
        assert time.monotonic() < deadline
        pool.refill(2.0, calm=False)
    pool.refill(2.5, calm=True)
    assert len(pool) == 0  # a spare that dies by itself is not replaced at once
    pool.refill(3.1, calm=True)
    assert len(pool) == 1
    eventually(pool.close)
    wait_gone(child)
    child.reap()


def test_a_long_order_is_refused_and_not_cut(tmp_path: Path) -> None:
    child = ChildProcess(["cat"], os.environ, tmp_path / "log", listens=True)
    with pytest.raises(ValueError, match="pipe"):
        child.tell("x" * select.PIPE_BUF)
    assert child.tell("short")
    wait_gone(child)
    assert child.reap() and child.last_lines() == ["short"]
    assert not child.reaped or not child.exit_status()


def test_a_restart_takes_a_spare(tmp_path: Path) -> None:
    trainer = Path(__file__).with_name("fake_trainer.py").read_text()
    environment = package(tmp_path, "print('preloaded', flush=True)", trainer)
    more = '[[chaos]]\nat_step = 50\nkill = "replica_1"'
    table = f'module = "worker"\nwarm_spares = 1\nenv = {{ PYTHONPATH = {json.dumps(environment["PYTHONPATH"])} }}'
    run = launch(tmp_path, table=table, more=more, module=True, FAKE_STEPS="120")
    status, output = run.finish()
    assert status == 0, output
    assert [e["warm"] for e in run.events("spawn") if e["replica_id"] == "replica_1"] == [0, 1]
    assert [e["warm"] for e in run.events("spawn") if e["replica_id"] == "replica_0"] == [0]
    assert run.summary()["failures"][0]["healed"]
    assert not run.left_behind()
