"""The state server over real sockets: what any HTTP client gets, and readers that stop."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from state_network import big_registry
from state_replicas import Replica, apply, fetch, head_at, make_replica, serve

from torchft_plus.state import StateError, StateRegistry, StateServer
from torchft_plus.state.http import (
    HttpError,
    ProtocolError,
    Stream,
    join_address,
    parse_range,
    parse_request,
    parse_response,
    request_head,
    split_address,
)
from torchft_plus.state.listener import Listener
from torchft_plus.state.manifest import CHECKSUM_BYTES, PIECE_BYTES, TORN, TRAILER_BYTES, parse_manifest
from torchft_plus.state.staging import Bytes

HEAD = head_at(3)


@pytest.fixture(name="donor")
def _donor() -> Iterator[tuple[Replica, StateServer, str]]:
    replica = make_replica(1)
    replica.train(1, 3)
    server = StateServer(replica.registry, transfer_stall_ms=1_000)
    serve(server, HEAD)
    yield replica, server, f"http://{server.address}/v1/state"
    server.close()


def _get(url: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, dict(response.headers), response.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def test_the_file_is_read_by_safetensors(donor: tuple[Replica, StateServer, str], tmp_path: Path) -> None:
    replica, _, url = donor
    path = tmp_path / "state.safetensors"
    if shutil.which("curl"):
        subprocess.run(["curl", "-sS", "-f", "-o", path, f"{url}/3-77"], check=True, timeout=30)
    else:
        path.write_bytes(_get(f"{url}/3-77")[2])
    tensors = load_file(path)
    entries = replica.registry.snapshot().entries
    assert tensors.keys() == {name for name, _ in entries}
    for name, entry in entries:
        assert torch.equal(tensors[name], entry.local), name


def test_ranges_and_head(donor: tuple[Replica, StateServer, str]) -> None:
    _, _, url = donor
    status, headers, whole = _get(f"{url}/3-77")
    assert (status, headers["Accept-Ranges"], int(headers["Content-Length"])) == (200, "bytes", len(whole))
    assert _get(f"{url}/3-77", "HEAD")[1]["Content-Length"] == str(len(whole))
    header = 8 + int.from_bytes(whole[:8], "little")
    for start, end in [
        (0, 1),
        (3, header),
        (header - 2, header + 3),
        (header + 1, len(whole)),
        (0, len(whole)),
    ]:
        status, headers, part = _get(f"{url}/3-77", Range=f"bytes={start}-{end - 1}")
        assert status == 206
        assert part == whole[start:end]
        assert headers["Content-Range"] == f"bytes {start}-{end - 1}/{len(whole)}"
    assert _get(f"{url}/3-77", Range="bytes=-5")[2] == whole[-5:]
    assert _get(f"{url}/3-77", Range=f"bytes={header}-")[2] == whole[header:]
    for wrong in (f"bytes={len(whole)}-", "bytes=1-2,4-5", "bytes=-", "lines=1-2", "bytes=5-3"):
        assert _get(f"{url}/3-77", Range=wrong)[0] == 416, wrong


def test_manifest_and_list(donor: tuple[Replica, StateServer, str]) -> None:
    replica, _, url = donor
    manifest = parse_manifest(_get(f"{url}/3-77/manifest")[2], HEAD)
    assert manifest.signature == replica.registry.signature()
    assert manifest.values["scheduler"] == replica.registry.snapshot().values["scheduler"]
    assert json.loads(_get(url)[2]) == {"published": "3-77", "served": ["3-77"]}


@pytest.mark.parametrize(
    ("path", "method", "status", "sentence"),
    [
        ("/2-77", "GET", 404, "this replica serves 3-77 and published 3-77 last"),
        ("/3-76", "GET", 404, "is not served"),
        ("/9-77?wait_ms=1", "GET", 503, "is not served yet"),
        ("/x", "GET", 404, "not the name of a version"),
        ("/3-77/other", "GET", 404, "there is nothing here"),
        ("/../secret", "GET", 404, ""),
        ("/3-77", "DELETE", 405, "not how this is asked for"),
        ("/3-77/release?reader=a&start=0&end=1", "GET", 405, ""),
        ("/3-77/release?start=0&end=1", "POST", 400, "add ?reader=NAME"),
        ("/3-77/release?reader=a&start=0", "POST", 400, "end=N"),
        ("/3-77/release?reader=a&start=-1&end=3", "POST", 400, "start=N"),
        ("/3-77/pieces?reader=a&first=0&last=99999999999999999999", "GET", 400, "last=N"),
        ("/3-77/pieces?reader=a&first=0&last=2", "GET", 416, "no pieces 0 <= i < 2"),
        ("/3-77/pieces?reader=a&first=1&last=1", "GET", 416, "no pieces 1 <= i < 1"),
        ("/3-77/release?start=0&end=9", "POST", 400, "?reader=NAME"),
        ("/3-77?reader=" + "a" * 100, "GET", 400, "1 to 64 characters"),
        ("/3-77/manifest?wait_ms=abc", "GET", 400, "wait_ms=N"),
    ],
)
def test_refusals_are_a_status_and_a_sentence(
    donor: tuple[Replica, StateServer, str], path: str, method: str, status: int, sentence: str
) -> None:
    got, headers, body = _get(donor[2] + path, method)
    assert got == status
    assert sentence in body.decode()
    assert headers["Content-Type"].startswith("text/plain")
    assert _get(donor[2])[0] == 200


def _raw(address: str) -> Stream:
    connection = socket.create_connection(split_address(address), 10)
    return Stream(connection, 10)


@pytest.mark.parametrize(
    "head",
    [
        b"nonsense\r\n\r\n",
        b"GET /v1/state\r\n\r\n",
        b"GET /v1/state HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST /v1/state HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
        b"GET /v1/state HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /v1/\xff HTTP/1.1\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\n\r\n",
    ],
)
def test_malformed_requests_end_the_connection_only(
    donor: tuple[Replica, StateServer, str], head: bytes
) -> None:
    stream = _raw(donor[1].address)
    stream.write([head])
    answer = stream.read_head()
    assert answer is not None
    assert parse_response(answer).status == 400
    stream.close()
    assert _get(donor[2])[0] == 200


def test_a_head_without_end_and_a_silent_client_are_cut_off(donor: tuple[Replica, StateServer, str]) -> None:
    endless, silent = _raw(donor[1].address), _raw(donor[1].address)
    endless.write([b"GET /" + b"a" * 40_000])
    for stream in (endless, silent):
        with contextlib.suppress(ConnectionResetError):
            assert stream.read_head() is None
        stream.close()


def test_one_connection_serves_many_requests(donor: tuple[Replica, StateServer, str]) -> None:
    stream = _raw(donor[1].address)
    for _ in range(3):
        stream.write([request_head("GET", "/v1/state", "x"), request_head("HEAD", "/v1/state/3-77", "x")])
        for has_body in (True, False):
            head = stream.read_head()
            assert head is not None
            response = parse_response(head)
            if has_body:
                stream.read(response.content_bytes)
    stream.close()


def test_a_stalled_reader_does_not_slow_the_donor() -> None:
    registry, tensors = big_registry(60, filled=True)
    server = StateServer(registry, transfer_stall_ms=60_000)
    serve(server, HEAD)
    stream = _raw(server.address)
    stream.write([request_head("GET", "/v1/state/3-77?reader=slow", "x")])
    assert stream.read_head() is not None
    started = time.monotonic()
    for step in range(4, 8):
        assert server.before_update() == (registry.size_bytes() if step == 4 else 0)
        for tensor in tensors.values():
            tensor.add_(1)
        server.publish(head_at(step))
    assert time.monotonic() - started < 20, "the donor waited for its reader"
    stream.close()
    server.close()


def test_a_reader_that_takes_nothing_is_cut_off() -> None:
    registry, _ = big_registry(60, filled=True)
    server = StateServer(registry, transfer_stall_ms=200)
    serve(server, HEAD)
    stream = _raw(server.address)
    stream.write([request_head("GET", "/v1/state/3-77?reader=slow", "x")])
    head = stream.read_head()
    assert head is not None
    threading.Event().wait(1)
    with pytest.raises((ProtocolError, ConnectionResetError)):
        stream.read(parse_response(head).content_bytes)
    stream.close()
    server.close()


def test_a_reader_that_trickles_is_cut_off() -> None:
    """It takes a little at any time, so no wait ever ends, and would keep the donor's copy for ever."""
    registry, _ = big_registry(60, filled=True)
    server = StateServer(registry, transfer_stall_ms=300)
    serve(server, HEAD)
    stream = _raw(server.address)
    stream.write([request_head("GET", "/v1/state/3-77?reader=slow", "x")])
    head = stream.read_head()
    assert head is not None
    content_bytes = parse_response(head).content_bytes
    with pytest.raises((ProtocolError, ConnectionResetError)):
        for _ in range(30):
            stream.read(20_000)  # of the megabyte that it must take in 300 ms
            threading.Event().wait(0.05)
        stream.read(content_bytes - 30 * 20_000)
    stream.close()
    server.close()


