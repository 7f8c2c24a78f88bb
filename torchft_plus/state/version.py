"""Immutable versions of the state, and which of them are kept. No sockets.

A version starts as references to live tensors. Just before the training thread changes them
(``before_update``), the version copies what its readers still need, and lets go of the rest
(``version_memory``); nobody ever waits for a reader.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition

import torch

from lighthouse.messages import Head
from torchft_plus.state.manifest import Manifest, head_name, safetensors_header
from torchft_plus.state.ranges import RangeSet
from torchft_plus.state.registry import Snapshot
from torchft_plus.state.room import Layout
from torchft_plus.state.version_memory import Piece, VersionMemory

_MAX_READERS = 256


@dataclass(slots=True)
class Pin:
    """Why a version is kept: readers are expected, or have come and not released all of it."""

    expected: int
    deadline: float
    """On the store's clock: no reader has come or asked until then, and the pin is void."""
    released: dict[str, RangeSet] = field(default_factory=dict[str, RangeSet])
    """What each reader has received and verified."""

    def needs(self, start: int, end: int) -> bool:
        """True if somebody may still ask for data bytes ``[start, end)``."""
        if len(self.released) < self.expected:
            return True
        return any(not ranges.covers(start, end) for ranges in self.released.values())


@dataclass(slots=True, eq=False)
class Hold:
    """A response that is being sent: it needs ``[start, end)``. Two of the same range are two."""

    start: int
    end: int


class Version:
    """The state of one head. All methods but ``manifest``, ``header``, ``hold``, ``copy_ahead`` and ``detach`` are for
    holders of ``changed``.

    Args:
        head: whose state it is.
        snapshot: taken at this moment, on the training thread.
        signature: of the registry.
        changed: lock of the store.
        block: for copies, if there is one already.
    """

    def __init__(
        self,
        head: Head,
        snapshot: Snapshot,
        signature: dict[str, str],
        changed: Condition,
        block: torch.Tensor | None = None,
    ) -> None:
        self.head = head
        self.pin: Pin | None = None
        self.copies_ahead = False
        """A thread of the store has been given ``copy_ahead`` to do."""
        self._changed = changed
        self._specs = snapshot.specs()
        self._memory = VersionMemory(
            head_name(head), self._specs, snapshot.entries, self.needs, changed, block
        )
        self._holds: list[Hold] = []
        self._values, self._trees, self._signature = snapshot.values, snapshot.trees, signature
        self._header: bytes | None = None
        self._manifest: bytes | None = None

    # --- what it is ---

    @property
    def live(self) -> bool:
        """Some memory is still that of the training tensors."""
        return self._memory.live

    @property
    def size_bytes(self) -> int:
        """Size of the data."""
        return self._specs[-1].end if self._specs else 0

    def layout(self) -> Layout:
        """Where the data lie."""
        return Layout.of(self._specs)

    def header(self) -> bytes:
        """Header of the safetensors file; made on first use, any thread."""
        if self._header is None:
            self._header = safetensors_header(self.head, self._specs)
        return self._header

    def manifest(self) -> bytes:
        """The manifest as JSON; made on first use, any thread."""
        if self._manifest is None:
            manifest = Manifest(
                self.head, self._signature, self._specs, len(self.header()), self._values, self._trees
            )
            self._manifest = manifest.to_bytes()
        return self._manifest

    # --- readers ---

    def add_reader(self, reader: str) -> None:
        """``reader`` has come; the version is kept until it has released everything or the pin is void."""
        if self.pin is not None and len(self.pin.released) < _MAX_READERS:
            self.pin.released.setdefault(reader, RangeSet())

    def release(self, reader: str, start: int, end: int) -> None:
        """``reader`` has verified data bytes ``[start, end)`` and will not ask for them again."""
        if self.pin is not None and reader in self.pin.released:
            self.pin.released[reader].add(start, end)

    @contextmanager
    def hold(self, start: int, end: int) -> Generator[Hold]:
        """While a response is being sent, what it has not sent yet is kept. Takes the lock itself."""
        hold = Hold(start, end)
        with self._changed:
            self._holds.append(hold)
        try:
            yield hold
        finally:
            with self._changed:
                self._holds.remove(hold)

    def is_held(self) -> bool:
        """True while a response is being sent."""
        return bool(self._holds)

    def needs(self, start: int, end: int) -> bool:
        """True if a reader may still need data bytes ``[start, end)``."""
        if self.pin is not None and self.pin.needs(start, end):
            return True
        return any(hold.start < end and start < hold.end for hold in self._holds)

    # --- bytes ---

    def read(self, start: int, end: int, *, copy: bool) -> Piece:
        """As ``VersionMemory.read``."""
        return self._memory.read(start, end, copy=copy)

    def is_intact(self, piece: Piece) -> bool:
        """True if no memory of ``piece`` was given back to training since it was looked up."""
        return self._memory.is_intact(piece)

    def copy_ahead(self) -> None:
        """As ``VersionMemory.copy_ahead``."""
        self._memory.copy_ahead()

    def detach(self) -> int:
        """As ``VersionMemory.detach``."""
        return self._memory.detach()

    def drop(self) -> list[object]:
        """As ``VersionMemory.drop``."""
        return self._memory.drop()
