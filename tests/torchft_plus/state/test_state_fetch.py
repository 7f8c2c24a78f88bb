"""Fetching over real sockets: straight into place, checked, from donors that die, stall, lie or train on."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from state_network import Proxy, big_registry, donor_processes
from state_replicas import InBackground, apply, fetch, head_at, make_replica, serve

from lighthouse.messages import Head
from torchft_plus.state import FetchReport, StateError, StateRegistry, StateServer
from torchft_plus.state.http import HttpError, join_address
from torchft_plus.state.manifest import PIECE_BYTES

HEAD = head_at(3)


@pytest.fixture(name="big_donor")
def _big_donor() -> Iterator[tuple[StateServer, StateRegistry]]:
    registry, _ = big_registry(48, filled=True)
    server = StateServer(registry, transfer_stall_ms=2_000)
    serve(server, HEAD, readers=10)
    yield server, registry
    server.close()


ODD = {
    "0-dim": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "bf16": torch.randn(5, 3).bfloat16(),
    "fp16": torch.randn(5).half(),
    "fp64": torch.randn(5).double(),
    "fp8 e4m3": torch.randn(7).to(torch.float8_e4m3fn),
    "fp8 e5m2": torch.randn(7).to(torch.float8_e5m2),
    "fp8 e4m3 fnuz": torch.randn(7).to(torch.float8_e4m3fnuz),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.tensor([-(1 << 62), 3]),
    "uint8": torch.arange(5, dtype=torch.uint8),
    "uint16": torch.arange(5).to(torch.uint16),
    "complex64": torch.randn(3, dtype=torch.complex64),
    "complex128": torch.randn(3, dtype=torch.complex128),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "transposed": torch.randn(4, 6).t(),
    "strided": torch.randn(10)[::2],
    "expanded": torch.randn(1, 3).expand(4, 3),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "big": torch.randn(3, 1 << 19),
    "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
}


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros with the same strides."""
    if tensor.is_conj():
        return torch.zeros(tensor.shape, dtype=tensor.dtype).conj()
    if 0 in tensor.stride():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    zeros = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    zeros.untyped_storage().fill_(0)
    return zeros


def test_every_dtype_and_layout_in_place() -> None:
    own = {name: _zeros_like(tensor) for name, tensor in ODD.items()}
    donor, joiner = StateRegistry(), StateRegistry()
    donor.register_tensors("odd", lambda: ODD)
    joiner.register_tensors("odd", lambda: own)
    addresses = {name: tensor.data_ptr() for name, tensor in own.items()}
    assert joiner.digest() != donor.digest()
    server = StateServer(donor)
    serve(server, HEAD)
    report = fetch(joiner, HEAD, server.address)
    apply(joiner, report)
    assert joiner.digest() == donor.digest()
    assert {name: tensor.data_ptr() for name, tensor in own.items()} == addresses
    assert report.size_bytes == joiner.size_bytes()
    server.close()


