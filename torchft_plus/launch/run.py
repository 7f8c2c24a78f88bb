"""``torchft-plus run``: from a run file to an exit status."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from lighthouse.client import LighthouseRefused, LighthouseUnreachable, fetch_status
from lighthouse.security import Security, without_security
from torchft_plus.config import ConfigError, RunFile
from torchft_plus.launch.summary import ExitCode, Summary, summarise
from torchft_plus.launch.summary_text import summary_lines
from torchft_plus.launch.supervisor import LighthouseFailed, Outcome, Supervisor
from torchft_plus.launch.view import View

TITAN = "torchft_plus.titan"
TOKEN_FILE = "token"
_GREETING_S = 1.0


def check(path: Path, arguments: Sequence[str]) -> RunFile:
    """Read a run file and check all of it, the trainer's part included, without starting anything.

    Raises:
        ConfigError: one sentence.
    """
    run = RunFile.load(path, arguments)
    if not run.has_launch:
        raise ConfigError(f"{path} has no [launch] table: it says how many replica groups to start.")
    run.security.resolve(os.environ)
    if run.launch.module == TITAN and not run.launch.command:
        _check_titan(run)
    return run


def _check_titan(run: RunFile) -> None:
    # Imported here: a launcher for other trainers needs no torchtitan.
    from torchft_plus.titan import config, versions

    versions.check(versions.installed("torchtitan"), versions.installed("torch"))
    arguments = ["--job.config_file", str(run.path), *run.trainer_arguments]
    config.read(arguments, {"TORCHFT_LIGHTHOUSE": "127.0.0.1:1", "REPLICA_ID": run.replica_ids[0]})


def make_folder(run: RunFile) -> Path:
    """Make the run folder.

    Raises:
        ConfigError: ``launch.folder`` holds an earlier run, or cannot be made.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = Path(run.launch.folder or f"outputs/{run.path.stem}-{stamp}-{os.getpid()}").resolve()
    if (folder / "events").exists():
        raise ConfigError(f"launch.folder {folder} holds an earlier run: name another, or remove it.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"launch.folder {folder} cannot be made: {error.strerror}.") from error
    return folder


def make_security(run: RunFile, folder: Path, environment: Mapping[str, str]) -> Security:
    """What guards this run. With a Lighthouse of its own and no token, it gets a new one, kept in the run folder.

    Raises:
        ConfigError: the Lighthouse that is there already does not let this run in.
    """
    security = run.security.resolve(environment)
    address = run.fault_tolerance.lighthouse
    if address:
        try:
            fetch_status(
                address, run.fault_tolerance.job_id, timeout_s=_GREETING_S, security=security, wait=False
            )
        except LighthouseRefused as error:
            raise ConfigError(f"{error}.") from error
        except LighthouseUnreachable:
            pass  # it may come later: the groups wait for it
        return security
    if security.token:
        return security
    security = replace(security, token=secrets.token_hex(32))
    path = folder / TOKEN_FILE
    path.touch(mode=0o600)
    path.write_text(security.token + "\n", encoding="ascii")
    return security


def run(
    path: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str] = os.environ,
    console: Console | None = None,
) -> int:
    """Run a run file to its end, show it, judge it.

    Args:
        path: the run file.
        arguments: overrides ``--section.key value``.
        environment: of the children.
        console: where to show it; standard output by default.

    Returns:
        Exit status: see ``ExitCode``.

    Raises:
        ConfigError: one sentence; nothing was started.
    """
    console = console or Console()
    run_file = check(path, arguments)
    folder = make_folder(run_file)
    console.print(Text(f"run folder: {folder}"), soft_wrap=True)
    security = make_security(run_file, folder, environment)
    environment = without_security(environment) | security.environment()
    try:
        with View(console, run_file.steps, run_file.fault_tolerance.steps_per_commit) as view:
            outcome = Supervisor(run_file, folder, environment, view, security).run()
    except LighthouseFailed as error:
        console.print(Text(str(error)), soft_wrap=True)
        return ExitCode.NOT_FINISHED
    return _conclude(run_file, folder, outcome, console)


def _conclude(run_file: RunFile, folder: Path, outcome: Outcome, console: Console) -> int:
    table = run_file.fault_tolerance
    summary = summarise(
        outcome.events,
        outcome.end,
        steps_wanted=run_file.commits,
        steps_per_commit=table.steps_per_commit,
        digests_expected=table.digest_every > 0 and run_file.launch.replicas > 1,
        signal=outcome.signal,
    )
    write_summary(folder / "summary.json", summary)
    for name, lines in outcome.last_lines.items():
        console.print(
            Text(f"\nlast lines of {name} (all of it: {folder / 'logs' / name}.log):"), soft_wrap=True
        )
        for line in lines:
            console.print(Text(f"  {line}"), soft_wrap=True)
    console.print()
    for line in summary_lines(summary):
        console.print(Text(line), soft_wrap=True)
    return summary.exit_code


def write_summary(path: Path, summary: Summary) -> None:
    """Write summary.json, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(summary.as_json(), indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
