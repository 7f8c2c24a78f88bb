"""The canvas of the bench's plots. Without matplotlib (``pip install '.[plots]'``) there are none."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

COLOURS = {"torchft_plus": "C0", "torchft": "C1", "torchft tuned": "C2", "plain torch": "C3"}
"""One colour for a system, in every plot."""


def available() -> bool:
    """Whether plots can be made; says so where not."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no plots: matplotlib is not installed (pip install '.[plots]')", file=sys.stderr)
        return False
    return True


def figure(width: float = 8, height: float = 4) -> Any:
    """An empty figure, sizes in hundreds of pixels. Drawn without a display.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=100)


def save(drawn: Any, path: Path) -> None:
    """Write it as PNG; the same data make the same bytes."""
    drawn.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, metadata={"Software": None})
