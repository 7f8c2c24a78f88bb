"""The fault-tolerant trainer for torchtitan 0.3.x."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torchtitan.train as entry
from torchtitan.distributed import utils as dist_utils
from torchtitan.trainer import Trainer

from torchft_plus.strict_table import ConfigError
from torchft_plus.titan.config import TitanConfig
from torchft_plus.titan.config_v03 import trainer_config
from torchft_plus.titan.data import Share
from torchft_plus.titan.mixin import FaultTolerantMixin


class FaultTolerantTrainer(FaultTolerantMixin, Trainer):
    """torchtitan 0.3's trainer with a share of the data and a quorum."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """Nothing of our own: what this plugin needs is in ``FaultTolerantTrainer.plugin``."""

    def __init__(self, config: Any) -> None:
        config.dataloader = sharded(config.dataloader, self.share)
        super().__init__(config)
        self._first_step: int | None = None

    def tokens_of(self, labels: torch.Tensor) -> int:
        """0.3 counts the labels that are left to a rank when context parallelism has cut them."""
        return labels.numel() // self.parallel_dims.cp

    @property
    def training_steps(self) -> int:
        """See the mixin."""
        return self.config.training.steps

    def train_step(self, data_iterator: Any) -> None:
        """See the mixin."""
        if self._first_step is None:
            self._first_step = self.step
        super().train_step(data_iterator)

    def lower_timeouts(self) -> None:
        """The stock loop does it after the first step it counts, which a group that joins later jumps over."""
        if self.step != self._first_step:
            seconds = self.config.comm.train_timeout_seconds
            dist_utils.set_pg_timeouts(timeout=timedelta(seconds=seconds), parallel_dims=self.parallel_dims)


def sharded(config: Any, share: Share) -> Any:
    """The dataloader's config, building the loader of one share of several."""
    base = cast(type[Any], type(config))

    class Sharded(base):
        def build(self, *, dp_world_size: int, dp_rank: int, **named: Any) -> Any:
            rank, size = share.shift(dp_rank, dp_world_size)
            return base.build(self, dp_world_size=size, dp_rank=rank, **named)

    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return Sharded(**values)


def settings(config: TitanConfig) -> Any:
    """torchtitan's own config, of the fault-tolerant trainer or, if fault tolerance is off, of the stock one.

    Raises:
        ConfigError: torchtitan refused a value.
    """
    kind = FaultTolerantTrainer.Config if config.fault_tolerance.enable else Trainer.Config
    try:
        return trainer_config(config, kind)
    except (ValueError, AssertionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"torchtitan refuses the run file: {' '.join(str(error).split())}") from error


def train(config: TitanConfig, settings: Any) -> None:
    """Train with the stock entry point."""

    class ConfigManager:
        def parse_args(self) -> Any:
            return settings

    FaultTolerantTrainer.plugin = config
    entry.ConfigManager = ConfigManager  # pyright: ignore[reportAttributeAccessIssue]
    entry.main()
