"""What ``scripts/bench all`` measures: the arguments of each bench, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass

MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Budget:
    """One bench."""

    arguments: tuple[str, ...]
    deadline_s: float
    """A hung bench is ended after this; several times what it takes on two idle cores."""
    quick: tuple[str, ...]
    """Arguments of ``--quick``: every code path, no figure worth keeping."""
    quick_deadline_s: float = 5 * MINUTE_S
    by_default: bool = True
    """Part of a run that names no benches."""
    torchft: bool = True
    """It measures torchft, too."""


BUDGETS = {
    "overhead": Budget(("--rounds", "40"), 20 * MINUTE_S, ("--rounds", "2")),
    "recovery": Budget(("--kills", "10"), 45 * MINUTE_S, ("--kills", "1")),
    "goodput": Budget(
        ("--seconds", "300", "--kill-every", "20", "--undisturbed-seconds", "60"),
        90 * MINUTE_S,
        (
            *("--quick", "--scenarios", "lighthouse"),
            *("--rows", "torchft_plus", "torchft tuned", "checkpoint-restart"),
        ),
        quick_deadline_s=12 * MINUTE_S,
    ),
    "lighthouse": Budget(
        ("--groups", "16", "128", "512", "1024", "4096", "--rest", "20", "--rounds", "100", "--losses", "50"),
        45 * MINUTE_S,
        ("--groups", "16", "128", "--rest", "1", "--rounds", "5", "--losses", "5"),
    ),
    "state": Budget(
        ("--sizes-mb", "64", "512", "2048", "--repeats", "9", "--joins", "3", "--faults", "5"),
        40 * MINUTE_S,
        (
            *("--sizes-mb", "16", "64", "--repeats", "2", "--joins", "1"),
            *("--faults", "1", "--fault-mb", "64", "--stopped-s", "1"),
        ),
    ),
    "windows": Budget(("--kills", "5"), 20 * MINUTE_S, ("--kills", "1")),
    "compression": Budget(
        ("--rounds", "20"),
        10 * MINUTE_S,
        ("--rounds", "2", "--sizes", "2", "--width", "64", "--layers", "1"),
        torchft=False,
    ),
    "convergence": Budget(("--seeds", "3"), 60 * MINUTE_S, ("--quick",), by_default=False, torchft=False),
}
