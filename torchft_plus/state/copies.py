"""How tensors are copied for versions: many small ones in one call, or on their accelerator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

_BATCH_BYTES = 4 << 20
_BATCH_TENSORS = 256
"""At most so many in one call: what is done for each of them in Python stays below a millisecond."""


def batches(sizes_bytes: Iterable[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    """Cut (index, size) pairs into runs that are copied in one call each, so that other threads get their turn.

    Yields:
        Indices, in order.
    """
    batch: list[int] = []
    batch_bytes = 0
    for index, size_bytes in sizes_bytes:
        if batch and (batch_bytes + size_bytes > _BATCH_BYTES or len(batch) == _BATCH_TENSORS):
            yield tuple(batch)
            batch, batch_bytes = [], 0
        batch.append(index)
        batch_bytes += size_bytes
    if batch:
        yield tuple(batch)


def copy_on_host(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy host memory to host memory in one call, so that Python's lock is given away once and not per tensor.

    Raises:
        RuntimeError: there is nothing to copy.
    """
    torch._foreach_copy_(list(targets), list(sources))  # pyright: ignore[reportPrivateUsage]


def written(memory: Iterable[torch.Tensor]) -> tuple[torch.Event, ...]:
    """When what the current streams have been given so far is done, on each accelerator that ``memory`` lies on."""
    devices = {tensor.device for tensor in memory if tensor.device.type != "cpu"}
    events: list[torch.Event] = []
    for device in devices:
        event = torch.Event(device)
        event.record(torch.accelerator.current_stream(device))
        events.append(event)
    return tuple(events)


def copy_on_device(memory: torch.Tensor) -> torch.Tensor:
    """A copy on the same accelerator; on the host if that has no room."""
    try:
        return memory.clone()
    except torch.OutOfMemoryError:
        return memory.to("cpu", copy=True)
