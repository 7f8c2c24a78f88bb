"""``torchft-plus simulate``."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from torchft_plus.config import ConfigError
from torchft_plus.goodput.plot import draw_png, draw_svg
from torchft_plus.goodput.report import as_json, as_text
from torchft_plus.goodput.scenario import POLICIES, PRESETS, Scenario
from torchft_plus.goodput.study import Study, run_study

EXIT_REFUSED = 2
UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}

_DESCRIPTION = """\
Goodput of a run under a failure rate: this system beside checkpoint-restart and torchft-like policies.
Goodput: committed steps x contributing groups, over what all groups would have committed undisturbed.
docs/simulation.md says what is real, what is modelled, and every assumption.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; torchft-plus simulate --help tells the options")


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    try:
        options = _parser().parse_args(arguments)
        policies = _policies(options.policy)
        for name, least in (("seeds", 1), ("first_seed", 0), ("trials", 1)):
            if getattr(options, name) < least:
                raise ConfigError(f"{name} is {getattr(options, name)}: give at least {least}")
        scenario = _scenario(options)
        if options.out is not None and options.out.exists() and not options.out.is_dir():
            raise ConfigError(f"--out: {options.out} is not a folder: name one, or leave it out")
        study = run_study(
            scenario, policies, options.seeds, first_seed=options.first_seed, trials=options.trials
        )
        print(as_text(study), end="")
        if options.out is not None:
            _write(study, options.out)
    except ConfigError as error:
        print(f"torchft-plus: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except OSError as error:
        print(f"torchft-plus: --out: {error}", file=sys.stderr)
        return EXIT_REFUSED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "torchft-plus simulate",
        description=_DESCRIPTION,
        epilog="presets: " + "; ".join(f"{name} ({preset.about})" for name, preset in PRESETS.items()) + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    default = Scenario()
    parser.add_argument("--preset", choices=list(PRESETS), default=None, help="start from a known cluster")
    parser.add_argument("--policy", default=",".join(POLICIES), help="comma-separated; default: %(default)s")
    parser.add_argument("--seeds", type=int, default=20, help="runs, each with its own failures; default: 20")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them; default: 0")
    parser.add_argument(
        "--trials", type=int, default=6, help="deaths played through the real cores; default: 6"
    )
    parser.add_argument("--out", type=Path, default=None, help="folder for table, JSON and plot")
    parser.add_argument("--replicas", type=int, help=f"replica groups; default: {default.replicas}")
    parser.add_argument("--hours", type=float, help=f"length of the run; default: {default.hours:g}")
    parser.add_argument(
        "--mtbf",
        type=_seconds,
        dest="mtbf_s",
        help='mean time between failures of the whole cluster at full strength, as "180s", "3.1h", "2d" or "never"; '
        "of one group: divide by --replicas; default: 1h",
    )
    parser.add_argument(
        "--regular",
        action=argparse.BooleanOptionalAction,
        help="failures at equal intervals, not at random times",
    )
    for name, what in (
        ("step-seconds", "an undisturbed step"),
        ("restart-seconds", "from a death until the new program has built its model"),
        ("reconfigure-seconds", "setting up communicators (ours and torchft-like)"),
        ("lighthouse-restart-seconds", "how long a dead Lighthouse is away"),
    ):
        field = name.replace("-seconds", "_s").replace("-", "_")
        parser.add_argument(
            f"--{name}", type=float, dest=field, help=f"{what}; default: {getattr(default, field):g}"
        )
    for name, what in (
        ("state-gb", "size of a group's state"),
        ("bandwidth-gbps", "gigabits a second at which a group reads a state"),
        ("checkpoint-minutes", "from checkpoint to checkpoint"),
        ("silent-share", "share of failures that only silence tells"),
        ("reduce-share", "share of a step spent in the reduction after the backward"),
        ("apply-share", "share of a step spent in the optimizer"),
    ):
        shown = getattr(default, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=float, help=f"{what}; default: {shown:g}")
    parser.add_argument(
        "--sync-every", type=int, help="steps between averages, torchft-like policies; default: 1"
    )
    parser.add_argument(
        "--window-loss",
        choices=["any", "sync"],
        help="with --sync-every: a death costs the window at any time (default), or in its sync only",
    )
    parser.add_argument(
        "--lighthouse-mtbf", type=_seconds, dest="lighthouse_mtbf_s", help="as --mtbf; default: never"
    )
    return parser


def _seconds(text: str) -> float:
    """A time with its unit, in seconds."""
    if text == "never":
        return math.inf
    try:
        value = float(text[:-1]) * UNITS_S[text[-1:]]
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(
            f'{text!r} is not a time: write "180s", "5m", "3.1h", "2d" or "never"'
        ) from None
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: give more than 0")
    return value


def _policies(text: str) -> list[str]:
    policies = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    unknown = [policy for policy in policies if policy not in POLICIES]
    if unknown or not policies:
        raise ConfigError(f"--policy is {text!r}: choose from {', '.join(POLICIES)}")
    return policies


def _scenario(options: argparse.Namespace) -> Scenario:
    values: dict[str, Any] = dict(PRESETS[options.preset].values) if options.preset is not None else {}
    known = Scenario.__dataclass_fields__
    values.update({name: value for name, value in vars(options).items() if name in known})
    return Scenario(**values)


def _write(study: Study, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "goodput.txt").write_text(as_text(study), encoding="utf-8")
    (folder / "goodput.json").write_text(json.dumps(as_json(study), indent=1) + "\n", encoding="utf-8")
    (folder / "goodput.svg").write_text(draw_svg(study), encoding="utf-8")
    if draw_png(study, folder / "goodput.png"):
        print(f"\n{folder}: goodput.txt, goodput.json, goodput.svg, goodput.png")
    else:
        print(
            f"\n{folder}: goodput.txt, goodput.json, goodput.svg (a PNG too with: pip install 'torchft-plus[plots]')"
        )
