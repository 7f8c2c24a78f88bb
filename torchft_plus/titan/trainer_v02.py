"""The fault-tolerant trainer for torchtitan 0.2.x."""

# Only one torchtitan can be installed where types are checked, and that is 0.3:
# pyright: reportAttributeAccessIssue=false, reportUntypedBaseClass=false, reportCallIssue=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torchtitan.train as stock
from torchtitan.distributed import utils as dist_utils

from torchft_plus.strict_table import ConfigError
from torchft_plus.titan.config import TitanConfig
from torchft_plus.titan.config_v02 import job_config
from torchft_plus.titan.data import Share
from torchft_plus.titan.mixin import FaultTolerantMixin


class FaultTolerantTrainer(FaultTolerantMixin, stock.Trainer):
    """torchtitan 0.2's trainer with a share of the data and a quorum."""

    @property
    def train_spec(self) -> Any:
        """What the stock trainer is built of; its dataloader reads this group's share."""
        return self._train_spec

    @train_spec.setter
    def train_spec(self, spec: Any) -> None:
        build = spec.build_dataloader_fn
        self._train_spec = dataclasses.replace(
            spec, build_dataloader_fn=None if build is None else sharded(build, self.share)
        )

    def tokens_of(self, labels: torch.Tensor) -> int:
        """0.2 counts the labels as they come from the dataloader."""
        return labels.numel()

    @property
    def training_steps(self) -> int:
        """See the mixin."""
        return self.job_config.training.steps

    def lower_timeouts(self) -> None:
        """The stock loop does it at step 1, which a group that joins later never has."""
        if self.step != 1:
            seconds = self.job_config.comm.train_timeout_seconds
            dist_utils.set_pg_timeouts(timedelta(seconds=seconds), self.parallel_dims)


def sharded(build: Callable[..., Any], share: Share) -> Callable[..., Any]:
    """``build`` for one share of several."""

    def build_share(*, dp_world_size: int, dp_rank: int, **named: Any) -> Any:
        rank, size = share.shift(dp_rank, dp_world_size)
        return build(dp_world_size=size, dp_rank=rank, **named)

    return build_share


def settings(config: TitanConfig) -> Any:
    """torchtitan's own config.

    Raises:
        ConfigError: torchtitan refused a value.
    """
    try:
        return job_config(config)
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"torchtitan refuses the run file: {' '.join(str(error).split())}") from error


def train(config: TitanConfig, settings: Any) -> None:
    """Train with the stock entry point, with the stock trainer if fault tolerance is off."""

    class ConfigManager:
        def parse_args(self) -> Any:
            return settings

    stock.ConfigManager = ConfigManager
    FaultTolerantTrainer.plugin = config
    stock.main(FaultTolerantTrainer if config.fault_tolerance.enable else stock.Trainer)
