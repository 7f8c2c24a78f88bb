"""Runs the launcher as people do: as a process of its own, with fake trainers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
TRAINER = Path(__file__).with_name("fake_trainer.py")
DEADLINE_S = 60.0


@dataclass
class Launched:
    """A launcher that runs."""

    process: subprocess.Popen[str]
    folder: Path
    mark: str

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Events of one kind of all logs so far."""
        lines = [
            line for log in (self.folder / "events").glob("*.jsonl") for line in log.read_text().splitlines()
        ]
        return [
            event
            for event in (json.loads(line) for line in lines if line.endswith("}"))
            if event["kind"] == kind
        ]

    def finish(self) -> tuple[int, str]:
        """Wait for its end: exit status and output."""
        output, _ = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, output

    def summary(self) -> dict[str, Any]:
        """What it wrote at the end."""
        return json.loads((self.folder / "summary.json").read_text())

    def left_behind(self) -> list[int]:
        """Processes that carry this run's mark in their environment."""
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and self.mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return [pid for pid in found if pid != self.process.pid]


def eventually(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Wait for something that another process does."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def launch(
    tmp_path: Path,
    *,
    table: str = "",
    more: str = "",
    plan: Mapping[str, str] | None = None,
    program: str = "python",
    module: bool = False,
    known_steps: bool = True,
    lighthouse: bool = False,
    address: str = "127.0.0.1:9",
    **env: str,
) -> Launched:
    """Start ``python -m torchft_plus run`` on a run file made of the parts (``module``: ``table`` says what to run)."""
    mark = f"mark-{uuid.uuid4().hex}"
    folder = tmp_path / "run"
    external = "" if lighthouse else f'lighthouse = "{address}"'
    lines = [f"folder = {json.dumps(str(folder))}"]
    if "replicas" not in table:
        lines.append("replicas = 2")
    if not module:
        lines.append(f"command = {json.dumps([program, str(TRAINER)])}")
        lines.append(f"env = {{ PYTHONPATH = {json.dumps(str(ROOT))} }}")
    lines.append(table)
    text = f"""
{f"[training]{chr(10)}steps = {env.get('FAKE_STEPS', '20')}" if known_steps else ""}
[fault_tolerance]
enable = true
digest_every = 1
{external}
[launch]
{chr(10).join(lines)}
{more}
"""
    path = tmp_path / "run.toml"
    path.write_text(text)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "FAKE_PLAN": json.dumps(dict(plan or {})),
        "MARK": mark,
        **env,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "torchft_plus", "run", str(path)],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return Launched(process, folder, mark)