def test_memory_that_has_two_names_stays_one_memory() -> None:
    """Tied weights and a buffer that two modules share, while the donor trains on."""

    class Tied(torch.nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.one, self.two = torch.nn.Linear(300, 300), torch.nn.Linear(300, 300)
            self.two.weight = self.one.weight
            table = torch.randn(1 << 20)
            self.one.register_buffer("table", table)
            self.two.register_buffer("table", table)

    donor, joiner = Tied(1), Tied(2)
    registries = [StateRegistry(), StateRegistry()]
    for registry, model in zip(registries, (donor, joiner), strict=True):
        registry.register_module("model", model)
    expected = registries[0].digest()
    server = StateServer(registries[0])
    serve(server, HEAD)
    server.before_update()
    with torch.no_grad():
        donor.one.weight.add_(1)
        donor.one.get_buffer("table").add_(1)
    apply(registries[1], fetch(registries[1], HEAD, server.address))
    assert registries[1].digest() == expected
    assert joiner.two.weight is joiner.one.weight
    assert joiner.two.get_buffer("table").data_ptr() == joiner.one.get_buffer("table").data_ptr()
    server.close()


def test_a_whole_replica_and_its_report() -> None:
    donor, joiner = make_replica(1), make_replica(2)
    donor.train(1, 3)
    server = StateServer(donor.registry)
    serve(server, HEAD)
    progress: list[tuple[int, int]] = []
    report = fetch(
        joiner.registry, HEAD, server.address, on_progress=lambda done, total: progress.append((done, total))
    )
    assert not joiner.registry.holds_state
    apply(joiner.registry, report)
    assert joiner.registry.holds_state
    assert joiner.registry.digest() == donor.registry.digest()
    assert report.donors == (server.address,)
    assert (report.refetched_bytes, report.notes) == (0, ())
    assert progress[-1] == (report.size_bytes, report.size_bytes)
    server.close()


def test_nothing_registered_is_a_version_too() -> None:
    server = StateServer(StateRegistry())
    serve(server, HEAD)
    joiner = StateRegistry()
    apply(joiner, fetch(joiner, HEAD, server.address))
    assert joiner.holds_state
    server.close()


def test_a_version_does_not_change_while_the_donor_trains_on() -> None:
    """A slow reader, a donor that takes a step every few milliseconds: the reader gets the head that it asked
    for."""
    donor, joiner = make_replica(1), make_replica(2)
    registry, tensors = big_registry(24, filled=True)
    donor.registry.register_tensors("big", lambda: tensors)
    own_registry, own = big_registry(24, filled=False)
    joiner.registry.register_tensors("big", lambda: own)
    del registry, own_registry
    donor.train(1, 3)
    expected = donor.registry.digest()
    server = StateServer(donor.registry)
    proxy = Proxy(server.address, lambda data, _: time.sleep(0.002) or data)
    serve(server, HEAD)
    transfer = InBackground(lambda: fetch(joiner.registry, HEAD, proxy.address))
    steps = 0
    while transfer.running:
        steps += 1
        server.publish(head_at(3 + steps))
        donor.backward(steps)
        server.before_update()
        donor.step()
        for tensor in tensors.values():
            tensor.add_(1)
    report = transfer.result()
    assert isinstance(report, FetchReport)
    apply(joiner.registry, report)
    assert joiner.registry.digest() == expected
    assert donor.registry.digest() != expected
    assert steps > 3
    proxy.close()
    server.close()


def test_one_flipped_bit_is_found_fetched_again_and_told(
    big_donor: tuple[StateServer, StateRegistry],
) -> None:
    server, registry = big_donor
    flips = count()

    def flip_once(data: bytes, offset: int) -> bytes:
        # Far behind all heads and the manifest, which are short here.
        if offset > 1_000_000 and next(flips) == 0:
            middle = len(data) // 2
            return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]
        return data

    proxy = Proxy(server.address, flip_once)
    joiner, _ = big_registry(48, filled=False)
    report = fetch(joiner, HEAD, proxy.address)
    apply(joiner, report)
    assert joiner.digest() == registry.digest()
    assert report.refetched_bytes == 4 << 20
    assert len(report.notes) == 1
    assert "came damaged and are fetched again" in report.notes[0]
    proxy.close()


def test_a_connection_that_breaks_costs_the_piece_that_was_under_way(
    big_donor: tuple[StateServer, StateRegistry],
) -> None:
    server, registry = big_donor
    broken = threading.Event()

    def break_once(data: bytes, offset: int) -> bytes:
        if (
            offset > PIECE_BYTES + (1 << 20) and not broken.is_set()
        ):  # in the second piece of the first stripe
            broken.set()
            raise ConnectionError
        return data

    proxy = Proxy(server.address, break_once)
    joiner, _ = big_registry(48, filled=False)
    report = fetch(joiner, HEAD, proxy.address)
    apply(joiner, report)
    assert broken.is_set()
    assert joiner.digest() == registry.digest()
    assert 0 < report.refetched_bytes < PIECE_BYTES
    proxy.close()


