"""Tensors as bytes: local shards, dtypes by name, views of memory without a copy."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchft_plus.state.errors import StateError

CACHE_LINE_BYTES = 64
"""Some processors copy at half the speed if source and target lie differently in their cache lines. The kernel lays end to
end what a thread sends, so tensors keep their place in the lines if all that is sent before them is a multiple of this."""

# Names of safetensors where the format has the dtype; others travel as bytes and only our manifest tells
# their dtype.
SAFETENSORS_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}

_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *SAFETENSORS_DTYPES,
        torch.complex128,
        torch.complex32,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    )
}


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype on the wire, for example ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_by_name(name: str) -> torch.dtype:
    """Inverse of ``dtype_name``.

    Raises:
        StateError: the name is not one of the dtypes that may travel.
    """
    try:
        return _DTYPES[name]
    except KeyError:
        raise StateError(f"dtype {name[:40]!r} is not one of the dtypes that can be sent") from None


def local_tensor(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The plain tensor that this rank holds of ``tensor``: the local shard of a DTensor, else itself,
    detached.

    Raises:
        StateError: its memory cannot be sent (sparse, quantized, on the meta device, a tensor subclass).
    """
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    if is_traceable_wrapper_subclass(local):
        raise StateError(
            f"{name} is a {type(local).__name__}, a tensor made of others: register its parts with "
            "register_tensors"
        )
    if local.layout != torch.strided or local.is_quantized or local.device.type == "meta":
        raise StateError(
            f"{name} is a {local.layout} tensor of dtype {local.dtype} on {local.device.type}, which has no "
            "bytes to send: "
            "register it after it was materialised, or as its dense parts with register_tensors"
        )
    if dtype_name(local.dtype) not in _DTYPES:
        raise StateError(
            f"{name} has dtype {local.dtype}, which cannot be sent: register a view of a plain dtype"
        )
    return local


def lies_on_host(tensor: torch.Tensor) -> bool:
    """True if the processor can read and write the memory of ``tensor``."""
    return tensor.device.type == "cpu"


def is_plain_memory(local: torch.Tensor) -> bool:
    """True if the bytes of ``local`` in row-major order are one block of memory as they are."""
    return local.is_contiguous() and not local.is_conj() and not local.is_neg()


def is_expanded(local: torch.Tensor) -> bool:
    """True if several elements of ``local`` are one in memory."""
    return any(stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape, strict=True))


def contiguous_local(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """``local_tensor`` with plain memory, copied where it must be."""
    local = local_tensor(tensor, name)
    if is_plain_memory(local):
        return local
    return local.resolve_conj().resolve_neg().contiguous()


def bytes_of(local: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor with plain memory as a 1-D uint8 tensor, no copy."""
    return local.reshape(-1).view(torch.uint8)


def memory_of(local: torch.Tensor) -> memoryview:
    """The memory of a CPU tensor with plain memory, no copy. Writes go to the tensor and autograd does not
    see them."""
    return bytes_of(local).numpy().data
