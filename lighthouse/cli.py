"""Command line of the Lighthouse: ``python -m lighthouse``, ``torchft-plus lighthouse``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lighthouse.client import LighthouseRefused, LighthouseUnreachable, fetch_status, report_exit
from lighthouse.core.words import CoreConfig
from lighthouse.daemon import DEFAULT_TICK_MS, BindError, LighthouseDaemon
from lighthouse.events import EventLog
from lighthouse.job import Superseded
from lighthouse.messages import Process
from lighthouse.rpc import DEFAULT_PORT, parse_address
from lighthouse.security import Security
from lighthouse.status import describe
from lighthouse.storage import MemoryStorage, SqliteStorage, Storage, StorageError, default_path
from lighthouse.timeouts import DEFAULT_TIMEOUT_MS, Timeouts

PREFIX = "TORCHFT_LIGHTHOUSE_"
ADDRESS_VARIABLE = "TORCHFT_LIGHTHOUSE"
MEMORY = "memory"

BAD_USE = 2
FAILED = 1


class _BadUse(ValueError):
    """One sentence about a wrong argument."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _BadUse(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (0 good, 1 failed, 2 wrong use)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = {"status": _status, "gone": _gone}
    run = commands.get(arguments[0], _serve) if arguments else _serve
    try:
        return run(arguments[1:] if run is not _serve else arguments)
    except SystemExit as end:  # argparse: --help
        return end.code if isinstance(end.code, int) else BAD_USE
    except (ValueError, LighthouseRefused) as error:
        print(f"lighthouse: {error}", file=sys.stderr)
        return BAD_USE
    except (BindError, StorageError, Superseded, LighthouseUnreachable) as error:
        print(f"lighthouse: {error}", file=sys.stderr)
        return FAILED


# --- serve ------------------------------------------------------------------------------------------------------

_NUMBERS: list[tuple[str, int | None, str]] = [
    ("min_replicas", 1, "no quorum has fewer members"),
    ("expected_replicas", None, "the first quorum forms at once when so many have asked"),
    ("join_timeout_ms", 60_000, "how long a round waits for those who are there and have not asked"),
    ("restart_timeout_ms", 60_000, "after the loss of all replicas: how long to wait for all to restart"),
    ("timeout_ms", DEFAULT_TIMEOUT_MS, "how long a healthy member may let the others wait"),
    ("heartbeat_timeout_ms", None, "silence after which a process is lost (default: timeout_ms / 12)"),
    ("quorum_tick_ms", DEFAULT_TICK_MS, "at most so long between two looks at the clock"),
    ("outage_limit_ms", 3_600_000, "how long members train on without a Lighthouse"),
]


_SECURITY = (
    "Token and TLS come from the environment only, here and in members, launchers and tools alike: TORCHFT_PLUS_TOKEN or "
    "TORCHFT_PLUS_TOKEN_FILE; TORCHFT_PLUS_TLS_CERT, TORCHFT_PLUS_TLS_KEY and TORCHFT_PLUS_TLS_CA (docs/configuration.md)."
)


def _serve_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lighthouse",
        allow_abbrev=False,
        description="Decides which replica groups train together. "
        "Other commands: `status` (what it knows), `gone` (a process will never come back). "
        "Managers of torchft 0.2.0 can use it too, as a job of their own (`torchft`), unless a token is set.",
        epilog=f"Every flag has an environment variable: {PREFIX}MIN_REPLICAS, {PREFIX}BIND, ... {_SECURITY}",
    )
    bind = f"[::]:{DEFAULT_PORT}"
    _add(parser, "bind", bind, f"host:port to listen on, IPv4 and IPv6; port 0 chooses one (default: {bind})")
    for name, default, text in _NUMBERS:
        _add(parser, name, default, text if default is None else f"{text} (default: {default})", whole=True)
    _add(
        parser, "store", None, f"SQLite file for the last quorum, or `{MEMORY}` (default: by port, XDG state)"
    )
    _add(parser, "log_level", "INFO", "DEBUG, INFO, WARNING or ERROR (default: INFO)")
    return parser