def test_a_donor_whose_bytes_are_always_damaged_is_left_out(
    big_donor: tuple[StateServer, StateRegistry],
) -> None:
    server, registry = big_donor

    def flip_always(data: bytes, offset: int) -> bytes:
        return bytes([data[0] ^ 1]) + data[1:] if len(data) > 30_000 and offset > 100_000 else data

    proxy = Proxy(server.address, flip_always)
    joiner, _ = big_registry(48, filled=False)
    with pytest.raises(StateError, match=r"could not be fetched .*came damaged"):
        fetch(joiner, HEAD, proxy.address)
    assert not joiner.holds_state
    apply(joiner, fetch(joiner, HEAD, proxy.address, server.address))
    assert joiner.digest() == registry.digest()
    proxy.close()


def test_a_joiner_that_is_cut_off_from_everybody_for_a_while_goes_on() -> None:
    """Each connection breaks, and each new one for a second; what was verified is not fetched again."""
    with donor_processes(2, 96, HEAD) as (_, addresses):
        cut_off = threading.Event()
        until: list[float] = []

        def change(data: bytes, offset: int) -> bytes:
            if not cut_off.is_set() and offset > 20 << 20:
                until.append(time.monotonic() + 1.0)
                cut_off.set()
            if until and time.monotonic() < until[0]:
                raise ConnectionError
            return data

        proxies = [Proxy(address, change) for address in addresses]
        joiner, _ = big_registry(96, filled=False)
        report = fetch(joiner, HEAD, *[proxy.address for proxy in proxies])
        apply(joiner, report)
        assert cut_off.is_set()
        assert joiner.digest() == big_registry(96, filled=True)[0].digest()
        assert report.refetched_bytes < 32 << 20
        assert len(report.notes) < 8, "one sentence, not one for each try"
        for proxy in proxies:
            proxy.close()


def test_connections_that_only_break_are_given_up_in_time(
    big_donor: tuple[StateServer, StateRegistry],
) -> None:
    server, _ = big_donor

    def change(data: bytes, offset: int) -> bytes:
        if offset > 1_000_000:
            raise ConnectionError
        return data

    proxy = Proxy(server.address, change)
    joiner, _ = big_registry(48, filled=False)
    started = time.monotonic()
    with pytest.raises(StateError, match="broke off"):
        fetch(joiner, HEAD, proxy.address, transfer_stall_ms=300)
    assert time.monotonic() - started < 10
    proxy.close()


