from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from torchft_plus.reduce import codec as codecs
from torchft_plus.reduce.codec import BLOCK, NAMES, Codec, codec


def _there_and_back(one: Codec, values: torch.Tensor) -> torch.Tensor:
    payload = torch.full((one.payload_bytes(values.numel()),), 77, dtype=torch.uint8)
    one.encode(values, payload)
    decoded = torch.full_like(values, 99.0)
    one.decode(payload, decoded)
    return decoded


def _bound(name: str, values: torch.Tensor) -> torch.Tensor:
    """The greatest error that each value may have."""
    if name == "bf16":
        return values.abs() * 2.0**-8
    padded = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    absmax = padded.abs().amax(1).repeat_interleave(BLOCK)[: values.numel()]
    if name == "int8":
        return absmax / 254 * (1 + 1e-5)
    return torch.maximum(values.abs() * 2.0**-4, absmax / 448 * 2.0**-10) * (1 + 1e-5)


@given(
    st.sampled_from(NAMES),
    st.integers(0, 3 * BLOCK),
    st.integers(0, 2**31),
    st.floats(-80, 80),
    st.sampled_from([0.0, 1.0, 8.0]),
)
@example("int8", BLOCK, 0, 0.0, 0.0)
@example("fp8", BLOCK + 1, 0, 0.0, 0.0)
def test_errors_are_within_the_closed_forms(
    name: str, size: int, seed: int, power: float, spread: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator) * 2.0**power
    values *= torch.exp2(spread * torch.randn(size, generator=generator)).clamp(2.0**-20, 2.0**20)
    decoded = _there_and_back(codec(name), values)
    assert bool(((decoded - values).abs() <= _bound(name, values)).all())


@pytest.mark.parametrize("name", NAMES)
def test_special_values_are_exact(name: str) -> None:
    one = codec(name)
    for size in (1, BLOCK, BLOCK + 3):
        assert torch.equal(_there_and_back(one, torch.zeros(size)), torch.zeros(size))
    few = torch.tensor([2.0, -2.0, 0.0])
    assert torch.equal(_there_and_back(one, few), few)  # the largest of a block, and nothing


@pytest.mark.parametrize("name", NAMES)
def test_values_too_small_or_large_for_a_scale_stay_what_they_are(name: str) -> None:
    one = codec(name)
    tiny = torch.tensor([1e-45, -1e-43, 1e-40, 0.0])
    decoded = _there_and_back(one, tiny)
    assert bool((decoded.abs() <= 2 * tiny.abs().max()).all())
    large = torch.tensor([1e38, -3e38, 1.0])
    assert bool(((_there_and_back(one, large) - large).abs() <= _bound(name, large)).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_stays_so_and_harms_its_block_alone(name: str, bad: float) -> None:
    values = torch.ones(3 * BLOCK + 5)
    for place in (0, BLOCK + 7, 3 * BLOCK + 4):
        spoiled = values.clone()
        spoiled[place] = bad
        decoded = _there_and_back(codec(name), spoiled)
        assert not bool(torch.isfinite(decoded[place]))
        block = place // BLOCK * BLOCK
        others = torch.cat([decoded[:block], decoded[block + BLOCK :]])
        assert bool((others == 1).all())


@pytest.mark.parametrize("name", NAMES)
def test_a_value_depends_on_its_block_alone_and_repeats_are_equal(name: str) -> None:
    one = codec(name)
    values = torch.randn(5 * BLOCK + 9, generator=torch.Generator().manual_seed(3))
    whole = _there_and_back(one, values)
    parts = [
        _there_and_back(one, values[start : start + 2 * BLOCK])
        for start in range(0, values.numel(), 2 * BLOCK)
    ]
    assert torch.equal(whole, torch.cat(parts))
    assert torch.equal(whole, _there_and_back(one, values))


@pytest.mark.parametrize(
    ("name", "size", "expected"), [("bf16", 7, 14), ("int8", 257, 265), ("fp8", 256, 260)]
)
def test_bytes(name: str, size: int, expected: int) -> None:
    assert codec(name).payload_bytes(size) == expected
    assert codec(name).payload_bytes(0) == 0


def test_an_unknown_codec_offers_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="codec 'int9' is unknown: did you mean 'int8'"):
        codec("int9")
    with pytest.raises(ValueError, match="known are bf16, int8, fp8"):
        codec("zzz")
    monkeypatch.setattr(codecs, "_float8", lambda: None)
    with pytest.raises(ValueError, match="this torch has no float8_e4m3fn: use 'int8'"):
        codec("fp8")
