"""A ``torch.distributed`` process group whose reductions go through a Manager, and so through the quorum."""

from __future__ import annotations

import itertools
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import AllreduceOptions
from torch.distributed import ReduceOp

from torchft_plus.process_group.works import InnerWork, SwallowingWork
from torchft_plus.process_group.wrappers import Base, Tensors, reduce_op

_numbers = itertools.count()
registry: Any = c10d


class ReducingManager(Protocol):
    """What is needed of a Manager."""

    def allreduce(
        self, tensor: torch.Tensor, *, reduce_op: ReduceOp.RedOpType = ReduceOp.AVG
    ) -> InnerWork: ...

    def report_error(self, error: Exception) -> None: ...

    def num_participants(self) -> int: ...

    def participating_rank(self) -> int | None: ...


class ManagedProcessGroup(Base):
    """Reduces over the contributors of the current quorum; failures are left to the Manager's vote, never raised.

    Usable as an ordinary process group: ``dist.all_reduce(t, group=pg)`` at once, and functional collectives,
    compiled code and ``DeviceMesh.from_group`` after ``register``. Reductions only: whatever else moves data
    between replicas would bypass the vote.

    Args:
        manager: the Manager; needs ``allreduce``, ``report_error``, ``num_participants`` and ``participating_rank``.
    """

    def __init__(self, manager: ReducingManager) -> None:
        super().__init__(0, 1)
        self._manager = manager
        self._registered_name = ""
        self._description = ""
        self._known_to_torch = False

    # --- torch.distributed's view ------------------------------------------------------------------------------------

    def size(self) -> int:
        """Contributors of the current quorum, at least 1."""
        return max(1, self._manager.num_participants())

    def rank(self) -> int:
        """Replica rank; 0 while this replica does not contribute."""
        return self._manager.participating_rank() or 0

    def getBackendName(self) -> str:
        return "torchft_plus-managed"

    @property
    def group_name(self) -> str:
        """The name in torch's registry; empty before ``register``."""
        return self._registered_name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._registered_name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def register(self, name: str) -> ManagedProcessGroup:
        """Put the group into torch's registry, so that it can be found by name. Once.

        With a default group (``init_process_group``) it is known to all of ``torch.distributed``, as a group of
        this rank alone; without, to functional collectives.

        Args:
            name: for people, for example the mesh dimension "dp_replicate".

        Raises:
            RuntimeError: it is registered already.
        """
        if self._registered_name:
            raise RuntimeError(
                f"the process group is registered as {self._description!r}: unregister() it first"
            )
        unique = f"torchft_plus_{name}_{next(_numbers)}"
        if dist.is_initialized():
            dist.Backend.register_backend(unique, lambda *_: self, devices=["cpu", "cuda"])
            # Only this rank makes it: no other must wait for that.
            dist.new_group([dist.get_rank()], backend=unique, group_desc=name, use_local_synchronization=True)
            self._known_to_torch = True
        else:
            self._set_group_name(unique)
            self._set_group_desc(name)
            registry._register_process_group(unique, self)
        return self

    def unregister(self) -> None:
        """Take it out of torch's registry again. Repeatable."""
        if not self._registered_name:
            return
        if self._known_to_torch and dist.is_initialized():
            dist.destroy_process_group(self)
        elif not self._known_to_torch:
            registry._unregister_process_group(self._registered_name)
        self._registered_name, self._known_to_torch = "", False

    def shutdown(self) -> None:
        """Nothing of its own to end: the Manager owns the connections."""

    def abort(self) -> None:
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
