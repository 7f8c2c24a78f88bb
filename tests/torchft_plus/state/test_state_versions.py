"""Which versions exist, what they cost, and that nothing changes them: the store without sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from state_replicas import InBackground, bytes_of_piece, head_at, make_replica

from lighthouse.messages import Head
from torchft_plus.state import StateError, StateRegistry
from torchft_plus.state.copies import copy_on_device, copy_on_host
from torchft_plus.state.manifest import PIECE_BYTES
from torchft_plus.state.ranges import RangeSet
from torchft_plus.state.stripes import Stripes
from torchft_plus.state.version import Version
from torchft_plus.state.version_store import NotServed, NotYetServed, VersionStore


class Donor:
    """A store with a clock that stands still, over two tensors of 100 bytes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tensors = {name: torch.zeros(100, dtype=torch.uint8) for name in ("a", "b")}
        self.schedule = 0
        registry = StateRegistry()
        registry.register_tensors("x", lambda: self.tensors)
        registry.register_values("schedule", lambda: self.schedule, lambda _: None)
        self.store = VersionStore(registry, linger_ms=10_000, clock=lambda: self.now)

    def update(self) -> int:
        """An optimizer step; gives the bytes that were copied first."""
        copied = self.store.before_update()
        for tensor in self.tensors.values():
            tensor.add_(1)
        self.schedule += 1
        return copied

    def acquire(self, step: int, reader: str | None = "r") -> Version:
        return self.store.acquire(head_at(step), 0, reader)


def _content(version: Version, start: int = 0, end: int = 200) -> bytes:
    return bytes_of_piece(version.read(start, end, copy=False))


def test_nothing_is_captured_or_copied_when_nobody_reads() -> None:
    donor = Donor()
    for step in range(3):
        donor.store.publish(head_at(step))
        assert donor.update() == 0
    assert donor.store.served() == (head_at(2), ())
    with pytest.raises(NotServed, match="nobody had asked for it when training went on"):
        donor.acquire(2)


def test_a_pinned_version_outlives_updates_and_copies_once() -> None:
    donor = Donor()
    donor.store.pin(head_at(0))
    donor.store.publish(head_at(0))
    assert donor.update() == 200
    donor.store.publish(head_at(1))
    assert donor.update() == 0
    version = donor.acquire(0)
    assert _content(version) == bytes(200)
    assert b'"schedule":0' in version.manifest()


def test_a_pin_between_boundary_and_update_is_in_time() -> None:
    donor = Donor()
    donor.store.publish(head_at(0))
    donor.store.pin(head_at(0))
    assert donor.update() == 200
    assert _content(donor.acquire(0)) == bytes(200)
    donor.store.pin(head_at(0), readers=2)
    donor.store.publish(head_at(1))
    donor.store.pin(head_at(1))
    donor.store.publish(head_at(1))
    assert _content(donor.acquire(1)) == bytes([1] * 200)
    assert _content(donor.acquire(0)) == bytes(200)


def test_only_what_readers_have_not_verified_is_copied() -> None:
    donor = Donor()
    donor.store.pin(head_at(0), readers=2)
    donor.store.publish(head_at(0))
    version = donor.acquire(0, "one")
    version.release("one", 0, 100)
    donor.acquire(0, "two")
    version.release("two", 0, 60)
    version.release("two", 60, 100)
    assert donor.update() == 100
    assert _content(version, 100, 200) == bytes(100)
    with pytest.raises(StateError, match="'x/a' of version 0-77 was let go"):
        version.read(0, 1, copy=False)
    version.release("one", 100, 200)
    donor.store.publish(head_at(1))
    assert donor.store.served()[1] == (head_at(0),)
    version.release("two", 100, 200)
    donor.store.publish(head_at(1))
    assert donor.store.served()[1] == ()


def test_one_of_two_expected_readers_is_not_enough() -> None:
    donor = Donor()
    donor.store.pin(head_at(0), readers=2)
    donor.store.publish(head_at(0))
    donor.acquire(0, "one").release("one", 0, 200)
    assert donor.update() == 200


