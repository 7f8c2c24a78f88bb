"""Where the bytes of a version go at the joiner."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch

from torchft_plus.state.errors import StateError
from torchft_plus.state.manifest import Manifest
from torchft_plus.state.memory import is_plain_memory, local_tensor, memory_of


class LoadPlan:
    """Memory for every tensor of a manifest: the target's own where it is plain CPU memory, else a bounce
    buffer.

    Bytes are written by raw writes that autograd does not see; whoever owns the tensors must not compute with
    them until the version is applied.

    Args:
        manifest: the version.
        targets: the tensor for each of ``manifest.tensors``, in order.
    """

    def __init__(self, manifest: Manifest, targets: Sequence[torch.Tensor]) -> None:
        self.manifest = manifest
        self._targets = tuple(targets)
        self._starts = [spec.offset for spec in manifest.tensors]
        self._bounces: dict[int, torch.Tensor] = {}
        self._memory: list[memoryview] = []
        for index, (spec, target) in enumerate(zip(manifest.tensors, targets, strict=True)):
            local = local_tensor(target, spec.name)
            if local.device.type != "cpu" or not is_plain_memory(local):
                local = torch.empty(spec.shape, dtype=local.dtype)
                self._bounces[index] = local
            self._memory.append(memory_of(local))
        self._complete = False

    def memory(self, start: int, end: int) -> list[memoryview]:
        """The memory of data bytes ``[start, end)``, in order, without empty parts."""
        return slice_memory(self._memory, self._starts, start, end)

    def finish(self) -> None:
        """All bytes are there and verified: move bounced tensors to their place."""
        with torch.no_grad():
            for index, bounce in self._bounces.items():
                local_tensor(self._targets[index], self.manifest.tensors[index].name).copy_(bounce)
        self._bounces.clear()
        self._complete = True

    def complete_tensors(self) -> dict[str, torch.Tensor]:
        """Targets by name.

        Raises:
            StateError: ``finish`` was not reached.
        """
        if not self._complete:
            raise StateError("the state was not received completely and cannot be applied")
        return {spec.name: target for spec, target in zip(self.manifest.tensors, self._targets, strict=True)}


def slice_memory(
    parts: Sequence[memoryview], starts: Sequence[int], start: int, end: int
) -> list[memoryview]:
    """The memory of ``[start, end)`` in parts that lie one after the other, part i from ``starts[i]`` on."""
    views: list[memoryview] = []
    index = max(0, bisect_right(starts, start) - 1)
    while index < len(parts) and starts[index] < end:
        part = parts[index]
        first = max(0, start - starts[index])
        last = min(len(part), end - starts[index])
        if first < last:
            views.append(part[first:last])
        index += 1
    return views