def _add(
    parser: argparse.ArgumentParser, name: str, default: str | int | None, text: str, whole: bool = False
) -> None:
    variable = PREFIX + name.upper()
    value: str | int | None = os.environ.get(variable, default)
    flags = dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"])
    # argparse applies `type` to defaults that are strings, so a bad variable gets the same sentence.
    parser.add_argument(*flags, dest=name, default=value, type=_whole if whole else str, help=text)


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, 0 or more")
    return int(text)


def _serve(arguments: Sequence[str]) -> int:
    options = _serve_parser().parse_args(arguments)
    level = str(options.log_level).upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise _BadUse(f"log_level is {options.log_level!r}: give DEBUG, INFO, WARNING or ERROR")
    if options.quorum_tick_ms < 1:
        raise _BadUse("quorum_tick_ms is 0: give 1 or more")
    timeouts = Timeouts(options.timeout_ms, options.outage_limit_ms, options.heartbeat_timeout_ms)
    config = CoreConfig(
        min_replicas=options.min_replicas,
        expected_replicas=options.expected_replicas,
        join_timeout_ms=options.join_timeout_ms,
        restart_timeout_ms=options.restart_timeout_ms,
        timeouts=timeouts,
    )
    _, port = parse_address(options.bind)
    security = Security.resolve()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s lighthouse: %(message)s")
    storage = _open_store(options.store, port)
    events = EventLog.from_environment("lighthouse", "lighthouse")
    try:
        asyncio.run(_run(config, storage, events, options.bind, options.quorum_tick_ms, security))
    finally:
        events.close()
        storage.close()
    return 0


def _open_store(store: str | None, port: int) -> Storage:
    if store == MEMORY or (store is None and port == 0):
        return MemoryStorage()
    path = Path(store) if store is not None else default_path(port)
    logging.getLogger(__name__).info("the store is %s", path)
    return SqliteStorage(path)


async def _run(
    config: CoreConfig, storage: Storage, events: EventLog, bind: str, tick_ms: int, security: Security
) -> None:
    daemon = LighthouseDaemon(config, storage, events, tick_ms, security)
    server = await daemon.start(bind)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.stop)
    print(f"listening on http://{daemon.address}", flush=True)
    await daemon.serve(server)


# --- calls --------------------------------------------------------------------------------------------------------


def _call_parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"lighthouse {command}", allow_abbrev=False, description=description, epilog=_SECURITY
    )
    default = os.environ.get(ADDRESS_VARIABLE) or f"localhost:{DEFAULT_PORT}"
    parser.add_argument(
        "--address", default=default, help=f"host:port of the Lighthouse (${ADDRESS_VARIABLE}, {default})"
    )
    return parser


def _status(arguments: Sequence[str]) -> int:
    parser = _call_parser("status", "Show what the Lighthouse knows.")
    parser.add_argument("--job_id", "--job-id", dest="job_id", default=None, help="one job only")
    parser.add_argument("--story", action="store_true", help="also the last decisions")
    options = parser.parse_args(arguments)
    reply = fetch_status(options.address, options.job_id, security=Security.resolve())
    print(describe(reply))
    if options.story:
        print("\n".join(line for job in reply.jobs for line in job.story))
    return 0


def _gone(arguments: Sequence[str]) -> int:
    parser = _call_parser(
        "gone", "Vouch that a process will never act again, so that nobody waits for the state it held."
    )
    parser.add_argument("job_id")
    parser.add_argument("replica_id")
    parser.add_argument("incarnation", nargs="?", default="", help="default: the one in the last quorum")
    options = parser.parse_args(arguments)
    process = Process(options.replica_id, options.incarnation)
    known = report_exit(options.address, options.job_id, process, security=Security.resolve())
    print("noted" if known else "no such process is known; noted all the same")
    return 0
