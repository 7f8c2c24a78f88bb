"""The command ``torchft-plus``. Importing it costs no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchft_plus.config import ConfigError

EXIT_REFUSED = 2

_DESCRIPTION = """\
Quorum-based fault tolerance for PyTorch and TorchTitan.

  torchft-plus run FILE [--section.key value ...]
      Start a Lighthouse and the replica groups that the TOML file describes, on this machine;
      restart a group that dies; make the faults of its [[chaos]] entries; judge the run at the end.
  torchft-plus check FILE [--section.key value ...]
      Check the file and start nothing.
  torchft-plus lighthouse [--bind HOST:PORT] ...
      Run a Lighthouse by itself (torchft-plus lighthouse --help).
  torchft-plus status [--address HOST:PORT] [--job_id ID] [--story]
      Ask a Lighthouse what it knows, and why. Of a local run: with TORCHFT_PLUS_TOKEN_FILE=RUN_FOLDER/token.
  torchft-plus simulate [--preset llama3] ...
      Goodput under a failure rate, beside checkpoint-restart and torchft-like policies (docs/simulation.md).
"""

_RUN_EPILOG = """\
The file's own tables are [fault_tolerance], [launch], [lighthouse], [security] and [[chaos]]; all others go to the
trainer (docs/configuration.md). Any key can be overridden: --launch.replicas 2, --training.steps 100.

Output of every rank, event logs, the Lighthouse's store and summary.json go to the run folder
(launch.folder; by default a new one under outputs/). Ctrl-C ends everything in good order, a second
Ctrl-C at once.

Token and certificates: [security] in the file, or TORCHFT_PLUS_TOKEN, TORCHFT_PLUS_TOKEN_FILE and
TORCHFT_PLUS_TLS_CERT, _KEY and _CA. A run with a Lighthouse of its own makes a token (in the run folder).

exit status:
  0    the run finished, digests are equal, survivors lost no step
  1    it did not finish: a group was given up, the deadline passed, the Lighthouse did not come up
  2    the file, the command line or the installation is wrong: nothing was started
  3    it finished, but the replicas are not proved equal
  4    it finished, but steps were lost: a survivor's, or by the loss of all groups at once
  130  ended by Ctrl-C (128 + the number of the signal)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] in (["lighthouse"], ["status"]):
        from lighthouse.cli import main as lighthouse_main

        return lighthouse_main(words[1:] if words[0] == "lighthouse" else words)
    if words[:1] == ["simulate"]:
        from torchft_plus.goodput.command import main as simulate_main

        return simulate_main(words[1:])
    options, rest = _parser().parse_known_args(words)
    try:
        if options.command == "run":
            from torchft_plus.launch.run import run

            return int(run(options.file, rest))
        from torchft_plus.launch.run import check

        checked = check(options.file, rest)
        print(
            f"{options.file} is good: {checked.launch.replicas} groups, faults to inject: {len(checked.chaos)}."
        )
        return 0
    except ConfigError as error:
        print(f"torchft-plus: {error}", file=sys.stderr)
        return EXIT_REFUSED


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "torchft-plus", description=_DESCRIPTION, formatter_class=raw, usage=argparse.SUPPRESS
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="run | check | lighthouse | status | simulate"
    )
    run = commands.add_parser(
        "run",
        help="run a run file on this machine",
        epilog=_RUN_EPILOG,
        formatter_class=raw,
        allow_abbrev=False,
    )
    check = commands.add_parser("check", help="check a run file, start nothing", allow_abbrev=False)
    for command in (run, check):
        command.add_argument("file", type=Path, help="the run file (TOML)")
        command.usage = f"torchft-plus {'run' if command is run else 'check'} FILE [--section.key value ...]"
    commands.add_parser("lighthouse", help="run a Lighthouse by itself", add_help=False)
    commands.add_parser("status", help="ask a Lighthouse what it knows", add_help=False)
    commands.add_parser("simulate", help="goodput under a failure rate", add_help=False)
    return parser
