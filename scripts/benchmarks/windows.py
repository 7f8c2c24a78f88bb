"""``bench windows``: how many inner steps a survivor loses when one of two DiLoCo groups dies in a sync."""

from __future__ import annotations

import queue
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import lighthouses
from benchmarks.children import ROOT, ChildFailed, Worker, environment

SYNC_EVERY = 20
STEP_S = 0.02
DIE_AT, AFTER = 3, 3
"""Sync that the victim dies in, and syncs of the survivor after that."""
DEADLINE_S = 180.0


@dataclass(frozen=True, slots=True)
class Kill:
    """What became of the survivor."""

    lost: int
    """Inner steps that it took for its syncs, beyond those that they are made of."""
    stall_s: float
    """Its longest time from one inner step to the next, minus a normal one."""
    died: bool


def measure(options: Any, torchft_python: str | None) -> dict[str, Any]:
    """Run each system so often. Returns what the report needs."""
    results: list[dict[str, Any]] = []
    for system in options.systems:
        kills: list[Kill] = []
        for number in range(options.kills):
            folder = Path(options.scratch) / f"{system}-{number}"
            folder.mkdir(parents=True)
            kills.append(_run(system, folder, torchft_python))
        results.append({"system": system, "kills": [asdict(kill) for kill in kills]})
        print("  ".join(_row(results[-1])), file=sys.stderr, flush=True)
    return {"systems": results}


def _run(system: str, folder: Path, torchft_python: str | None) -> Kill:
    if system == "torchft_plus":
        python, path = sys.executable, [ROOT, ROOT / "scripts"]
        lighthouse, address = lighthouses.start_torchft_plus(folder, 1, 2)
    else:
        assert torchft_python is not None
        python, path = torchft_python, [ROOT / "scripts"]
        lighthouse, address = lighthouses.start_torchft(torchft_python, folder, "lighthouse", 1)
    lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    workers: list[Worker] = []
    try:
        for name in ("survivor", "victim"):
            worker = Worker(
                name,
                [python, "-m", "benchmarks.windows_worker"],
                environment(path, RES_OPTIONS="timeout:1 attempts:1"),
                folder / f"{name}.log",
                on_line=lines.put if name == "survivor" else lambda line: None,
            )
            worker.send(
                system=system,
                replica_id=name,
                lighthouse=address,
                sync_every=SYNC_EVERY,
                step_s=STEP_S,
                die_at=DIE_AT if name == "victim" else 0,
            )
            workers.append(worker)
        return _watch(lines, *workers)
    finally:
        for worker in workers:
            worker.process.kill()
            worker.end()
        lighthouse.end()


def _watch(lines: queue.SimpleQueue[dict[str, Any]], survivor: Worker, victim: Worker) -> Kill:
    seen: list[dict[str, Any]] = []
    end = time.monotonic() + DEADLINE_S
    last: int | None = None
    while last is None or seen[-1]["syncs"] < last:
        if last is None and seen and not victim.alive:
            last = seen[-1]["syncs"] + AFTER
        try:
            line = lines.get(timeout=0.5)
        except queue.Empty:
            line = {}
        if line:
            seen.append(line)
        elif not survivor.alive:
            return Kill(0, 0.0, died=True)
        if time.monotonic() > end:
            raise ChildFailed(f"the survivor does not go on, see {survivor.log}")
    gaps = [b["time"] - a["time"] for a, b in pairwise(seen)]
    return Kill(seen[-1]["total"] - seen[-1]["syncs"] * SYNC_EVERY, max(gaps) - median(gaps), died=False)


def tables(result: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """The result as (title, header, rows)."""
    header = ["system", "kills", "survivor died", "inner steps lost", "of a window", "stall s, median"]
    title = "one of two DiLoCo groups is killed in a sync: what the other one loses"
    return [(title, header, [_row(one) for one in result["systems"]])]


def _row(result: dict[str, Any]) -> list[str]:
    left = [kill for kill in result["kills"] if not kill["died"]]
    return [
        result["system"],
        str(len(result["kills"])),
        str(len(result["kills"]) - len(left)),
        ", ".join(str(kill["lost"]) for kill in left) or "-",
        str(SYNC_EVERY),
        f"{median(kill['stall_s'] for kill in left):.2f}" if left else "-",
    ]


def failures(result: dict[str, Any]) -> list[str]:
    """Ours loses nothing."""
    return [
        f"torchft_plus lost {kill['lost']} inner steps"
        for one in result["systems"]
        if one["system"] == "torchft_plus"
        for kill in one["kills"]
        if kill["lost"] or kill["died"]
    ]


NOTES = [
    f"two groups of one process, DiLoCo with sync_every = {SYNC_EVERY}, each system's own class and defaults. The victim is"
    f" killed when it is to send its pseudo-gradient of sync {DIE_AT}, and does not come back.",
    f"inner steps lost: those that the survivor took until {AFTER} syncs later, minus {SYNC_EVERY} for each sync.",
]
