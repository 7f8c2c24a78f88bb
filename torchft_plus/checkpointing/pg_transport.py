"""A state dict through a process group, under torchft's names."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch

from torchft_plus.checkpointing.portable import put_together, take_apart
from torchft_plus.checkpointing.transport import CheckpointTransport
from torchft_plus.process_group.wrappers import ProcessGroup
from torchft_plus.state.errors import StateError
from torchft_plus.state.memory import dtype_by_name, dtype_name
from torchft_plus.state.values import MAX_JSON_BYTES, Json, decode, encode

T = TypeVar("T")
_TAG = 3


class PGTransport(CheckpointTransport[T]):
    """Sends a state dict of tensors and plain values rank to rank (no pickle: other objects are refused).

    Args:
        pg: configured by whoever uses the transport; both sides must be members.
        timeout: accepted for torchft's sake: calls have their own.
        device: where received tensors lie.
        state_dict: gives tensors to receive into, where shape and dtype fit.
    """

    def __init__(
        self,
        pg: ProcessGroup,
        timeout: timedelta,
        device: torch.device | str,
        state_dict: Callable[[], T] | None = None,
    ) -> None:
        del timeout
        self._pg = pg
        self._device = torch.device(device)
        self._own = state_dict

    def metadata(self) -> str:
        """Nothing to know: the process group is the address."""
        return "process group"

    def send_checkpoint(self, dst_ranks: Sequence[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Send ``state_dict`` to each of ``dst_ranks``, one after the other; blocks.

        Raises:
            StateError: something in it is neither a tensor nor a plain value.
            RuntimeError: a receiver is gone, or it timed out.
        """
        tensors: dict[str, torch.Tensor] = {}
        tree = _encode(state_dict, tensors)
        specs = [[name, dtype_name(one.dtype), list(one.shape)] for name, one in tensors.items()]
        header = bytearray(json.dumps({"step": step, "tree": tree, "tensors": specs}).encode())
        lines = torch.frombuffer(header, dtype=torch.uint8).to(self._device)
        size = torch.tensor([len(header)], dtype=torch.int64, device=self._device)
        for rank in dst_ranks:
            for tensor in (size, lines, *tensors.values()):
                self._pg.send([tensor.to(self._device).contiguous()], rank, _TAG).wait(timeout)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Receive what ``src_rank`` sends; blocks.

        Raises:
            StateError: it is of another step, or not what ``send_checkpoint`` sends.
            RuntimeError: the sender is gone, or it timed out.
        """
        del metadata

        def receive(into: torch.Tensor) -> torch.Tensor:
            self._pg.recv([into], src_rank, _TAG).wait(timeout)
            return into

        size = int(receive(torch.zeros(1, dtype=torch.int64, device=self._device)))
        if not 0 < size <= MAX_JSON_BYTES:
            raise StateError(f"rank {src_rank} announced a header of {size} bytes")
        lines = receive(torch.zeros(size, dtype=torch.uint8, device=self._device))
        header = json.loads(bytes(lines.cpu().numpy()))
        if header["step"] != step:
            raise StateError(f"rank {src_rank} sent step {header['step']}, and step {step} is expected")
        own: dict[str, torch.Tensor] = {}
        if self._own is not None:
            _encode(self._own(), own)
        tensors: dict[str, torch.Tensor] = {}
        for name, dtype, shape in header["tensors"]:
            tensors[name] = receive(_target(own.get(name), dtype_by_name(dtype), shape, self._device))
        return put_together(decode(header["tree"], "state_dict", tensors.__getitem__))


def _encode(state: Any, tensors: dict[str, torch.Tensor]) -> Json:
    def add(path: str, tensor: torch.Tensor) -> Json:
        tensors[path] = tensor.detach()
        return {"!": "ref", "name": path}

    return encode(take_apart(state), "state_dict", add)


def _target(
    own: torch.Tensor | None, dtype: torch.dtype, shape: list[int], device: torch.device
) -> torch.Tensor:
    if own is not None and own.dtype == dtype and list(own.shape) == shape and own.device.type == device.type:
        return own if own.is_contiguous() else torch.empty(shape, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, device=device)
