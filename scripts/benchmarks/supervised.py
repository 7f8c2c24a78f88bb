"""Runs a command to its end or its deadline, and leaves none of its descendants behind (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.children import Child, ChildFailed

PR_SET_CHILD_SUBREAPER = 36
INTERRUPT_S = 30.0
"""How long a command that was interrupted may clean up."""
SWEEP_S = 30.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Ending:
    """How a command ended."""

    status: int
    seconds: float
    timed_out: bool
    left_behind: int
    """Descendants that outlived it and were killed."""


def run(name: str, command: Sequence[str], env: Mapping[str, str], log: Path, deadline_s: float) -> Ending:
    """Run ``command`` with its output in ``log``. At the deadline it is interrupted, and killed if that does not help.

    Descendants that it leaves behind become children of this process, whatever session they are in, and are killed: nothing may
    disturb what is measured next. So this process must have no other children that are started meanwhile.

    Raises:
        ChildFailed: descendants cannot be killed.
    """
    _adopt_orphans()
    before = children_of(os.getpid())
    began = time.monotonic()
    log.unlink(missing_ok=True)
    child = Child(name, command, env, log)
    timed_out = False
    try:
        try:
            child.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            _interrupt(child)
    finally:
        if child.alive:  # we are interrupted ourselves
            _interrupt(child)
        left_behind = _sweep(before)
    return Ending(child.process.returncode, time.monotonic() - began, timed_out, left_behind)


def _interrupt(child: Child) -> None:
    """As by Ctrl-C: it ends what it has started, and its traceback says where it was."""
    child.process.send_signal(signal.SIGINT)
    try:
        child.process.wait(INTERRUPT_S)
    except subprocess.TimeoutExpired:
        child.process.kill()
        child.process.wait()


def _adopt_orphans() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _sweep(spared: set[int]) -> int:
    """Kill all children but those, and what they leave behind in turn. Returns how many that were."""
    killed: set[int] = set()
    end = time.monotonic() + SWEEP_S
    while children := children_of(os.getpid()) - spared:
        if time.monotonic() > end:
            raise ChildFailed(f"processes {sorted(children)} cannot be killed")
        for pid in children:
            os.kill(pid, signal.SIGKILL)  # ours and not yet waited for: the id cannot be another's
            reaped, _ = os.waitpid(pid, os.WNOHANG)
            killed.add(pid)
            if reaped == 0:
                time.sleep(_POLL_S)  # it is on its way out
    return len(killed)


def children_of(pid: int) -> set[int]:
    """Ids of the processes whose parent that is, ended ones that it has not waited for included."""
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        if int(fields[1]) == pid:
            found.add(int(entry.name))
    return found
