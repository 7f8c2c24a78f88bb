"""One gRPC stream to a Lighthouse over plain sockets: as little HTTP/2 as that takes, so that a bench of thousands
of members measures the server and not its own client.

HTTP/2: RFC 9113, HPACK: RFC 7541 (only indexed names and literals without indexing, so no table is kept), messages:
the gRPC protocol over HTTP/2. The windows that the server may fill are opened wide once; what goes up is so little
that the server's own windows never fill.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import cast

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
STREAM_ID = 1
MAX_WINDOW = 2**31 - 1
INITIAL_WINDOW_SIZE, ENABLE_PUSH = 4, 2
FRAME_HEADER_BYTES = 9
MESSAGE_HEADER_BYTES = 5


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One HTTP/2 frame."""
    return struct.pack(">BHBBI", len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


def message_frame(message: bytes) -> bytes:
    """A gRPC message as the DATA frame in which it goes up; below 16 KiB."""
    return frame(DATA, 0, STREAM_ID, struct.pack(">BI", 0, len(message)) + message)


def opening(authority: str, path: str) -> bytes:
    """What a client says first: preface, settings, windows, and the headers of the call."""
    text = [
        (b"\x04", path),
        (b"\x01", authority),
        (b"\x0f\x10", "application/grpc"),
        (b"\x00" + _literal("te"), "trailers"),
    ]
    headers = b"\x83\x86" + b"".join(name + _literal(value) for name, value in text)
    settings = struct.pack(">HIHI", ENABLE_PUSH, 0, INITIAL_WINDOW_SIZE, MAX_WINDOW)
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame(SETTINGS, 0, 0, settings)
        + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", MAX_WINDOW - 65_535))
        + frame(HEADERS, END_HEADERS, STREAM_ID, headers)
    )


def _literal(text: str) -> bytes:
    data = text.encode("ascii")
    assert len(data) < 127, "longer strings would need more than one byte of length"
    return bytes([len(data)]) + data


class LightSession(asyncio.Protocol):
    """A connection with one open call.

    Args:
        greeting: what is written when the connection stands: ``opening`` and the first messages.
        on_message: called with each gRPC message.
        on_end: called when the call or the connection has ended by the server's will.
    """

    def __init__(
        self, greeting: bytes, on_message: Callable[[bytes], None], on_end: Callable[[], None]
    ) -> None:
        self._greeting = greeting
        self._on_message = on_message
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._frames = bytearray()
        self._messages = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._greeting)

    def send(self, message_frames: bytes) -> None:
        """Write what ``message_frame`` made; lost without a connection."""
        if self._transport is not None:
            self._transport.write(message_frames)

    def abort(self) -> None:
        """Drop the connection, as the death of a process does."""
        if self._transport is not None:
            transport, self._transport = self._transport, None
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        del exc
        self._ended()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        frames = self._frames
        frames += data
        start, end = 0, len(frames)
        while end - start >= FRAME_HEADER_BYTES:
            high, low, kind, flags = struct.unpack_from(">BHBB", frames, start)
            first = start + FRAME_HEADER_BYTES
            after = first + (high << 16 | low)
            if after > end:
                break
            self._take(kind, flags, bytes(frames[first:after]))
            start = after
        del frames[:start]

    def _take(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == DATA:
            self._take_data(payload)
        elif kind in (SETTINGS, PING) and not flags & ACK:
            self.send(frame(kind, ACK, 0, payload if kind == PING else b""))
        if kind in (RST_STREAM, GOAWAY) or (kind in (DATA, HEADERS) and flags & END_STREAM):
            self._ended()

    def _take_data(self, payload: bytes) -> None:
        messages = self._messages
        messages += payload
        while len(messages) >= MESSAGE_HEADER_BYTES:
            after = MESSAGE_HEADER_BYTES + int.from_bytes(messages[1:MESSAGE_HEADER_BYTES])
            if len(messages) < after:
                return
            message = bytes(messages[MESSAGE_HEADER_BYTES:after])
            del messages[:after]
            self._on_message(message)

    def _ended(self) -> None:
        if self._transport is not None:
            self.abort()
            self._on_end()
