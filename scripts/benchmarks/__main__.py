"""Measure this repository beside plain torch and torchft, in one run.

    scripts/bench overhead     step time with nobody failing, as a ratio to plain DDP over gloo
    scripts/bench recovery     what a SIGKILL of one of three replica groups costs the others
    scripts/bench compression  bytes, time and error of a sync in fp32, bf16, int8 and fp8
    scripts/bench convergence  loss after the same tokens: data-parallel and DiLoCo, undisturbed and with kills
    scripts/bench windows      inner steps that a survivor loses when one of two DiLoCo groups dies in a sync
    scripts/bench goodput      tokens committed with a group killed every 20 s, and after single faults; also torchrun
    scripts/bench lighthouse   what 16 to 4,096 replica groups cost a Lighthouse, and how fast it answers them
    scripts/bench state        transfer of 64 MB to 2 GB to a group that joins, and what the others feel of it
    scripts/bench all          one after the other: 75 minutes on two idle cores, 40 more for goodput (convergence if named: 20)
    scripts/bench report       docs/benchmarks.md and its plots, from what the others have written into --out

torchft is measured in an environment of its own: .venv-torchft, made at need, or the one that --torchft-python or
$TORCHFT_PYTHON names.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import (
    compression,
    convergence,
    goodput,
    lighthouse_load,
    overhead,
    page,
    recovery,
    report,
    run_all,
    state,
    state_faults,
    state_transfer,
    torchft_environment,
)
from benchmarks.about import About
from benchmarks.benches import BENCHES
from benchmarks.budgets import BUDGETS
from benchmarks.children import ROOT, ChildFailed

SYSTEMS = ("torchft_plus", "torchft")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Command line."""
    summary, _, text = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description=summary,
        epilog=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    alone = argparse.ArgumentParser(add_help=False)
    alone.add_argument(
        "--out", type=Path, default=ROOT / "outputs", help="folder for the JSON and the Markdown file"
    )
    common = argparse.ArgumentParser(add_help=False, parents=[alone])
    common.add_argument("--torchft-python", help="Python of an environment that has torchft 0.2.0")
    common.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: both")
    common.add_argument(
        "--seed", type=int, default=0, help="of the order of blocks, the victims and the moments"
    )
    names = [workload.name for workload in overhead.WORKLOADS]
    part = commands.add_parser("overhead", parents=[common], help="step time with nobody failing")
    part.add_argument("--rounds", type=int, default=40, help="blocks of each mode (default 40)")
    part.add_argument("--workloads", nargs="+", choices=names, default=names, help="default: all")
    part = commands.add_parser("recovery", parents=[common], help="the survivors' gap after a SIGKILL")
    part.add_argument("--kills", type=int, default=10, help="of each variant (default 10)")
    variants = list(recovery.VARIANTS)
    part.add_argument("--variants", nargs="+", choices=variants, default=variants, help="default: all")
    part = commands.add_parser("goodput", parents=[common], help="tokens committed while groups are killed")
    goodput.add_options(part)
    part = commands.add_parser("lighthouse", parents=[common], help="load on the Lighthouse")
    groups = lighthouse_load.GROUPS
    part.add_argument("--groups", nargs="+", type=int, default=groups, help=f"default: {groups}")
    part.add_argument("--rest", type=float, default=20.0, help="seconds at rest (default 20)")
    part.add_argument("--rounds", type=int, default=100, help="with up to 128 groups (default 100)")
    part.add_argument(
        "--losses", type=int, default=100, help="of each kind with up to 128 groups (default 100)"
    )
    part = commands.add_parser("state", parents=[common], help="transfer of the state to a group that joins")
    part.add_argument(
        "--parts", nargs="+", choices=state.PARTS, default=list(state.PARTS), help="default: all"
    )
    sizes = state_transfer.SIZES_MB
    part.add_argument("--sizes-mb", nargs="+", type=int, default=sizes, help=f"default: {sizes}")
    part.add_argument("--repeats", type=int, default=9, help="of each transfer (default 9)")
    part.add_argument(
        "--joins",
        type=int,
        default=3,
        help="of each variant of steps, half of that on a free link (default 3)",
    )
    part.add_argument("--faults", type=int, default=5, help="of each kind (default 5)")
    part.add_argument(
        "--fault-mb", type=int, default=state_faults.SIZE_MB, help=f"default {state_faults.SIZE_MB}"
    )
    part.add_argument("--stopped-s", type=float, default=10.0, help="of the deaf reader (default 10)")
    part = commands.add_parser("compression", parents=[alone], help="bytes and errors of compressed syncs")
    part.add_argument("--rounds", type=int, default=20, help="syncs of each mode (default 20)")
    sizes, modes = compression.SIZES, compression.MODES
    part.add_argument("--sizes", nargs="+", type=int, default=sizes, help=f"groups (default {sizes})")
    part.add_argument("--modes", nargs="+", choices=modes, default=modes, help="default: all")
    part.add_argument("--width", type=int, default=384, help="of the model (default 384)")
    part.add_argument("--layers", type=int, default=3, help="of the model (default 3)")
    part.set_defaults(systems=[])
    part = commands.add_parser(
        "windows", parents=[common], help="what a death in a DiLoCo sync costs the other"
    )
    part.add_argument("--kills", type=int, default=3, help="of each system (default 3)")
    part = commands.add_parser("convergence", parents=[alone], help="loss with and without kills, per token")
    part.set_defaults(systems=[])
    part.add_argument("--seed", type=int, default=1, help="the first one (default 1)")
    part.add_argument("--seeds", type=int, default=3, help="how many (default 3)")
    modes = list(convergence.MODES)
    part.add_argument("--modes", nargs="+", choices=modes, default=modes, help="default: all")
    budget = convergence.BATCHES
    part.add_argument(
        "--batches", type=int, default=budget, help=f"of all groups together (default {budget})"
    )
    part.add_argument(
        "--step-s", type=float, default=convergence.STEP_S, help="least time of a step, seconds"
    )
    part.add_argument("--kill-every", type=float, default=12.0, help="seconds between kills (default 12)")
    part.add_argument("--quick", action="store_true", help="one seed and a twentieth of the tokens")
    _add_joint_commands(commands, alone)
    options = parser.parse_args(arguments)
    if options.command == "all" and options.quick:
        if options.docs:
            parser.error("all: --quick makes no figures for docs/: leave out --docs")
        options.out /= "quick"
    return options


