"""Plain values survive the wire exactly; what is not plain is refused with a sentence."""

from __future__ import annotations

import datetime
import json
import math
from collections import Counter, OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchft_plus.state import StateError
from torchft_plus.state.values import canonical, decode, encode, parse_json

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**300), 2**300)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
)
KEYS = (
    st.text(max_size=4)
    | st.integers(-5, 5)
    | st.just("!")
    | st.tuples(st.integers(0, 3), st.text(max_size=2))
)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, st.integers(0, 9), max_size=3).map(Counter)
    ),
    max_leaves=20,
)


def _same(a: Any, b: Any) -> bool:
    """Equality that also sees types and the sign of zero."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b and (not isinstance(a, float) or math.copysign(1, a) == math.copysign(1, b))


@given(PLAIN)
def test_round_trip_is_exact(value: Any) -> None:
    text = json.dumps(encode(value, "x"), allow_nan=False)
    assert _same(decode(parse_json(text.encode(), "x"), "x"), value)


@given(st.dictionaries(st.text(max_size=3) | st.integers(0, 9), st.integers(), max_size=5))
def test_canonical_does_not_depend_on_order(value: dict[Any, Any]) -> None:
    backwards = dict(reversed(value.items()))
    assert canonical(encode(value, "x")) == canonical(encode(backwards, "x"))


def test_floats_that_json_lacks() -> None:
    encoded = encode([math.inf, -math.inf, math.nan, -0.0], "x")
    plus, minus, nan, zero = decode(parse_json(json.dumps(encoded, allow_nan=False).encode(), "x"), "x")
    assert (plus, minus) == (math.inf, -math.inf)
    assert math.isnan(nan)
    assert math.copysign(1, zero) == -1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_small_tensors_go_by_value(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape).to(dtype)
    got = decode(parse_json(json.dumps(encode({"lr": tensor}, "x")).encode(), "x"), "x")["lr"]
    assert got.dtype == dtype
    assert torch.equal(got, tensor)


def test_subclasses_become_plain() -> None:
    assert type(decode(encode(OrderedDict(a=1), "x"), "x")) is dict
    assert type(decode(encode(torch.Size([1, 2]), "x"), "x")) is tuple


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (object(), "neither a tensor nor a plain value: register it as"),
        (b"bytes", "neither a tensor nor a plain value"),
        ({"a": {"b": {1, 2}}}, "values/a/b is a builtins.set"),
        (datetime.timedelta(1), "datetime.timedelta"),
        (torch.float32, "torch.dtype"),
        (Point(1, 2), "Point"),
        (1j, "complex"),
        (2**2000, "integer of 2001 bits"),
        (torch.zeros(5000), "register it with register_tensors"),
        ({torch.zeros(()): 1}, "use a string or a number as the key"),
    ],
)
def test_the_rest_is_refused(value: Any, sentence: str) -> None:
    with pytest.raises(StateError, match=sentence):
        encode(value, "values")


def test_depth_is_bounded() -> None:
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    with pytest.raises(StateError, match="deeper than 64"):
        encode(deep, "x")
    with pytest.raises(StateError, match="deeper than 64"):
        decode(deep, "x")
    with pytest.raises(StateError, match="no JSON"):
        parse_json(b"[" * 100_000, "x")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["!", "items", "value", "name", "dtype", "shape", "data", "device", "a"]),
            inner,
            max_size=6,
        )
        | st.fixed_dictionaries(
            {"!": st.sampled_from(["float", "tuple", "dict", "counter", "tensor", "ref"])},
            optional={
                "items": inner,
                "value": inner,
                "name": st.text(max_size=3),
                "dtype": st.sampled_from(["float32", "int8", "object"]),
                "shape": st.lists(st.integers(-2, 4), max_size=3),
                "data": st.text("0123456789abcdefg", max_size=8),
                "device": st.just("cpu"),
            },
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_decoding_what_others_send_gives_a_value_or_a_sentence(value: Any) -> None:
    try:
        decode(value, "x", lambda name: torch.zeros(1))
    except StateError as error:
        assert str(error)


def test_constants_that_are_no_json_are_refused() -> None:
    with pytest.raises(StateError, match="no JSON number"):
        parse_json(b"[NaN]", "x")
