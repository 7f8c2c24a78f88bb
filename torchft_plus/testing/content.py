"""What a step adds to the state, as hashes: who contributed, computed at which content, from which batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Gradient:
    """The gradient of one batch of one replica group."""

    replica_id: str
    batch: int
    computed_at: str
    """Content of the state that it was computed at."""
    rank: int = 0
    """Group rank: each holds its shard."""
    fragment: int = 0
    """Which part of the model it is of (DiLoCo)."""


@dataclass(frozen=True, slots=True)
class State:
    """A state as a joiner would fetch it."""

    content: str
    positions: tuple[tuple[str, int], ...] = ()
    """Data positions, by name."""


def initial_content(name: str) -> str:
    """Content before the first step."""
    return _hash("initial", name)


def next_content(content: str, gradients: Iterable[Gradient]) -> str:
    """Content after a step with these contributions."""
    parts = [f"{g.replica_id}:{g.batch}:{g.computed_at}:{g.fragment}" for g in sorted(gradients)]
    return _hash(content, *parts)


def positions_of(positions: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Positions in the form of ``State``."""
    return tuple(sorted(positions.items()))


def _hash(*parts: str) -> str:
    return hashlib.blake2b("|".join(parts).encode(), digest_size=6).hexdigest()