@pytest.mark.parametrize("reader", ["r", "reader", "a-rather-long-name"])
def test_tensors_come_where_they_lie_in_their_cache_lines(reader: str) -> None:
    """Whatever was sent before: some processors copy at half the speed otherwise."""
    registry = StateRegistry()
    tensors = {
        f"t{i}": torch.full((n,), i, dtype=torch.uint8) for i, n in enumerate([5, 128, 7, 64, 1000, 192])
    }
    registry.register_tensors("x", lambda: tensors)
    whole = [name for name, tensor in tensors.items() if tensor.numel() % 64 == 0]
    server = StateServer(registry)
    serve(server, HEAD)
    stream = _raw(server.address)
    passed_bytes = 0
    for path in ("/manifest?", "/pieces?first=0&last=1&", "/manifest?", "/pieces?first=0&last=1&"):
        stream.write([request_head("GET", f"/v1/state/3-77{path}reader={reader}", "x")])
        head = stream.read_head()
        assert head is not None
        body = stream.read(parse_response(head).content_bytes)
        passed_bytes += len(head)
        if "pieces" in path:
            assert passed_bytes % 64 == 0
        else:
            manifest = parse_manifest(body, HEAD)
        passed_bytes += len(body)
    offsets = {spec.name.removeprefix("x/"): spec.offset for spec in manifest.tensors}
    assert all(offsets[name] % 64 == 0 for name in whole)
    assert list(offsets) == [*whole, *(name for name in tensors if name not in whole)]
    stream.close()
    server.close()


