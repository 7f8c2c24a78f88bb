"""The part of a tensor that lives on this rank, and gradients made from it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from torchft_plus.reduce.layout import Entry

REDUCIBLE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Of a DTensor the local shard, else the tensor itself. No collective, no autograd."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # pyright: ignore[reportPrivateUsage]


def gradient_entry(name: str, parameter: Parameter) -> Entry:
    """What travels for ``parameter``: its local shape in the dtype of its gradient.

    Raises:
        ValueError: that dtype cannot be averaged.
    """
    local = local_part(parameter.detach())
    declared: Any = getattr(parameter, "grad_dtype", None)
    dtype: torch.dtype = parameter.dtype if declared is None else declared
    if dtype not in REDUCIBLE:
        raise ValueError(f"parameter {name} has gradients of {dtype}, which cannot be averaged: freeze it")
    return Entry(name, tuple(local.shape), dtype, local.device.type)


def local_gradient(name: str, parameter: Parameter) -> torch.Tensor | None:
    """The local part of ``parameter.grad``, or None if there is no gradient.

    Raises:
        ValueError: its layout is not that of the parameter.
    """
    if parameter.grad is None:
        return None
    gradient = local_part(parameter.grad)
    if gradient.layout != torch.strided:
        raise ValueError(f"the gradient of {name} is {gradient.layout}: use dense gradients (sparse=False)")
    expected = local_part(parameter.detach()).shape
    if gradient.shape != expected:
        raise ValueError(
            f"the gradient of {name} has the local shape {tuple(gradient.shape)}, its parameter {tuple(expected)}: "
            "redistribute it to the parameter's placements"
        )
    return gradient


def set_gradient(parameter: Parameter, local: torch.Tensor) -> None:
    """Give ``parameter`` a gradient whose local part is ``local``."""
    if not isinstance(parameter, DTensor):
        parameter.grad = local
        return
    parameter.grad = DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
