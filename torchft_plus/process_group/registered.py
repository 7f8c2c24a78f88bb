"""A process group of ours in torch's registry: for functional collectives, compiled code and device meshes."""

from __future__ import annotations

import itertools
from typing import Any, Self

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup as TorchProcessGroup

_numbers = itertools.count()
_registry: Any = c10d
Base: Any = TorchProcessGroup
"""torch's stub of it is wrong in constructor and arguments."""


class Registrable(Base):
    """A process group of Python that torch can find by name."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self._registered_name = ""
        self._description = ""
        self._known_to_torch = False

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

    def register(self, name: str) -> Self:
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
            _registry._register_process_group(unique, self)
        return self

    def unregister(self) -> None:
        """Take it out of torch's registry again. Repeatable."""
        if not self._registered_name:
            return
        if self._known_to_torch and dist.is_initialized():
            dist.destroy_process_group(self)
        elif not self._known_to_torch:
            _registry._unregister_process_group(self._registered_name)
        self._registered_name, self._known_to_torch = "", False