def test_a_torn_piece_is_marked_and_comes_right_the_second_time() -> None:
    """The donor goes on in the middle of sending a piece, whose rest then comes from changed memory."""
    registry, tensors = big_registry(60, filled=True)
    pieces = 8
    original = b"".join(bytes(t.view(torch.uint8).numpy().data) for t in tensors.values())[
        : pieces * PIECE_BYTES
    ]
    server = StateServer(registry, transfer_stall_ms=10_000)
    serve(server, HEAD)
    stream = _raw(server.address)

    def ask(first: int, last: int) -> None:
        stream.write([request_head("GET", f"/v1/state/3-77/pieces?reader=r&first={first}&last={last}", "x")])
        assert stream.read_head() is not None

    ask(0, pieces)
    got = stream.read(1 << 16)
    _wait_for_full_buffers()
    server.before_update()
    for tensor in tensors.values():
        tensor.add_(1)
    got += stream.read(pieces * (PIECE_BYTES + TRAILER_BYTES) - len(got))
    torn: list[int] = []
    for piece in range(pieces):
        span = slice(piece * PIECE_BYTES, (piece + 1) * PIECE_BYTES)
        start = piece * (PIECE_BYTES + TRAILER_BYTES)
        content = got[start : start + PIECE_BYTES]
        checksum = got[start + PIECE_BYTES : start + PIECE_BYTES + CHECKSUM_BYTES]
        if checksum == TORN:
            torn.append(piece)
            ask(piece, piece + 1)
            content, checksum = stream.read(PIECE_BYTES), stream.read(TRAILER_BYTES)[:CHECKSUM_BYTES]
        assert content == original[span]
        assert checksum == xxhash.xxh3_128_digest(content)
    assert len(torn) == 1, "exactly the piece that was being sent"
    stream.close()
    server.close()


