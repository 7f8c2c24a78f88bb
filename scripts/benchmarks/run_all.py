"""``bench all``: one bench after the other, each in a process of its own and with a deadline. An error in one ends no other."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from benchmarks import page, report, supervised, torchft_environment
from benchmarks.about import command_line
from benchmarks.budgets import BUDGETS
from benchmarks.children import ROOT

DOCS = ROOT / "docs"
SAID = "scripts/bench: "
"""What the failures that a bench tells begin with."""


def main(options: Any) -> list[str]:
    """Run them. Returns what failed, one sentence each.

    Raises:
        RuntimeError: the environment of torchft could not be made.
        ChildFailed: processes of a bench cannot be killed, and would disturb the next.
    """
    # A background job of a shell has SIGINT ignored, and so would a bench that is to be interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    names = options.only or [name for name, budget in BUDGETS.items() if budget.by_default]
    torchft = None
    if any(BUDGETS[name].torchft for name in names):  # made here once, in nobody's deadline
        torchft = torchft_environment.torchft_python(options.torchft_python)
    failed: list[str] = []
    for number, name in enumerate(names, 1):
        print(f"{number}/{len(names)} {name}", flush=True)
        failure = run_one(name, out, torchft, quick=options.quick)
        if failure:
            failed.append(f"{name}: {failure}")
            print(f"  failed: {failure}", flush=True)
    if options.docs:
        failed += page.write(out, DOCS)
    else:
        print(f"scripts/bench report makes {DOCS.name}/{page.PAGE} of what is in --out")
    return failed


def run_one(name: str, out: Path, torchft_python: str | None, *, quick: bool) -> str:
    """Run a bench; its output goes to ``name``.log. Returns why it failed, or nothing.

    Where it has written no figures, ``name``.failed.json says so; figures of an earlier run stay.
    """
    arguments = bench_arguments(name, quick=quick)
    places = ["--out", str(out.resolve())]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}"}
    if torchft_python is not None:
        env[torchft_environment.VARIABLE] = torchft_python
    log, figures = out / f"{name}.log", out / f"{name}.json"
    before = _written_ns(figures)
    budget = BUDGETS[name]
    deadline_s = budget.quick_deadline_s if quick else budget.deadline_s
    # Unbuffered, so that its log has tables and errors in the order in which they came.
    command = [sys.executable, "-u", "-m", "benchmarks", *arguments, *places]
    ending = supervised.run(f"bench {name}", command, env, log, deadline_s)
    print(f"  {ending.seconds:.0f} s, exit status {ending.status}, see {log}", flush=True)
    if ending.left_behind:
        print(f"  it left {ending.left_behind} processes behind: killed", flush=True)
    if ending.status == 0:
        return ""
    reason = f"not done within {deadline_s:g} s" if ending.timed_out else reason_in(log, ending.status)
    if _written_ns(figures) == before:
        report.write_failure(out, name, command_line(arguments), reason)
    return reason


def bench_arguments(name: str, *, quick: bool) -> list[str]:
    """What ``scripts/bench`` is called with for this bench."""
    budget = BUDGETS[name]
    return [name, *(budget.quick if quick else budget.arguments)]


def _written_ns(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def reason_in(log: Path, status: int) -> str:
    """Why a bench failed: what it said itself, else the end of its log."""
    if status < 0:
        return f"ended by signal {-status}"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    said = [line.removeprefix(SAID) for line in lines if line.startswith(SAID)]
    last = [line for line in lines if line][-1:]
    return "; ".join(said or last) or f"exit status {status}"