def _add_joint_commands(commands: Any, alone: argparse.ArgumentParser) -> None:
    part = commands.add_parser("all", parents=[alone], help="the benches one after the other")
    part.add_argument("--torchft-python", help="Python of an environment that has torchft 0.2.0")
    absent = ", ".join(name for name, budget in BUDGETS.items() if not budget.by_default)
    part.add_argument(
        "--only", nargs="+", choices=list(BUDGETS), metavar="BENCH", help=f"default: all but {absent}"
    )
    part.add_argument(
        "--quick", action="store_true", help="only to see that everything runs; writes into quick/ of --out"
    )
    part.add_argument(
        "--docs", action="store_true", help="make docs/benchmarks.md in the end, as report does"
    )
    part = commands.add_parser("report", parents=[alone], help="make docs/benchmarks.md without measuring")
    part.add_argument("--docs", type=Path, default=run_all.DOCS, help="folder of the page (default: docs)")


def main(arguments: list[str]) -> int:
    """Measure, print and write."""
    options = parse(arguments)
    try:
        if options.command == "all":
            return _tell(run_all.main(options))
        if options.command == "report":
            return _tell(page.write(options.out, options.docs))
        return _measure(options, arguments)
    except (ChildFailed, RuntimeError) as error:
        return _tell([str(error)])


def _tell(failures: list[str]) -> int:
    """Print what went wrong. Returns the exit status."""
    for failure in failures:
        print(f"{run_all.SAID}{failure}", file=sys.stderr)
    return 1 if failures else 0


def _measure(options: argparse.Namespace, arguments: list[str]) -> int:
    bench = BENCHES[options.command]
    options.scratch = tempfile.mkdtemp(prefix=f"bench-{options.command}-")
    torchft = None
    if "torchft" in options.systems:
        torchft = torchft_environment.torchft_python(options.torchft_python)
    about = About(arguments, getattr(options, "seed", None), torchft)
    result = bench.measure(options, torchft)
    tables = bench.tables(result)
    report.print_tables(tables)
    for path in report.write(options.out, options.command, about.finished(), result, tables, bench.NOTES):
        print(path)
    failures = bench.failures(result)
    if not failures:  # otherwise its logs are wanted
        shutil.rmtree(options.scratch, ignore_errors=True)
    return _tell(failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