def _body(stream: Stream) -> bytes:
    head = stream.read_head()
    assert head is not None
    return bytes(stream.read(parse_response(head).content_bytes))


def _wait_for_full_buffers() -> None:
    """Let the sender fill the socket's buffers, so that it stands in the middle of a piece."""
    threading.Event().wait(0.5)


def _ask_pieces(stream: Stream, reader: str, first: int, last: int) -> int:
    """Status of the answer, whose body is not read."""
    path = f"/v1/state/3-77/pieces?reader={reader}&first={first}&last={last}"
    stream.write([request_head("GET", path, "x")])
    head = stream.read_head()
    assert head is not None
    return parse_response(head).status


def test_what_lies_before_a_piece_that_was_let_go_is_sent() -> None:
    registry, tensors = big_registry(18, filled=True)
    server = StateServer(registry)
    serve(server, HEAD)
    early, late = _raw(server.address), _raw(server.address)
    for path in ("manifest?reader=a", f"release?reader=a&start={8 << 20}&end={12 << 20}"):
        method = "GET" if "manifest" in path else "POST"
        early.write([request_head(method, f"/v1/state/3-77/{path}", "x")])
        head = early.read_head()
        assert head is not None
        early.read(parse_response(head).content_bytes)
    content = bytes(tensors["000"].view(torch.uint8).numpy().data)
    server.before_update()
    for tensor in tensors.values():
        tensor.add_(1)
    assert _ask_pieces(late, "b", 0, 4) == 200
    assert late.read(len(content)) == content
    assert _ask_pieces(_raw(server.address), "b", 2, 3) == 410
    early.close()
    late.close()
    server.close()


def test_an_answer_from_copies_breaks_off_when_nothing_is_served_any_more() -> None:
    registry, _ = big_registry(60, filled=True)
    server = StateServer(registry)
    serve(server, HEAD)
    server.before_update()
    stream = _raw(server.address)
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    assert _ask_pieces(stream, "a", 0, 15) == 200
    _wait_for_full_buffers()
    server.withdraw()
    got_bytes = 0
    while data := stream.socket.recv(1 << 20):
        got_bytes += len(data)
    assert got_bytes < 6 * (PIECE_BYTES + TRAILER_BYTES)
    stream.close()
    server.close()


def test_views_of_many_tensors_are_made_without_the_lock_that_training_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry, _ = big_registry(12, filled=True)
    server = StateServer(registry)
    make, held = Bytes.between, []

    def between(self: Bytes, first: int, last: int) -> memoryview | torch.Tensor:
        held.append(server._store.changed._is_owned())  # type: ignore[attr-defined]
        return make(self, first, last)

    monkeypatch.setattr(Bytes, "between", between)
    serve(server, HEAD)
    joiner, _ = big_registry(12, filled=False)
    apply(joiner, fetch(joiner, HEAD, server.address))
    assert held
    assert not any(held)
    server.close()


@pytest.mark.parametrize("path", ["", "/3-77", "/3-77/manifest", "/4-1"])
def test_a_connection_is_closed_for_who_asks_for_it(
    donor: tuple[Replica, StateServer, str], path: str
) -> None:
    with socket.create_connection(split_address(donor[1].address), 10) as connection:
        connection.settimeout(0.9)  # the server itself would end it after a second
        head = f"GET /v1/state{path}{'?wait_ms=1' if path else ''} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode())
        while connection.recv(1 << 16):
            pass


