"""Command and environment of one training rank. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchft_plus.config import RunFile


@dataclass(frozen=True, slots=True)
class Place:
    """What is decided anew at every start of a group."""

    replica_index: int
    incarnation: str
    master_port: int
    lighthouse_address: str
    events_folder: Path


def module_arguments(run: RunFile) -> list[str]:
    """Command line of ``launch.module``."""
    return ["--job.config_file", str(run.path), *run.trainer_arguments]


def rank_command(run: RunFile) -> list[str]:
    """``launch.command``, or ``python -m MODULE`` with its arguments."""
    if run.launch.command:
        program, *arguments = run.launch.command
        return [sys.executable if program == "python" else program, *arguments]
    return [sys.executable, "-m", run.launch.module, *module_arguments(run)]


def common_environment(base: Mapping[str, str], run: RunFile) -> dict[str, str]:
    """What all ranks have in common: the launcher's environment and, before it, ``launch.env``."""
    defaults = {
        # One thread, as torchrun sets it: many ranks on one host must not each take all cores.
        "OMP_NUM_THREADS": "1",
        # torch's store looks up its peers' names: a resolver that drops a query would stall a recovery for 5 s.
        "RES_OPTIONS": "timeout:1 attempts:2",
    }
    return {**defaults, **base, **run.launch.env, "PYTHONUNBUFFERED": "1"}


def rank_environment(base: Mapping[str, str], run: RunFile, place: Place, rank: int) -> dict[str, str]:
    """The environment that torchrun would give, and ours.

    Args:
        base: environment of the launcher.
        run: the run file; ``launch.env`` goes before ``base``, what identifies the rank before both.
        place: where this life of the group stands.
        rank: group rank.
    """
    launch, table = run.launch, run.fault_tolerance
    ranks = launch.ranks_per_replica
    environment = common_environment(base, run)
    if launch.gpus_per_rank:
        gpus = ranks * launch.gpus_per_rank
        first = place.replica_index * gpus
        # The HIP runtime reads this name as well.
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(first + i) for i in range(gpus))
    environment |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(place.master_port),
        "REPLICA_ID": run.replica_ids[place.replica_index],
        "TORCHFT_LIGHTHOUSE": place.lighthouse_address,
        "TORCHFT_PLUS_JOB_ID": table.job_id,
        "TORCHFT_PLUS_INCARNATION": place.incarnation,
        "TORCHFT_PLUS_EVENTS": str(place.events_folder),
        "TORCHFT_PLUS_TIMEOUT_MS": str(table.timeout_ms),
    }
    return environment
