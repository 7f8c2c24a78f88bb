"""Memory for a version's copies is touched while a step is computed, from the moment when readers are announced."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from state_replicas import InBackground, bytes_of_piece, head_at
from torch.multiprocessing.reductions import StorageWeakRef

from torchft_plus.state import StateRegistry, room
from torchft_plus.state.errors import StateError
from torchft_plus.state.manifest import TensorSpec
from torchft_plus.state.room import Layout, Room
from torchft_plus.state.version import Version
from torchft_plus.state.version_store import NotServed, VersionStore

COUNT, SIZE = 6, 100
STORE = "torchft_plus.state.version_store"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_PART_BYTES", SIZE)
    monkeypatch.setattr(f"{STORE}.LEAST_BYTES", 1)


class Touching:
    """Stands for ``_touch``: the helper waits for a word before each part but the first ``free`` ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int = COUNT) -> None:
        self.parts: list[tuple[int, int]] = []
        self.works = True
        self._words = threading.Semaphore(free)
        self.waits = threading.Event()
        monkeypatch.setattr(room, "_touch", self)

    def __call__(self, block: torch.Tensor, start: int, end: int) -> bool:
        if not self._words.acquire(blocking=False):
            self.waits.set()
            assert self._words.acquire(timeout=30)
        self.parts.append((start, end))
        return self.works

    def wait_in_hand(self) -> None:
        """Until the helper has touched all that it may, and has the next part in hand."""
        assert self.waits.wait(30)

    def go_on(self) -> None:
        """Let it touch all the rest."""
        self._words.release(COUNT)


class Donor:
    """A store over six tensors that hold the number of the step."""

    def __init__(self) -> None:
        self.step = 0
        self.tensors = {str(index): torch.zeros(SIZE, dtype=torch.uint8) for index in range(COUNT)}
        registry = StateRegistry()
        registry.register_tensors("x", lambda: self.tensors, advanced_by_optimizer=True)
        self.registry = registry
        self.store = VersionStore(registry, linger_ms=60_000)

    def start(self) -> None:
        """A step begins."""
        self.store.publish(head_at(self.step))

    def finish(self) -> int:
        """It ends in an update; the bytes that were copied."""
        self.store.publish(head_at(self.step), update_follows=True)
        copied_bytes = self.store.before_update()
        self.step += 1
        for tensor in self.tensors.values():
            tensor.add_(1)
        return copied_bytes

    def run_one_step(self) -> None:
        """After it, and in the next step, the store knows how large the state is."""
        self.start()
        self.finish()
        self.start()

    def pin(self) -> None:
        """Readers are announced."""
        self.store.pin(head_at(self.step))

    def version(self, step: int) -> Version:
        return self.store.acquire(head_at(step), 0, None)

    def wait_for_helpers(self) -> None:
        deadline = time.monotonic() + 30
        while self.store._helpers:
            assert time.monotonic() < deadline, "a helper does not end"
            threading.Event().wait(0.005)


def _content(version: Version) -> bytes:
    return bytes_of_piece(version.read(0, COUNT * SIZE, copy=False))


def _block_of(donor: Donor) -> torch.Tensor:
    made = donor.store._room
    assert made is not None
    return made.block


def test_room_is_made_from_the_pin_on_from_the_end_and_taken_for_the_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    touching, donor = Touching(monkeypatch), Donor()
    donor.run_one_step()
    donor.pin()
    donor.wait_for_helpers()
    assert touching.parts == [(first * SIZE, (first + 1) * SIZE) for first in reversed(range(COUNT))]
    address = _block_of(donor).data_ptr()
    assert donor.finish() == COUNT * SIZE
    version = donor.version(1)
    block = version._memory._block
    assert block is not None
    assert block.data_ptr() == address
    assert donor.store._room is None
    assert _content(version) == bytes([1]) * (COUNT * SIZE)


