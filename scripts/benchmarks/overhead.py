"""``bench overhead``: what a step costs with nobody failing, as a ratio to plain torch DDP over gloo.

Two processes a system (replica groups of one rank), each system in its own environment and beside its own plain DDP. Blocks of
all modes of both systems alternate in shuffled order, so that what the machine does meanwhile hits all alike; a ratio is made
only of blocks of one system and one round.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import lighthouses
from benchmarks.children import ROOT, Worker, environment
from benchmarks.figures import Summary, summarize
from benchmarks.machine import OtherLoad

READY_DEADLINE_S = 90.0
BLOCK_DEADLINE_S = 120.0
BASE = "plain"
WARM_MALLOC = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
"""glibc gives freed gradients back to the kernel or does not, as chance has arranged the heap: up to 10,000 page faults and
15 ms a step, in any mode. With these settings none does."""
PLAIN_MODES = (BASE, "plain_again")
TORCHFT_MODES = ("torchft async", "torchft sync")


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained, and how many steps make a block."""

    name: str
    title: str
    block_steps: int


WORKLOADS = (
    Workload("mlp", "MLP of 10.6 M parameters, batch 32: DDP and Optimizer", 4),
    Workload("model16", "model of 16 parameters: DDP and Optimizer", 60),
    Workload("calls", "start_quorum, allreduce of 16 floats, should_commit (plain: allreduce)", 60),
)


@dataclass(slots=True)
class Pair:
    """Two processes of one system that step together."""

    system: str
    modes: tuple[str, ...]
    workers: list[Worker]
    wall_ms: dict[str, list[float]] = field(default_factory=dict)
    cpu_ms: dict[str, list[float]] = field(default_factory=dict)
    faults: dict[str, list[float]] = field(default_factory=dict)

    def run_block(self, mode: str, steps: int) -> dict[str, float]:
        """One block on both. Returns wall and CPU milliseconds and page faults, a step and process."""
        for worker in self.workers:
            worker.send(mode=mode, steps=steps)
        answers = [worker.receive(BLOCK_DEADLINE_S) for worker in self.workers]
        return {key: sum(answer[key] for answer in answers) / len(answers) for key in answers[0]}

    def record_block(self, mode: str, steps: int) -> None:
        """One block, kept."""
        block = self.run_block(mode, steps)
        for series, key in ((self.wall_ms, "wall_ms"), (self.cpu_ms, "cpu_ms"), (self.faults, "faults")):
            series.setdefault(mode, []).append(block[key])


@dataclass(frozen=True, slots=True)
class Row:
    """One mode of one workload."""

    workload: str
    system: str
    mode: str
    ratio: Summary
    """Step time to plain DDP's, paired by round."""
    step_ms: Summary
    cpu_ms: Summary
    cpu_ratio: Summary
    faults: Summary


def measure(options: Any, torchft_python: str | None) -> dict[str, Any]:
    """Measure the chosen workloads; ``torchft_python`` may be None without torchft. Returns what the report needs."""
    rows: list[Row] = []
    others: dict[str, float] = {}
    for workload in WORKLOADS:
        if workload.name not in options.workloads:
            continue
        folder = Path(options.scratch) / workload.name
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            pairs: list[Pair] = []
            if "torchft_plus" in options.systems:
                pairs.append(stack.enter_context(_plus_pair(folder, workload)))
            if torchft_python is not None:
                pairs.append(stack.enter_context(_torchft_pair(folder, workload, torchft_python)))
            load = OtherLoad([worker.process.pid for pair in pairs for worker in pair.workers])
            _alternate(pairs, workload, options)
            others[workload.name] = load.cores()
        rows += [row for pair in pairs for row in _rows(workload, pair)]
    return {
        "rows": [asdict(row) for row in rows],
        "other_load_cores": others,
        "rounds": options.rounds,
        "block_steps": {workload.name: workload.block_steps for workload in WORKLOADS},
    }


def _alternate(pairs: list[Pair], workload: Workload, options: Any) -> None:
    blocks = [(pair, mode) for pair in pairs for mode in pair.modes]
    for pair, mode in blocks:
        pair.run_block(mode, workload.block_steps)  # first steps build groups, buckets and caches
    shuffle = random.Random(options.seed)
    for done in range(options.rounds):
        shuffle.shuffle(blocks)
        for pair, mode in blocks:
            pair.record_block(mode, workload.block_steps)
        if sys.stderr.isatty():
            print(f"\r{workload.name}: {done + 1}/{options.rounds}", end="", file=sys.stderr, flush=True)


