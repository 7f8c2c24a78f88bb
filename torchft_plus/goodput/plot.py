"""The plot of a study: goodput of each policy with its spread. SVG by hand; PNG if matplotlib is installed."""

from __future__ import annotations

import importlib.util
from html import escape
from pathlib import Path
from typing import Any

from torchft_plus.goodput.report import describe, mean, quantile
from torchft_plus.goodput.study import Study

COLOURS = {"ours": "#2a7f3f", "torchft": "#b5482f", "torchft-tuned": "#d9903d", "checkpoint": "#5b6c8f"}
WIDTH, HEIGHT = 900, 420
LEFT, TOP, BOTTOM = 60, 70, 370
SLOT = 190


def draw_svg(study: Study) -> str:
    """A bar for each policy (mean over the seeds), a whisker from the 5th to the 95th percentile."""

    def y(goodput: float) -> float:
        return BOTTOM - goodput * (BOTTOM - TOP)

    about = describe(study)
    length = min(WIDTH - LEFT - 20, 4.6 * len(about))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="28" font-size="17">Goodput: mean, 5th to 95th percentile of {study.seeds} seeds</text>',
        f'<text x="{LEFT}" y="48" font-size="9" fill="#555" textLength="{length:.0f}" '
        f'lengthAdjust="spacingAndGlyphs">{escape(about)}</text>',
    ]
    for tenth in range(0, 11, 2):
        at = y(tenth / 10)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        label = (
            f'<text x="{LEFT - 8}" y="{at + 4:.1f}" font-size="12" text-anchor="end">{tenth / 10:.1f}</text>'
        )
        parts.append(label)
    for index, (policy, accounts) in enumerate(study.accounts.items()):
        goodputs = [account.goodput for account in accounts]
        middle, value = LEFT + SLOT * index + SLOT // 2, mean(goodputs)
        low, high = quantile(goodputs, 0.05), quantile(goodputs, 0.95)
        parts += [
            f'<rect x="{middle - 45}" y="{y(value):.1f}" width="90" height="{BOTTOM - y(value):.1f}" '
            f'fill="{COLOURS[policy]}"/>',
            f'<line x1="{middle}" x2="{middle}" y1="{y(low):.1f}" y2="{y(high):.1f}" stroke="black"/>',
            f'<text x="{middle}" y="{y(high) - 6:.1f}" font-size="13" text-anchor="middle">{value:.4f}</text>',
            f'<text x="{middle}" y="{BOTTOM + 22}" font-size="14" text-anchor="middle">{policy}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def draw_png(study: Study, path: Path) -> bool:
    """The same as PNG; False if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    figure_module: Any = importlib.import_module("matplotlib.figure")
    figure = figure_module.Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=150)
    axes = figure.subplots()
    for index, (policy, accounts) in enumerate(study.accounts.items()):
        goodputs = [account.goodput for account in accounts]
        value = mean(goodputs)
        below, above = value - quantile(goodputs, 0.05), quantile(goodputs, 0.95) - value
        spread = [[max(0.0, below)], [max(0.0, above)]]
        axes.bar(index, value, yerr=spread, color=COLOURS[policy], capsize=4)
        axes.annotate(
            f"{value:.4f}",
            (index, value),
            ha="center",
            va="bottom",
            xytext=(24, 2),
            textcoords="offset points",
        )
    axes.set_xticks(range(len(study.accounts)), list(study.accounts))
    axes.set_ylim(0, 1.08)
    axes.set_ylabel("goodput")
    axes.set_title(f"Goodput: mean, 5th to 95th percentile of {study.seeds} seeds", loc="left")
    figure.savefig(path)
    return True