def test_a_response_that_is_being_sent_holds_what_it_has_not_sent() -> None:
    donor = Donor()
    donor.store.publish(head_at(0))
    donor.store.pin(head_at(0), readers=0)
    donor.store.publish(head_at(0))
    version = donor.acquire(0, None)
    with version.hold(0, 200) as hold:
        hold.start = 100
        assert donor.update() == 100
        assert _content(version, 100, 200) == bytes(100)
        donor.store.publish(head_at(1))
        assert donor.store.served()[1] == (head_at(0),)
    donor.store.publish(head_at(1))
    assert donor.store.served()[1] == ()


def test_memory_that_went_back_to_training_is_told() -> None:
    donor = Donor()
    donor.store.pin(head_at(0))
    donor.store.publish(head_at(0))
    version = donor.acquire(0)
    live, copied = version.read(0, 200, copy=False), version.read(0, 200, copy=True)
    assert version.is_intact(live)
    donor.update()
    assert not version.is_intact(live)
    assert bytes_of_piece(live)[0] == 1
    assert bytes_of_piece(copied)[0] == 0
    again = version.read(0, 200, copy=False)
    donor.update()
    assert version.is_intact(again)


def test_readers_are_served_while_the_training_thread_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of many gigabytes takes a while; what a reader verifies in that time is not copied."""
    monkeypatch.setattr("torchft_plus.state.copies._BATCH_TENSORS", 1)
    donor = Donor()
    donor.store.pin(head_at(0))
    donor.store.publish(head_at(0))
    version = donor.acquire(0)
    served: list[bytes] = []

    def copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        def serve() -> None:
            with donor.store.changed:
                piece = version.read(0, 100, copy=False)
                served.append(bytes_of_piece(piece))
                assert version.is_intact(piece)
                version.release("r", 0, 100)

        InBackground(serve).result()
        copy_on_host(targets, sources)

    monkeypatch.setattr("torchft_plus.state.version_memory.copy_on_host", copy)
    assert donor.update() == 100
    assert served == [bytes(100)]
    assert _content(version, 100, 200) == bytes(100)


def test_a_version_that_is_withdrawn_while_it_is_copied_stays_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    donor = Donor()
    donor.store.pin(head_at(0))
    donor.store.publish(head_at(0))
    version = donor.acquire(0)

    def copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        InBackground(donor.store.withdraw).result()
        copy_on_host(targets, sources)

    monkeypatch.setattr("torchft_plus.state.version_memory.copy_on_host", copy)
    donor.update()
    assert donor.store.served() == (None, ())
    with pytest.raises(StateError, match="was let go"):
        version.read(0, 200, copy=False)


def test_a_version_is_given_up_when_there_is_no_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    donor = Donor()
    donor.store.pin(head_at(0))
    donor.store.publish(head_at(0))

    def copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        raise RuntimeError(f"can't allocate memory: you tried to allocate {len(targets)} tensors")

    monkeypatch.setattr("torchft_plus.state.version_memory.copy_on_host", copy)
    assert donor.update() == 0
    with pytest.raises(NotServed, match="it could not be kept when training went on"):
        donor.acquire(0)


def test_an_accelerator_without_room_is_helped_out_by_the_host() -> None:
    class Full(torch.Tensor):
        def clone(self, **_: object) -> torch.Tensor:  # type: ignore[override]
            raise torch.OutOfMemoryError

    memory = torch.arange(5, dtype=torch.uint8).as_subclass(Full)
    assert torch.equal(copy_on_device(memory).as_subclass(torch.Tensor), torch.arange(5, dtype=torch.uint8))


def test_two_responses_of_the_same_range_are_two_holds() -> None:
    """The end of one left the other without its hold, or a hold without its response, for ever."""
    donor = Donor()
    donor.store.pin(head_at(0))
    donor.store.publish(head_at(0))
    version = donor.acquire(0)
    with version.hold(0, 200) as first:
        with version.hold(0, 200):
            pass
        first.start = 100
        assert version.is_held()
        with donor.store.changed:
            assert version.needs(100, 200)
    assert not version.is_held()


def test_unpin_expiry_and_withdraw_let_go() -> None:
    donor = Donor()
    for end in ("unpin", "expiry", "withdraw"):
        donor.now = 0.0
        donor.store.pin(head_at(0))
        donor.store.publish(head_at(0))
        if end == "unpin":
            donor.store.unpin(head_at(0))
        elif end == "expiry":
            donor.now = 11.0
        else:
            donor.store.withdraw()
            assert donor.store.served() == (None, ())
            with pytest.raises(NotYetServed, match="published none last"):
                donor.acquire(0)
            donor.store.unpin(head_at(0))
        assert donor.update() == 0, end
        assert donor.store.served()[1] == (), end


def test_a_reader_that_is_active_keeps_its_pin() -> None:
    donor = Donor()
    donor.store.pin(head_at(0))
    donor.store.publish(head_at(0))
    version = donor.acquire(0)
    donor.update()
    with version.hold(0, 200):
        donor.now = 60.0
        donor.store.publish(head_at(1))
    donor.now = 65.0
    donor.store.publish(head_at(1))
    assert head_at(0) in donor.store.served()[1]
    donor.now = 80.0
    donor.store.publish(head_at(1))
    assert donor.store.served()[1] == ()


def test_copies_are_bounded() -> None:
    donor = Donor()
    for step in range(4):
        donor.store.pin(head_at(step))
        donor.store.publish(head_at(step))
        donor.update()
    assert donor.store.served()[1] == (head_at(2), head_at(3))
    with pytest.raises(NotServed, match="2 newer versions are kept"):
        donor.acquire(0)
    assert _content(donor.acquire(2)) == bytes([2] * 200)


def test_pins_are_bounded_and_heads_are_compared_as_a_whole() -> None:
    donor = Donor()
    donor.store.publish(Head(0, 0, "aa"))
    with pytest.raises(NotServed):
        donor.store.acquire(Head(0, 0, "bb"), 0, None)
    donor.store.publish(head_at(5))
    with pytest.raises(NotServed):
        donor.store.acquire(Head(5, 76), 0, None)
    with pytest.raises(NotServed, match="others are waited for"):
        for step in range(6, 40):
            with pytest.raises(NotYetServed):
                donor.acquire(step)


def test_a_skipped_step_keeps_the_version_live() -> None:
    donor = Donor()
    donor.store.pin(head_at(0))
    donor.store.publish(head_at(0))
    donor.store.publish(head_at(1))
    assert _content(donor.acquire(0)) == bytes(200)
    assert donor.update() == 200


def test_waiting_readers_are_woken_by_the_boundary_and_by_its_passing() -> None:
    donor = Donor()
    donor.store.publish(head_at(0))
    here = InBackground(lambda: donor.store.acquire(head_at(1), 10_000, "r"))
    gone = InBackground(lambda: donor.store.acquire(Head(1, 76), 10_000, "r"))
    donor.update()
    donor.store.publish(head_at(1))
    _wait_until(lambda: not gone.running, donor)
    assert isinstance(here.result(), Version)
    with pytest.raises(NotServed):
        gone.result()


def _wait_until(condition: object, donor: Donor) -> None:
    """The training thread passes boundaries until readers that came late have been seen."""
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        donor.store.publish(head_at(1))
        threading.Event().wait(0.01)


def test_a_state_that_cannot_be_read_is_said_to_the_reader_and_does_not_stop_training() -> None:
    donor = Donor()
    donor.store.pin(head_at(0))
    donor.schedule = object()  # type: ignore[assignment]
    donor.store.publish(head_at(0))
    with pytest.raises(NotServed, match=r"could not be read: StateError: schedule is a builtins.object"):
        donor.acquire(0)
    assert donor.store.before_update() == 0
    donor.schedule = 3
    donor.store.publish(head_at(1))


def test_buffers_are_copied_when_they_are_captured() -> None:
    replica = make_replica(1)
    store = VersionStore(replica.registry, linger_ms=10_000)
    store.pin(head_at(0))
    store.publish(head_at(0))
    version = store.acquire(head_at(0), 0, "r")
    before = _content(version, 0, version.size_bytes)
    replica.net.seen.add_(7)  # as a forward would, without before_update
    assert _content(version, 0, version.size_bytes) == before


def test_publishing_costs_nothing_when_nobody_reads() -> None:
    """A step of a 150-tensor model: below 0.1 ms for the boundary, finish_step and the update together."""
    net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(75)])
    registry = StateRegistry()
    registry.register_module("model", net)
    store = VersionStore(registry, linger_ms=10_000)
    times: list[float] = []
    for step in range(200):
        started = time.perf_counter()
        store.publish(head_at(step))
        store.publish(head_at(step))
        store.before_update()
        times.append(time.perf_counter() - started)
    assert sorted(times)[100] < 1e-4


RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12)


@given(RANGES, st.integers(0, 30), st.integers(0, 30))
def test_range_set_is_a_set_of_integers(ranges: list[tuple[int, int]], start: int, end: int) -> None:
    ours, plain = RangeSet(), set[int]()
    for first, last in ranges:
        ours.add(first, last)
        plain.update(range(first, last))
    assert ours.size() == len(plain)
    assert ours.covers(start, end) == plain.issuperset(range(start, end))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40), st.integers(0, PIECE_BYTES - 1), st.integers(1, 5), st.data())
def test_stripes_hand_out_every_piece_until_it_is_verified(
    pieces: int, rest: int, connections: int, data: st.DataObject
) -> None:
    size_bytes = pieces * PIECE_BYTES + rest
    stripes = Stripes(size_bytes)
    under_way: list[tuple[int, int]] = []
    seen = RangeSet()
    failures = 10
    while not stripes.complete:
        # Without a wanted piece take() would wait for those under way, which are ours.
        may_take = len(under_way) < connections and bool(stripes._wanted)
        if may_take and (not under_way or data.draw(st.booleans())):
            waiting = sum(last - first for first, last in stripes._wanted)
            least = data.draw(st.integers(1, 10))
            stripe = stripes.take(connections, least, most := data.draw(st.integers(least, 10)))
            assert stripe is not None
            assert 0 < stripe[1] - stripe[0] <= min(most, max(1, -(-waiting // connections)))
            assert all(stripe[1] <= first or last <= stripe[0] for first, last in under_way)
            under_way.append(stripe)
            continue
        first, last = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
        bad = data.draw(st.lists(st.integers(first, last - 1), unique=True)) if failures else []
        failures -= bool(bad)
        stripes.settle(first, last, bad, (last - first) * PIECE_BYTES)
    for start, end in stripes.verified_since(0):
        seen.add(start, end)
    assert seen.size() == size_bytes == stripes.verified_bytes
    assert stripes.take(connections) is None


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_happens_a_version_reads_as_it_was_or_not_at_all(data: st.DataObject) -> None:
    donor = Donor()
    step = 0
    content = {0: bytes(200)}
    donor.store.publish(head_at(0))
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(
            st.sampled_from(["pin", "unpin", "step", "publish", "read", "release", "withdraw", "wait"])
        )
        which = data.draw(st.integers(max(0, step - 2), step + 1))
        if action == "pin":
            donor.store.pin(head_at(which), data.draw(st.integers(1, 2)))
        elif action == "unpin":
            donor.store.unpin(head_at(which))
        elif action == "step":
            donor.update()
            step += 1
            content[step] = bytes([step] * 200)
            donor.store.publish(head_at(step))
        elif action == "publish":
            donor.store.publish(head_at(step))
        elif action == "withdraw":
            donor.store.withdraw()
            donor.store.publish(head_at(step))
        elif action == "wait":
            donor.now += 6.0
        else:
            try:
                version = donor.acquire(which, data.draw(st.sampled_from(["r", "s"])))
            except (NotServed, NotYetServed):
                continue
            assert f'"schedule":{which}'.encode() in version.manifest()
            start = data.draw(st.sampled_from([0, 50, 100, 150]))
            if action == "release":
                version.release("r", start, start + 50)
                continue
            try:
                got = _content(version, start, start + 50)
            except StateError:
                continue
            assert got == content[which][start : start + 50]
