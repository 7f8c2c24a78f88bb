"""The table at the top of the page: what one feels, in one line each, computed from the results of the benches.

A line has four cells: here, torchft with its defaults, torchft tuned, plain torch. What was not measured says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean
from typing import Any

from benchmarks.figures import summarize
from benchmarks.goodput_scenarios import SCENARIOS
from benchmarks.report import Table

NOT_MEASURED = "not measured"
FAILED = "failed, see below"
NOTHING = "-"
"""There is no such thing: a comparison that would make no sense."""
ROUNDS = (128, 512, 1024)
"""Replica groups of the lines about the Lighthouse."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, and how far it may be off."""

    value: float
    low: float
    high: float
    text: str = ""
    """Shown in place of the number."""

    def __str__(self) -> str:
        if self.text:
            return self.text
        if self.low == self.high:
            return digits(self.value)
        return f"{digits(self.value)} [{digits(self.low)}..{digits(self.high)}]"


Cell = Figure | str
Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that is compared."""

    what: str
    here: Cell
    torchft: Cell
    tuned: Cell = NOTHING
    plain: Cell = NOTHING
    more_is_better: bool = False


def table(results: Results) -> Table:
    """The summary of whatever was measured, as (title, header, rows). ``results``: what each bench wrote, by its name."""
    header = ["", "here", "torchft, defaults", "torchft, tuned", "plain torch", "better by", "bench"]
    rows = [
        [
            line.what,
            *map(str, (line.here, line.torchft, line.tuned, line.plain)),
            ratio(line),
            f"[{bench}](#{bench})",
        ]
        for bench, lines in LINES.items()
        for line in lines(results.get(bench, {}))
    ]
    return "What you feel", header, rows


def ratio(line: Line) -> str:
    """How many times better ``here`` is than the better of torchft's two, with the widest range that the spreads allow."""
    others = [cell for cell in (line.torchft, line.tuned) if isinstance(cell, Figure)]
    if not isinstance(line.here, Figure) or not others:
        return NOTHING
    here = line.here
    best = (max if line.more_is_better else min)(others, key=lambda one: one.value)
    above, below = (here, best) if line.more_is_better else (best, here)
    if not all(math.isfinite(one) and one > 0 for one in (above.value, below.low)):
        return NOTHING
    value, low, high = above.value / below.value, above.low / below.high, above.high / below.low
    if low == high:
        return f"{digits(value)} x"
    return f"{digits(value)} x [{digits(low)}..{digits(high)}]"


def digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    if not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    places = min(4, max(0, 2 - math.floor(math.log10(abs(value)))))
    return f"{value:.{places}f}"


def _series(values: Iterable[float | None]) -> Cell:
    """Median and its 95 % interval."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return NOT_MEASURED
    one = summarize(known)
    return Figure(one.median, one.median_low, one.median_high)


def _exact(value: float | None, text: str = "") -> Cell:
    return NOT_MEASURED if value is None else Figure(value, value, value, text)


def _mean_count(counts: Iterable[float]) -> Cell:
    value = mean(counts)
    return _exact(value, f"{value:.2f}".rstrip("0").rstrip("."))


def _summary(one: Mapping[str, float] | None) -> Cell:
    """A ``figures.Summary`` as JSON has it."""
    return NOT_MEASURED if one is None else Figure(one["median"], one["median_low"], one["median_high"])


def _find(entries: Iterable[Mapping[str, Any]], **wanted: Any) -> Mapping[str, Any] | None:
    fits = (one for one in entries if all(one.get(key) == value for key, value in wanted.items()))
    return next(fits, None)


# --- the lines of each bench -------------------------------------------------------------------------------------------


def _recovery(result: Mapping[str, Any]) -> list[Line]:
    variants = {one["variant"]: one["kills"] for one in result.get("variants", [])}

    def cells(make: Callable[[Sequence[Mapping[str, Any]]], Cell], *names: str) -> list[Cell]:
        return [make(variants[name]) if variants.get(name) else NOT_MEASURED for name in names]

    def stall(kills: Sequence[Mapping[str, Any]]) -> Cell:
        left = [kill["stall_s"] for kill in kills if kill["stall_s"] is not None]
        return _series(left) if left else "no survivor"

    def deaths(kills: Sequence[Mapping[str, Any]]) -> Cell:
        count = sum(kill["survivors_died"] > 0 for kill in kills)
        return _exact(count / len(kills), f"{count} of {len(kills)}")

    def lost(kills: Sequence[Mapping[str, Any]]) -> Cell:
        left = [kill["steps_lost"] for kill in kills if kill["stall_s"] is not None]
        return _mean_count(left) if left else "no survivor"

    ddp, single = ("torchft", "torchft-tuned"), ("torchft-allreduce", "torchft-tuned-allreduce")
    return [
        Line("gap of the survivors after a kill, s", *cells(stall, "plus", *ddp)),
        Line("the same if no launcher reports the exit, s", *cells(stall, "plus-unreported", *ddp)),
        Line("kills that took survivors with them", *cells(deaths, "plus", *ddp)),
        Line("steps lost by survivors per kill", *cells(lost, "plus", *ddp)),
        Line("the same, torchft without its DDP", *cells(lost, "plus", *single)),
    ]


def _overhead(result: Mapping[str, Any]) -> list[Line]:
    def cell(workload: str, mode: str, key: str) -> Cell:
        row = _find(result.get("rows", []), workload=workload, mode=mode)
        return _summary(row[key] if row else None)

    modes = {"here": "torchft_plus", "torchft": "torchft async", "plain": "plain"}
    return [
        Line(
            "step with nobody failing, of plain DDP's",
            **{who: cell("mlp", mode, "ratio") for who, mode in modes.items()},
        ),
        Line("trivial step, ms", **{who: cell("calls", mode, "step_ms") for who, mode in modes.items()}),
    ]


def _state(result: Mapping[str, Any]) -> list[Line]:
    transfers = result.get("transfer", [])
    size_mb = max((one["size_mb"] for one in transfers), default=0)
    modes = {"here": "ours", "torchft": "http", "tuned": "pg", "plain": "raw"}
    found = {who: _find(transfers, size_mb=size_mb, mode=mode) for who, mode in modes.items()}

    def memory(one: Mapping[str, Any] | None) -> Cell:
        return _exact(round(one["donor_extra"] + one["receiver_extra"], 2) if one else None)

    def speed(one: Mapping[str, Any] | None) -> Cell:
        return Figure(one["gb_s"], one["gb_s_low"], one["gb_s_high"]) if one else NOT_MEASURED

    size = f" of {size_mb} MB" if size_mb else ""
    return [
        Line(
            f"state{size} to a joiner, GB/s",
            **{who: speed(one) for who, one in found.items()},
            more_is_better=True,
        ),
        Line(
            "memory that it takes on both sides, of the state's size",
            **{who: memory(one) for who, one in found.items()},
        ),
        *_steps(result.get("steps", [])),
    ]


def _steps(entries: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Survivors' steps during a download, of the normal ones."""

    def cell(system: str, compute: str, throttled: bool, place: int, base: int) -> Cell:
        entry = _find(entries, system=system, compute=compute, throttled=throttled)
        return _exact(entry["during_ms"][place] / entry["normal_ms"][base] if entry else None)

    links, computes = ((True, "a slow link"), (False, "a fast link")), ("device", "cpu")
    kinds = (("p95 step", 1, 1, "p95"), ("worst step", 2, 0, "median"))
    return [
        Line(
            f"survivors' {what} while a joiner fetches, {link}, compute: {compute}, of the normal {of}",
            *(cell(system, compute, throttled, place, base) for system in ("torchft_plus", "torchft")),
        )
        for (throttled, link), (what, place, base, of), compute in product(links, kinds, computes)
    ]


