"""Starts the Lighthouse of either system on loopback."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from benchmarks.children import ROOT, Child, ChildFailed, environment, free_port, wait_listening
from benchmarks.torchft_environment import lighthouse_command

LISTEN_DEADLINE_S = 30.0


def start_torchft_plus(
    folder: Path, min_replicas: int, expected_replicas: int, address: str = ""
) -> tuple[Child, str]:
    """Ours, at its defaults, on a port of its own choice. Returns the process and host:port.

    Args:
        address: host:port of the one before it, whose store it takes over.

    Raises:
        ChildFailed: it does not listen.
    """
    events = folder / "events"
    command = [sys.executable, "-m", "lighthouse", "--bind", address or "127.0.0.1:0"]
    command += ["--store", str(folder / "lighthouse.sqlite")]
    command += ["--min_replicas", str(min_replicas), "--expected_replicas", str(expected_replicas)]
    env = environment([ROOT], TORCHFT_PLUS_EVENTS=str(events))
    child = Child("the Lighthouse", command, env, folder / "lighthouse.log")
    if address:
        wait_listening(child, int(address.rpartition(":")[2]), LISTEN_DEADLINE_S)
        return child, address
    return child, _announced_address(child, events / "lighthouse.jsonl")


def start_torchft(
    python: str,
    folder: Path,
    name: str,
    min_replicas: int,
    options: tuple[str, ...] = (),
    address: str = "",
) -> tuple[Child, str]:
    """torchft's, quiet (its default log costs it 0.1 ms a step and more). Returns the process and host:port.

    Args:
        address: host:port of the one before it; else on a free port.

    Raises:
        ChildFailed: it does not listen.
    """
    port = int(address.rpartition(":")[2]) if address else free_port()
    command = [lighthouse_command(python), "--bind", f"127.0.0.1:{port}", "--min_replicas", str(min_replicas)]
    env = environment([], RUST_LOG="error")
    child = Child(f"torchft's lighthouse ({name})", [*command, *options], env, folder / f"{name}.log")
    wait_listening(child, port, LISTEN_DEADLINE_S)
    return child, f"127.0.0.1:{port}"


def _announced_address(child: Child, events: Path) -> str:
    end = time.monotonic() + LISTEN_DEADLINE_S
    while time.monotonic() < end:
        if not child.alive:
            raise ChildFailed(f"{child.name} ended with status {child.process.returncode}, see {child.log}")
        lines = events.read_text(encoding="utf-8").split("\n")[:-1] if events.exists() else []
        for event in map(json.loads, lines):
            if event["kind"] == "listening":
                return str(event["address"])
        time.sleep(0.05)
    raise ChildFailed(f"{child.name} does not listen after {LISTEN_DEADLINE_S:g} s, see {child.log}")
