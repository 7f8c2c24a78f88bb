"""A manifest that comes from outside is understood completely or refused with a sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from lighthouse.messages import Head
from torchft_plus.state import StateError, StateRegistry
from torchft_plus.state.manifest import (
    MAX_TENSORS,
    Manifest,
    TensorSpec,
    head_name,
    parse_head,
    parse_manifest,
    safetensors_header,
)
from torchft_plus.state.values import MAX_JSON_BYTES

HEAD = Head(12, 5 << 32)


def _manifest() -> Manifest:
    registry = StateRegistry()
    tensors = {"b": torch.zeros(3, 4), "a": torch.zeros((), dtype=torch.bfloat16), "c": torch.zeros(0, 7)}
    registry.register_tensors("x", lambda: tensors)
    registry.register_values("v", lambda: {"lr": 0.1}, lambda _: None)
    snapshot = registry.snapshot()
    specs = snapshot.specs()
    header = safetensors_header(HEAD, specs)
    return Manifest(HEAD, registry.signature(), specs, len(header), snapshot.values, snapshot.trees)


GOOD = json.loads(_manifest().to_bytes())


def test_round_trip() -> None:
    assert parse_manifest(_manifest().to_bytes(), HEAD) == _manifest()


def test_header_is_read_by_safetensors() -> None:
    manifest = _manifest()
    tensors = load(safetensors_header(HEAD, manifest.tensors) + bytes(manifest.size_bytes))
    assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} == {
        "x/a": (torch.bfloat16, ()),
        "x/b": (torch.float32, (3, 4)),
        "x/c": (torch.float32, (0, 7)),
    }


def _changed(path: list[Any], value: Any) -> bytes:
    document = json.loads(json.dumps(GOOD))
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (["format"], 1, "format 1"),
        (["head", "step"], 13, "version 13-21474836480, asked for was 12-21474836480"),
        (["head", "quorum_id"], 1, "asked for"),
        (["head", "digest"], "ab", "asked for"),
        (["head"], None, "lacks a field"),
        (["values"], [], "lacks a field"),
        (["signature", "torch"], 1, "signature"),
        (["header_bytes"], -1, "header_bytes"),
        (["piece_bytes"], 1, "pieces of 1 bytes"),
        (["tensors", 2, "offset"], 0, "overlaps"),
        (["tensors", 2, "offset"], 8, "leaves a gap"),
        (["tensors", 2, "name"], "x/a", "twice"),
        (["tensors", 2, "name"], "x" * 2000, "not understood"),
        (["tensors", 2, "dtype"], "float16", "takes 24"),
        (["tensors", 2, "dtype"], "object", "not one of the dtypes"),
        (["tensors", 2, "size_bytes"], 1 << 60, "takes 48"),
        (["tensors", 2, "shape"], [3, -4], "out of range"),
        (["tensors", 2, "shape"], [1 << 60], "out of range"),
        (["tensors", 2, "shape"], [1] * 100, "out of range"),
        (["tensors", 2, "shape"], "3", "not understood"),
        (["tensors", 2], None, "not understood"),
    ],
)
def test_each_lie_has_its_sentence(path: list[Any], value: Any, sentence: str) -> None:
    with pytest.raises(StateError, match=sentence):
        parse_manifest(_changed(path, value), HEAD)


def test_a_huge_tensor_that_is_consistent_is_bounded() -> None:
    sizes = [1 << 50, 1 << 50]
    data = _changed(
        ["tensors"],
        [
            {
                "name": "x/a",
                "dtype": "int8",
                "shape": sizes,
                "device": "cpu",
                "offset": 0,
                "size_bytes": 1 << 100,
            }
        ],
    )
    with pytest.raises(StateError, match="more than"):
        parse_manifest(data, HEAD)


VALUES = st.none() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=3) | st.just({})


@settings(max_examples=300)
@given(st.data())
def test_fuzzed_fields_give_a_manifest_or_a_sentence(data: st.DataObject) -> None:
    document = json.loads(json.dumps(GOOD))
    for _ in range(data.draw(st.integers(1, 3))):
        place: Any = data.draw(st.sampled_from([document, document["head"], *document["tensors"]]))
        if isinstance(place, dict) and place:
            place[data.draw(st.sampled_from(sorted(place)))] = data.draw(VALUES)
            if not isinstance(document.get("tensors"), list) or not isinstance(document.get("head"), dict):
                break
    try:
        manifest = parse_manifest(json.dumps(document).encode(), HEAD)
    except StateError as error:
        assert str(error)
    else:
        assert manifest.head == HEAD
        ends = [0, *(spec.end for spec in manifest.tensors)]
        assert [spec.offset for spec in manifest.tensors] == ends[:-1]


@given(st.binary(max_size=200), st.integers(0, 2000))
def test_truncated_or_foreign_bytes_give_a_sentence(noise: bytes, cut: int) -> None:
    text = _manifest().to_bytes()
    for data in (noise, text[: min(cut, len(text) - 1)], text[:cut] + noise + b"\xff" + text[cut:]):
        with pytest.raises(StateError):
            parse_manifest(data, HEAD)


@given(st.integers(0, 2**63), st.integers(0, 2**63), st.sampled_from(["", "0af3", "f" * 32]))
def test_head_names(step: int, quorum_id: int, digest: str) -> None:
    head = Head(step, quorum_id, digest)
    assert parse_head(head_name(head)) == head


@pytest.mark.parametrize(
    "text", ["", "1", "1-2-3-4", "a-1", "1-", "-1-2", "1-2-", "1 -2", "9" * 30 + "-1", "1-٣"]
)
def test_no_head_names(text: str) -> None:
    assert parse_head(text) is None


def test_a_manifest_of_as_many_tensors_as_allowed_can_be_read() -> None:
    name = "layers.123.feed_forward.w1.weight/exp_avg_sq"
    specs = tuple(
        TensorSpec(f"optimizer/{name}/{i}", "float32", (64, 128), "cuda", i << 15, 1 << 15)
        for i in range(100)
    )
    size_bytes = len(Manifest(HEAD, {}, specs, 8, {}, {}).to_bytes())
    assert size_bytes / len(specs) * MAX_TENSORS <= MAX_JSON_BYTES
