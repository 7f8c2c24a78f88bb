"""Groups of torchtitan's debug model in processes of their own, for tests."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchft_plus.titan import assets

ROOT = Path(__file__).parents[3]
PROCESS = Path(__file__).with_name("titan_process.py")
RUN = """
[job]
dump_folder = "{folder}/dump"
[metrics]
log_freq = 1
[model]
hf_assets_path = "{folder}/tokenizer"
[lr_scheduler]
warmup_steps = 2
[training]
dataset = "c4_test"
dataset_path = "{folder}/text"
local_batch_size = 1
seq_len = 32
steps = {steps}
mixed_precision_param = "float32"
[activation_checkpoint]
mode = "none"
[comm]
trace_buf_size = 0
[debug]
seed = 42
[fault_tolerance]
enable = true
group_size = {groups}
timeout_ms = 20000
digest_every = 1
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Runs:
    """Processes of one test; everything has ended after ``close``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lighthouse_address = f"127.0.0.1:{free_port()}"
        self._processes: list[subprocess.Popen[bytes]] = []
        assets.make(folder, count=400)

    def _start(self, name: str, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        everything = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
        everything["RES_OPTIONS"] = "timeout:1 attempts:1"
        everything["HF_HOME"] = str(self.folder / "cache")
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, env=everything, stdout=log, stderr=log)
        self._processes.append(process)
        return process

    def start_lighthouse(self, expected: int) -> None:
        command = [sys.executable, "-m", "lighthouse", "--bind", self.lighthouse_address, "--store", "memory"]
        command += ["--expected_replicas", str(expected), "--timeout_ms", "20000"]
        self._start("lighthouse", command)
        host, port = self.lighthouse_address.split(":")
        self.until(lambda: socket.socket().connect_ex((host, int(port))) == 0, 20, "the Lighthouse to listen")

    def start(self, name: str, steps: int, *arguments: str, groups: int = 1, **environment: str) -> Any:
        """One group of one rank, started as torchrun would."""
        file = self.folder / f"{name}.toml"
        file.write_text(RUN.format(folder=self.folder, steps=steps, groups=groups))
        return self._start(
            name,
            [sys.executable, str(PROCESS), "--job.config_file", str(file), *arguments],
            RANK="0",
            LOCAL_RANK="0",
            WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free_port()),
            REPLICA_ID=environment.pop("REPLICA_ID", "replica_0"),
            TORCHFT_LIGHTHOUSE=self.lighthouse_address,
            TORCHFT_PLUS_EVENTS=str(self.folder / "events"),
            TITAN_RESULT=str(self.folder / f"{name}.json"),
            **environment,
        )

    def result(self, name: str) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.folder / f"{name}.json").read_text())
        return result

    def events(self, replica: str, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "events" / f"{replica}.0.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in events if event["kind"] == kind]

    def metrics(self) -> dict[str, list[float]]:
        """What tensorboard was given, by tag."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        file = next(self.folder.glob("dump/tb/**/events.out*"))
        reader = EventAccumulator(str(file))
        reader.Reload()
        return {tag: [e.value for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}

    def until(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        end = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < end, f"waited {timeout_s} s for {what}; {self.tails()}"
            time.sleep(0.02)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def tails(self) -> str:
        return "\n".join(f"{p.name}: {p.read_text()[-1500:]}" for p in sorted(self.folder.glob("*.log")))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
