"""Processes that the bench starts: they cannot outlive it, and speak JSON lines. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXEC_CHILD = ROOT / "torchft_plus" / "launch" / "exec_child.py"
END_DEADLINE_S = 10.0


class ChildFailed(RuntimeError):
    """A process of the bench ended, or did not answer in time; the text says where its log is."""


def tied_to_this_process(command: Sequence[str]) -> list[str]:
    """The command in a wrapper that asks the kernel to end it together with the bench."""
    return [sys.executable, "-I", "-S", str(EXEC_CHILD), str(os.getpid()), *command]


class Child:
    """A child whose output goes to a log."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as errors:
            self.process = self._start(tied_to_this_process(command), dict(env), errors.fileno())

    def _start(self, command: list[str], env: dict[str, str], errors: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, text=True
        )

    @property
    def alive(self) -> bool:
        """It has not ended."""
        return self.process.poll() is None

    def end(self) -> None:
        """Ask it to end, and kill it if it does not."""
        if self.alive:
            self.process.terminate()
        try:
            self.process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Worker(Child):
    """A child that takes commands and answers; see ``channel.Channel`` for its side.

    Args:
        on_line: called with each answer on a thread of its own; without it answers are kept for ``receive``.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        on_line: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        super().__init__(name, command, env, log)
        self._on_line = on_line or self._answers.put
        self._reader = threading.Thread(target=self._read, name=f"read-{name}", daemon=True)
        self._reader.start()

    def _start(self, command: list[str], env: dict[str, str], errors: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )

    def send(self, **fields: Any) -> None:
        """Send a command; to a dead one it is lost."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(fields) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next answer.

        Raises:
            ChildFailed: it ended, or was silent for ``timeout_s``.
        """
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise ChildFailed(f"{self.name} did not answer within {timeout_s:g} s, see {self.log}") from None
        if answer is None:
            raise ChildFailed(f"{self.name} ended with status {self.process.wait()}, see {self.log}")
        return answer

    def end(self) -> None:
        """Close its channel, and kill it if it does not end by that."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(END_DEADLINE_S)
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # the last line of a killed process may be half a line
                self._on_line(json.loads(line))
        self._answers.put(None)


def environment(python_path: Sequence[Path], **extra: str) -> dict[str, str]:
    """Environment of a measured process: one thread, loopback, no settings of an outer job."""
    outer = ("TORCHFT", "TORCHELASTIC", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "REPLICA", "GROUP_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(outer)}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(map(str, python_path)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **extra,
    }


def free_port() -> int:
    """A port that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_listening(child: Child, port: int, timeout_s: float) -> None:
    """Wait until ``child`` accepts connections.

    Raises:
        ChildFailed: it ended, or did not within ``timeout_s``.
    """
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if not child.alive:
            raise ChildFailed(f"{child.name} ended with status {child.process.returncode}, see {child.log}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise ChildFailed(f"{child.name} does not listen after {timeout_s:g} s, see {child.log}")
