"""Draws the plots of the page, each from what its bench has written. None of them knows whether it is worth drawing."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from benchmarks.figures import summarize
from benchmarks.groups import VARIANTS
from benchmarks.plots import COLOURS, figure
from benchmarks.state_transfer import TITLES

LEAST_STALL_S = 1e-3
"""A gap shorter than that is drawn here: the axis is logarithmic."""
MODE_COLOURS = {
    "ours": COLOURS["torchft_plus"],
    "http": COLOURS["torchft"],
    "pg": COLOURS["torchft tuned"],
    "raw": COLOURS["plain torch"],
}
ROW_COLOURS = {
    "torchft_plus": COLOURS["torchft_plus"],
    "torchft default": COLOURS["torchft"],
    "torchft tuned": COLOURS["torchft tuned"],
    "torchft tuned, allreduce": COLOURS["torchft tuned"],
    "checkpoint-restart": COLOURS["plain torch"],
}


def _logarithmic(axis: Any) -> None:
    """Plain numbers at the decades, and none between."""
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def gaps(result: Mapping[str, Any]) -> Any:
    """``bench recovery``: each kill a dot, the medians as strokes."""
    drawn = figure(8, 3.2)
    axes = drawn.subplots()
    variants = result["variants"]
    for place, variant in enumerate(variants):
        stalls = [kill["stall_s"] for kill in variant["kills"] if kill["stall_s"] is not None]
        shown = [max(LEAST_STALL_S, stall) for stall in stalls]
        known = VARIANTS.get(variant["variant"])
        tuned = " tuned" if known is not None and known.tuning else ""
        colour = COLOURS.get(f"{known.system}{tuned}" if known is not None else "", "C7")
        # Side by side rather than on top of each other.
        heights = [place + 0.3 * ((number % 5) / 4 - 0.5) for number in range(len(shown))]
        axes.plot(shown, heights, "o", markersize=4, alpha=0.6, color=colour)
        if shown:
            axes.plot([summarize(shown).median] * 2, [place - 0.3, place + 0.3], color=colour, linewidth=2)
        elif variant["kills"]:
            axes.annotate(
                "no survivor", (0.02, place), xycoords=("axes fraction", "data"), fontsize=8, va="center"
            )
    axes.set_xscale("log")
    _logarithmic(axes.xaxis)
    axes.set_yticks(range(len(variants)), [variant["title"] for variant in variants], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("gap of the survivors after a kill, s")
    axes.grid(alpha=0.3, axis="x")
    return drawn


def transfers(result: Mapping[str, Any]) -> Any:
    """``bench state``: GB/s by size and transport; without memcpy, beside which the others would be dwarfs."""
    drawn = figure(8, 3.5)
    axes = drawn.subplots()
    entries = result["transfer"]
    sizes = sorted({one["size_mb"] for one in entries})
    modes = [mode for mode in MODE_COLOURS if any(one["mode"] == mode for one in entries)]
    width = 0.8 / len(modes)
    for number, mode in enumerate(modes):
        own = [one for one in entries if one["mode"] == mode]
        places = [sizes.index(one["size_mb"]) + (number - (len(modes) - 1) / 2) * width for one in own]
        spread = [
            [one["gb_s"] - one["gb_s_p10"] for one in own],
            [one["gb_s_p90"] - one["gb_s"] for one in own],
        ]
        axes.bar(
            places,
            [one["gb_s"] for one in own],
            width,
            yerr=spread,
            label=TITLES[mode],
            color=MODE_COLOURS[mode],
            error_kw={"linewidth": 1, "alpha": 0.6},
        )
    axes.set_xticks(range(len(sizes)), [f"{size} MB" for size in sizes])
    axes.set_ylabel("GB/s, median and p10..p90")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3, axis="y")
    return drawn


def rounds(result: Mapping[str, Any]) -> Any:
    """``bench lighthouse``: a full round by the number of groups."""
    drawn = figure(8, 3.5)
    axes = drawn.subplots()
    for system in ("torchft_plus", "torchft"):
        loads = [load for load in result["loads"] if load["system"] == system and load["round_ms"]]
        if not loads:
            continue
        loads.sort(key=lambda load: load["groups"])
        groups, figures = [load["groups"] for load in loads], [summarize(load["round_ms"]) for load in loads]
        axes.plot(groups, [one.median for one in figures], "o-", label=system, color=COLOURS[system])
        low, high = [one.p10 for one in figures], [one.p90 for one in figures]
        axes.fill_between(groups, low, high, alpha=0.2, color=COLOURS[system])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _logarithmic(axes.yaxis)
    ticks = sorted({load["groups"] for load in result["loads"]})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("replica groups")
    axes.set_ylabel("a round, ms: median and p10..p90")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return drawn


def tokens(result: Mapping[str, Any]) -> Any:
    """``bench goodput``: committed tokens over time, under kills."""
    drawn = figure(8, 4)
    axes = drawn.subplots()
    for row in result["goodput"]["rows"]:
        if not row.get("timeline"):
            continue  # a job that never trained
        counts = [count / 1e3 for _, count in sorted(row["timeline"])]
        seconds = range(len(counts) + 1)
        colour = ROW_COLOURS.get(row["name"], "C7")
        dashes = "--" if "allreduce" in row["name"] else "-"  # the same system another way
        axes.plot(seconds, list(accumulate(counts, initial=0.0)), dashes, label=row["name"], color=colour)
        if row["name"] == "torchft_plus":
            undisturbed = [row["undisturbed_tokens_per_s"] * second / 1e3 for second in seconds]
            axes.plot(seconds, undisturbed, ":", label="the same, undisturbed", color=colour, linewidth=1)
    axes.set_xlabel("seconds")
    axes.set_ylabel("thousand tokens committed")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return drawn