def test_a_donor_that_is_not_ready_once_is_asked_again(
    big_donor: tuple[StateServer, StateRegistry], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, registry = big_donor
    send, asked = StateServer._send_pieces, count()

    def refuse_second(self: StateServer, *args: Any) -> bool:
        if next(asked) == 1:
            raise HttpError(503, "not now")
        return send(self, *args)

    monkeypatch.setattr(StateServer, "_send_pieces", refuse_second)
    joiner, _ = big_registry(48, filled=False)
    report = fetch(joiner, HEAD, server.address, connections_per_donor=1)
    apply(joiner, report)
    assert joiner.digest() == registry.digest()
    assert "not now" in report.notes[0]


def test_a_tensor_whose_memory_moves_is_sent_from_and_received_into_where_it_lies_now() -> None:
    def registry_of(value: int) -> tuple[StateRegistry, dict[str, torch.Tensor]]:
        tensors = {
            f"{i:03}": torch.full((1 << 16,), value and i + value, dtype=torch.uint8) for i in range(200)
        }
        registry = StateRegistry()
        registry.register_tensors("x", lambda: tensors)
        return registry, tensors

    donor, tensors = registry_of(1)
    server = StateServer(donor)
    serve(server, HEAD, readers=2)
    apply(first := registry_of(0)[0], fetch(first, HEAD, server.address))
    for tensor in tensors.values():
        tensor.share_memory_()
    joiner, received = registry_of(0)
    moved = threading.Event()

    def move(_done: int, _total: int) -> None:
        if not moved.is_set():
            moved.set()
            for tensor in received.values():
                tensor.share_memory_()

    others = [torch.full((1 << 16,), 250, dtype=torch.uint8) for _ in range(400)]  # where it lay before
    report = fetch(joiner, HEAD, server.address, on_progress=move)
    apply(joiner, report)
    assert moved.is_set()
    assert all(torch.equal(received[name], tensors[name]) for name in tensors)
    assert all(bool((other == 250).all()) for other in others)
    server.close()


def test_a_donor_killed_half_way_is_replaced() -> None:
    with donor_processes(2, 180, HEAD) as (processes, addresses):
        joiner, _ = big_registry(180, filled=False)
        reference, _ = big_registry(180, filled=True)
        killed = threading.Event()

        def kill_half_way(done: int, total: int) -> None:
            if done * 2 >= total and not killed.is_set():
                killed.set()
                processes[0].kill()

        report = fetch(joiner, HEAD, *addresses, on_progress=kill_half_way)
        apply(joiner, report)
        assert killed.is_set()
        assert joiner.digest() == reference.digest()
        assert report.refetched_bytes < report.size_bytes / 10
        assert addresses[1] in report.donors

        processes[1].kill()
        processes[1].join()
        with pytest.raises(StateError, match=r"could not be fetched: donor .*; donor "):
            fetch(joiner, HEAD, *addresses)


def test_a_donor_that_freezes_is_replaced() -> None:
    with donor_processes(2, 90, HEAD) as (processes, addresses):
        joiner, _ = big_registry(90, filled=False)
        frozen = threading.Event()

        def freeze(done: int, _total: int) -> None:
            if done and not frozen.is_set():
                frozen.set()
                os.kill(processes[0].pid or 0, signal.SIGSTOP)

        report = fetch(joiner, HEAD, *addresses, transfer_stall_ms=500, on_progress=freeze)
        apply(joiner, report)
        assert frozen.is_set()
        assert joiner.digest() == big_registry(90, filled=True)[0].digest()


def test_our_own_lost_connection_is_made_again(big_donor: tuple[StateServer, StateRegistry]) -> None:
    server, registry = big_donor
    breaks = count()

    def break_once(data: bytes, offset: int) -> bytes:
        if offset > 6_000_000 and next(breaks) == 0:
            raise ConnectionError
        return data

    proxy = Proxy(server.address, break_once)
    joiner, _ = big_registry(48, filled=False)
    report = fetch(joiner, HEAD, proxy.address, connections_per_donor=1)
    apply(joiner, report)
    assert joiner.digest() == registry.digest()
    assert "broke off" in report.notes[0]
    proxy.close()


def test_cancel_ends_a_transfer_at_once(big_donor: tuple[StateServer, StateRegistry]) -> None:
    server, _ = big_donor
    blocked, cancel = threading.Event(), threading.Event()

    def block(data: bytes, offset: int) -> bytes:
        if offset > 1_000_000:
            blocked.set()
            cancel.wait(20)
        return data

    proxy = Proxy(server.address, block)
    joiner, _ = big_registry(48, filled=False)
    transfer = InBackground(
        lambda: fetch(joiner, HEAD, proxy.address, cancel=cancel, transfer_stall_ms=60_000)
    )
    assert blocked.wait(10)
    cancel.set()
    with pytest.raises(StateError, match="it was cancelled"):
        transfer.result(10)
    assert not joiner.holds_state
    proxy.close()


def _trickle(data: bytes, offset: int) -> bytes:
    """Heads and the manifest as they come, then next to nothing: no single wait is long."""
    if offset > 100_000:
        time.sleep(0.05)
        return data[:1]
    return data


def test_a_donor_that_trickles_is_replaced_by_its_speed(big_donor: tuple[StateServer, StateRegistry]) -> None:
    """It sends something at any time, so no wait for a byte ever ends; the other donor shows how fast one can be."""
    server, registry = big_donor
    proxy = Proxy(server.address, _trickle)
    joiner, _ = big_registry(48, filled=False)
    started = time.monotonic()
    report = fetch(joiner, HEAD, proxy.address, server.address, transfer_stall_ms=60_000)
    apply(joiner, report)
    assert joiner.digest() == registry.digest()
    assert time.monotonic() - started < 20
    assert any("it kept the others waiting" in note for note in report.notes)
    assert report.refetched_bytes < 1 << 20
    proxy.close()


def test_a_single_donor_that_trickles_has_stalled(big_donor: tuple[StateServer, StateRegistry]) -> None:
    server, _ = big_donor
    proxy = Proxy(server.address, _trickle)
    joiner, _ = big_registry(48, filled=False)
    with pytest.raises(StateError, match=r"only \d+ bytes passed within transfer_stall_ms"):
        fetch(joiner, HEAD, proxy.address, transfer_stall_ms=500)
    proxy.close()


def test_a_slow_donor_gets_less_of_the_work(big_donor: tuple[StateServer, StateRegistry]) -> None:
    server, registry = big_donor
    passed = [0]

    def slow(data: bytes, _offset: int) -> bytes:
        time.sleep(len(data) / 40e6)
        passed[0] += len(data)
        return data

    proxy = Proxy(server.address, slow)
    joiner, _ = big_registry(48, filled=False)
    report = fetch(joiner, HEAD, proxy.address, server.address)
    apply(joiner, report)
    assert joiner.digest() == registry.digest()
    assert passed[0] < report.size_bytes / 2
    proxy.close()


def test_a_silent_donor_has_a_deadline() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = join_address("127.0.0.1", listener.getsockname()[1])
    with pytest.raises(StateError, match="no byte came within transfer_stall_ms"):
        fetch(make_replica(1).registry, HEAD, address, transfer_stall_ms=200)
    listener.close()


def test_donors_of_another_head_or_with_another_state_are_told_apart() -> None:
    joiner, donor, odd = make_replica(9), make_replica(1), make_replica(2)
    servers = [StateServer(replica.registry) for replica in (donor, odd)]
    for server in servers:
        serve(server, HEAD)
    report = fetch(joiner.registry, HEAD, servers[0].address, wait_ms=0)
    apply(joiner.registry, report)
    odd.optimizer.param_groups[0]["lr"] = 0.7
    servers[1].before_update()
    serve(servers[1], head_at(4))
    servers[0].before_update()
    serve(servers[0], head_at(4))
    # Slow enough that both manifests have come before one donor has given everything.
    proxies = [Proxy(server.address, lambda data, _: time.sleep(0.1) or data) for server in servers]
    report = fetch(joiner.registry, head_at(4), *(proxy.address for proxy in proxies))
    assert any("its manifest differs from that of" in note for note in report.notes)
    with pytest.raises(StateError, match="version 3-78 is not served yet: this replica serves"):
        fetch(joiner.registry, Head(3, 78), servers[0].address, wait_ms=0)
    with pytest.raises(StateError, match=r"version 2-77 is not served: nobody had asked for it"):
        fetch(joiner.registry, head_at(2), servers[0].address)
    with pytest.raises(StateError, match="there is no donor"):
        fetch(joiner.registry, HEAD)
    with pytest.raises(StateError, match="is not host:port"):
        fetch(joiner.registry, HEAD, "nowhere")
    for end in (*proxies, *servers):
        end.close()


def test_a_mismatch_is_one_sentence_and_changes_nothing() -> None:
    donor = make_replica(1, lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True))
    joiner = make_replica(2)
    before = joiner.registry.digest()
    server = StateServer(donor.registry)
    serve(server, HEAD)
    with pytest.raises(StateError, match=r"'optimizer.group 0.fused' is 'True' at the donor and 'None' here"):
        fetch(joiner.registry, HEAD, server.address)
    assert joiner.registry.holds_state
    assert joiner.registry.digest() == before
    server.close()


