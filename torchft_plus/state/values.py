"""Plain values as bounded JSON, and trees of plain values in which tensors hang. Pure.

JSON keeps ``str``, finite ``float`` (shortest repr, exact), ``int``, ``bool``, ``None``, ``list`` and
``dict`` with string keys as they are. Everything else that we carry is an object with the key ``"!"`` (a dict
that has this key itself is carried as items):

    {"!": "float", "value": "nan" | "inf" | "-inf"}
    {"!": "tuple", "items": [...]}
    {"!": "dict" | "counter", "items": [[key, value], ...]}      keys that are no strings; sorted
    {"!": "tensor", "dtype": ..., "shape": [...], "device": "cpu", "data": hex}      by value, small
    {"!": "ref", "name": ...}                                     a named tensor of the manifest

Nothing here can name a class or a function, so decoding cannot run code.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from torchft_plus.state.errors import StateError
from torchft_plus.state.memory import contiguous_local, dtype_by_name, dtype_name, memory_of

Json = dict[str, Any] | list[Any] | str | int | float | bool | None

MAX_DEPTH = 64
MAX_JSON_BYTES = 64 << 20
MAX_INT_BITS = 1024
MAX_INLINE_TENSOR_BYTES = 4096

_TAG = "!"
_HOW_TO_REGISTER = (
    "register it as numbers, strings, lists and dicts (register_values), as tensors (register_tensors), "
    "or turn it into these in a pair of callables (register_state_dict)"
)

EncodeTensor = Callable[[str, torch.Tensor], Json]
DecodeTensor = Callable[[str], torch.Tensor]


def encode(value: object, path: str, encode_tensor: EncodeTensor | None = None) -> Json:
    """Turn a plain value or tree into JSON.

    Args:
        value: nested dicts, lists, tuples, Counters, strings, numbers, bools, None and tensors.
        path: name of ``value``; the sentences of errors and ``encode_tensor`` get it extended by the keys.
        encode_tensor: what to put in place of a tensor; None carries it by value (at most 4096 bytes).

    Raises:
        StateError: something in it is neither plain nor a tensor, or a bound is passed.
    """
    return _encode(value, path, encode_tensor or inline_tensor, 0)


def _encode(value: object, path: str, encode_tensor: EncodeTensor, depth: int) -> Json:
    if depth > MAX_DEPTH:
        raise StateError(
            f"{path[:200]} is nested deeper than {MAX_DEPTH} levels: flatten it before it is registered"
        )
    match value:
        case None | bool():
            return value
        case int():
            if value.bit_length() > MAX_INT_BITS:
                raise StateError(
                    f"{path} is an integer of {value.bit_length()} bits, above {MAX_INT_BITS}: split it"
                )
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else {_TAG: "float", "value": repr(float(value))}
        case str():
            return str.__str__(value)
        case torch.Tensor():
            return encode_tensor(path, value)
        case Counter() | dict():
            return _encode_mapping(cast("Mapping[object, object]", value), path, encode_tensor, depth)
        case list():
            items = cast("list[object]", value)
            return [_encode(item, f"{path}/{i}", encode_tensor, depth + 1) for i, item in enumerate(items)]
        case tuple() if type(cast("object", value)) in (tuple, torch.Size):
            items = list(cast("tuple[object, ...]", value))
            return {_TAG: "tuple", "items": _encode(items, path, encode_tensor, depth)}
        case _:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise StateError(
                f"{path} is a {kind}, which is neither a tensor nor a plain value: {_HOW_TO_REGISTER}"
            )


def _encode_mapping(
    value: Mapping[object, object], path: str, encode_tensor: EncodeTensor, depth: int
) -> dict[str, Json]:
    if not isinstance(value, Counter) and _TAG not in value and all(isinstance(key, str) for key in value):
        return {
            str(key): _encode(item, f"{path}/{key}", encode_tensor, depth + 1) for key, item in value.items()
        }
    items: list[list[Json]] = [
        [
            _encode(key, f"key of {path}", _no_tensor, depth + 1),
            _encode(item, f"{path}/{key}", encode_tensor, depth + 1),
        ]
        for key, item in value.items()
    ]
    items.sort(key=lambda pair: canonical(pair[0]))
    return {_TAG: "counter" if isinstance(value, Counter) else "dict", "items": items}


def _no_tensor(path: str, _tensor: torch.Tensor) -> Json:
    raise StateError(f"{path} is a tensor: use a string or a number as the key")


def inline_tensor(path: str, tensor: torch.Tensor) -> Json:
    """A tensor of at most 4096 bytes by value (for example a learning rate that is a tensor).

    Raises:
        StateError: it is larger.
    """
    local = contiguous_local(tensor, path)
    size_bytes = local.numel() * local.element_size()
    if size_bytes > MAX_INLINE_TENSOR_BYTES:
        raise StateError(
            f"{path} is a tensor of {size_bytes} bytes, above the {MAX_INLINE_TENSOR_BYTES} that go among "
            "plain values: "
            "register it with register_tensors or register_state_dict"
        )
    return {
        _TAG: "tensor",
        "dtype": dtype_name(local.dtype),
        "shape": list(local.shape),
        "device": local.device.type,
        "data": memory_of(local.cpu()).hex(),
    }


def reference(name: str) -> Json:
    """What stands in a tree for the named tensor of the manifest."""
    return {_TAG: "ref", "name": name}


def decode(value: Json, path: str, decode_tensor: DecodeTensor | None = None) -> Any:
    """Inverse of ``encode``; ``decode_tensor`` gives the tensor for a name.

    Raises:
        StateError: ``value`` is not what ``encode`` makes.
    """
    return _decode(value, path, decode_tensor, 0)


def _decode(value: Json, path: str, decode_tensor: DecodeTensor | None, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise StateError(f"{path[:200]} is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, list):
        return [_decode(item, f"{path}/{i}", decode_tensor, depth + 1) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _decode(item, f"{path}/{key}", decode_tensor, depth + 1) for key, item in value.items()}
    match value:
        case {"!": "float", "value": "nan" | "inf" | "-inf" as text}:
            return float(text)
        case {"!": "tuple", "items": list(items)}:
            return tuple(_decode(cast("list[Any]", items), path, decode_tensor, depth + 1))
        case {"!": "dict" | "counter" as kind, "items": list(items)}:
            mapping = _decode_items(cast("list[Any]", items), path, decode_tensor, depth)
            return mapping if kind == "dict" else Counter(mapping)
        case {"!": "tensor"}:
            return _decode_inline(value, path)
        case {"!": "ref", "name": str(name)} if decode_tensor is not None:
            return decode_tensor(name)
        case _:
            raise StateError(f"{path} holds an object that is not understood: {str(value)[:80]}")


def _decode_items(
    items: list[Any], path: str, decode_tensor: DecodeTensor | None, depth: int
) -> dict[Any, Any]:
    mapping: dict[Any, Any] = {}
    for item in items:
        if not isinstance(item, list) or len(cast("list[Any]", item)) != 2:
            raise StateError(f"{path} holds a pair of key and value that is none: {str(item)[:80]}")
        key, inner = (_decode(part, path, decode_tensor, depth + 1) for part in cast("list[Any]", item))
        try:
            mapping[key] = inner
        except TypeError as error:
            raise StateError(f"{path} holds a key that is no plain value: {str(item)[:80]}") from error
    return mapping


def _decode_inline(value: dict[str, Any], path: str) -> torch.Tensor:
    match value:
        case {"dtype": str(dtype_text), "shape": list(shape), "device": str(), "data": str(data)} if (
            len(data) <= 2 * MAX_INLINE_TENSOR_BYTES
        ):
            pass
        case _:
            raise StateError(f"{path} holds a tensor that is not understood: {str(value)[:80]}")
    sizes = cast("list[Any]", shape)
    try:
        dtype = dtype_by_name(dtype_text)
        raw = (
            torch.frombuffer(bytearray.fromhex(data), dtype=torch.uint8)
            if data
            else torch.empty(0, dtype=torch.uint8)
        )
        return raw.view(dtype).reshape([int(size) for size in sizes])
    except (ValueError, RuntimeError, TypeError, OverflowError) as error:
        raise StateError(
            f"{path} holds a tensor whose bytes do not fit its shape or dtype: {error}"
        ) from error


def canonical(value: Json) -> str:
    """One text for equal values: sorted keys, no blanks."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def parse_json(data: bytes | bytearray, what: str) -> Json:
    """Parse bounded JSON that came from outside.

    Raises:
        StateError: it is too large, too deep or no JSON.
    """
    if len(data) > MAX_JSON_BYTES:
        raise StateError(f"{what} has {len(data)} bytes, above the bound of {MAX_JSON_BYTES}")
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise StateError(f"{what} is no JSON: {error}") from error


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")
