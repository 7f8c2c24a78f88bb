"""A ``torch.distributed`` process group whose reductions go through a Manager, and so through the quorum."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import AllreduceOptions
from torch.distributed import ReduceOp

from torchft_plus.process_group.registered import Registrable
from torchft_plus.process_group.works import InnerWork, SwallowingWork
from torchft_plus.process_group.wrappers import Tensors, reduce_op


class ReducingManager(Protocol):
    """What is needed of a Manager."""

    def allreduce(
        self, tensor: torch.Tensor, *, reduce_op: ReduceOp.RedOpType = ReduceOp.AVG
    ) -> InnerWork: ...

    def report_error(self, e: Exception) -> None: ...

    def num_participants(self) -> int: ...

    def participating_rank(self) -> int | None: ...

    def expect_reductions(self) -> None: ...


class ManagedProcessGroup(Registrable):
    """Reduces over the contributors of the current quorum; failures are left to the Manager's vote, never raised.

    Usable as an ordinary process group: ``dist.all_reduce(t, group=pg)`` at once, and functional collectives,
    compiled code and ``DeviceMesh.from_group`` after ``register``. Reductions only: whatever else moves data
    between replicas would bypass the vote.

    Args:
        manager: the Manager; what is needed of it is ``ReducingManager``.
    """

    def __init__(self, manager: ReducingManager) -> None:
        super().__init__()
        self._manager = manager
        manager.expect_reductions()

    # --- torch.distributed's view ------------------------------------------------------------------------------------

    def size(self) -> int:
        """Contributors of the current quorum, at least 1."""
        return max(1, self._manager.num_participants())

    def rank(self) -> int:
        """Replica rank; 0 while this replica does not contribute."""
        return self._manager.participating_rank() or 0

    def getBackendName(self) -> str:
        return "torchft_plus-managed"

    def shutdown(self) -> None:
        """Nothing of its own to end: the Manager owns the connections."""

    def abort(self, errored: bool = True) -> None:
        """As ``shutdown``."""

    # --- collectives -------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: AllreduceOptions | ReduceOp | ReduceOp.RedOpType) -> Any:
        """Reduce each tensor in place over the contributors, exactly as asked. Never raises for a failing peer."""
        op = reduce_op(opts)
        started: list[InnerWork] = []
        for tensor in tensors:
            try:
                started.append(self._manager.allreduce(tensor, reduce_op=op))
            except Exception as error:  # noqa: BLE001 - a raise in a gradient hook would cost the step (torchft 295)
                self._manager.report_error(error)
        return SwallowingWork(started, tensors, self._manager.report_error)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> Any:
        return self.allreduce(tensors, opts)

    def _refuse(self, name: str) -> Any:
        raise RuntimeError(
            f"{self.getBackendName()} does not support {name}: what moves data between replicas without a reduction would "
            "bypass the vote"
        )

    def allgather(self, *_: Any) -> Any:
        return self._refuse("allgather")

    def allgather_into_tensor_coalesced(self, *_: Any) -> Any:
        return self._refuse("allgather_into_tensor_coalesced")

    def alltoall_base(self, *_: Any) -> Any:
        return self._refuse("alltoall_base")

    def barrier(self, *_: Any) -> Any:
        return self._refuse("barrier")

    def broadcast(self, *_: Any) -> Any:
        return self._refuse("broadcast")

    def broadcast_one(self, *_: Any) -> Any:
        return self._refuse("broadcast_one")

    def recv(self, *_: Any) -> Any:
        return self._refuse("recv")

    def reduce_scatter(self, *_: Any) -> Any:
        return self._refuse("reduce_scatter")

    def reduce_scatter_tensor_coalesced(self, *_: Any) -> Any:
        return self._refuse("reduce_scatter_tensor_coalesced")

    def send(self, *_: Any) -> Any:
        return self._refuse("send")
