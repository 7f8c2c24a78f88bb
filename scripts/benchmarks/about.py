"""What a measurement was made with: machine, versions, command, and what others used of the machine meanwhile."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.children import ROOT
from benchmarks.machine import OtherLoad

_PRIVATE = ("--out", "--torchft-python")
"""Options that name places of this machine and change nothing of what is measured."""
_VERSIONS = (
    "import importlib.metadata as m, json, platform;"
    "print(json.dumps([m.version('torchft'), m.version('torch'), platform.python_version()]))"
)


class About:
    """Made when a bench starts, told when it has ended.

    Args:
        arguments: of ``scripts/bench``, the name of the bench first.
        seed: None if the bench has none.
        torchft_python: of the environment that torchft is measured in; None without torchft.
    """

    def __init__(self, arguments: list[str], seed: int | None, torchft_python: str | None) -> None:
        self._began = time.monotonic()
        self._load = OtherLoad([])  # its children have ended when it is asked
        self._fields: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            "command": command_line(arguments),
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "kernel": platform.release(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": _version("torch"),
            "commit": _commit(),
        }
        if torchft_python is not None:
            self._fields["torchft"] = _torchft_versions(torchft_python)
        if seed is not None:
            self._fields["seed"] = seed

    def finished(self) -> dict[str, Any]:
        """All of it; called when the processes of the bench have ended."""
        lasted_s = round(time.monotonic() - self._began, 1)
        return {**self._fields, "seconds": lasted_s, "others_used_cores": round(self._load.cores(), 2)}


def command_line(arguments: list[str]) -> str:
    """The command as others would type it: without the options that name places of this machine."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word in _PRIVATE:
            next(words, None)
        elif not word.startswith(tuple(f"{option}=" for option in _PRIVATE)):
            kept.append(word)
    return shlex.join(["scripts/bench", *kept])


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or "unknown"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _torchft_versions(python: str) -> str:
    answer = subprocess.run([python, "-c", _VERSIONS], check=False, capture_output=True, text=True)
    if answer.returncode != 0:
        return "unknown"
    torchft, torch, own = json.loads(answer.stdout)
    return f"{torchft} (torch {torch}, Python {own})"


def _commit() -> str:
    """Of the checkout, and whether tracked files differ from it."""
    try:
        name = _git("rev-parse", "--short=10", "HEAD")
        return name + (" and changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