@pytest.mark.parametrize("tensor", [torch.zeros(1).expand(4), torch.zeros(3, 1).expand(3, 4)])
def test_an_expanded_tensor_is_sent_and_not_received_into(tensor: torch.Tensor) -> None:
    donor, whole, joiner = StateRegistry(), StateRegistry(), StateRegistry()
    target = tensor.contiguous() + 1
    donor.register_tensors("x", lambda: {"a": tensor})
    whole.register_tensors("x", lambda: {"a": target})
    joiner.register_tensors("x", lambda: {"a": tensor})
    server = StateServer(donor)
    serve(server, HEAD, readers=2)
    apply(whole, fetch(whole, HEAD, server.address))
    assert torch.equal(target, tensor)
    with pytest.raises(StateError, match="was expanded"):
        fetch(joiner, HEAD, server.address)
    assert joiner.holds_state
    server.close()


def test_a_reader_that_comes_first_waits_for_the_boundary() -> None:
    donor, joiner = make_replica(1), make_replica(2)
    server = StateServer(donor.registry)
    server.publish(head_at(2))
    transfer = InBackground(lambda: fetch(joiner.registry, HEAD, server.address, transfer_stall_ms=500))
    time.sleep(0.7)  # longer than the server waits in one request
    assert transfer.running
    donor.train(3, 3)
    server.publish(HEAD)
    report = transfer.result()
    assert isinstance(report, FetchReport)
    apply(joiner.registry, report)
    assert joiner.registry.digest() == donor.registry.digest()
    server.close()


