"""Operations that lanes hand out, whatever the backend: a state, an error and callbacks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch
from torch.distributed import ReduceOp

from torchft_plus.process_group.lane import LaneError

logger = logging.getLogger(__name__)

_SUPPORTED: tuple[ReduceOp.RedOpType, ...] = (
    ReduceOp.SUM,
    ReduceOp.PRODUCT,
    ReduceOp.MIN,
    ReduceOp.MAX,
    ReduceOp.BAND,
    ReduceOp.BOR,
    ReduceOp.BXOR,
)


REDUCIBLE_DTYPES = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
    }
)
"""What every backend reduces."""


class LaneOperation:
    """An ``Operation`` that the lane which started it ends with ``finish``. Any thread may call anything.

    Holds the tensors it works on until it has ended.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._lock = threading.Lock()
        self._tensors = tensors
        self._ended = False
        self._error: LaneError | None = None
        self._callbacks: list[Callable[[], None]] = []

    def poll(self) -> bool:
        """True once it has ended. Never blocks."""
        return self._ended

    @property
    def error(self) -> LaneError | None:
        """Why it failed; None while it runs and after success."""
        return self._error

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when it has ended, on the thread that ends it, or at once if it is over."""
        with self._lock:
            if not self._ended:
                self._callbacks.append(callback)
                return
        callback()

    def finish(self, error: LaneError | None = None) -> bool:
        """End it, done (None) or failed. The first call counts; returns whether this was it."""
        with self._lock:
            if self._ended:
                return False
            self._error = error
            self._ended = True
            self._tensors = ()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:  # a listener's bug must not keep the others from hearing
                logger.exception("a listener of a finished operation failed")
        return True


def ended(error: LaneError | None = None) -> LaneOperation:
    """An operation that is over: done (None) or failed."""
    operation = LaneOperation()
    operation.finish(error)
    return operation


def check_arguments(tensor: torch.Tensor, op: ReduceOp.RedOpType, backend: str, device_type: str) -> None:
    """Refuse what not every backend does the same way: it would look like a failure of the lane.

    Raises:
        ValueError: ``tensor`` is on another device, strided, or of a dtype that cannot be reduced.
        ValueError: ``op`` is an average (pytorch issue 162338) or a pre-multiplied sum (which gloo lacks).
    """
    if op not in _SUPPORTED:
        raise ValueError(
            f"op is {op}, which a {backend} lane does not reduce: "
            "use ReduceOp.SUM and divide by the number of contributors"
        )
    if tensor.dtype not in REDUCIBLE_DTYPES and tensor.dtype != torch.bool:
        raise ValueError(f"the tensor is {tensor.dtype}, which {backend} does not reduce: cast it")
    if tensor.device.type != device_type:
        raise ValueError(
            f"the tensor is on {tensor.device}, and {backend} reduces {device_type} tensors: move it"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"the tensor of shape {tuple(tensor.shape)} is not contiguous: reduce a contiguous copy"
        )


def check_exchange(
    larger: torch.Tensor, smaller: torch.Tensor, ratio: int, world_size: int, device_type: str
) -> None:
    """Refuse what would not travel in equal parts.

    Args:
        larger, smaller: output and input; the larger one holds ``ratio`` times the other.
        world_size: members; each has an equal part of ``larger``.

    Raises:
        ValueError: the tensors are not flat, contiguous, of one dtype, on ``device_type`` and of fitting lengths.
    """
    for tensor in (larger, smaller):
        if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device.type != device_type:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} cannot be exchanged: "
                f"pass flat, contiguous tensors on {device_type}"
            )
    if larger.dtype != smaller.dtype or larger.numel() != ratio * smaller.numel():
        raise ValueError(
            f"{larger.numel()} x {larger.dtype} and {smaller.numel()} x {smaller.dtype} do not fit: "
            f"one must hold {ratio} times the elements of the other"
        )
    if larger.numel() % world_size:
        raise ValueError(
            f"{larger.numel()} elements are not {world_size} equal parts: pad them to a multiple of {world_size}"
        )
