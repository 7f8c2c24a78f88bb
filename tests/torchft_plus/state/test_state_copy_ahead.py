"""Copies that another thread makes before the training thread must: whoever comes first, a version reads as it was."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from state_replicas import InBackground, bytes_of_piece, head_at
from torch.multiprocessing.reductions import StorageWeakRef

from torchft_plus.state import StateError, StateRegistry, StateServer
from torchft_plus.state.copies import batches, copy_on_host
from torchft_plus.state.version import Version
from torchft_plus.state.version_store import NotServed, VersionStore

COUNT, SIZE = 6, 100
COPY = "torchft_plus.state.version_memory.copy_on_host"


@pytest.fixture(autouse=True)
def _one_tensor_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchft_plus.state.copies._BATCH_TENSORS", 1)


class Copying:
    """Stands for ``copy_on_host``: the helper's copies wait for a word each, those of other threads do not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_training = 0
        self.in_hand = threading.Semaphore(0)
        self._words = threading.Semaphore(0)
        self._free = threading.Event()
        self.error: Exception | None = None
        monkeypatch.setattr(COPY, self)

    def __call__(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        if threading.current_thread().name != "state-helper":
            self.by_training += 1
        elif not self._free.is_set():
            self.in_hand.release()
            assert self._words.acquire(timeout=30)
        if self.error is not None:
            raise self.error
        copy_on_host(targets, sources)

    def wait_in_hand(self) -> None:
        """Until the helper is about to copy a tensor."""
        assert self.in_hand.acquire(timeout=30)

    def go_on(self) -> None:
        """Let it copy that one."""
        self._words.release()

    def go_free(self) -> None:
        """Let it copy that one and all others."""
        self._free.set()
        self._words.release()


class Donor:
    """A store over six tensors that hold the number of the step."""

    def __init__(self) -> None:
        self.tensors = {str(index): torch.zeros(SIZE, dtype=torch.uint8) for index in range(COUNT)}
        registry = StateRegistry()
        registry.register_tensors("x", lambda: self.tensors)
        self.store = VersionStore(registry, linger_ms=60_000)

    def capture(self, step: int = 0, readers: int = 1) -> Version:
        """As ``finish_step`` does, with readers that are expected."""
        self.store.pin(head_at(step), readers)
        self.store.publish(head_at(step), update_follows=True)
        return self.store.acquire(head_at(step), 0, None)

    def update(self) -> int:
        copied_bytes = self.store.before_update()
        for tensor in self.tensors.values():
            tensor.add_(1)
        return copied_bytes

    def wait_for_helpers(self) -> None:
        deadline = time.monotonic() + 30
        while self.store._helpers:
            assert time.monotonic() < deadline, "a helper does not end"
            threading.Event().wait(0.005)


def _content(version: Version, start: int = 0, end: int = COUNT * SIZE) -> bytes:
    return bytes_of_piece(version.read(start, end, copy=False))


def _block(version: Version) -> StorageWeakRef:
    """Tells whether the copies are still in memory."""
    block = version._memory._block
    assert block is not None
    return StorageWeakRef(block.untyped_storage())


def test_all_is_copied_before_the_update_and_nothing_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    copying, donor = Copying(monkeypatch), Donor()
    copying.go_free()
    version = donor.capture()
    donor.wait_for_helpers()
    assert donor.update() == COUNT * SIZE
    assert copying.by_training == 0
    assert _content(version) == bytes(COUNT * SIZE)
    assert version.is_intact(version.read(0, SIZE, copy=False))


def test_the_update_waits_for_the_tensor_in_hand_and_copies_the_rest_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copying, donor = Copying(monkeypatch), Donor()
    version = donor.capture()
    copying.wait_in_hand()
    copying.go_on()
    copying.wait_in_hand()
    update = InBackground(donor.update)
    deadline = time.monotonic() + 30
    while copying.by_training < COUNT - 2 and time.monotonic() < deadline:
        threading.Event().wait(0.005)
    assert copying.by_training == COUNT - 2, "all but the one that is copied and the one in hand"
    assert update.running
    assert donor.tensors["0"][0] == 0
    copying.go_free()
    assert update.result() == COUNT * SIZE
    assert _content(version) == bytes(COUNT * SIZE)
    donor.wait_for_helpers()


def test_without_a_word_that_an_update_follows_nothing_is_copied_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A forward and a backward are long: readers may have it all by then."""
    copying, donor = Copying(monkeypatch), Donor()
    donor.store.pin(head_at(0))
    donor.store.publish(head_at(0))
    assert not donor.store._helpers
    assert donor.update() == COUNT * SIZE
    assert copying.by_training == COUNT


def _verified_while_copying(copying: Copying, donor: Donor) -> Version:
    """A version of which a reader has verified the first three tensors before their turn to be copied came."""
    version = donor.capture()
    copying.wait_in_hand()
    donor.store.acquire(head_at(0), 0, "early")
    with donor.store.changed:
        version.release("early", 0, 3 * SIZE)
    copying.go_free()
    donor.wait_for_helpers()
    return version


def test_what_was_verified_is_not_copied_but_for_a_reader_who_comes_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copying, donor = Copying(monkeypatch), Donor()
    version = _verified_while_copying(copying, donor)
    assert copying.by_training == 0
    assert version.live
    donor.store.acquire(head_at(0), 0, "late")
    assert donor.update() == COUNT * SIZE
    assert copying.by_training == 3
    assert _content(version) == bytes(COUNT * SIZE)


def test_what_was_verified_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    copying, donor = Copying(monkeypatch), Donor()
    version = _verified_while_copying(copying, donor)
    assert donor.update() == 3 * SIZE
    assert _content(version, 3 * SIZE) == bytes(3 * SIZE)
    with pytest.raises(StateError, match="was let go"):
        version.read(0, 1, copy=False)


@pytest.mark.parametrize("end", ["withdraw", "unpin", "close"])
def test_a_version_that_ends_while_it_is_copied_leaves_no_memory_and_no_thread(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    copying, donor = Copying(monkeypatch), Donor()
    version = donor.capture()
    copying.wait_in_hand()
    copying.go_on()
    copying.wait_in_hand()
    block = _block(version)
    closing = None
    if end == "withdraw":
        donor.store.withdraw()
    elif end == "close":
        closing = InBackground(donor.store.close)
    else:
        donor.store.unpin(head_at(0))
    copying.go_free()
    if closing is not None:
        closing.result()
    assert donor.update() == 0
    donor.wait_for_helpers()
    assert donor.store.served()[1] == ()
    with pytest.raises(StateError, match="was let go"):
        version.read(0, 1, copy=False)
    assert block.expired(), "the copies are still held"


def test_memory_of_a_version_that_all_have_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    copying, donor = Copying(monkeypatch), Donor()
    copying.go_free()
    version = donor.capture()
    donor.store.acquire(head_at(0), 0, "r")
    donor.update()
    block = _block(version)
    assert not block.expired()
    with donor.store.changed:
        version.release("r", 0, COUNT * SIZE)
    donor.store.publish(head_at(1))
    donor.wait_for_helpers()
    assert block.expired()


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("no room"), TypeError("a bug")])
def test_what_fails_ahead_is_done_again_by_the_update(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    copying, donor = Copying(monkeypatch), Donor()
    copying.error = error
    copying.go_free()
    version = donor.capture()
    donor.wait_for_helpers()
    copying.error = None
    assert donor.update() == COUNT * SIZE
    assert copying.by_training == COUNT
    assert _content(version) == bytes(COUNT * SIZE)


def test_a_version_that_cannot_be_copied_at_all_is_void(monkeypatch: pytest.MonkeyPatch) -> None:
    copying, donor = Copying(monkeypatch), Donor()
    copying.error = MemoryError()
    copying.go_free()
    donor.capture()
    assert donor.update() == 0
    with pytest.raises(NotServed, match="it could not be kept when training went on"):
        donor.store.acquire(head_at(0), 0, None)
    copying.error = None
    version = donor.capture(1)
    donor.update()
    assert _content(version) == bytes([1]) * (COUNT * SIZE)


def test_a_copy_that_hangs_costs_the_version_and_not_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    copying, donor = Copying(monkeypatch), Donor()
    monkeypatch.setattr("torchft_plus.state.version_memory.IN_HAND_DEADLINE_S", 0.05)
    donor.capture()
    copying.wait_in_hand()
    assert donor.update() == 0
    with pytest.raises(NotServed, match="did not end within"):
        donor.store.acquire(head_at(0), 0, None)
    copying.go_free()
    donor.wait_for_helpers()
    assert donor.store.served()[1] == (), "what came late changes nothing"


def test_no_thread_to_be_had_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    donor = Donor()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        version = donor.capture()
        assert donor.update() == COUNT * SIZE
        assert _content(version) == bytes(COUNT * SIZE)
        donor.store.withdraw()
    donor.store.close()


def test_tensors_that_were_replaced_or_resized_since_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    copying, donor = Copying(monkeypatch), Donor()
    version = donor.capture()
    copying.wait_in_hand()
    donor.tensors = {name: torch.full((2 * SIZE,), 9, dtype=torch.uint8) for name in donor.tensors}
    copying.go_free()
    assert donor.update() == COUNT * SIZE
    assert _content(version) == bytes(COUNT * SIZE)
    donor.wait_for_helpers()


def test_the_training_thread_copies_what_lies_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none here: the first three tensors pass for its."""
    by_thread: list[str] = []

    def copy(memory: torch.Tensor) -> torch.Tensor:
        by_thread.append(threading.current_thread().name)
        return memory.clone()

    copying, donor = Copying(monkeypatch), Donor()
    there = {donor.tensors[str(index)].data_ptr() for index in range(3)}
    prefix = "torchft_plus.state.version_memory"
    monkeypatch.setattr(f"{prefix}.lies_on_host", lambda memory: memory.data_ptr() not in there)
    monkeypatch.setattr(f"{prefix}.copy_on_device", copy)
    copying.go_free()
    version = donor.capture()
    donor.wait_for_helpers()
    assert by_thread == []
    assert donor.update() == COUNT * SIZE
    assert by_thread == [threading.current_thread().name] * 3
    assert copying.by_training == 0
    assert _content(version) == bytes(COUNT * SIZE)


def test_the_server_ends_the_thread_that_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    copying = Copying(monkeypatch)
    before = set(threading.enumerate())
    registry = StateRegistry()
    tensors = {str(index): torch.zeros(SIZE) for index in range(COUNT)}
    registry.register_tensors("x", lambda: tensors)
    server = StateServer(registry)
    server.pin(head_at(0))
    server.publish(head_at(0), update_follows=True)
    copying.wait_in_hand()
    closing = InBackground(server.close)
    copying.go_free()
    closing.result()
    assert {thread for thread in set(threading.enumerate()) - before if thread.is_alive()} <= {
        closing._thread
    }


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_publish_and_update_in_quick_succession(data: st.DataObject) -> None:
    """No word holds anybody back here: the helper and the training thread meet where they meet."""
    donor = Donor()
    kept: dict[int, Version] = {}
    for step in range(data.draw(st.integers(1, 8))):
        if data.draw(st.booleans()):
            kept[step] = donor.capture(step, readers=data.draw(st.integers(1, 2)))
        donor.store.publish(head_at(step), update_follows=data.draw(st.booleans()))
        if data.draw(st.integers(0, 4)) == 0:
            donor.store.withdraw()
            kept.clear()
        donor.update()
        if data.draw(st.booleans()) and kept:
            which = data.draw(st.sampled_from(sorted(kept)))
            donor.store.unpin(head_at(which))
        for version in kept.values():
            try:
                content = _content(version)
            except StateError:
                continue
            assert content == bytes([version.head.step]) * (COUNT * SIZE)
    donor.store.close()
    assert not donor.store._helpers


def test_batches_are_runs_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchft_plus.state.copies._BATCH_TENSORS", 3)
    monkeypatch.setattr("torchft_plus.state.copies._BATCH_BYTES", 10)
    sizes = [4, 4, 4, 0, 1, 1, 1, 50, 2]
    assert list(batches(enumerate(sizes))) == [(0, 1), (2, 3, 4), (5, 6), (7,), (8,)]
    assert list(batches([])) == []