RESPONSES = st.one_of(
    st.binary(max_size=60),
    st.builds(
        lambda status, length, body: (
            f"HTTP/1.1 {status} X\r\nContent-Length: {length}\r\n\r\n".encode() + body
        ),
        st.sampled_from([200, 206, 404, 410, 500, 503, 99]),
        st.integers(-1, 200) | st.just(1 << 70) | st.just(1 << 40),
        st.binary(max_size=120) | st.just(b'{"format": 2}') | st.just(b"[" * 100),
    ),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(RESPONSES, min_size=1, max_size=3))
def test_any_answer_of_a_hostile_donor_ends_in_a_sentence(responses: list[bytes]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = join_address("127.0.0.1", listener.getsockname()[1])

        def answer() -> None:
            for response in responses:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(2)
                    with contextlib.suppress(OSError):
                        connection.recv(1 << 14)
                        connection.sendall(response)

        server = threading.Thread(target=answer, daemon=True)
        server.start()
        registry = StateRegistry()
        with pytest.raises(StateError, match="could not be fetched"):
            fetch(registry, HEAD, address, transfer_stall_ms=100, wait_ms=0)
        assert registry.holds_state
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        server.join(5)
        assert not server.is_alive()


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.integers(0, 40_000) | st.integers(0, 9_000_000),
    st.sampled_from(["flip", "cut", "drop", "repeat"]),
    st.integers(0, 7),
)
def test_damage_anywhere_is_mended_or_told(where: int, damage: str, bit: int) -> None:
    """In heads, manifest, data or checksums of one connection: right bytes and right values, or a
    sentence."""
    donor, joiner = make_replica(1), make_replica(2)
    donor.train(1, 3)
    for replica, filled in ((donor, True), (joiner, False)):
        _, tensors = big_registry(9, filled)
        replica.registry.register_tensors("big", lambda tensors=tensors: tensors)
    done = threading.Event()

    def change(data: bytes, offset: int) -> bytes:
        if done.is_set() or not offset <= where < offset + len(data):
            return data
        done.set()
        at = where - offset
        if damage == "cut":
            raise ConnectionError
        if damage == "flip":
            return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
        return data[:at] + (data[at:] if damage == "repeat" else b"") + data[at + 1 :]

    server = StateServer(donor.registry)
    proxy = Proxy(server.address, change)
    serve(server, HEAD)
    try:
        report = fetch(joiner.registry, HEAD, proxy.address, transfer_stall_ms=300, wait_ms=1_000)
    except StateError as error:
        assert "could not be fetched" in str(error)
    else:
        apply(joiner.registry, report)
        assert joiner.registry.digest() == donor.registry.digest()
    proxy.close()
    server.close()
