"""A torch backend object as a ``torch.distributed.ProcessGroup``, which offers all collectives by one interface."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup


def as_process_group(backend: Any, kind: str, device_type: str) -> Any:
    """Wrap ``backend`` so that its collectives are called as methods of a process group.

    Args:
        backend: a connected ProcessGroupGloo or ProcessGroupNCCL.
        kind: name in ``ProcessGroup.BackendType``, for example "GLOO".
        device_type: of the tensors that it takes.
    """
    make: Any = ProcessGroup  # torch's stub lacks this constructor
    group = make(HashStore(), backend.rank(), backend.size())
    backend_type = getattr(make.BackendType, kind)
    group._register_backend(torch.device(device_type), backend_type, backend)
    group._set_default_backend(backend_type)
    return group
