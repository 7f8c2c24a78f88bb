"""The memory of a version's tensors: that of training at first, copies later. No sockets.

Just before the training thread changes its tensors, what readers still need is copied and the rest is let go. Copies on the
host go to one block, at their offsets in the data, and can be made ahead on another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Condition

import torch

from torchft_plus.state.copies import batches, copy_on_device, copy_on_host, written
from torchft_plus.state.errors import StateError
from torchft_plus.state.load_plan import parts_between
from torchft_plus.state.manifest import TensorSpec
from torchft_plus.state.memory import bytes_of, contiguous_local, is_plain_memory, lies_on_host
from torchft_plus.state.sources import Entry
from torchft_plus.state.staging import Bytes, Span

IN_HAND_DEADLINE_S = 30.0
"""For the few megabytes (or the one tensor) that the other thread is copying."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that were looked up under the lock and are sent without it."""

    live: bool
    """Some of the memory is that of the training tensors."""
    spans: tuple[Span, ...]
    written: tuple[torch.Event, ...] = ()
    """When the accelerators have written it."""


class VersionMemory:
    """Bytes of one version. All methods but ``copy_ahead`` and ``detach`` are for holders of ``changed``.

    Args:
        version: its name, for messages.
        specs: the tensors as the manifest lists them.
        entries: the tensors, with their names; those that a forward may change are copied at once.
        needs: True if a reader may still need data bytes from the first argument to the second; asked with the lock held.
        changed: lock of the store.
        block: for the copies, as ``room`` makes it; of another size it is of no use.
    """

    def __init__(
        self,
        version: str,
        specs: Sequence[TensorSpec],
        entries: Iterable[tuple[str, Entry]],
        needs: Callable[[int, int], bool],
        changed: Condition,
        block: torch.Tensor | None = None,
    ) -> None:
        self.live = True
        """Some memory is still that of the training tensors."""
        self._version = version
        self._specs = specs
        self._needs = needs
        self._changed = changed
        self._starts = [spec.offset for spec in specs]
        self._lengths = [spec.size_bytes for spec in specs]
        self._memory: list[Bytes | None] = []
        self._copied: list[bool] = []
        for name, entry in entries:
            local = contiguous_local(entry.local, name)
            copied = not is_plain_memory(entry.local)
            if entry.changes_in_forward and not copied:
                local, copied = local.clone(), True
            self._memory.append(Bytes(bytes_of(local)))
            self._copied.append(copied)
        self._written = written(self._live_tensors().values())
        self._uncopied = _on_host(self._live_tensors())
        """Host tensors of the training thread that nobody has taken in hand to copy."""
        self._block = block if block is not None and len(block) == sum(self._lengths) else None
        """For copies of all data; it takes memory where something was copied to, and what was touched before."""
        self._in_hand = False
        """``copy_ahead`` is copying."""
        self._copied_bytes = 0

    def _live_tensors(self) -> dict[int, torch.Tensor]:
        """Those that are neither copied nor let go."""
        return {
            index: memory.tensor
            for index, memory in enumerate(self._memory)
            if memory is not None and not self._copied[index]
        }

    # --- reading ---

    def read(self, start: int, end: int, *, copy: bool) -> Piece:
        """Look up data bytes ``[start, end)``.

        Args:
            start: offset of the first byte.
            end: offset behind the last one.
            copy: False gives memory that the training thread may change under the sender, who then asks
                ``is_intact``.

        Raises:
            StateError: they were let go.
        """
        live = False
        spans: list[Span] = []
        for event in self._written if copy else ():
            event.wait()  # the stream in which the copies are made
        for index, first, last in parts_between(self._lengths, self._starts, start, end):
            memory = self._memory[index]
            if memory is None:
                raise StateError(
                    f"tensor {self._specs[index].name!r} of version {self._version} was let go when training went on"
                )
            live = live or not (copy or self._copied[index])
            spans.append((memory, first, last))
        if copy:
            copies = [memory.tensor[first:last].clone() for memory, first, last in spans]
            return Piece(live, tuple((Bytes(copied), 0, len(copied)) for copied in copies), written(copies))
        return Piece(live, tuple(spans), self._written)

    def is_intact(self, piece: Piece) -> bool:
        """True if no memory of ``piece`` was given back to training since it was looked up."""
        return self.live or not piece.live

    # --- copying ---

    def copy_ahead(self) -> None:
        """Copy what readers need while the training thread does something else, until nothing is left.

        Any thread but the training thread, one at a time. ``detach`` may be called at any moment; it shares the work.

        Raises:
            MemoryError: there is no room; ``detach`` will try again.
        """
        while self._copy_batch(ahead=True):
            pass

    def detach(self) -> int:
        """The training thread is about to change its tensors: copy what readers need, let go of the rest.

        Does not hold the lock while it copies: readers are served meanwhile, and what they verify needs no copy.

        Returns:
            Bytes that were copied, now or ahead.

        Raises:
            MemoryError: there is no room for them.
            TimeoutError: what ``copy_ahead`` has in hand does not end.
        """
        self._copy_accelerator()
        while True:
            while self._copy_batch(ahead=False):
                pass
            with self._changed:
                if not self._changed.wait_for(lambda: not self._in_hand, IN_HAND_DEADLINE_S):
                    raise TimeoutError(f"a copy did not end within {IN_HAND_DEADLINE_S:g} s")
                # What nobody needed when its turn came may be needed by a reader who came later.
                self._uncopied = _on_host(self._needed(self._live_tensors()))
                if not self._uncopied:
                    self._let_go()
                    return self._copied_bytes

    def drop(self) -> list[object]:
        """Let go of everything; pieces in flight are torn.

        Returns:
            What is to be forgotten on a thread that may wait: to give back a gigabyte takes the kernel 0.2 s.
        """
        kept: list[object] = (
            [self._block, *self._memory] if self._copied_bytes or self._block is not None else []
        )
        self._uncopied.clear()
        self._block = None
        self._copied = [False] * len(self._memory)
        self._let_go()
        return kept

    def _let_go(self) -> None:
        """Of all that is not copied."""
        self._memory = [
            memory if copied else None for memory, copied in zip(self._memory, self._copied, strict=True)
        ]
        self.live = False

    def _copy_batch(self, *, ahead: bool) -> bool:
        """Copy the next tensors on the host; False if there are none."""
        with self._changed:
            if not self._uncopied:
                return False
            batch = self._uncopied.pop()  # from the end on: readers begin at the beginning
            sources = self._needed(batch)
            targets = self._targets(sources) if sources else []
            self._in_hand = self._in_hand or ahead
        try:
            if sources:
                copy_on_host(targets, list(sources.values()))
                with self._changed:
                    self._keep(sources, targets)
        finally:
            if ahead:
                with self._changed:
                    self._in_hand = False
                    self._changed.notify_all()
        return True

    def _copy_accelerator(self) -> None:
        # In the order of the current stream, which the training thread's updates follow: it need not wait.
        for index in [index for index, memory in self._live_tensors().items() if not lies_on_host(memory)]:
            with self._changed:
                sources = self._needed((index,))
            copies = [copy_on_device(memory) for memory in sources.values()]
            done = written(copies)
            with self._changed:
                self._written = tuple({event.device: event for event in (*self._written, *done)}.values())
                self._keep(sources, copies)

    def _needed(self, batch: Iterable[int]) -> dict[int, torch.Tensor]:
        needed: dict[int, torch.Tensor] = {}
        for index in batch:
            memory, spec = self._memory[index], self._specs[index]
            if memory is not None and not self._copied[index] and self._needs(spec.offset, spec.end):
                needed[index] = memory.tensor
        return needed

    def _targets(self, indices: Iterable[int]) -> list[torch.Tensor]:
        if self._block is None:
            self._block = torch.empty(sum(self._lengths), dtype=torch.uint8)
        return [self._block[self._starts[index] : self._specs[index].end] for index in indices]

    def _keep(self, sources: dict[int, torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
        for (index, source), kept in zip(sources.items(), copies, strict=True):
            memory = self._memory[index]
            if memory is not None and memory.tensor is source:  # else the version was dropped meanwhile
                self._memory[index], self._copied[index] = Bytes(kept), True
                self._copied_bytes += len(kept)


def _on_host(tensors: dict[int, torch.Tensor]) -> list[tuple[int, ...]]:
    """Batches of the tensors that lie on the host."""
    return list(batches((index, len(memory)) for index, memory in tensors.items() if lies_on_host(memory)))
