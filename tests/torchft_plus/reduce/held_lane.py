"""A lane whose operations end when the test says, on another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from torchft_plus.process_group.lane import LaneError, LaneSpec
from torchft_plus.process_group.operation import LaneOperation, ended


class HeldLane:
    """A lane of ``world_size``; ``others`` says what the other members add to each tensor."""

    def __init__(
        self, world_size: int = 2, others: Callable[[torch.Tensor, Any], None] | None = None
    ) -> None:
        self.spec = LaneSpec(HashStore(), 0, world_size, 1, 1000)
        self.error: LaneError | None = None
        self.started: list[tuple[torch.Tensor, LaneOperation]] = []
        self._ops: list[Any] = []
        self._others = others

    def allreduce(self, tensor: torch.Tensor, op: Any = None) -> LaneOperation:
        if self.error is not None:
            return ended(self.error)
        operation = LaneOperation(tensor)
        self.started.append((tensor, operation))
        self._ops.append(op)
        return operation

    def end(self, error: LaneError | None = None, first: int = 0, last: int | None = None) -> None:
        """End the operations ``first`` to ``last``, well or not."""
        self.error = error

        def run() -> None:
            for (tensor, operation), op in list(zip(self.started, self._ops, strict=True))[first:last]:
                if error is None and self._others is not None and not operation.poll():
                    self._others(tensor, op)
                operation.finish(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(10)

    def forget(self) -> None:
        """Start counting anew."""
        self.started.clear()
        self._ops.clear()

    def process_group(self) -> Any:
        raise AssertionError("nobody asks a held lane for it")

    def abort(self, reason: str) -> None: ...

    def retire(self) -> None: ...