def _lighthouse(result: Mapping[str, Any]) -> list[Line]:
    def cell(system: str, groups: int) -> Cell:
        load = _find(result.get("loads", []), system=system, groups=groups)
        return _series(load["round_ms"] if load else [])

    return [
        Line(
            f"Lighthouse, a round of {groups} groups, ms",
            cell("torchft_plus", groups),
            cell("torchft", groups),
        )
        for groups in ROUNDS
    ]


def _windows(result: Mapping[str, Any]) -> list[Line]:
    def cells(key: str, make: Callable[[list[float]], Cell]) -> list[Cell]:
        found = [_find(result.get("systems", []), system=system) for system in ("torchft_plus", "torchft")]
        return [one_cell(one, key, make) for one in found]

    def one_cell(one: Mapping[str, Any] | None, key: str, make: Callable[[list[float]], Cell]) -> Cell:
        if not one or not one["kills"]:
            return NOT_MEASURED
        left = [kill[key] for kill in one["kills"] if not kill["died"]]
        return make(left) if left else "no survivor"

    return [
        Line(
            "inner steps lost by a death in a DiLoCo sync",
            *cells("lost", _mean_count),
        ),
        Line("gap of the survivor then, s", *cells("stall_s", _series)),
    ]


def _goodput(result: Mapping[str, Any]) -> list[Line]:
    rows = result.get("goodput", {}).get("rows", [])

    def best(prefix: str) -> Mapping[str, Any]:
        """Of the ways to run a system, the one that commits most."""
        own = [row for row in rows if row["name"].startswith(prefix)]
        return max(own, key=lambda row: row.get("tokens_per_s", -1.0), default={})

    names = {"here": "torchft_plus", "torchft": "torchft default", "tuned": "torchft tuned"}
    found = {who: best(prefix) for who, prefix in {**names, "plain": "checkpoint-restart"}.items()}

    def cells(key: str) -> dict[str, Cell]:
        return {who: _exact(row.get(key)) if key in row or not row else FAILED for who, row in found.items()}

    lines = [
        Line("goodput under kills, committed tokens/s", **cells("tokens_per_s"), more_is_better=True),
        Line("the same, of its undisturbed run", **cells("share_raw"), more_is_better=True),
        Line("the same, corrected for absent groups", **cells("share_corrected"), more_is_better=True),
    ]
    return lines + [_fault(name, result.get("scenarios", [])) for name in SCENARIOS]


def _fault(name: str, outcomes: Iterable[Mapping[str, Any]]) -> Line:
    def cell(system: str) -> Cell:
        outcome = _find(outcomes, scenario=name, system=system)
        if outcome is None:
            return NOT_MEASURED
        if outcome["error"]:
            return FAILED
        share = outcome["share"]
        ended_s = outcome["ended_s"]
        return _exact(
            share, "" if ended_s is None else f"{digits(share)}, all ended after {digits(ended_s)} s"
        )

    return Line(
        f"{SCENARIOS[name].title}: the others' steps then, of undisturbed",
        *map(cell, ("torchft_plus", "torchft default", "torchft tuned")),
        more_is_better=True,
    )


LINES: dict[str, Callable[[Mapping[str, Any]], list[Line]]] = {
    "recovery": _recovery,
    "goodput": _goodput,
    "overhead": _overhead,
    "state": _state,
    "windows": _windows,
    "lighthouse": _lighthouse,
}
