"""``bench convergence``: does it matter for the loss that groups die? The same tokens, with and without kills."""

from __future__ import annotations

import os
import queue
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import lighthouses, plots
from benchmarks.children import ROOT, ChildFailed, Worker, environment

GROUPS = 4
SYNC_EVERY = 20
STEP_S = 0.05
"""An inner step takes at least so long: four groups then fit on two cores, and kills fall into comparable places."""
TOKENS_PER_BATCH = 8 * 64
BATCHES = 4000
"""Of all groups together: the token budget."""
VALIDATE_EVERY = 80
START_DEADLINE_S, RUN_DEADLINE_S, END_S = 120.0, 900.0, 10.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Mode:
    """How the groups train."""

    title: str
    sync_every: int
    kills: bool


MODES = {
    "steps": Mode("data-parallel, undisturbed", 1, False),
    "diloco": Mode("DiLoCo, undisturbed", SYNC_EVERY, False),
    "diloco-kills": Mode("DiLoCo, kills", SYNC_EVERY, True),
    "steps-kills": Mode("data-parallel, kills", 1, True),
}


@dataclass(slots=True)
class Run:
    """What one run came to."""

    mode: str
    seed: int
    kills: int = 0
    seconds: float = 0.0
    batches: int = 0
    commits: int = 0
    lost: int = 0
    """Inner steps that processes which were not killed computed in vain."""
    losses: dict[int, float] = field(default_factory=dict[int, float])
    """Committed batches of all groups -> loss on held-out text."""
    contributors: dict[int, int] = field(default_factory=dict[int, int])
    """Committed batches -> groups that the last commit before them counted."""

    @property
    def final(self) -> float:
        """Loss at the end."""
        return self.losses[max(self.losses)]


