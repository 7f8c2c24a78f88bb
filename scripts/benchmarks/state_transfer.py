"""``bench state``, part *transfer*: a state from one process to another, straight into warm tensors.

Ours and torchft's transports beside a raw TCP copy and memcpy, which are the limits. One pair of processes a system; the modes
take turns in shuffled order, so that what the machine does meanwhile hits all alike.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.children import ROOT, Worker, environment
from benchmarks.figures import summarize
from benchmarks.machine import OtherLoad

MB = 1 << 20
SIZES_MB = [64, 512, 2048]
READY_DEADLINE_S = 120.0
TRANSFER_DEADLINE_S = 120.0
MODES = {"torchft_plus": ("ours", "raw", "memcpy"), "torchft": ("pg", "http")}
TITLES = {
    "ours": "torchft_plus",
    "pg": "torchft PGTransport, in place",
    "http": "torchft HTTPTransport (default)",
    "raw": "raw TCP copy (no checksum)",
    "memcpy": "memcpy",
}


@dataclass(slots=True)
class Pair:
    """Donor and receiver of one system."""

    system: str
    donor: Worker
    receiver: Worker

    def transfer(self, mode: str, step: int) -> dict[str, float]:
        """One transfer. Returns seconds, and what donor and receiver took in memory above what they had.

        Raises:
            RuntimeError: the receiver got something else than the donor has.
        """
        self.donor.send(mode=mode, step=step)
        offer = self.donor.receive(READY_DEADLINE_S)["offer"]
        self.receiver.send(mode=mode, step=step, offer=offer)
        got = self.receiver.receive(TRANSFER_DEADLINE_S)
        self.donor.send(ended=True)
        gave = self.donor.receive(TRANSFER_DEADLINE_S)
        if not got["right"]:
            raise RuntimeError(f"{TITLES[mode]} gave another state than the donor has")
        cpu_s = got["cpu_s"] + gave["cpu_s"]
        return {
            "seconds": got["seconds"],
            "cpu_s": cpu_s,
            "receiver": got["extra_bytes"],
            "donor": gave["extra_bytes"],
        }


def measure(options: Any, torchft_python: str | None) -> list[dict[str, Any]]:
    """Every size and mode. Returns one entry each."""
    entries: list[dict[str, Any]] = []
    for size_mb in options.sizes_mb:
        folder = Path(options.scratch) / f"transfer-{size_mb}"
        folder.mkdir(parents=True)
        with ExitStack() as stack:
            pythons = {"torchft_plus": sys.executable, "torchft": torchft_python}
            pairs = [
                stack.enter_context(_pair(system, python, size_mb * MB, folder))
                for system, python in pythons.items()
                if python is not None and system in options.systems
            ]
            load = OtherLoad([worker.process.pid for pair in pairs for worker in (pair.donor, pair.receiver)])
            series = _alternate(pairs, options)
            others = load.cores()
        entries += [_entry(size_mb, mode, runs, others) for mode, runs in series.items()]
    return entries


def _alternate(pairs: list[Pair], options: Any) -> dict[str, list[dict[str, float]]]:
    turns = [(pair, mode) for pair in pairs for mode in MODES[pair.system]]
    steps = count(1)
    for pair, mode in turns:
        pair.transfer(mode, next(steps))  # first transfers make connections and warm the allocator
    shuffle = random.Random(options.seed)
    series: dict[str, list[dict[str, float]]] = {mode: [] for _, mode in turns}
    for _ in range(options.repeats):
        shuffle.shuffle(turns)
        for pair, mode in turns:
            series[mode].append(pair.transfer(mode, next(steps)))
    return series


def _entry(size_mb: int, mode: str, runs: list[dict[str, float]], others: float) -> dict[str, Any]:
    size_bytes = size_mb * MB
    speed = summarize([size_bytes / run["seconds"] / 1e9 for run in runs])
    return {
        "size_mb": size_mb,
        "mode": mode,
        "gb_s": speed.median,
        "gb_s_p10": speed.p10,
        "gb_s_p90": speed.p90,
        "gb_s_low": speed.median_low,
        "gb_s_high": speed.median_high,
        "runs": speed.count,
        "cpu_s_gb": summarize([run["cpu_s"] / size_bytes * 1e9 for run in runs]).median,
        "donor_extra": max(run["donor"] for run in runs) / size_bytes,
        "receiver_extra": max(run["receiver"] for run in runs) / size_bytes,
        "other_load_cores": others,
    }


@contextmanager
def _pair(system: str, python: str, size_bytes: int, folder: Path) -> Generator[Pair]:
    path = [ROOT, ROOT / "scripts"] if system == "torchft_plus" else [ROOT / "scripts"]
    env = environment(path, RUST_LOG="error")
    setup = {"system": system, "size_bytes": size_bytes}
    with ExitStack() as stack:
        workers: list[Worker] = []
        for role in ("donor", "receiver"):
            name = f"{system}-{role}"
            command = [python, "-m", "benchmarks.state_worker"]
            worker = Worker(name, command, env, folder / f"{name}.log")
            stack.callback(worker.end)
            workers.append(worker)
        donor, receiver = workers
        donor.send(role="donor", **setup)
        store = donor.receive(READY_DEADLINE_S)["store"]
        receiver.send(role="receiver", store=store, **setup)
        donor.receive(READY_DEADLINE_S)
        receiver.receive(READY_DEADLINE_S)
        yield Pair(system, donor, receiver)


def table(entries: list[dict[str, Any]]) -> tuple[str, list[str], list[list[str]]]:
    """The entries as (title, header, rows)."""
    header = ["size MB", "transport", "GB/s", "p10..p90", "of torchft's default", "CPU s/GB"]
    header += ["memory: donor", "receiver"]
    rows: list[list[str]] = []
    base = {entry["size_mb"]: entry["gb_s"] for entry in entries if entry["mode"] == "http"}
    for entry in entries:
        size_mb = entry["size_mb"]
        rows.append(
            [
                str(size_mb),
                TITLES[entry["mode"]],
                f"{entry['gb_s']:.2f}",
                f"{entry['gb_s_p10']:.2f}..{entry['gb_s_p90']:.2f}",
                f"{entry['gb_s'] / base[size_mb]:.2f} x" if size_mb in base else "-",
                f"{entry['cpu_s_gb']:.3f}",
                f"{entry['donor_extra']:.3f} x",
                f"{entry['receiver_extra']:.3f} x",
            ]
        )
    load = max((entry["other_load_cores"] for entry in entries), default=0.0)
    return f"Transfer into warm tensors; others used up to {load:.2f} cores", header, rows
