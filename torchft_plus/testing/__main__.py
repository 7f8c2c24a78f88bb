"""Command line of the simulator."""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from torchft_plus.testing.faults import PROFILES
from torchft_plus.testing.seeds import replay_command, settings_of
from torchft_plus.testing.simulation import Simulation


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
    first = options.first if options.seed is None else options.seed
    count = options.seeds if options.seed is None else 1
    started = time.monotonic()
    failed = ran = steps = events = 0
    for seed in range(first, first + count):
        if options.seconds is not None and time.monotonic() - started > options.seconds:
            break
        ran += 1
        simulation = Simulation(settings_of(seed, options.profile), options.trace)
        failure = ""
        try:
            report = simulation.run()
            steps, events = steps + report.steps, events + report.events
            summary = str(report)
        except AssertionError as error:
            failed += 1
            place = traceback.extract_tb(error.__traceback__)[-1]
            failure = str(error) or f"{place.filename}:{place.lineno}: {place.line}"
            summary = f"seed {seed}: {failure}\n  replay: {replay_command(seed, options.profile)}"
        if options.trace:
            print("\n".join([*simulation.world.trace_lines(), *simulation.stories()]))
        if failure or options.seed is not None:
            print(summary, flush=True)
        if failure and not options.keep_going:
            break
    seconds = time.monotonic() - started
    print(f"{ran} seeds, {failed} failed, {steps} steps, {events} events, {seconds:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
