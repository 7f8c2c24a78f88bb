"""The checked run as torchtitan 0.2.x's own JobConfig."""

# Only one torchtitan can be installed where types are checked, and that is 0.3:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportUntypedBaseClass=false
# pyright: reportCallIssue=false

# No `from __future__ import annotations` here: torchtitan 0.2.2 reads field types of config classes raw.

from dataclasses import dataclass, field
from typing import Any

from torchtitan.config import ConfigManager, JobConfig
from torchtitan.config.job_config import FaultTolerance as TitanFaultTolerance

from torchft_plus.titan.config import TitanConfig
from torchft_plus.titan.schema import Tables

SHARED_KEYS = ("enable", "process_group", "replica_id", "group_size", "min_replica_size", "semi_sync_method")
"""Keys of ``[fault_tolerance]`` that torchtitan has too (its metrics logger reads some of them)."""


@dataclass
class PluginFaultTolerance(TitanFaultTolerance):
    """torchtitan's table and the rest of ours: a saved or printed config shows how the run was started."""

    lighthouse: str = ""
    job_id: str = "default"
    timeout_ms: int = 0
    weighting: str = "equal"
    sync_steps: int = 0


@dataclass
class PluginJobConfig(JobConfig):
    """JobConfig with our ``[fault_tolerance]``."""

    fault_tolerance: PluginFaultTolerance = field(default_factory=PluginFaultTolerance)


def nested(tables: Tables) -> dict[str, Any]:
    """Tables under dotted names as tables inside tables."""
    document: dict[str, Any] = {}
    for name, table in sorted(tables.items()):
        target = document
        for part in name.split("."):
            target = target.setdefault(part, {})
        target.update(table)
    return document


def job_config(config: TitanConfig) -> JobConfig:
    """Build torchtitan's config with its own manager: defaults, custom config module, command line.

    Raises:
        SystemExit: torchtitan's command line refused ``config.native`` (status 2, its own words).
        ValueError: torchtitan refused a value.
    """
    table = config.fault_tolerance
    document = nested(config.tables)
    document["fault_tolerance"] = {
        **{key: getattr(table, key) for key in SHARED_KEYS},
        "replica_id": config.replica_index,
        "process_group_timeout_ms": table.process_group_timeout_ms or table.timeout_ms,
        "lighthouse": config.lighthouse,
        "job_id": table.job_id,
        "timeout_ms": table.timeout_ms,
        "weighting": table.weighting,
        "sync_steps": table.sync_steps if table.semi_sync_method else 0,
    }

    class Manager(ConfigManager):
        def _maybe_load_toml(self, args: list[str]) -> dict[str, Any] | None:
            return document

    return Manager(PluginJobConfig).parse_args(list(config.native))
