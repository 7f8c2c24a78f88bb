"""The one place where the plugin touches the Manager: what it uses of it, and how it makes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from lighthouse.messages import Head
from torchft_plus.titan.config import TitanConfig


class Plan(Protocol):
    """What ``start_step`` says."""

    @property
    def behind(self) -> bool:
        """This group has not got the state of the head yet: no forward, no backward, no data."""
        ...

    @property
    def caught_up(self) -> bool:
        """This group has got the state just now."""
        ...


class Outcome(Protocol):
    """What ``finish_step`` says."""

    @property
    def head(self) -> Head:
        """Where this group stands now."""
        ...

    @property
    def applied(self) -> bool:
        """Committed, and the optimizer steps."""
        ...

    @property
    def refused(self) -> bool:
        """Not committed."""
        ...

    @property
    def contributors(self) -> int:
        """Groups whose gradients counted."""
        ...

    @property
    def contributed(self) -> bool:
        """This group's gradient counted."""
        ...

    @property
    def scalars(self) -> Mapping[str, float]:
        """Sums over all ranks of all contributors."""
        ...


class StepManager(Protocol):
    """The part of ``torchft_plus.Manager`` that the plugin uses; docs/design.md says what each call does."""

    @property
    def positions(self) -> Mapping[str, int]:
        """Data positions of all shares."""
        ...

    def start_step(self) -> Plan: ...

    def finish_step(self, *, scalars: Mapping[str, float], positions: Mapping[str, int]) -> Outcome: ...

    def record_or_step(self, optimizers: list[torch.optim.Optimizer], step: Callable[[], Any]) -> Any: ...

    def set_weight(self, weight: float) -> None: ...

    def current_step(self) -> int: ...

    def participating_rank(self) -> int | None: ...

    def quorum_id(self) -> int: ...

    def disk_saved(self, head: Head) -> None: ...

    def shutdown(self) -> None: ...


def gradient_reducer(parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> Any:
    """What averages the gradients of ``parameters`` over the groups; all skip a step in which one is not finite."""
    from torchft_plus.reduce.reducer import GradientReducer

    return GradientReducer(parameters, check_finite=True)


def connect(config: TitanConfig) -> Any:
    """Make the Manager that ``[fault_tolerance]`` describes.

    Raises:
        SettingsError: torchrun's environment is missing.
    """
    from torchft_plus.manager.manager import Manager
    from torchft_plus.process_group.wrappers import ProcessGroupGloo, ProcessGroupNCCL

    table = config.fault_tolerance
    timeout = timedelta(milliseconds=table.process_group_timeout_ms or table.timeout_ms)
    kind = (
        ProcessGroupGloo if table.process_group == "gloo" else ProcessGroupNCCL
    )  # rccl: nccl's name on ROCm
    return Manager(
        kind(timeout=timeout),
        min_replica_size=table.min_replica_size,
        timeout=timedelta(milliseconds=table.timeout_ms),
        outage_limit=timedelta(milliseconds=table.outage_limit_ms),
        lighthouse_addr=config.lighthouse,
        replica_id=config.replica_name,
        job_id=table.job_id,
        catch_up_max_steps=table.catch_up_max_steps,
        digest_every=table.digest_every,
        security=config.security,
    )
