"""The README's plain PyTorch example, as a newcomer runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_the_plain_example_loses_a_group_and_ends_equal(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "torchft_plus", "run", "configs/plain_pytorch.toml"]
    overrides = ["--launch.folder", str(folder), "--launch.deadline_s", "240"]
    done = subprocess.run(
        [*command, *overrides],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((folder / "summary.json").read_text())
    (failure,) = summary["failures"]
    assert failure["healed"], done.stdout
    assert summary["lost_steps"] == [] and summary["digests"]["unequal"] == 0
    assert summary["digests"]["compared"] == summary["steps"] == 2500


def test_the_readme_shows_the_example_as_it_is() -> None:
    example = (ROOT / "docs" / "examples" / "plain_pytorch.py").read_text().replace("STEPS:", "2500:")
    bare = [line.split("  #")[0].strip() for line in example.splitlines()]
    readme = (ROOT / "README.md").read_text().split("## Plain PyTorch")[1].split("torchft-plus run")[0]
    shown = [line.strip() for line in readme.splitlines() if line.startswith("    ") and line.strip()]
    assert len(shown) > 10
    for line in shown:
        assert (
            line in bare
            or line.replace(", min_replica_size=1)", ", min_replica_size=1, digest_every=1)") in bare
        ), line
