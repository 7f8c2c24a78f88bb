"""``bench state``, part *faults*: a donor that dies, a bit that flips, a reader that stops, and what copy on commit costs. Ours."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.children import ROOT, Worker, environment
from benchmarks.figures import quantile

MB = 1 << 20
SIZE_MB = 512
STEPS = 100
DEADLINE_S = 120.0


def measure(options: Any) -> dict[str, Any]:
    """All of it. Returns what the table needs."""
    folder = Path(options.scratch) / "faults"
    folder.mkdir(parents=True)
    size_bytes = options.fault_mb * MB
    result: dict[str, Any] = {"size_mb": options.fault_mb, "kills": [], "flips": []}
    for run in range(options.faults):
        result["kills"].append(_fetch(folder, size_bytes, run, kill=True))
        result["flips"].append(_fetch(folder, size_bytes, run, kill=False))
    with ExitStack() as stack:
        trainer = _start(stack, "trainer", "benchmarks.state_faults_worker", folder)
        trainer.send(call="train", size_bytes=size_bytes, steps=STEPS, stopped_s=options.stopped_s)
        result["read"] = trainer.receive(DEADLINE_S)
    result["stopped_s"] = options.stopped_s
    return result


def _fetch(folder: Path, size_bytes: int, run: int, *, kill: bool) -> dict[str, Any]:
    with ExitStack() as stack:
        donors = [
            _start(stack, f"donor-{index}", "benchmarks.state_worker", folder)
            for index in range(2 if kill else 1)
        ]
        joiner = _start(stack, "joiner", "benchmarks.state_faults_worker", folder)
        for donor in donors:
            donor.send(role="donor", system="torchft_plus", size_bytes=size_bytes)
        for donor in donors:
            donor.receive(DEADLINE_S)
            donor.receive(DEADLINE_S)
            donor.send(mode="ours", step=1)
        addresses = [donor.receive(DEADLINE_S)["offer"] for donor in donors]
        if kill:
            joiner.send(
                call="fetch", size_bytes=size_bytes, step=1, donors=addresses, kill=donors[0].process.pid
            )
        else:
            joiner.send(call="flip", size_bytes=size_bytes, step=1, donors=addresses, seed=run)
        return joiner.receive(DEADLINE_S)


def _start(stack: ExitStack, name: str, module: str, folder: Path) -> Worker:
    env = environment([ROOT, ROOT / "scripts"])
    worker = Worker(name, [sys.executable, "-m", module], env, folder / f"{name}.log")
    stack.callback(worker.end)
    return worker


def failures(result: dict[str, Any]) -> list[str]:
    """What must never happen."""
    said: list[str] = []
    for what in ("kills", "flips"):
        said += [
            f"{what}: run {run} gave wrong bytes" for run, one in enumerate(result[what]) if not one["right"]
        ]
    said += [
        f"flips: run {run} did not tell of the damage"
        for run, one in enumerate(result["flips"])
        if not any("damaged" in note for note in one["notes"])
    ]
    return said


def table(result: dict[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """The result as (title, header, rows)."""
    read = result["read"]
    size_bytes = result["size_mb"] * MB
    kills, flips = result["kills"], result["flips"]
    again = max(one["refetched"] for one in kills)
    normal, meanwhile = read["normal_s"], read["meanwhile_s"]
    rows = [
        ["one of two donors killed at 50 %", f"{_right(kills)}; fetched twice: at most {100 * again:.1f} %"],
        [
            "one flipped bit, anywhere in the data",
            f"{_right(flips)}, found and told {sum(any('damaged' in n for n in one['notes']) for one in flips)} times",
        ],
        [
            f"reader that stops for {result['stopped_s']:g} s",
            f"donor's step p50 {_ratio(normal, meanwhile, 0.5)}, p95 {_ratio(normal, meanwhile, 0.95)} ({len(meanwhile)} steps)",
        ],
        [
            "copy on commit, nothing sent yet",
            f"once {1000 * read['copy_s']:.0f} ms ({read['copied_bytes'] / max(read['copy_s'], 1e-9) / 1e9:.1f} GB/s), "
            f"memory {read['extra_bytes'] / size_bytes:.2f} x the state",
        ],
    ]
    return f"Faults, state of {result['size_mb']} MB", ["what", "result"], rows


def _right(runs: list[dict[str, Any]]) -> str:
    return f"{sum(one['right'] for one in runs)} of {len(runs)} bit-identical"


def _ratio(normal: list[float], meanwhile: list[float], share: float) -> str:
    return f"{quantile(meanwhile, share) / quantile(normal, share):.3f} x"
