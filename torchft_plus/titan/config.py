"""What one training process is told: run file, command line and environment, checked, as plain values.

Nothing here imports torch or torchtitan; ``config_v02`` and ``config_v03`` make torchtitan's config of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from lighthouse.security import Security
from torchft_plus.config import FaultTolerance, RunFile
from torchft_plus.strict_table import ConfigError, load_table, parse_overrides
from torchft_plus.titan.schema import Tables, check_tables, override

CONFIG_FILE = ("job", "config_file")


@dataclass(frozen=True, kw_only=True)
class TitanConfig:
    """A checked run, as one replica group sees it."""

    path: Path
    fault_tolerance: FaultTolerance
    tables: Tables = field(default_factory=dict[str, dict[str, object]])
    """torchtitan's part, with overrides set; torchtitan 0.2.2's names."""
    native: tuple[str, ...] = ()
    """Arguments that only the installed torchtitan can know."""
    replica_index: int = 0
    """Which share of the data this group reads, 0 to ``group_size - 1``."""
    lighthouse: str = ""
    """host:port."""
    security: Security = field(default_factory=Security)

    @property
    def replica_name(self) -> str:
        """The stable name of this group."""
        return self.fault_tolerance.replica_name

    @property
    def group_size(self) -> int:
        """Number of groups that share the data."""
        return max(1, self.fault_tolerance.group_size)


def read(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> TitanConfig:
    """Read ``--job.config_file FILE [--section.key value]...``.

    Args:
        arguments: the command line without the program.
        environment: ``REPLICA_ID`` goes before the file's ``replica_id`` (an override before both),
            ``TORCHFT_LIGHTHOUSE`` before its ``lighthouse``.

    Raises:
        ConfigError: one sentence that names the key and the mend.
    """
    overrides = parse_overrides(arguments)
    files = [text for section, key, text in overrides if (section, key) == CONFIG_FILE]
    if not files or not files[-1]:
        raise ConfigError("--job.config_file is missing: give the TOML file that describes the run.")
    path = Path(files[-1])
    run = RunFile.load(path, arguments)
    named = any((section, key) == ("fault_tolerance", "replica_id") for section, key, _ in overrides)
    table = run.fault_tolerance if named else _named_by_launcher(run.fault_tolerance, environment)
    own = ("fault_tolerance", "launch", "lighthouse", "security")
    theirs = [o for o in overrides if o[0] not in own and o[:2] != CONFIG_FILE]
    document, native = override(run.training, theirs)
    custom = bool(document.get("job", {}).get("custom_config_module"))
    tables = check_tables(document, open_ended=custom)
    tables.get("job", {}).pop("config_file", None)
    lighthouse = environment.get("TORCHFT_LIGHTHOUSE", "") or table.lighthouse
    config = TitanConfig(
        path=path,
        fault_tolerance=table,
        tables=tables,
        native=tuple(native),
        replica_index=_index(table),
        lighthouse=re.sub(r"^https?://|/$", "", lighthouse),
    )
    if not table.enable:
        return config
    config = replace(config, security=run.security.resolve(environment))
    _check_enabled(config)
    return (
        config if config.group_size == 1 else replace(config, tables=own_folder(tables, config.replica_name))
    )


def own_folder(tables: Tables, replica_name: str) -> Tables:
    """A folder for each group: ranks of several groups have the same numbers and would write the same files.

    ``job.dump_folder`` (logs, traces, metrics) gets a subfolder; ``checkpoint.folder`` stays where it was, for all
    groups share it.
    """
    base = str(tables.get("job", {}).get("dump_folder", "./outputs"))
    if "://" in base:
        return tables
    job = {**tables.get("job", {}), "dump_folder": os.path.join(base, replica_name)}
    checkpoint = dict(tables.get("checkpoint", {}))
    folder = str(checkpoint.get("folder", "checkpoint"))
    if "://" not in folder:
        checkpoint["folder"] = os.path.abspath(os.path.join(base, folder))
    return {**tables, "job": job, "checkpoint": checkpoint}


def _named_by_launcher(table: FaultTolerance, environment: Mapping[str, str]) -> FaultTolerance:
    name = environment.get("REPLICA_ID", "")
    if not name:
        return table
    value = int(name) if name.isdecimal() else name
    load_table(FaultTolerance, {"replica_id": value}, "REPLICA_ID")
    return replace(table, replica_id=value)


def _index(table: FaultTolerance) -> int:
    """Number at the end of the replica's name."""
    if isinstance(table.replica_id, int):
        index: int | None = table.replica_id
    else:
        digits = re.search(r"\d+$", table.replica_id)
        index = int(digits.group()) if digits else None
    size = max(1, table.group_size)
    if index is None:
        raise ConfigError(
            f"replica_id {table.replica_id!r} does not end in a number, so its share of the data is unknown:"
            f" name it replica_0 to replica_{size - 1}."
        )
    if table.enable and index >= size:
        raise ConfigError(
            f"replica_id is {table.replica_id!r}, but fault_tolerance.group_size = {size} allows the numbers"
            f" 0 to {size - 1} only: raise group_size, or correct replica_id (or REPLICA_ID)."
        )
    return index


def _check_enabled(config: TitanConfig) -> None:
    """What fault tolerance cannot be combined with."""
    if not config.lighthouse:
        raise ConfigError(
            "No Lighthouse is named: set TORCHFT_LIGHTHOUSE=host:port or fault_tolerance.lighthouse, "
            "or fault_tolerance.enable = false."
        )
    if not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):\d+", config.lighthouse):
        raise ConfigError(f"TORCHFT_LIGHTHOUSE is {config.lighthouse!r}, expected host:port.")
    if config.tables.get("optimizer", {}).get("early_step_in_backward"):
        raise ConfigError(
            "optimizer.early_step_in_backward steps before the groups' gradients are averaged: remove it, "
            "or set fault_tolerance.enable = false."
        )
    linear: Any = config.tables.get("quantize", {}).get("linear", {})
    if isinstance(linear, dict) and cast(Any, linear).get("float8", {}).get(
        "precompute_float8_dynamic_scale_for_fsdp"
    ):
        raise ConfigError(
            "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp leaves scales behind that a group which"
            " comes back does not have: remove it, or set fault_tolerance.enable = false."
        )
    _check_semi_sync(config)
    if config.tables.get("comm", {}).get("mode", "default") != "default":
        raise ConfigError(
            "comm.mode must be left out with fault_tolerance.enable = true: it simulates the ranks."
        )


DEFAULT_STEPS = 10_000
"""torchtitan's own ``training.steps``."""


def _check_semi_sync(config: TitanConfig) -> None:
    """What does not go together with windows of inner steps."""
    table = config.fault_tolerance
    if table.semi_sync_method is None:
        return
    window = table.steps_per_commit
    steps = config.tables.get("training", {}).get("steps", DEFAULT_STEPS)
    if steps % window:
        raise ConfigError(
            f"training.steps is {steps}: with fault_tolerance.semi_sync_method it must be a multiple of the {window} steps"
            f" between two syncs, for a run ends with a sync: make it {steps // window * window or window}"
            f" or {(steps // window + 1) * window}."
        )
    pipeline = config.tables.get("parallelism", {}).get("pipeline_parallel_degree", 1)
    if pipeline > 1 and table.fragments > 1:
        raise ConfigError(
            f"fault_tolerance.num_fragments is {table.fragments}, but with parallelism.pipeline_parallel_degree ="
            f" {pipeline} a rank may hold nothing of a fragment: synchronise the model as one fragment."
        )
