"""Frames on a TCP connection: a 4-byte big-endian size, then one protobuf message. For asyncio loops."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from typing import cast

from google.protobuf.message import DecodeError, Message

from lighthouse.security import (
    HANDSHAKE_DEADLINE_S,
    NO_TLS_ALERT,
    SPEAKS_TLS,
    TLS_ALERT,
    TLS_HANDSHAKE,
    Security,
    client_context,
    describe_tls_error,
    is_mismatch,
)
from torchft_plus.manager.tls_handshake import talking_server_context

MAX_FRAME_BYTES = 16 * 1024 * 1024
HEADER_BYTES = 4
MAX_HELLO_BYTES = 64 * 1024
"""A frame of somebody who has not shown the token yet."""


class PeerRefused(ConnectionError):
    """Token or TLS settings of the two sides do not fit: trying again cannot help."""


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
        self.max_frame_bytes = MAX_FRAME_BYTES
        self.refused = False
        """It ended before the first frame, because the two sides' TLS settings do not fit."""
        self._heard = False

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
            if size_bytes > self.max_frame_bytes:
                self._fail(self._too_large(size_bytes))
                return
            end = HEADER_BYTES + size_bytes
            if len(self._buffer) < end:
                return
            self._heard = True
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
            self.refused = is_mismatch(exc) and not self._heard
            reason = (
                describe_tls_error(exc) if isinstance(exc, ssl.SSLError) else str(exc or "closed by peer")
            )
            self.on_lost(self, reason)

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

    def _too_large(self, size_bytes: int) -> str:
        self.refused = not self._heard and self._buffer[0] in (TLS_ALERT, TLS_HANDSHAKE)
        if self.refused:
            if self._transport is not None:
                self._transport.write(NO_TLS_ALERT)
            return SPEAKS_TLS
        return f"a frame of {size_bytes} bytes, more than {self.max_frame_bytes}"

    def _fail(self, reason: str) -> None:
        self._closed = True
        if self._transport is not None:
            (self._transport.close if self.refused else self._transport.abort)()
        self.on_lost(self, reason)


async def listen(factory: Callable[[], FrameConnection], host: str, security: Security) -> asyncio.Server:
    """Serve connections on any free port of ``host``. Who does not end its handshake in time is cut off."""
    loop = asyncio.get_running_loop()
    if security.tls is None:
        return await loop.create_server(factory, host, 0)
    context = talking_server_context(security.tls)
    return await loop.create_server(factory, host, 0, ssl=context, ssl_handshake_timeout=HANDSHAKE_DEADLINE_S)


async def connect(
    factory: Callable[[], FrameConnection], address: str, security: Security
) -> FrameConnection:
    """Connect to "host:port". The caller brings the deadline.

    Raises:
        PeerRefused: the TLS settings of the two sides do not fit.
        OSError: nobody answers there.
        ValueError: bad address.
    """
    host, port = split_address(address)
    loop = asyncio.get_running_loop()
    if security.tls is None:
        return (await loop.create_connection(factory, host, port))[1]
    context, name = client_context(security.tls), security.tls.name
    try:
        return (
            await loop.create_connection(
                factory,
                host,
                port,
                ssl=context,
                server_hostname=name,
                ssl_handshake_timeout=HANDSHAKE_DEADLINE_S,
            )
        )[1]
    except ssl.SSLError as error:
        if not is_mismatch(error):
            raise
        raise PeerRefused(describe_tls_error(error)) from error


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port"."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"address {address!r} is not host:port")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """ "host:port", with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
