"""Which tensor travels in which bucket, and where: pure arithmetic, the same on every replica.

Buckets follow the *reversed* order of registration, which is about the order in which gradients appear, and depend on nothing
that is observed at run time: so every replica posts the same operations, whatever its hooks do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

MEBIBYTE = 1024 * 1024
DEFAULT_BUCKET_BYTES = 25 * MEBIBYTE
FIRST_BUCKET_BYTES = MEBIBYTE
"""The first bucket is small, so that the first operation starts early."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor (of a DTensor: the local shard)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where the tensor ``index`` of the entries lies in its bucket; offsets in elements."""

    index: int
    offset: int
    elements: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat buffer: the slots one after the other, then (if any) one presence flag per slot."""

    dtype: torch.dtype
    device_type: str
    slots: tuple[Slot, ...]
    flags_offset: int
    elements: int

    @property
    def size_bytes(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """Buckets in the order in which they are posted."""

    buckets: tuple[Bucket, ...]
    bucket_of: tuple[int, ...]
    """Bucket of each entry."""
    digest: str
    """Equal on two replicas if and only if entries and buckets are."""

    @property
    def size_bytes(self) -> int:
        return sum(bucket.size_bytes for bucket in self.buckets)


def plan(
    entries: Sequence[Entry],
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
    flags: bool = True,
) -> Layout:
    """Cut ``entries`` into buckets, each of one dtype and device.

    Args:
        entries: in order of registration.
        bucket_bytes: a bucket is closed when it holds at least so much.
        first_bucket_bytes: the same for the first bucket of each dtype and device.
        flags: whether each bucket ends with one presence flag per tensor.

    Raises:
        ValueError: a size is not positive.
    """
    if bucket_bytes <= 0 or first_bucket_bytes <= 0:
        raise ValueError(
            f"bucket sizes are {bucket_bytes} and {first_bucket_bytes} bytes: they must be above 0"
        )
    groups = _cut(entries, bucket_bytes, min(first_bucket_bytes, bucket_bytes))
    buckets = tuple(_bucket(entries, group, flags) for group in groups)
    bucket_of = [0] * len(entries)
    for number, bucket in enumerate(buckets):
        for slot in bucket.slots:
            bucket_of[slot.index] = number
    return Layout(buckets, tuple(bucket_of), _digest(entries, buckets))


def _cut(entries: Sequence[Entry], bucket_bytes: int, first_bucket_bytes: int) -> list[list[int]]:
    """Indices of each bucket, in the order in which buckets were filled, the unfilled last."""
    closed: list[list[int]] = []
    filling: dict[tuple[torch.dtype, str], list[int]] = {}
    filled_bytes: dict[tuple[torch.dtype, str], int] = {}
    limit: dict[tuple[torch.dtype, str], int] = {}
    for index in reversed(range(len(entries))):
        entry = entries[index]
        key = (entry.dtype, entry.device_type)
        filling.setdefault(key, []).append(index)
        filled_bytes[key] = filled_bytes.get(key, 0) + entry.elements * entry.dtype.itemsize
        if filled_bytes[key] >= limit.get(key, first_bucket_bytes):
            closed.append(filling.pop(key))
            filled_bytes[key] = 0
            limit[key] = bucket_bytes
    return closed + list(filling.values())


def _bucket(entries: Sequence[Entry], indices: Sequence[int], flags: bool) -> Bucket:
    slots: list[Slot] = []
    offset = 0
    for index in indices:
        entry = entries[index]
        slots.append(Slot(index, offset, entry.elements, entry.shape))
        offset += entry.elements
    first = entries[indices[0]]
    elements = offset + (len(slots) if flags else 0)
    return Bucket(first.dtype, first.device_type, tuple(slots), offset, elements)


def _digest(entries: Sequence[Entry], buckets: Sequence[Bucket]) -> str:
    lines = [f"{entry.name} {entry.shape} {entry.dtype} {entry.device_type}" for entry in entries]
    lines += [f"{bucket.elements} {[slot.index for slot in bucket.slots]}" for bucket in buckets]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
