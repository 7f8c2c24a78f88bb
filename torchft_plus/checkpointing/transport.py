"""What moves a state dict from one group to others, under torchft's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Generic, TypeVar

T = TypeVar("T")


class CheckpointTransport(ABC, Generic[T]):
    """Sends and receives a state dict. For scripts that move state themselves: a Manager has its own way."""

    @abstractmethod
    def metadata(self) -> str:
        """What a receiver must know of this sender."""

    @abstractmethod
    def send_checkpoint(self, dst_ranks: Sequence[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Send ``state_dict``, or have it ready, for the receivers ``dst_ranks``."""

    def disallow_checkpoint(self) -> None:
        """The state dict is about to change: nobody may read it any more."""

    @abstractmethod
    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Receive what ``src_rank`` sends of ``step``; ``metadata`` is the sender's."""

    def shutdown(self, wait: bool = True) -> None:
        """End what was started."""