def measure(options: Any, torchft_python: str | None) -> dict[str, Any]:
    """Run all modes and seeds one after the other. Returns what the report needs."""
    del torchft_python
    if options.quick:
        options.seeds, options.batches = 1, options.batches // 20
    runs: list[dict[str, Any]] = []
    for seed in range(options.seed, options.seed + options.seeds):
        for name in options.modes:
            folder = Path(options.scratch) / f"{name}-{seed}"
            folder.mkdir(parents=True)
            with _Job(name, seed, folder, options) as job:
                run = job.run()
            runs.append({**asdict(run), "final": run.final})
            print(
                f"{MODES[name].title}, seed {seed}: loss {run.final:.4f}, kills {run.kills}, inner steps lost {run.lost},"
                f" {run.seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    result = {"runs": runs, "batches": options.batches, "kill_every_s": options.kill_every}
    if plots.available():
        plots.save(draw(result), options.out / "convergence.png")
    return result


class _Job:
    """Four groups of one mode."""

    def __init__(self, mode: str, seed: int, folder: Path, options: Any) -> None:
        self._mode, self._folder, self._options = MODES[mode], folder, options
        self._seed = seed
        self._chance = random.Random(seed)
        self._result = Run(mode, seed)
        self._workers: dict[str, Worker] = {}
        self._lines: queue.SimpleQueue[tuple[str, int, dict[str, Any]]] = queue.SimpleQueue()
        self._lives = dict.fromkeys((f"replica_{share}" for share in range(GROUPS)), 0)
        self._level: set[str] = set()
        """Groups whose present life has told a commit."""
        self._lost: dict[tuple[str, int], int] = {}
        self._lighthouse, self._address = lighthouses.start_torchft_plus(folder, 1, GROUPS)

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.process.kill()
        for worker in self._workers.values():
            worker.end()
        self._lighthouse.end()

    def run(self) -> Run:
        """Train to the end of the budget.

        Raises:
            ChildFailed: a group ended by itself, or it takes too long.
        """
        for name in self._lives:
            self._start(name)
        self._await_commit()
        began = time.monotonic()
        due = began + self._options.kill_every
        ended: float | None = None
        while ended is None or (time.monotonic() < ended + END_S and self._level):
            if time.monotonic() > began + RUN_DEADLINE_S:
                raise ChildFailed(f"the run takes longer than {RUN_DEADLINE_S:g} s, see {self._folder}")
            if self._take() and ended is None:
                ended = time.monotonic()
                self._result.seconds = ended - began
            if self._mode.kills and ended is None and time.monotonic() >= due and len(self._level) > 1:
                self._kill(self._chance.choice(sorted(self._level)))
                due += self._options.kill_every
            for name, worker in self._workers.items():
                if not worker.alive and ended is None:
                    raise ChildFailed(f"{name} ended by itself, see {worker.log}")
        self._result.lost = sum(self._lost.values())
        return self._result

    def _await_commit(self) -> None:
        end = time.monotonic() + START_DEADLINE_S
        while not self._level:
            self._take()
            if time.monotonic() > end:
                raise ChildFailed(f"no commit within {START_DEADLINE_S:g} s, see {self._folder}")

    def _take(self) -> bool:
        """One line of a worker; True if it has ended."""
        try:
            name, life, line = self._lines.get(timeout=POLL_S)
        except queue.Empty:
            return False
        if life != self._lives[name]:
            return False
        self._lost[name, life] = line["refused"]
        if line.get("ended"):
            self._level.discard(name)
            return True
        self._level.add(name)
        result, batches = self._result, line["batches"]
        result.commits += batches not in result.contributors
        result.contributors[batches] = line["contributors"]
        result.batches = max(result.batches, batches)
        if "loss" in line:
            result.losses[batches] = line["loss"]
        return False

    def _kill(self, name: str) -> None:
        worker = self._workers[name]
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.end()
        self._result.kills += 1
        self._level.discard(name)
        self._start(name)

    def _start(self, name: str) -> None:
        self._lives[name] += 1
        life = self._lives[name]
        command = [sys.executable, "-m", "benchmarks.convergence_worker"]
        env = environment([ROOT, ROOT / "scripts"], RES_OPTIONS="timeout:1 attempts:1")
        lines = self._lines
        worker = Worker(
            name,
            command,
            env,
            self._folder / f"{name}.log",
            on_line=lambda line: lines.put((name, life, line)) if line else None,
        )
        self._workers[name] = worker
        worker.send(
            seed=self._seed,
            share=int(name.rsplit("_", 1)[1]),
            lighthouse=self._address,
            budget=self._options.batches,
            step_s=self._options.step_s,
            sync_every=self._mode.sync_every,
            validate_every=VALIDATE_EVERY,
        )


# --- report ------------------------------------------------------------------------------------------------------------


def tables(result: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """The result as (title, header, rows)."""
    header = [
        "mode",
        "loss, mean",
        "least to most",
        "tokens",
        "commits",
        "kills",
        "inner steps lost",
        "seconds",
    ]
    rows: list[list[str]] = []
    for name, runs in _by_mode(result).items():
        finals = [run["final"] for run in runs]
        rows.append(
            [
                MODES[name].title,
                f"{mean(finals):.4f}",
                f"{min(finals):.4f} to {max(finals):.4f}",
                f"{mean(run['batches'] for run in runs) * TOKENS_PER_BATCH / 1e6:.2f} M",
                _list(runs, "commits"),
                _list(runs, "kills"),
                str(sum(run["lost"] for run in runs)),
                _list(runs, "seconds", "{:.0f}"),
            ]
        )
    seeds = len({run["seed"] for run in result["runs"]})
    return [(f"loss on held-out text after the same tokens, {seeds} seeds", header, rows)]


def failures(result: dict[str, Any]) -> list[str]:
    """Survivors must lose nothing."""
    return [
        f"{MODES[run['mode']].title}, seed {run['seed']}: {run['lost']} inner steps lost"
        for run in result["runs"]
        if run["lost"]
    ]


def draw(result: Mapping[str, Any]) -> Any:
    """Curves (mean over the seeds, with their range), and participants below."""
    drawn = plots.figure(8, 6)
    above, below = drawn.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    for name, runs in _by_mode(result).items():
        grid = [VALIDATE_EVERY * n for n in range(1, result["batches"] // VALIDATE_EVERY + 1)]
        curves = [[_at(run["losses"], at) for at in grid] for run in runs]
        tokens = [at * TOKENS_PER_BATCH / 1e6 for at in grid]
        columns = list(zip(*curves, strict=True))
        (line,) = above.plot(tokens, [mean(c) for c in columns], label=MODES[name].title, linewidth=1.2)
        above.fill_between(
            tokens, [min(c) for c in columns], [max(c) for c in columns], alpha=0.2, color=line.get_color()
        )
        if MODES[name].kills:
            points = sorted((int(at), count) for at, count in runs[0]["contributors"].items())
            below.step(
                [at * TOKENS_PER_BATCH / 1e6 for at, _ in points],
                [count for _, count in points],
                where="pre",
                linewidth=1,
                color=line.get_color(),
            )
    above.set_ylabel("loss on held-out text")
    above.legend()
    above.grid(alpha=0.3)
    below.set_ylabel("participants")
    below.set_ylim(0, GROUPS + 0.5)
    below.set_xlabel("million tokens, all groups together")
    return drawn


def _by_mode(result: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [run for run in result["runs"] if run["mode"] == name]
        for name in MODES
        if any(run["mode"] == name for run in result["runs"])
    }


def _at(losses: dict[Any, float], at: int) -> float:
    """The curve at a number of batches, between the two points beside it."""
    points = sorted((int(key), value) for key, value in losses.items())
    before = [p for p in points if p[0] <= at] or points[:1]
    after = [p for p in points if p[0] >= at] or points[-1:]
    (x0, y0), (x1, y1) = before[-1], after[0]
    return y0 if x1 == x0 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def _list(runs: Sequence[dict[str, Any]], key: str, form: str = "{}") -> str:
    return ", ".join(form.format(run[key]) for run in runs)


NOTES = [
    f"{GROUPS} groups of one process; a transformer of 2 layers on made-up text (titan/assets.py), bytes as tokens. An inner step"
    f" takes at least {STEP_S * 1000:.0f} ms; DiLoCo synchronises every {SYNC_EVERY}.",
    "the same tokens: a run ends when all groups together have committed the budget, so with kills it takes more steps.",
    "loss: of the parameters that all groups share (DiLoCo: right after a sync), always on the same 64 pieces of held-out text.",
    "kills: SIGKILL of a random group that trains; it is started again at once, fetches the state from the others and goes on.",
    "inner steps lost: computed by processes that were not killed, and counted in no commit.",
]
