"""The lane of a replica that is alone: every operation is done at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ReduceOp

from torchft_plus.process_group.lane import LaneError, LaneSpec
from torchft_plus.process_group.operation import LaneOperation, check_arguments, check_exchange, ended
from torchft_plus.process_group.posting_order import Place, PostingOrder


class LocalLane:
    """A lane of one member. A sum, product, minimum or maximum over one is the input itself.

    Args:
        spec: with world size 1.
        make_group: builds a raw torch group of one rank, only if somebody asks for it.
    """

    def __init__(self, spec: LaneSpec, make_group: Callable[[], Any]) -> None:
        self._spec = spec
        self._make_group = make_group
        self._group: Any = None
        self._error: LaneError | None = None
        self._order = PostingOrder()

    @property
    def spec(self) -> LaneSpec:
        return self._spec

    @property
    def error(self) -> LaneError | None:
        return self._error

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM) -> LaneOperation:
        """Done at once; ``tensor`` is left as it is."""
        check_arguments(tensor, op, "local", tensor.device.type)
        return ended(self._error)

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> LaneOperation:
        """Done at once: a copy."""
        check_exchange(output, input, 1, 1, input.device.type)
        output.copy_(input)
        return ended(self._error)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, place: Place | None = None
    ) -> LaneOperation:
        """Done at once: a copy."""
        check_exchange(output, input, 1, 1, input.device.type)
        output.copy_(input)
        return ended(self._error) if place is None else place.take(lambda: ended(self._error))

    def reserve(self, last: bool) -> Place:
        return self._order.reserve(last)

    def process_group(self) -> Any:
        if self._group is None:
            self._group = self._make_group()
        return self._group

    def abort(self, reason: str) -> None:
        if self._error is None:
            self._error = LaneError(reason)
            self._order.abandon()

    def retire(self) -> None:
        self.abort("the lane is retired")
        self._group = None