def test_a_version_that_is_captured_ends_it_and_readers_may_have_all_by_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    touching, donor = Touching(monkeypatch, free=2), Donor()
    donor.run_one_step()
    donor.pin()
    touching.wait_in_hand()
    donor.start()
    version = donor.version(1)
    touching.go_on()
    donor.wait_for_helpers()
    assert len(touching.parts) == 3, "the one in hand was the last"
    donor.store.acquire(head_at(1), 0, "r")
    with donor.store.changed:
        version.release("r", 0, COUNT * SIZE)
    assert donor.finish() == 0
    donor.wait_for_helpers()
    assert version._memory._block is None


@pytest.mark.parametrize("end", ["unpin", "withdraw", "void"])
def test_room_that_nobody_needs_any_more_is_given_back(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    touching, donor = Touching(monkeypatch, free=2), Donor()
    donor.run_one_step()
    donor.pin()
    touching.wait_in_hand()
    block = StorageWeakRef(_block_of(donor).untyped_storage())
    if end == "unpin":
        donor.store.unpin(head_at(1))
        donor.start()
    elif end == "withdraw":
        donor.store.withdraw()
    else:
        monkeypatch.setattr(donor.store, "_linger", -1.0)
        donor.start()
    touching.go_on()
    donor.wait_for_helpers()
    assert len(touching.parts) == 3, "the one in hand was the last"
    assert block.expired()
    assert donor.finish() == 0


def test_a_store_that_is_closed_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    touching, donor = Touching(monkeypatch, free=2), Donor()
    donor.run_one_step()
    donor.pin()
    touching.wait_in_hand()
    closing = InBackground(donor.store.close)
    touching.go_on()
    closing.result()
    donor.pin()
    assert not donor.store._helpers
    assert donor.store._room is None


def test_there_is_none_for_a_head_that_is_gone_or_served(monkeypatch: pytest.MonkeyPatch) -> None:
    touching, donor = Touching(monkeypatch), Donor()
    donor.run_one_step()
    donor.store.pin(head_at(0))
    donor.wait_for_helpers()
    donor.pin()
    donor.wait_for_helpers()
    donor.finish()
    made = len(touching.parts)
    donor.store.pin(head_at(1), 2)
    donor.wait_for_helpers()
    assert len(touching.parts) == made == COUNT


def test_there_is_none_before_the_first_update_nor_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer makes its state in the first update."""
    touching, donor = Touching(monkeypatch), Donor()
    donor.start()
    donor.pin()
    assert donor.finish() == COUNT * SIZE
    monkeypatch.setattr(f"{STORE}.LEAST_BYTES", COUNT * SIZE + 1)
    donor.start()
    donor.pin()
    assert donor.finish() == COUNT * SIZE
    donor.wait_for_helpers()
    assert touching.parts == []


def test_a_callable_that_makes_the_state_is_not_called_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take long, and be a collective."""
    calls: list[int] = []

    def save() -> dict[str, torch.Tensor]:
        calls.append(1)
        return donor.tensors

    touching, donor = Touching(monkeypatch), Donor()
    donor.registry.register_state_dict("y", save, lambda _: None)
    calls.clear()
    donor.run_one_step()
    donor.start()
    assert (calls, touching.parts) == ([], [])


def test_a_second_version_gets_room_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    touching, donor = Touching(monkeypatch, free=3 * COUNT), Donor()
    donor.run_one_step()
    for _ in range(2):
        donor.pin()
        donor.pin()
        donor.wait_for_helpers()
        donor.finish()
        donor.start()
    assert len(touching.parts) == 2 * COUNT, "two pins of one head make one room"
    assert [_content(donor.version(step))[0] for step in (1, 2)] == [1, 2]


def test_room_of_another_size_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    Touching(monkeypatch, free=3 * COUNT)
    donor = Donor()
    donor.run_one_step()
    donor.pin()
    donor.wait_for_helpers()
    donor.tensors["late"] = torch.full((SIZE,), 1, dtype=torch.uint8)
    assert donor.finish() == (COUNT + 1) * SIZE
    assert _content(donor.version(1)) == bytes([1]) * (COUNT * SIZE)
    donor.start()
    donor.pin()
    donor.wait_for_helpers()
    assert len(_block_of(donor)) == (COUNT + 1) * SIZE, "its size is known now"


def test_a_kernel_that_cannot_do_it_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    touching, donor = Touching(monkeypatch), Donor()
    touching.works = False
    donor.run_one_step()
    donor.pin()
    donor.wait_for_helpers()
    assert len(touching.parts) == 1
    assert donor.finish() == COUNT * SIZE
    assert _content(donor.version(1)) == bytes([1]) * (COUNT * SIZE)


def test_no_memory_for_it_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Layout) -> Room:
        raise RuntimeError("no room")

    donor = Donor()
    donor.run_one_step()
    monkeypatch.setattr(f"{STORE}.Room", refuse)
    donor.pin()
    donor.wait_for_helpers()
    assert donor.finish() == COUNT * SIZE
    assert _content(donor.version(1)) == bytes([1]) * (COUNT * SIZE)


