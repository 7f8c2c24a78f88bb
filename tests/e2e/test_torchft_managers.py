"""Real training processes of torchft 0.2.0, from its wheel, on our Lighthouse: one is killed, the others go on, it heals.

Needs a Python with torchft, named by TORCHFT_PYTHON or made by ``scripts/bench`` (``.venv-torchft``).
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lighthouse.client import fetch_status
from lighthouse.server import LighthouseServer
from lighthouse.status import describe

ROOT = Path(__file__).resolve().parents[2]
TRAINER = Path(__file__).parent / "torchft_trainer.py"
OWN_PYTHON = ROOT / ".venv-torchft" / "bin" / "python"
PYTHON = os.environ.get("TORCHFT_PYTHON") or (str(OWN_PYTHON) if OWN_PYTHON.exists() else None)
FOR_EVER = 1_000_000
DEADLINE_S = 90.0

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        PYTHON is None, reason="no torchft: set TORCHFT_PYTHON to a Python with torchft 0.2.0"
    ),
]


class Group:
    """One life of a torchft replica group."""

    def __init__(self, folder: Path, name: str, life: int, lighthouse: str, steps: int) -> None:
        assert PYTHON is not None
        self.log = folder / f"{name}.{life}.log"
        self._lines = folder / f"{name}.{life}.jsonl"
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"RUST_LOG": "error"}
        with self._lines.open("wb") as out, self.log.open("wb") as err:
            command = [PYTHON, str(TRAINER), name, str(steps), lighthouse]
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)

    def commits(self) -> list[dict[str, Any]]:
        text = self._lines.read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.split("\n")[:-1]]
        return [line for line in lines if line["committed"]]

    def last(self, key: str) -> int:
        commits = self.commits()
        return commits[-1][key] if commits else 0

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", min_replicas=2) as server:
        yield server


@pytest.fixture
def start(tmp_path: Path, lighthouse: LighthouseServer) -> Iterator[Callable[..., Group]]:
    groups: list[Group] = []

    def start_group(name: str, life: int = 1, steps: int = FOR_EVER) -> Group:
        groups.append(Group(tmp_path, name, life, lighthouse.address(), steps))
        return groups[-1]

    yield start_group
    for group in groups:
        group.end()


def wait_until(what: Callable[[], bool], groups: list[Group], text: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not what():
        for group in groups:
            assert group.process.poll() is None, f"it has ended: {group.log.read_text()[-2000:]}"
        assert time.monotonic() < end, f"waited in vain for {text}"
        time.sleep(0.05)


def assert_equal_states(groups: list[Group]) -> None:
    """After each step their parameters are the same."""
    seen: dict[int, set[int]] = {}
    for group in groups:
        for commit in group.commits():
            seen.setdefault(commit["step"], set()).add(commit["crc"])
    assert len(seen) > 20
    assert not [step for step, crcs in seen.items() if len(crcs) > 1]


def test_torchfts_managers_survive_a_kill_and_heal(
    start: Callable[..., Group], lighthouse: LighthouseServer
) -> None:
    a, b, c = (start(name) for name in ("a", "b", "c"))
    wait_until(
        lambda: min(g.last("step") for g in (a, b, c)) > 20 and a.last("participants") == 3,
        [a, b, c],
        "three groups to train",
    )
    text = describe(fetch_status(lighthouse.address()))
    assert text.count("  member ") == 3 and "step" in text

    c.process.send_signal(signal.SIGKILL)
    killed_at = time.monotonic()
    c.process.wait()
    killed_step = c.last("step")
    wait_until(
        lambda: a.last("participants") == 2 and a.last("step") > killed_step + 10, [a, b], "two to go on"
    )
    times = [g["time"] for g in a.commits() if g["time"] > killed_at - 1]
    gap_s = max(after - before for before, after in itertools.pairwise(times))
    print(
        f"longest gap between commits of a survivor: {gap_s:.3f} s (a survivor may sit in gloo until its timeout)"
    )

    c2 = start("c", 2)
    wait_until(
        lambda: c2.last("step") > killed_step + 30 and a.last("participants") == 3, [a, b, c2], "c to heal"
    )
    wait_until(lambda: a.last("step") > c2.commits()[0]["step"] + 20, [a, b, c2], "three to go on")
    assert c2.commits()[0]["step"] > killed_step, "it healed from the others"
    assert_equal_states([a, b, c, c2])


@pytest.mark.long
def test_all_of_torchfts_groups_are_lost_and_others_begin_again(
    start: Callable[..., Group], lighthouse: LighthouseServer
) -> None:
    old = [start("a"), start("b")]
    wait_until(lambda: min(g.last("step") for g in old) > 5, old, "two groups to train")
    for group in old:
        group.end()
    new = [start("a", 2, steps=8), start("b", 2, steps=8)]
    for group in new:
        assert group.process.wait(DEADLINE_S) == 0, group.log.read_text()[-2000:]
    assert "steps are lost" in "\n".join(
        line for job in fetch_status(lighthouse.address()).jobs for line in job.story
    )
