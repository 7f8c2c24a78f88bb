"""The benches by name. Each has ``measure``, ``tables``, ``failures`` and ``NOTES``."""

from __future__ import annotations

from typing import Any

from benchmarks import compression, convergence, goodput, lighthouse_load, overhead, recovery, state, windows

BENCHES: dict[str, Any] = {
    "overhead": overhead,
    "recovery": recovery,
    "goodput": goodput,
    "lighthouse": lighthouse_load,
    "state": state,
    "windows": windows,
    "compression": compression,
    "convergence": convergence,
}
"""In the order of the page."""
