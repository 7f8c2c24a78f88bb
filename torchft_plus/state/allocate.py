"""Memory for tensors that only the donor has, described by its manifest."""

from __future__ import annotations

import re

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torchft_plus.state.errors import StateError
from torchft_plus.state.manifest import TensorSpec
from torchft_plus.state.memory import dtype_by_name, local_tensor


def fits(local: torch.Tensor, spec: TensorSpec) -> bool:
    """True if ``local`` has the shape and dtype of ``spec``."""
    return local.dtype == dtype_by_name(spec.dtype) and tuple(local.shape) == spec.shape


def placement_names(tensor: torch.Tensor) -> tuple[str, ...] | None:
    """Placements of a DTensor for the manifest, else None."""
    if not isinstance(tensor, DTensor):
        return None
    return tuple(_placement_name(placement) for placement in tensor.placements)


def _placement_name(placement: Placement) -> str:
    if type(placement) is Replicate:
        return "R"
    if type(placement) is Shard:
        return f"S({placement.dim})"
    return repr(placement)


def allocate(spec: TensorSpec, like: torch.Tensor | None) -> torch.Tensor:
    """A tensor that holds ``spec``, not initialised, as an optimizer would have made it for the parameter
    ``like``.

    With the local shape of ``like`` it has the placements and the memory format of ``like``; another DTensor
    is laid out on the mesh of ``like`` as the manifest says; anything else is a plain tensor, on the CPU if
    it is there at the donor.

    Raises:
        StateError: the manifest's placements cannot be made here.
    """
    dtype = dtype_by_name(spec.dtype)
    if like is not None:
        device = "cpu" if spec.device == "cpu" else like.device
        if _laid_out_alike(spec, like) and like.device.type == spec.device:
            return torch.empty_like(like, dtype=dtype, requires_grad=False)
        if spec.placements is not None:
            return _allocate_dtensor(spec, like)
    else:
        device = "cpu"
    return torch.empty(spec.shape, dtype=dtype, device=device)


def _laid_out_alike(spec: TensorSpec, like: torch.Tensor) -> bool:
    if tuple(local_tensor(like, spec.name).shape) != spec.shape:
        return False
    if not isinstance(like, DTensor):
        return spec.placements is None
    return spec.placements == placement_names(like) and spec.global_shape == tuple(like.shape)


def _allocate_dtensor(spec: TensorSpec, like: torch.Tensor) -> torch.Tensor:
    assert spec.placements is not None
    assert spec.global_shape is not None
    if not isinstance(like, DTensor) or len(spec.placements) != like.device_mesh.ndim:
        raise StateError(
            f"tensor {spec.name!r} is a DTensor at the donor, its parameter here is laid out otherwise"
        )
    local = torch.empty(spec.shape, dtype=dtype_by_name(spec.dtype), device=like.device)
    placements = [_placement(text, spec) for text in spec.placements]
    stride = torch.empty(spec.global_shape, device="meta").stride()
    return DTensor.from_local(
        local,
        like.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(spec.global_shape),
        stride=stride,
    )


def _placement(text: str, spec: TensorSpec) -> Placement:
    if text == "R":
        return Replicate()
    match = re.fullmatch(r"S\((\d{1,2})\)", text)
    if match is None:
        raise StateError(
            f"tensor {spec.name!r} has the placement {text[:40]!r}, which cannot be made from a manifest"
        )
    return Shard(int(match.group(1)))