class _Elsewhere:
    """Accepts connections of ``listener`` whose peers seem to be on another host."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        return self._listener.accept()[0], ("192.0.2.1", 1)


def test_only_peers_on_this_host_are_not_paced_for() -> None:
    def algorithm(of: socket.socket) -> bytes:
        return of.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")

    with socket.socket() as untouched:
        default = algorithm(untouched)
    listener = Listener("127.0.0.1", 0, 8)
    with socket.create_connection(("127.0.0.1", listener.port), 10), listener.accept() as here:
        assert algorithm(here) == b"reno"
    listening = listener._socket
    listener._socket = _Elsewhere(listening)  # type: ignore[assignment]
    with socket.create_connection(("127.0.0.1", listener.port), 10), listener.accept() as there:
        assert algorithm(there) == default
    listening.close()


def test_withdraw_breaks_off_and_publish_serves_again(donor: tuple[Replica, StateServer, str]) -> None:
    replica, server, url = donor
    server.withdraw()
    assert _get(f"{url}/3-77?wait_ms=1")[0] == 503
    serve(server, head_at(4))
    joiner = make_replica(2)
    apply(joiner.registry, fetch(joiner.registry, head_at(4), server.address))
    assert joiner.registry.digest() == replica.registry.digest()


def test_addresses() -> None:
    registry = make_replica(1).registry
    with pytest.raises(StateError, match="is a wildcard: say with advertise"):
        StateServer(registry, bind="0.0.0.0:0")
    server = StateServer(registry, bind="0.0.0.0:0", advertise="127.0.0.1")
    assert split_address(server.address)[0] == "127.0.0.1"
    with pytest.raises(StateError, match=r"cannot listen on '127.0.0.1'"):
        StateServer(registry, bind=f"127.0.0.1:{split_address(server.address)[1]}")
    server.close()
    for wrong in ("", "host", "host:", "host:99999", "::1:80", "[::1]"):
        with pytest.raises(ValueError, match="is not host:port"):
            split_address(wrong)
    assert split_address(join_address("::1", 80)) == ("::1", 80)


@pytest.mark.skipif(not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_ipv6() -> None:
    donor, joiner = make_replica(1), make_replica(2)
    try:
        server = StateServer(donor.registry, bind="[::1]:0")
    except StateError:
        pytest.skip("no IPv6 loopback here")
    assert server.address.startswith("[::1]:")
    serve(server, HEAD)
    apply(joiner.registry, fetch(joiner.registry, HEAD, server.address))
    assert joiner.registry.digest() == donor.registry.digest()
    server.close()


def test_close_ends_every_thread() -> None:
    before = set(threading.enumerate())
    server = StateServer(make_replica(1).registry)
    streams = [_raw(server.address) for _ in range(3)]
    for stream in streams:
        stream.write([request_head("GET", "/v1/state", "x")])
        _body(stream)
    server.close()
    assert set(threading.enumerate()) <= before
    for stream in streams:
        stream.close()


@given(
    st.binary(max_size=80)
    | st.text(max_size=60).map(lambda text: f"GET /{text} HTTP/1.1\r\n{text}\r\n\r\n".encode())
)
def test_any_request_head_parses_or_is_refused(head: bytes) -> None:
    try:
        request = parse_request(head)
    except HttpError as error:
        assert error.status == 400
    else:
        assert request.path.startswith("/")


@given(st.binary(max_size=80))
def test_any_response_head_parses_or_is_refused(head: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert parse_response(head).content_bytes >= 0


@given(
    st.none() | st.text(max_size=20) | st.from_regex(r"bytes=\d{0,3}-\d{0,3}", fullmatch=True),
    st.integers(0, 500),
)
def test_any_range_lies_inside_or_is_refused(text: str | None, size_bytes: int) -> None:
    try:
        wanted = parse_range(text, size_bytes)
    except HttpError as error:
        assert error.status == 416
    else:
        assert wanted is None or 0 <= wanted[0] < wanted[1] <= size_bytes
