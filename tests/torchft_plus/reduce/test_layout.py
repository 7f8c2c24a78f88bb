from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchft_plus.reduce.layout import Entry, plan

_shapes = st.lists(st.integers(0, 40), min_size=0, max_size=3).map(tuple)
_entries = st.lists(
    st.builds(
        Entry,
        st.text("abc", max_size=3),
        _shapes,
        st.sampled_from([torch.float32, torch.bfloat16]),
        st.sampled_from(["cpu", "cuda"]),
    ),
    min_size=1,
    max_size=30,
)


@given(_entries, st.integers(1, 4000), st.integers(1, 4000), st.booleans())
def test_each_tensor_has_one_slot_and_slots_do_not_overlap(
    entries: list[Entry], cap: int, first: int, flags: bool
) -> None:
    layout = plan(entries, cap, first, flags)
    slots = [slot for bucket in layout.buckets for slot in bucket.slots]
    assert sorted(slot.index for slot in slots) == list(range(len(entries)))
    for number, bucket in enumerate(layout.buckets):
        end = 0
        for slot in bucket.slots:
            entry = entries[slot.index]
            assert (slot.offset, slot.shape, slot.elements) == (end, entry.shape, entry.elements)
            assert (entry.dtype, entry.device_type) == (bucket.dtype, bucket.device_type)
            assert layout.bucket_of[slot.index] == number
            end += slot.elements
        assert bucket.flags_offset == end
        assert bucket.elements == end + (len(bucket.slots) if flags else 0)


@given(_entries, st.integers(1, 4000))
def test_buckets_follow_reversed_registration_and_are_closed_when_full(
    entries: list[Entry], cap: int
) -> None:
    layout = plan(entries, cap, cap)
    kinds = {(bucket.dtype, bucket.device_type) for bucket in layout.buckets}
    for kind in kinds:
        own = [bucket for bucket in layout.buckets if (bucket.dtype, bucket.device_type) == kind]
        order = [slot.index for bucket in own for slot in bucket.slots]
        assert order == sorted(order, reverse=True)
        for bucket in own:
            item = bucket.dtype.itemsize
            assert sum(slot.elements for slot in bucket.slots[:-1]) * item < cap
        assert all(bucket.flags_offset * bucket.dtype.itemsize >= cap for bucket in own[:-1])


@given(_entries, st.integers(1, 4000))
def test_the_digest_tells_layouts_apart(entries: list[Entry], cap: int) -> None:
    layout = plan(entries, cap)
    assert plan(list(entries), cap).digest == layout.digest
    more = [*entries, Entry("more", (2,), torch.float32, "cpu")]
    assert plan(more, cap).digest != layout.digest
    other = Entry(entries[0].name + "x", entries[0].shape, entries[0].dtype, entries[0].device_type)
    assert plan([other, *entries[1:]], cap).digest != layout.digest


def test_the_first_bucket_is_small() -> None:
    entries = [Entry(str(i), (100,), torch.float32, "cpu") for i in range(10)]
    assert [len(bucket.slots) for bucket in plan(entries, 1600, 400).buckets] == [1, 4, 4, 1]


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="bucket sizes are 0 and 1 bytes"):
        plan([], 0, 1)
