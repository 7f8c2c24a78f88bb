"""Where the bytes of a version go at the joiner."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import torch

from torchft_plus.state.copies import written
from torchft_plus.state.errors import StateError
from torchft_plus.state.manifest import Manifest
from torchft_plus.state.memory import bytes_of, is_expanded, is_plain_memory, local_tensor
from torchft_plus.state.staging import Bytes, Landing, Span


class LoadPlan:
    """Memory for every tensor of a manifest: the target's own where it is plain memory, else a bounce buffer beside it.

    Bytes are written by raw writes that autograd does not see; whoever owns the tensors must not compute with
    them until the version is applied.

    Args:
        manifest: the version.
        targets: the tensor for each of ``manifest.tensors``, in order.

    Raises:
        StateError: a target cannot be written.
    """

    def __init__(self, manifest: Manifest, targets: Sequence[torch.Tensor]) -> None:
        self.manifest = manifest
        self._targets = tuple(targets)
        self._starts = [spec.offset for spec in manifest.tensors]
        self._lengths = [spec.size_bytes for spec in manifest.tensors]
        self._bounces: dict[int, torch.Tensor] = {}
        self._memory: list[Bytes] = []
        for index, (spec, target) in enumerate(zip(manifest.tensors, targets, strict=True)):
            local = local_tensor(target, spec.name)
            if is_expanded(local):
                raise StateError(
                    f"tensor {spec.name!r} was expanded: several of its elements are one in memory, which cannot be received; "
                    "register the tensor that it was expanded from"
                )
            if not is_plain_memory(local):
                local = torch.empty(spec.shape, dtype=local.dtype, device=local.device)
                self._bounces[index] = local
            self._memory.append(Bytes(bytes_of(local)))
        self._ready = written(memory.tensor for memory in self._memory)
        """What is queued up to now may still write where an accelerator's new memory was before."""
        self._complete = False

    def landing(self) -> Landing:
        """Where one connection receives."""
        return Landing(self._spans, self._ready)

    def _spans(self, start: int, end: int) -> list[Span]:
        parts = parts_between(self._lengths, self._starts, start, end)
        return [(self._memory[index], first, last) for index, first, last in parts]

    def finish(self) -> None:
        """All bytes are there and verified, and landed: move bounced tensors to their place."""
        with torch.no_grad():
            for index, bounce in self._bounces.items():
                local_tensor(self._targets[index], self.manifest.tensors[index].name).copy_(bounce)
        for event in written(self._bounces.values()):
            event.synchronize()  # the training thread may use another stream
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


def parts_between(
    lengths: Sequence[int], starts: Sequence[int], start: int, end: int
) -> Iterator[tuple[int, int, int]]:
    """Which parts make up ``[start, end)``, where part i has ``lengths[i]`` bytes and begins at
    ``starts[i]``.

    Yields:
        Index of the part, first byte in it, and the byte behind the last; parts without bytes are left out.
    """
    index = max(0, bisect_right(starts, start) - 1)
    while index < len(starts) and starts[index] < end:
        first = max(0, start - starts[index])
        last = min(lengths[index], end - starts[index])
        if first < last:
            yield index, first, last
        index += 1
