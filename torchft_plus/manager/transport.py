"""Frames on a TCP connection: a 4-byte big-endian size, then one protobuf message. For asyncio loops."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import cast

from google.protobuf.message import DecodeError, Message

MAX_FRAME_BYTES = 16 * 1024 * 1024
HEADER_BYTES = 4


_open_descriptors: set[int] = set()


def _close_in_forked_child() -> None:
    """A forked worker (of a data loader, say) must not keep connections alive that would tell of its parent's death."""
    for descriptor in _open_descriptors:
        try:
            os.close(descriptor)
        except OSError:
            continue  # it was being closed while the process forked
    _open_descriptors.clear()


os.register_at_fork(after_in_child=_close_in_forked_child)


def _limit_silence(sock: socket.socket, limit_ms: int) -> None:
    """Have the kernel ask while nothing is sent, and give up when what was sent is not acknowledged.

    Some kernels have not all of these options; what is left still ends a dead connection, only later.
    """
    interval_s = max(1, limit_ms // 5000)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": interval_s,
        "TCP_KEEPINTVL": interval_s,
        "TCP_KEEPCNT": max(1, limit_ms // 1000 // interval_s),
        "TCP_USER_TIMEOUT": limit_ms,
    }
    for name, value in options.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class FrameConnection(asyncio.Protocol):
    """One framed connection. Callbacks run in the loop's thread.

    Args:
        parse: makes a message from one frame's bytes.
        on_frame: gets every message.
        on_lost: called once when the connection has ended, with the reason; not after ``close``.
        silence_limit_ms: the connection is lost when the other host has not even acknowledged anything for so long (its
            kernel does, also for a process that stands still); at least 1 s, and up to 1 s late. None: no limit.
    """

    def __init__(
        self,
        parse: Callable[[bytes], Message],
        on_frame: Callable[[FrameConnection, Message], None],
        on_lost: Callable[[FrameConnection, str], None],
        silence_limit_ms: int | None = None,
    ) -> None:
        self._silence_limit_ms = silence_limit_ms
        self._parse = parse
        self.on_frame = on_frame
        self.on_lost = on_lost
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._closed = False
        self._descriptor = -1
        self._early: list[Message] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._descriptor = sock.fileno()
            _open_descriptors.add(self._descriptor)
            if self._silence_limit_ms is not None:
                _limit_silence(sock, self._silence_limit_ms)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= HEADER_BYTES and not self._closed:
            size_bytes = int.from_bytes(self._buffer[:HEADER_BYTES])
            if size_bytes > MAX_FRAME_BYTES:
                self._fail(f"a frame of {size_bytes} bytes, more than {MAX_FRAME_BYTES}")
                return
            end = HEADER_BYTES + size_bytes
            if len(self._buffer) < end:
                return
            frame = bytes(self._buffer[HEADER_BYTES:end])
            del self._buffer[:end]
            try:
                message = self._parse(frame)
            except DecodeError:
                self._fail("a frame that is no message of this protocol")
                return
            self.on_frame(self, message)

    def connection_lost(self, exc: Exception | None) -> None:
        _open_descriptors.discard(self._descriptor)
        if not self._closed:
            self._closed = True
            self.on_lost(self, str(exc) if exc else "closed by peer")

    def send(self, message: Message) -> None:
        """Queue a message; nothing happens on a connection that has ended."""
        if self._transport is None or self._closed:
            return
        data = message.SerializeToString()
        self._transport.write(len(data).to_bytes(HEADER_BYTES) + data)

    def keep_early(self) -> None:
        """Keep frames from now on until somebody takes the connection over (``take_early``)."""
        self.on_frame = lambda _connection, message: self._early.append(message)

    def take_early(self) -> list[Message]:
        """The frames kept since ``keep_early``."""
        early, self._early = self._early, []
        return early

    def close(self) -> None:
        """Send what is queued, then end the connection, without a call to ``on_lost``."""
        self._closed = True
        if self._transport is not None:
            self._transport.close()

    def _fail(self, reason: str) -> None:
        self._closed = True
        if self._transport is not None:
            self._transport.abort()
        self.on_lost(self, reason)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port"."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"address {address!r} is not host:port")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """ "host:port", with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