def test_a_state_that_cannot_be_read_is_told_to_its_readers_only() -> None:
    donor = Donor()
    donor.start()
    donor.finish()
    donor.tensors = {"x": torch.zeros(2, 2).to_sparse()}
    donor.start()
    donor.pin()
    assert donor.store.before_update() == 0
    with pytest.raises(NotServed, match="its state could not be read"):
        donor.version(1)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_the_kernel_gives_the_memory_and_leaves_its_content() -> None:
    size_bytes = 64 << 20
    made = Room(Layout(size_bytes, ((0, 32 << 20), (40 << 20, size_bytes))))
    made.block[:5] = torch.arange(5, dtype=torch.uint8)
    if not room._touch(made.block, 0, 1):
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    between = made.block[33 << 20 : 39 << 20]
    before = _resident_pages(between)
    for start, end in ((1, 32 << 20), ((40 << 20) + 1, size_bytes)):
        assert room._touch(made.block, start, end)
        assert _resident_pages(made.block[start:end]) >= (end - start) // mmap.PAGESIZE - 1
    assert _resident_pages(between) == before
    assert made.block[:5].tolist() == [0, 1, 2, 3, 4]


def _resident_pages(memory: torch.Tensor) -> int:
    """Of the whole pages within ``memory``; what the process has in all changes with what other threads free."""
    first = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (memory.data_ptr() + len(memory) - first) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * mmap.PAGESIZE), found) == 0
    return sum(one & 1 for one in found)


def test_another_system_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    room._madvise.cache_clear()
    monkeypatch.setattr("sys.platform", "darwin")
    assert not room._touch(torch.empty(1, dtype=torch.uint8), 0, 1)
    room._madvise.cache_clear()


def test_only_what_lies_on_the_host_is_touched() -> None:
    specs: list[TensorSpec] = []
    offset = 0
    for device, size_bytes in (("cpu", 10), ("cpu", 0), ("cpu", 5), ("cuda", 100), ("cpu", 1), ("cuda", 1)):
        shape = (size_bytes,)
        specs.append(TensorSpec("x", "uint8", shape, device, offset, size_bytes, None, None))
        offset += size_bytes
    layout = Layout.of(specs)
    assert layout == Layout(117, ((0, 15), (115, 116)))
    assert layout.host_bytes == 16
    assert list(room._parts(Layout(300, ((0, 150), (290, 300))))) == [(290, 300), (50, 150), (0, 50)]
    assert Layout.of([]) == Layout(0, ())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_steps_in_quick_succession(data: st.DataObject) -> None:
    """No word holds anybody back here: the helpers and the training thread meet where they meet."""
    donor = Donor()
    for _ in range(data.draw(st.integers(1, 8))):
        donor.start()
        if data.draw(st.booleans()):
            donor.pin()
        if data.draw(st.booleans()):
            donor.start()
        if data.draw(st.integers(0, 3)) == 0:
            donor.store.unpin(head_at(donor.step))
        if data.draw(st.integers(0, 5)) == 0:
            donor.store.withdraw()
        donor.finish()
        for head in donor.store.served()[1]:
            try:
                assert _content(donor.version(head.step)) == bytes([head.step]) * (COUNT * SIZE)
            except StateError:
                continue
    donor.store.close()
    assert not donor.store._helpers
    assert donor.store._room is None
