"""Command line of the simulator."""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from torchft_plus.testing.faults import PROFILES
from torchft_plus.testing.simulation import Simulation, settings_of


def main(arguments: list[str] | None = None) -> int:
    """Run seeds; exit status 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m torchft_plus.testing", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this seed only")
    parser.add_argument("--seeds", type=int, default=100, help="run so many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--profile", choices=sorted(PROFILES), help="kinds of faults; default: by the seed")
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--seconds", type=float, help="stop after so much time")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failure")
    options = parser.parse_args(arguments)
    seeds = (
        [options.seed] if options.seed is not None else range(options.first, options.first + options.seeds)
    )
    started = time.monotonic()
    failed = ran = steps = events = 0
    for seed in seeds:
        if options.seconds is not None and time.monotonic() - started > options.seconds:
            break
        ran += 1
        simulation = Simulation(settings_of(seed, options.profile), options.trace)
        try:
            report = simulation.run()
        except AssertionError as error:
            failed += 1
            tail = traceback.extract_tb(error.__traceback__)[-1]
            print(
                f"seed {seed}: {error or type(error).__name__} ({tail.filename.rsplit('/', 1)[-1]}:{tail.lineno})"
            )
            print("  replay: " + replay_command(seed, options.profile))
            if options.trace:
                print("\n".join([*simulation.world.trace_lines(), *simulation.stories(), str(error)]))
            if not options.keep_going:
                break
            continue
        steps, events = steps + report.steps, events + report.events
        if options.seed is not None:
            if options.trace:
                print("\n".join([*simulation.world.trace_lines(), *simulation.stories()]))
            print(report)
    seconds = time.monotonic() - started
    print(f"{ran} seeds, {failed} failed, {steps} steps, {events} events, {seconds:.1f} s")
    return 1 if failed else 0


def replay_command(seed: int, profile: str | None) -> str:
    """The command that shows a seed again, event by event."""
    chosen = f" --profile {profile}" if profile is not None else ""
    return f"python -m torchft_plus.testing --seed {seed}{chosen} --trace"


if __name__ == "__main__":
    sys.exit(main())