def _rows(workload: Workload, pair: Pair) -> Iterator[Row]:
    for mode in pair.modes:
        yield Row(
            workload=workload.name,
            system=pair.system,
            mode=mode,
            ratio=summarize(_paired(pair.wall_ms, mode)),
            step_ms=summarize(pair.wall_ms[mode]),
            cpu_ms=summarize(pair.cpu_ms[mode]),
            cpu_ratio=summarize(_paired(pair.cpu_ms, mode)),
            faults=summarize(pair.faults[mode]),
        )


def _paired(series: dict[str, list[float]], mode: str) -> list[float]:
    return [one / base for one, base in zip(series[mode], series[BASE], strict=True)]


@contextmanager
def _plus_pair(folder: Path, workload: Workload) -> Generator[Pair]:
    child, address = lighthouses.start_torchft_plus(folder, min_replicas=2, expected_replicas=2)
    try:
        env = environment([ROOT, ROOT / "scripts"], **WARM_MALLOC)
        with _pair("torchft_plus", sys.executable, env, folder, workload, {"torchft_plus": address}) as pair:
            yield pair
    finally:
        child.end()


@contextmanager
def _torchft_pair(folder: Path, workload: Workload, python: str) -> Generator[Pair]:
    with ExitStack() as stack:
        addresses: dict[str, str] = {}
        for mode in TORCHFT_MODES:  # two managers of one replica cannot share a lighthouse
            name = mode.replace(" ", "-")
            child, addresses[mode] = lighthouses.start_torchft(python, folder, name, min_replicas=2)
            stack.callback(child.end)
        env = environment([ROOT / "scripts"], RUST_LOG="error", **WARM_MALLOC)
        yield stack.enter_context(_pair("torchft", python, env, folder, workload, addresses))


@contextmanager
def _pair(
    system: str, python: str, env: dict[str, str], folder: Path, workload: Workload, addresses: dict[str, str]
) -> Generator[Pair]:
    workers: list[Worker] = []
    try:
        for rank in (0, 1):
            name = f"{system}-{rank}"
            command = [python, "-m", "benchmarks.overhead_worker"]
            workers.append(Worker(name, command, env, folder / f"{name}.log"))
        setup = {"workload": workload.name, "lighthouses": addresses}
        workers[0].send(rank=0, store_port=0, **setup)
        port = workers[0].receive(READY_DEADLINE_S)["store_port"]
        workers[1].send(rank=1, store_port=port, **setup)
        for worker in workers:
            worker.receive(READY_DEADLINE_S)
        yield Pair(system, (*PLAIN_MODES, *addresses), workers)
    finally:
        for worker in workers:
            worker.end()


def tables(result: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """The result as (title, header, rows)."""
    header = ["mode", "ratio to plain", "p10..p90", "95 % of median", "ms/step", "CPU ms/step", "CPU ratio"]
    header += ["faults/step"]
    out: list[tuple[str, list[str], list[list[str]]]] = []
    for workload in WORKLOADS:
        rows = [row for row in result["rows"] if row["workload"] == workload.name]
        if not rows:
            continue
        lines = [_line(row) for row in rows]
        load = result["other_load_cores"][workload.name]
        title = f"{workload.title}; {result['rounds']} rounds, others used {load:.2f} cores"
        out.append((title, header, lines))
    return out


def _line(row: dict[str, Any]) -> list[str]:
    ratio, wall, cpu, cpu_ratio = row["ratio"], row["step_ms"], row["cpu_ms"], row["cpu_ratio"]
    names: dict[str, str] = {BASE: f"plain DDP ({row['system']}'s)", "plain_again": "the same again (A/A)"}
    return [
        names.get(row["mode"], str(row["mode"])),
        f"{ratio['median']:.3f}",
        f"{ratio['p10']:.2f}..{ratio['p90']:.2f}",
        f"{ratio['median_low']:.3f}..{ratio['median_high']:.3f}",
        f"{wall['median']:.2f} [{wall['p10']:.2f}..{wall['p90']:.2f}]",
        f"{cpu['median']:.2f}",
        f"{cpu_ratio['median']:.3f}",
        f"{row['faults']['median']:.0f}",
    ]


def failures(result: dict[str, Any]) -> list[str]:
    """Nothing can fail without an exception."""
    del result
    return []


NOTES = [
    "ratio: step time to plain DDP in the same two processes, paired by round; a block is the mean of its steps,"
    " its first step is not counted.",
    "95 % of median: where the median lies by order statistics; the A/A row shows what noise alone does.",
    "all processes keep freed memory (MALLOC_TRIM_THRESHOLD_ and others): otherwise the heap's layout, which is chance,"
    " decides over up to 15 ms a step in any mode.",
    "CPU: all threads of a training process; heartbeats and agents included, Lighthouses not.",
    "torchft's logs are switched off (RUST_LOG=error), which helps it.",
]
