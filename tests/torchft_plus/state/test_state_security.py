"""Token and TLS at the state server: who may read, what the others are told, and that TLS changes no byte."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from run_security import OTHER_TOKEN, TOKEN, make_security, make_tls, mixed
from safetensors.torch import load_file
from state_replicas import apply, fetch, head_at, make_replica, serve

from lighthouse.security import NO_TLS_ALERT, Security, client_context
from torchft_plus.state import StateRegistry, StateServer
from torchft_plus.state.errors import StateError
from torchft_plus.state.http import Stream, split_address

HEAD = head_at(3)


def ask(address: str, *lines: str) -> bytes:
    """Plain HTTP, as a port scanner or curl would."""
    with socket.create_connection(split_address(address), 10) as connection:
        head = "\r\n".join(["GET /v1/state HTTP/1.1", "Host: x", *lines]) + "\r\n\r\n"
        connection.sendall(head.encode())
        connection.settimeout(10)
        return connection.recv(4096)


def test_without_the_token_a_401_with_a_sentence() -> None:
    server = StateServer(StateRegistry(), security=Security(TOKEN))
    for lines in ([], [f"Authorization: Bearer {OTHER_TOKEN}"], [f"Authorization: Basic {TOKEN}"]):
        answer = ask(server.address, *lines).decode()
        assert answer.startswith("HTTP/1.1 401 ")
        assert "WWW-Authenticate: Bearer" in answer
        assert "TORCHFT_PLUS_TOKEN_FILE" in answer
        assert TOKEN not in answer
    assert ask(server.address, f"Authorization: Bearer {TOKEN}").startswith(b"HTTP/1.1 200 ")
    assert ask(server.address, f"authorization: bearer {TOKEN}").startswith(b"HTTP/1.1 200 ")
    server.close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl_reads_with_token_and_certificate(tmp_path: Path) -> None:
    replica = make_replica(1)
    for security in (Security(TOKEN), make_security(tmp_path)):
        server = StateServer(replica.registry, security=security)
        serve(server, HEAD)
        path = tmp_path / "state.safetensors"
        command = ["curl", "-sS", "-f", "-o", path, "-H", f"Authorization: {security.authorization}"]
        tls = security.tls
        if tls is None:
            command.append(f"http://{server.address}/v1/state/3-77")
        else:
            host, port = split_address(server.address)
            command += ["--cacert", tls.authority, "--cert", tls.certificate, "--key", tls.key]
            command += ["--connect-to", f"{tls.name}:{port}:{host}:{port}"]
            command.append(f"https://{tls.name}:{port}/v1/state/3-77")
        subprocess.run(command, check=True, timeout=30)
        tensors = load_file(path)
        assert all(torch.equal(tensors[n], e.local) for n, e in replica.registry.snapshot().entries)
        server.close()


def test_a_fetch_with_token_and_tls_is_bit_for_bit(tmp_path: Path) -> None:
    security = make_security(tmp_path)
    donor, joiner = make_replica(1), make_replica(2)
    big = torch.randn(5_000_000)
    small = {f"small{i}": torch.randn(7) for i in range(3_000)}
    own = {name: torch.zeros_like(tensor) for name, tensor in small.items()} | {"big": torch.zeros_like(big)}
    donor.registry.register_tensors("more", lambda: {**small, "big": big})
    joiner.registry.register_tensors("more", lambda: own)
    donor.train(1, 3)
    servers = [StateServer(donor.registry, security=security) for _ in range(2)]
    for server in servers:
        serve(server, HEAD)
    report = fetch(joiner.registry, HEAD, *(server.address for server in servers), security=security)
    apply(joiner.registry, report)
    assert joiner.registry.digest() == donor.registry.digest()
    assert report.notes == ()
    for server in servers:
        server.close()


def test_every_mismatch_ends_a_fetch_with_a_sentence(tmp_path: Path) -> None:
    ours, theirs = make_tls(tmp_path / "ours"), make_tls(tmp_path / "theirs")
    donor = make_replica(1)
    cases = [
        (Security(TOKEN), Security(OTHER_TOKEN), "TORCHFT_PLUS_TOKEN_FILE"),
        (Security(tls=ours), Security(), "wants TLS"),
        (Security(), Security(tls=ours), "speaks no TLS"),
        (Security(tls=ours), Security(tls=theirs), "is not accepted"),
        (Security(tls=ours), Security(tls=mixed(theirs, ours)), "not accepted"),
    ]
    for donors, readers, words in cases:
        server = StateServer(donor.registry, security=donors)
        serve(server, HEAD)
        started = time.monotonic()
        with pytest.raises(StateError, match=words):
            fetch(make_replica(2).registry, HEAD, server.address, security=readers)
        assert time.monotonic() - started < 4, "nobody waited for a deadline"
        server.close()


def test_a_silent_reader_keeps_nobody_waiting(tmp_path: Path) -> None:
    security = make_security(tmp_path)
    donor = make_replica(1)
    server = StateServer(donor.registry, security=security, transfer_stall_ms=1_000)
    serve(server, HEAD)
    silent = [socket.create_connection(split_address(server.address), 10) for _ in range(5)]
    silent[1].sendall(b"\x16\x03\x01")
    joiner = make_replica(2)
    apply(joiner.registry, fetch(joiner.registry, HEAD, server.address, security=security))
    for connection in silent:
        with connection:
            assert connection.recv(1) in (b"", NO_TLS_ALERT[:1]), "it is cut off"
    server.close()


def test_a_tls_reader_that_is_aborted_reads_no_cipher_text(tmp_path: Path) -> None:
    """What is left in the socket must not land in a tensor as if it were plain."""
    tls = make_tls(tmp_path)
    listener = socket.create_server(("127.0.0.1", 0))
    reader = Stream(socket.create_connection(listener.getsockname()), 10)
    server = Stream(listener.accept()[0], 10)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.certificate, tls.key)
    thread = threading.Thread(target=lambda: server.start_tls(context))
    thread.start()
    reader.start_tls(client_context(tls), tls.name)
    thread.join()
    server.write([b"\x01" * 100_000])
    reader.read(10)
    reader.abort()
    memory = bytearray(200_000)
    with pytest.raises(OSError):
        reader.read_into([memoryview(memory)])
    assert set(memory) <= {0, 1}
    for stream in (reader, server):
        stream.close()
    listener.close()
