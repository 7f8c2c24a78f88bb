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


def main(options: Any) -> int:
    """Run them. Returns the exit status: 1 if one failed."""
    # A background job of a shell has SIGINT ignored, and so would a bench that is to be interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    torchft = torchft_environment.torchft_python(options.torchft_python)  # made once, in nobody's deadline
    names = options.only or [name for name, budget in BUDGETS.items() if budget.by_default]
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
    for line in failed:
        print(f"scripts/bench: {line}", file=sys.stderr)
    return 1 if failed else 0


def run_one(name: str, out: Path, torchft_python: str, *, quick: bool) -> str:
    """Run a bench; its output goes to ``name``.log. Returns why it failed, or nothing.

    Where it has written no figures, ``name``.failed.json says so; figures of an earlier run stay.
    """
    arguments = bench_arguments(name, quick=quick)
    places = ["--out", str(out.resolve())]
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}",
        torchft_environment.VARIABLE: torchft_python,
    }
    log, figures = out / f"{name}.log", out / f"{name}.json"
    before = _written_ns(figures)
    budget = BUDGETS[name]
    deadline_s = budget.quick_deadline_s if quick else budget.deadline_s
    command = [sys.executable, "-m", "benchmarks", *arguments, *places]
    ending = supervised.run(f"bench {name}", command, env, log, deadline_s)
    print(f"  {ending.seconds:.0f} s, exit status {ending.status}, see {log}", flush=True)
    if ending.left_behind:
        print(f"  it left {ending.left_behind} processes behind: killed", flush=True)
    if ending.status == 0:
        return ""
    reason = _last_line(log) or f"exit status {ending.status}"
    if ending.timed_out:
        reason = f"not done within {deadline_s:g} s"
    if _written_ns(figures) == before:
        report.write_failure(out, name, command_line(arguments), reason)
    return reason


def bench_arguments(name: str, *, quick: bool) -> list[str]:
    """What ``scripts/bench`` is called with for this bench."""
    budget = BUDGETS[name]
    return [name, *(budget.quick if quick else budget.arguments)]


def _written_ns(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "").removeprefix("scripts/bench: ")
