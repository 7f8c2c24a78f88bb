"""State dicts as plain values and plain tensors: a DTensor is taken apart, and put together on the other side."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from torchft_plus.reduce.local_tensors import local_part
from torchft_plus.state.errors import StateError

_MARK = "torchft_plus.dtensor"


def take_apart(value: Any, path: str = "state_dict") -> Any:
    """``value`` without DTensors.

    Raises:
        StateError: a DTensor is placed in a way that has no name here.
    """
    match value:
        case DTensor():
            mesh = value.device_mesh
            return {
                _MARK: local_part(
                    value
                ).detach(),  # a rank outside the mesh would get an empty shard of value.detach()
                "device": mesh.device_type,
                "ranks": mesh.mesh.tolist(),
                "names": list(mesh.mesh_dim_names or ()),
                "placements": [_name(placement, path) for placement in value.placements],
                "shape": list(value.shape),
                "stride": list(value.stride()),
            }
        case dict():
            items = cast("dict[Any, Any]", value)
            return {key: take_apart(item, f"{path}/{key}") for key, item in items.items()}
        case list() | tuple():
            kept = [take_apart(item, path) for item in cast("list[Any]", value)]
            return kept if isinstance(value, list) else tuple(kept)
        case _:
            return value


def put_together(value: Any) -> Any:
    """Inverse of ``take_apart``. Makes device meshes, but no communicators."""
    match value:
        case dict():
            items = cast("dict[Any, Any]", value)
            if _MARK in items:
                return _dtensor(items)
            return {key: put_together(item) for key, item in items.items()}
        case list() | tuple():
            kept = [put_together(item) for item in cast("list[Any]", value)]
            return kept if isinstance(value, list) else tuple(kept)
        case _:
            return value


def _dtensor(parts: dict[Any, Any]) -> torch.Tensor:
    mesh = DeviceMesh(
        parts["device"],
        torch.tensor(parts["ranks"], dtype=torch.int),
        mesh_dim_names=tuple(parts["names"]) or None,
        _init_backend=False,
    )
    local: torch.Tensor = parts[_MARK]
    meta = TensorMeta(torch.Size(parts["shape"]), tuple(parts["stride"]), local.dtype)
    spec = DTensorSpec(mesh, tuple(_placement(name) for name in parts["placements"]), tensor_meta=meta)
    # Not from_local: whoever receives need not be in the mesh, and would be given an empty shard.
    return DTensor(local, spec, requires_grad=False)


def _name(placement: Placement, path: str) -> str:
    if type(placement) is Shard:
        return f"shard {placement.dim}"
    if type(placement) is Replicate:
        return "replicate"
    if type(placement) is Partial:
        return f"partial {placement.reduce_op}"
    raise StateError(f"{path} is a DTensor placed by {placement}, which cannot be sent: replicate it first")


def _placement(name: str) -> Placement:
    kind, _, argument = name.partition(" ")
    if kind == "shard":
        return Shard(int(argument))
    return Partial(argument) if kind == "partial" else Replicate()
