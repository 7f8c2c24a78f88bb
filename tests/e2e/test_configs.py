"""The shipped CPU run files, as a user starts them: a group is killed in mid-run, and the verdict is good."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import ROOT, until

pytestmark = [pytest.mark.e2e, pytest.mark.titan, pytest.mark.timeout(400)]


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    command = [sys.executable, "-m", "torchft_plus.titan.assets", "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    return folder


def launch(config: str, assets: Path, folder: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "torchft_plus", "run", f"configs/{config}", "--launch.folder", str(folder),
        "--model.hf_assets_path", str(assets / "tokenizer"), "--training.dataset_path", str(assets / "text"), *more,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "steps"),
    [("llama3_debug_cpu.toml", 100), ("llama3_debug_cpu_fsdp.toml", 70)],
    ids=["plain", "fsdp"],
)
def test_a_shipped_run_survives_its_kill(config: str, steps: int, assets: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = launch(config, assets, folder, "--training.steps", str(steps))
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-3000:]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["lost_steps"]) == (steps, [])
    assert summary["digests"]["compared"] >= steps // 4 and summary["digests"]["unequal"] == 0
    assert [failure["healed"] for failure in summary["failures"]] == [True]


@pytest.mark.long
def test_diloco_survives_its_kills(assets: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = launch("llama3_debug_cpu_diloco.toml", assets, folder, "--training.steps", "400")
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=390)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-3000:]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["steps_per_commit"], summary["lost_steps"]) == (20, 20, [])
    assert summary["digests"]["compared"] >= 19 and summary["digests"]["unequal"] == 0
    assert "Inner steps lost by survivors: 0." in ended.stdout


def test_ctrl_c_leaves_nothing_behind(assets: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = subprocess.Popen(
        launch("llama3_debug_cpu.toml", assets, folder),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        log = folder / "events" / "replica_0.0.jsonl"
        until(lambda: log.exists() and '"commit"' in log.read_text(), 120, "no step was committed")
        pids = {
            json.loads(line)["pid"]
            for path in log.parent.glob("replica_*.jsonl")
            for line in path.open()
            if '"pid"' in line
        }
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130
        assert pids and not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    finally:
        run.kill()
        run.wait()
        assert run.stdout is not None
        print(run.stdout.read().decode()[-3000:])
