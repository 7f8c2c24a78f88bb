"""Gradients as torchtitan's models leave them."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

IGNORE_INDEX = -100
"""Label of a token that does not count, in torch and in torchtitan."""


def lay_out_gradient(parameter: torch.Tensor) -> None:
    """Let a gradient lie as its parameter does.

    Tensor parallelism without FSDP leaves some as unsummed parts; the optimizer would lay them out in its step. All ranks of
    a group run the same backward, so the collective that this may take comes in the same order on each.
    """
    gradient = parameter.grad
    if (
        isinstance(gradient, DTensor)
        and isinstance(parameter, DTensor)
        and gradient.placements != parameter.placements
    ):
        with torch.no_grad():
            parameter.grad = gradient.redistribute(placements=parameter.placements)
