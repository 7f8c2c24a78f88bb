"""An accelerator's bytes go through pinned memory, on streams whose copies end late."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from itertools import count

import pytest
import torch
from accelerator_double import Accelerator
from state_network import Proxy, big_registry
from state_replicas import apply, bytes_of_piece, fetch, head_at, make_replica, serve

from torchft_plus.state import StateRegistry, StateServer
from torchft_plus.state.manifest import PIECE_BYTES
from torchft_plus.state.staging import pinned
from torchft_plus.state.version_store import VersionStore

HEAD = head_at(3)
SIZE = 100


@pytest.fixture(name="accelerator")
def _accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    accelerator = Accelerator(monkeypatch)
    yield accelerator
    accelerator.close()


@pytest.mark.parametrize("where", ["donor", "joiner", "both"])
@pytest.mark.parametrize("fault", ["none", "flip", "break"])
def test_a_state_comes_whole_from_and_to_an_accelerator(
    accelerator: Accelerator, where: str, fault: str
) -> None:
    """Of the tensors every third stays on the host; what came damaged never reaches the accelerator's memory."""
    registry, tensors = big_registry(36, filled=True)
    joiner, targets = big_registry(36, filled=False)
    for side, owned in (("donor", tensors), ("joiner", targets)):
        if where in (side, "both"):
            accelerator.take(tensor for index, tensor in enumerate(owned.values()) if index % 3)
    server = StateServer(registry, transfer_stall_ms=3_000)
    serve(server, HEAD)
    faults = count()

    def disturb(data: bytes, offset: int) -> bytes:
        if offset < PIECE_BYTES + (1 << 20) or fault == "none" or next(faults):
            return data
        if fault == "break":
            raise ConnectionError
        return data[:-1] + bytes([data[-1] ^ 4])

    proxy = Proxy(server.address, disturb)
    report = fetch(joiner, HEAD, proxy.address)
    apply(joiner, report)
    assert joiner.digest() == registry.digest()
    assert (report.refetched_bytes > 0) == (fault != "none")
    there_bytes = sum(8 * tensor.numel() for index, tensor in enumerate(tensors.values()) if index % 3)
    if where != "donor":
        assert accelerator.copied_bytes["to"] == there_bytes, "each byte once"
    if where != "joiner":
        assert accelerator.copied_bytes["from"] >= there_bytes
    proxy.close()
    server.close()


def test_a_file_of_an_accelerators_tensors_is_whole(accelerator: Accelerator) -> None:
    registry, tensors = big_registry(12, filled=True)
    accelerator.take(tensors.values())
    store = VersionStore(registry, linger_ms=60_000)
    store.pin(HEAD)
    store.publish(HEAD)
    version = store.acquire(HEAD, 0, None)
    piece = version.read(0, PIECE_BYTES, copy=True)
    original = b"".join(bytes(tensor.view(torch.uint8).numpy().data) for tensor in tensors.values())
    for tensor in tensors.values():
        tensor.zero_()
    assert bytes_of_piece(piece) == original[:PIECE_BYTES]
    store.close()


class _Event:
    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


def test_what_is_read_comes_after_what_an_accelerator_has_queued(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last update, or the copies that the training thread has made."""
    events: list[_Event] = []

    def written(memory: Iterable[torch.Tensor]) -> tuple[_Event, ...]:
        if not any(accelerator.has(tensor) for tensor in memory):
            return ()
        events.append(_Event())
        return (events[-1],)

    def copy(memory: torch.Tensor) -> torch.Tensor:
        copied = memory.clone()
        accelerator.take([copied])
        return copied

    tensors = {str(index): torch.zeros(SIZE, dtype=torch.uint8) for index in range(3)}
    accelerator.take(tensors.values())
    monkeypatch.setattr("torchft_plus.state.version_memory.copy_on_device", copy)
    monkeypatch.setattr("torchft_plus.state.version_memory.written", written)
    registry = StateRegistry()
    registry.register_tensors("x", lambda: tensors)
    store = VersionStore(registry, linger_ms=60_000)
    store.pin(HEAD)
    store.publish(HEAD)
    version = store.acquire(HEAD, 0, None)
    bytes_of_piece(version.read(0, 3 * SIZE, copy=False))
    assert set(accelerator.followed) == {events[0]}
    version.read(0, SIZE, copy=True)
    assert events[0].waits == 1, "the copy for a reader of the file is made on this thread's stream"
    store.before_update()
    for tensor in tensors.values():
        tensor.add_(1)
    accelerator.followed.clear()
    assert bytes_of_piece(version.read(0, 3 * SIZE, copy=False)) == bytes(3 * SIZE)
    assert set(accelerator.followed) == {events[-1]} != {events[0]}
    store.close()


def test_new_memory_is_written_after_what_was_queued_before_it_was_taken(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An allocator gives memory again to which kernels that are queued have still to write."""
    event = _Event()
    monkeypatch.setattr(
        "torchft_plus.state.load_plan.written", lambda memory: (event,) if list(memory) else ()
    )
    donor, joiner = make_replica(1), make_replica(2)
    donor.train(1, 3)
    accelerator.take(joiner.net.parameters())
    server = StateServer(donor.registry, transfer_stall_ms=3_000)
    serve(server, HEAD)
    report = fetch(joiner.registry, HEAD, server.address)
    apply(joiner.registry, report)
    assert accelerator.followed == [event]
    assert joiner.registry.digest() == donor.registry.digest()
    server.close()


def test_without_pinned_memory_ordinary_memory_does() -> None:
    assert pinned(10).numel() == 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA or AMD GPU")
def test_a_state_comes_whole_from_one_gpu_to_itself() -> None:
    """While the stream of training is busy, and the donor goes on."""
    device = torch.device("cuda")
    tensors = {str(index): torch.randn(1 << 20, device=device) for index in range(20)}
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    targets["3"] = torch.zeros(1 << 10, 1 << 10, device=device).t()
    tensors["3"] = tensors["3"].view(1 << 10, 1 << 10)
    donor, joiner = StateRegistry(), StateRegistry()
    donor.register_tensors("x", lambda: tensors)
    joiner.register_tensors("x", lambda: targets)
    busy = torch.randn(4096, 4096, device=device)
    for _ in range(50):
        busy = busy @ busy / 64
    for tensor in tensors.values():
        tensor.add_(1)
    server = StateServer(donor, transfer_stall_ms=10_000)
    serve(server, HEAD)
    updated = threading.Event()

    def update(_done: int, _total: int) -> None:
        if not updated.is_set():
            updated.set()
            server.before_update()
            for tensor in tensors.values():
                tensor.add_(1)

    report = fetch(joiner, HEAD, server.address, on_progress=update)
    apply(joiner, report)
    assert updated.is_set()
    for name, target in targets.items():
        torch.testing.assert_close(target + 1, tensors[name], rtol=0, atol=0)
    server.close()
