"""What a version consists of, and the safetensors file that its bytes make. Pure.

The tensors lie one after the other without gaps: first those that take whole cache lines, so that their bytes lie in the lines
of the data as they lie in memory, then the others; both sorted by name. ``offset`` counts from the start of the data. The
*file* is the data behind a safetensors header of ``header_bytes`` bytes. Data is cut into *pieces* of ``PIECE_BYTES``, each of
which has a checksum.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from lighthouse.messages import Head
from torchft_plus.state.errors import StateError
from torchft_plus.state.memory import CACHE_LINE_BYTES, SAFETENSORS_DTYPES, dtype_by_name
from torchft_plus.state.values import Json, parse_json

FORMAT = 3
PIECE_BYTES = 4 << 20
CHECKSUM_BYTES = 16
"""Of a piece's xxh3_128."""
TRAILER_BYTES = CACHE_LINE_BYTES
"""What follows a piece on the wire: its checksum, and zeros."""
TORN = bytes(CHECKSUM_BYTES)
"""Instead of a checksum: the piece changed while it was sent."""
MAX_TENSORS = 250_000
"""More would not fit into the JSON that is read at most."""
MAX_DIMENSIONS = 64
MAX_NAME_CHARACTERS = 1024
MAX_STATE_BYTES = 1 << 50


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A named tensor of a version; for a DTensor the local shard."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    device: str
    """Device type ("cpu", "cuda"): where an optimizer wants a state tensor that is not shaped like its
    parameter."""
    offset: int
    size_bytes: int
    global_shape: tuple[int, ...] | None = None
    """For a DTensor: its whole shape, else None."""
    placements: tuple[str, ...] | None = None
    """For a DTensor: "R" or "S(dim)" per mesh dimension, else None."""

    @property
    def end(self) -> int:
        """Offset behind its last byte."""
        return self.offset + self.size_bytes

    def describe(self) -> str:
        """Dtype and shape for sentences."""
        return f"{self.dtype}{list(self.shape)}"

    def to_json(self) -> dict[str, Json]:
        """The entry of the manifest."""
        entry: dict[str, Json] = {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "device": self.device,
            "offset": self.offset,
            "size_bytes": self.size_bytes,
        }
        if self.global_shape is not None and self.placements is not None:
            entry["global_shape"] = list(self.global_shape)
            entry["placements"] = list(self.placements)
        return entry


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about a version but the bytes of its tensors."""

    head: Head
    signature: dict[str, str]
    tensors: tuple[TensorSpec, ...]
    header_bytes: int
    values: dict[str, Json]
    """Plain values that follow the step (schedules, positions, optimizer options), by registered name,
    encoded."""
    trees: dict[str, Json]
    """Plain values that belong to the tensors (optimizer state, nested dicts), by registered name,
    encoded."""

    @property
    def size_bytes(self) -> int:
        """Size of the data, without the header."""
        return self.tensors[-1].end if self.tensors else 0

    def to_bytes(self) -> bytes:
        """The manifest as JSON."""
        document = {
            "format": FORMAT,
            "head": {"step": self.head.step, "quorum_id": self.head.quorum_id, "digest": self.head.digest},
            "signature": self.signature,
            "header_bytes": self.header_bytes,
            "piece_bytes": PIECE_BYTES,
            "tensors": [spec.to_json() for spec in self.tensors],
            "values": self.values,
            "trees": self.trees,
        }
        return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def trailer(checksum: bytes) -> bytes:
    """What follows the piece with ``checksum``."""
    return checksum.ljust(TRAILER_BYTES, b"\0")


def head_name(head: Head) -> str:
    """The name of a version in addresses: ``{step}-{quorum_id}``, at step 0 followed by ``-{digest}``."""
    return f"{head.step}-{head.quorum_id}" + (f"-{head.digest}" if head.digest else "")


def parse_head(text: str) -> Head | None:
    """Inverse of ``head_name``; None if ``text`` is no name of a version."""
    parts = text.split("-")
    if not 2 <= len(parts) <= 3 or not all(
        part.isascii() and part.isalnum() and len(part) <= 64 for part in parts
    ):
        return None
    if not (parts[0].isdigit() and parts[1].isdigit()) or max(len(parts[0]), len(parts[1])) > 20:
        return None
    return Head(int(parts[0]), int(parts[1]), parts[2] if len(parts) == 3 else "")


def safetensors_header(head: Head, tensors: Sequence[TensorSpec]) -> bytes:
    """Length and JSON header of the safetensors file, padded to 8 bytes.

    A dtype that the format lacks is given as its bytes (U8); the manifest tells the truth about it.
    """
    document: dict[str, Any] = {
        "__metadata__": {"format": "pt", "head": head_name(head)},
    }
    for spec in tensors:
        name = SAFETENSORS_DTYPES.get(dtype_by_name(spec.dtype))
        document[spec.name] = {
            "dtype": name or "U8",
            "shape": list(spec.shape) if name else [spec.size_bytes],
            "data_offsets": [spec.offset, spec.end],
        }
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def parse_manifest(data: bytes | bytearray, head: Head) -> Manifest:
    """Read a manifest that came from outside and check all of it.

    Args:
        data: JSON text.
        head: the version that was asked for.

    Raises:
        StateError: it is not well formed, is of another version, or its tensors overlap, leave gaps or pass a
            bound.
    """
    match parse_json(data, "the manifest"):
        case {
            "format": 3,
            "head": {"step": int(step), "quorum_id": int(quorum_id), "digest": str(digest)},
            "signature": dict(signature),
            "header_bytes": int(header_bytes),
            "piece_bytes": int(piece_bytes),
            "tensors": list(entries),
            "values": dict(values),
            "trees": dict(trees),
        }:
            pass
        case {"format": other} if other != FORMAT:
            raise StateError(f"the manifest has format {str(other)[:20]}, this program reads format {FORMAT}")
        case _:
            raise StateError("the manifest lacks a field or has one of a wrong type")
    if Head(step, quorum_id, digest) != head:
        got = head_name(Head(step, quorum_id, digest))
        raise StateError(f"the manifest is of version {got[:120]}, asked for was {head_name(head)}")
    if piece_bytes != PIECE_BYTES:
        raise StateError(f"the manifest has pieces of {piece_bytes} bytes, this program uses {PIECE_BYTES}")
    if not 0 < header_bytes <= 1 << 30:
        raise StateError(f"the manifest has header_bytes {header_bytes}, which is out of range")
    if not all(isinstance(item, str) for item in cast("dict[str, Any]", signature).values()):
        raise StateError("the manifest has a signature whose fields are not all strings")
    return Manifest(
        head=head,
        signature=cast("dict[str, str]", signature),
        tensors=_parse_tensors(cast("list[Any]", entries)),
        header_bytes=header_bytes,
        values=cast("dict[str, Json]", values),
        trees=cast("dict[str, Json]", trees),
    )


def _parse_tensors(entries: list[Any]) -> tuple[TensorSpec, ...]:
    if len(entries) > MAX_TENSORS:
        raise StateError(f"the manifest has {len(entries)} tensors, above the bound of {MAX_TENSORS}")
    specs: list[TensorSpec] = []
    names: set[str] = set()
    offset = 0
    for entry in entries:
        spec = _parse_tensor(entry)
        if spec.name in names:
            raise StateError(f"the manifest names tensor {spec.name!r} twice")
        if spec.offset != offset:
            kind = "overlaps" if spec.offset < offset else "leaves a gap behind"
            raise StateError(f"tensor {spec.name!r} of the manifest {kind} the one before it")
        names.add(spec.name)
        specs.append(spec)
        offset = spec.end
        if offset > MAX_STATE_BYTES:
            raise StateError(f"the manifest's tensors have more than {MAX_STATE_BYTES} bytes")
    return tuple(specs)


def _parse_tensor(entry: Any) -> TensorSpec:
    match entry:
        case {
            "name": str(name),
            "dtype": str(dtype),
            "shape": list(shape),
            "device": str(device),
            "offset": int(offset),
            "size_bytes": int(size_bytes),
        } if len(name) <= MAX_NAME_CHARACTERS:
            pass
        case _:
            raise StateError(f"the manifest has a tensor that is not understood: {str(entry)[:120]}")
    sizes = _parse_shape(shape, name)
    expected = math.prod(sizes) * dtype_by_name(dtype).itemsize
    if size_bytes != expected:
        raise StateError(
            f"tensor {name!r} of the manifest has {size_bytes} bytes, its {dtype}{list(sizes)} takes "
            f"{expected}"
        )
    fields = cast("dict[str, Any]", entry)
    global_shape, placements = fields.get("global_shape"), fields.get("placements")
    if global_shape is None or placements is None:
        return TensorSpec(name, dtype, sizes, device[:16], offset, size_bytes)
    if not isinstance(placements, list) or not all(isinstance(p, str) for p in cast("list[Any]", placements)):
        raise StateError(f"tensor {name!r} of the manifest has placements that are not strings")
    whole = _parse_shape(global_shape, name)
    return TensorSpec(
        name, dtype, sizes, device[:16], offset, size_bytes, whole, tuple(cast("list[str]", placements))
    )


def _parse_shape(shape: Any, name: str) -> tuple[int, ...]:
    sizes = cast("list[Any]", shape) if isinstance(shape, list) else None
    if (
        sizes is None
        or len(sizes) > MAX_DIMENSIONS
        or not all(type(size) is int and 0 <= size <= MAX_STATE_BYTES for size in sizes)
    ):
        raise StateError(
            f"tensor {name[:120]!r} of the manifest has a shape that is out of range: {str(shape)[:80]}"
        )
    return tuple(sizes)
