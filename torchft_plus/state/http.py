"""The little HTTP/1.1 that state transfer needs: bounded heads parsed by hand, bytes straight from and into
memory."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

from torchft_plus.state.memory import CACHE_LINE_BYTES

MAX_HEAD_BYTES = 16 << 10
CHECKSUM_HEADER = "Body-XXH3-128"
LEAST_BYTES_A_TIMEOUT = 1 << 20
_MAX_VECTORS = 256
_TICK_S = 0.1
_LOW_WATER_BYTES = 1 << 20
_TLS_BATCH_BYTES = 128 << 10
_LINGER_S, _LINGER_READS = 1.0, 16
_T = TypeVar("_T")
_REASONS = {
    200: "OK",
    206: "Partial Content",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    410: "Gone",
    416: "Range Not Satisfiable",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class HttpError(Exception):
    """A request that is refused with a status and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class ProtocolError(ConnectionError):
    """The other side does not speak our HTTP."""


class BrokenOff(ProtocolError):
    """The connection ended before it should."""


@dataclass(frozen=True, slots=True)
class Request:
    """Head of a request."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    """Names in lower case."""

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer of the query, from 0 to 2**62.

        Raises:
            HttpError: it is missing and has no default, or is no such integer.
        """
        text = self.query.get(name)
        if text is None and default is not None:
            return default
        if text is None or not re.fullmatch(r"[0-9]{1,19}", text) or int(text) > 1 << 62:
            raise HttpError(400, f"the query needs {name}=N, a number from 0 to 2**62")
        return int(text)


@dataclass(frozen=True, slots=True)
class Response:
    """Head of a response."""

    status: int
    content_bytes: int
    checksum: str | None = None
    """xxh3_128 (hex) of the body, if the sender gave it."""


def _parse_headers(lines: Sequence[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise HttpError(400, "a header line of the request is malformed")
        headers[name.lower()] = value.strip()
    return headers


def parse_request(head: bytes) -> Request:
    """Parse the head of a request, up to its empty line.

    Raises:
        HttpError: it is malformed or announces a body.
    """
    try:
        lines = head.decode("ascii").removesuffix("\r\n\r\n").split("\r\n")
    except UnicodeDecodeError:
        raise HttpError(400, "the request's head is not ASCII") from None
    parts = lines[0].split(" ")
    if len(parts) != 3 or not parts[1].startswith("/") or parts[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise HttpError(400, "the request line must be METHOD /path HTTP/1.1")
    headers = _parse_headers(lines[1:])
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise HttpError(400, "requests with a body are not accepted")
    try:
        url = urlsplit(parts[1])
        query = dict(parse_qsl(url.query, max_num_fields=16))
    except ValueError:
        raise HttpError(400, "the request's address is malformed") from None
    return Request(parts[0], url.path, query, headers)


def parse_range(text: str | None, size_bytes: int) -> tuple[int, int] | None:
    """The bytes ``[start, end)`` that a ``Range`` header asks for; None if there is no header.

    Raises:
        HttpError: it is malformed, has several ranges, or lies outside of ``size_bytes``.
    """
    if text is None:
        return None
    match = re.fullmatch(r"bytes=([0-9]{0,19})-([0-9]{0,19})", text)
    if match is None or not (match[1] or match[2]):
        raise HttpError(416, "Range must be one range, bytes=FIRST-LAST")
    if not match[1]:
        start, end = max(0, size_bytes - int(match[2])), size_bytes
    else:
        start = int(match[1])
        end = min(size_bytes, int(match[2]) + 1) if match[2] else size_bytes
    if start >= end:
        raise HttpError(416, f"Range lies outside of the {size_bytes} bytes")
    return start, end


def response_head(status: int, content_bytes: int, headers: Mapping[str, str] | None = None) -> bytes:
    """Head of a response."""
    lines = [f"HTTP/1.1 {status} {_REASONS[status]}", f"Content-Length: {content_bytes}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


def aligned_head(content_bytes: int, sent_bytes: int) -> bytes:
    """Head of the response with bytes of tensors, at the end of which a multiple of ``CACHE_LINE_BYTES`` has been sent.

    Args:
        content_bytes: length of the body.
        sent_bytes: what the connection has sent before.
    """
    headers = {"Content-Type": "application/octet-stream", "Padding": ""}
    plain_bytes = sent_bytes + len(response_head(200, content_bytes, headers))
    headers["Padding"] = "-" * (-plain_bytes % CACHE_LINE_BYTES)
    return response_head(200, content_bytes, headers)


def request_head(method: str, path: str, host: str, headers: Mapping[str, str] | None = None) -> bytes:
    """Head of a request without a body."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


def parse_response(head: bytes) -> Response:
    """Parse the head of a response.

    Raises:
        ProtocolError: it is malformed or has no length.
    """
    lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    match = re.fullmatch(r"HTTP/1\.[01] ([0-9]{3})(?: .*)?", lines[0])
    try:
        headers = _parse_headers(lines[1:])
    except HttpError:
        headers = {}
    length = headers.get("content-length", "")
    if match is None or not re.fullmatch(r"[0-9]{1,18}", length):
        raise ProtocolError("the answer is no HTTP response with a length")
    return Response(int(match[1]), int(length), headers.get(CHECKSUM_HEADER.lower()))


class Views:
    """A cursor over the memory that a message comes from or goes to."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = [view for view in views if len(view)]
        self._index = 0

    def batch(self) -> list[memoryview]:
        """The next memory, for one system call; empty at the end."""
        return self._views[self._index : self._index + _MAX_VECTORS]

    @property
    def done(self) -> bool:
        """Nothing is left."""
        return self._index >= len(self._views)

    def advance(self, count: int) -> list[memoryview]:
        """``count`` bytes of it are done, or all that are left. Returns where they lie."""
        parts: list[memoryview] = []
        while count and not self.done:
            view = self._views[self._index]
            if count < len(view):
                self._views[self._index] = view[count:]
                parts.append(view[:count])
                break
            parts.append(view)
            count -= len(view)
            self._index += 1
        return parts


class TooSlow(TimeoutError):
    """The other side does something, but next to nothing."""


class _Pace:
    """Ends a transfer that trickles: a byte now and then would hold it for ever without a single wait that is too long.

    Args:
        timeout_s: in each so many seconds ``LEAST_BYTES_A_TIMEOUT`` bytes must pass, if it takes so long.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._started = self._moved = time.monotonic()
        self._bytes = 0

    def waited(self) -> None:
        """Not a byte in a tick. Raises TimeoutError."""
        if time.monotonic() >= self._moved + self._timeout_s:
            raise TimeoutError("timed out")

    def passed(self, count: int) -> None:
        """So many bytes more. Raises TooSlow."""
        self._bytes += count
        self._moved = now = time.monotonic()
        if now < self._started + self._timeout_s:
            return
        if self._bytes < LEAST_BYTES_A_TIMEOUT:
            raise TooSlow(f"only {self._bytes} bytes passed")
        self._started, self._bytes = now, 0


class Stream:
    """A socket, connected or to be connected: heads are read by hand, bodies go straight to and from memory.

    The kernel waits for bytes, a tick at a time, and has not to be asked before each call whether there are any; a socket that
    speaks TLS waits by Python's timeouts.

    Args:
        connection: the socket; it is the stream's from now on.
        timeout_s: no wait is longer, nor trickles on for longer.
    """

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self.socket: socket.socket = connection
        self._timeout_s = timeout_s
        self._left = b""
        self._tls = False
        self._aborted = False
        self._coming_bytes = 0
        self._low_water_bytes = 1
        self.sent_bytes = 0
        """How much was written."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._set_timeouts()

    def limit(self, timeout_s: float) -> None:
        """No wait is longer from now on."""
        if timeout_s != self._timeout_s:
            self._timeout_s = timeout_s
            self._set_timeouts()

    def _set_timeouts(self) -> None:
        if self._tls:
            self.socket.settimeout(self._timeout_s)
            return
        self.socket.setblocking(True)
        tick = struct.pack("@ll", 0, max(1, int(1e6 * min(self._timeout_s, _TICK_S))))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.socket.setsockopt(socket.SOL_SOCKET, option, tick)

    def connect(self, address: tuple[Any, ...]) -> None:
        """Connect to an address as of ``getaddrinfo``. Raises OSError."""
        self.socket.settimeout(self._timeout_s)
        self.socket.connect(address)
        self._set_timeouts()

    def start_tls(self, context: ssl.SSLContext, server_name: str | None = None) -> None:
        """Speak TLS from now on; as the server, if there is no name. The timeout bounds the whole handshake.

        Raises:
            OSError: the handshake failed or was not over in time.
        """
        server_side = server_name is None
        self.socket = context.wrap_socket(
            self.socket, server_side=server_side, server_hostname=server_name, do_handshake_on_connect=False
        )
        self._tls = True
        self._set_timeouts()
        if self._aborted:
            raise ConnectionAbortedError("the connection was broken off")
        self.socket.do_handshake()

    def first_byte(self) -> int:
        """What the other side will say first, left where it is; -1 if it closed. Raises OSError."""
        return next(
            iter(_patiently(lambda: self.socket.recv(1, socket.MSG_PEEK), _Pace(self._timeout_s))), -1
        )

    def linger(self) -> None:
        """Let the last words arrive: closing at once would take them back if the other side is still sending.

        Raises OSError.
        """
        socket.socket.shutdown(self.socket, socket.SHUT_WR)
        self.socket.settimeout(_LINGER_S)
        for _ in range(_LINGER_READS):
            if not socket.socket.recv(self.socket, MAX_HEAD_BYTES):
                break

    def read_head(self) -> bytes | None:
        """The next head with its empty line; None if the other side closed between two heads.

        Raises:
            ProtocolError: it is longer than 16 KiB or breaks off.
            OSError: the connection broke, or it did not come within the timeout.
        """
        head = self._left
        pace = _Pace(self._timeout_s)
        while (end := head.find(b"\r\n\r\n")) < 0:
            if len(head) > MAX_HEAD_BYTES:
                raise ProtocolError(f"a head is longer than {MAX_HEAD_BYTES} bytes")
            data = _patiently(lambda: self.socket.recv(MAX_HEAD_BYTES), pace)
            if not data:
                if head:
                    raise BrokenOff("the connection broke off inside of a head")
                return None
            head += data
            self.expect(-len(data))
            pace.passed(len(data))
        self._left = head[end + 4 :]
        return head[: end + 4]

    def read_into(
        self, views: Sequence[memoryview], received: Callable[[memoryview], None] = lambda _part: None
    ) -> None:
        """Fill ``views`` in order; ``received`` is given each part as it comes, while it is in the processor's cache.

        Raises:
            ProtocolError: the other side closed before all bytes were there.
            OSError: the connection broke, or nothing or too little came within the timeout.
        """
        target = Views(views)
        pace = _Pace(self._timeout_s)
        while batch := target.batch():
            if self._left:
                count = min(len(self._left), len(batch[0]))
                batch[0][:count] = self._left[:count]
                self._left = self._left[count:]
            else:
                count = _patiently(partial(self._receive_into, batch), pace)
                if not count:
                    raise BrokenOff("the connection broke off inside of an answer")
            for part in target.advance(count):
                received(part)
            if not target.done:
                pace.passed(count)

    def _receive_into(self, batch: list[memoryview]) -> int:
        # An SSLSocket takes one piece of memory at a time; for a single one recvmsg is slower.
        one = self._tls or len(batch) == 1
        count = self.socket.recv_into(batch[0]) if one else self.socket.recvmsg_into(batch)[0]
        self.expect(-count)
        return count

    def expect(self, count: int) -> None:
        """So many bytes more will come, because they were asked for.

        While much is to come the thread is woken for a megabyte at a time, or by a tick: at a few hundred kilobytes, as the
        kernel does by itself, waking takes as much CPU as copying. Twice as much must be to come: a call that has taken part
        of a megabyte before it waits is woken for a whole one more.
        """
        self._coming_bytes = max(0, self._coming_bytes + count)
        much = self._coming_bytes >= 2 * _LOW_WATER_BYTES and not self._tls
        low_water_bytes = _LOW_WATER_BYTES if much else 1
        if low_water_bytes != self._low_water_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water_bytes)
            self._low_water_bytes = low_water_bytes

    def read(self, count: int) -> bytearray:
        """The next ``count`` bytes; errors as ``read_into``."""
        data = bytearray(count)
        self.read_into([memoryview(data)])
        return data

    def write(self, views: Sequence[memoryview | bytes]) -> None:
        """Send ``views`` in order.

        Raises:
            OSError: the connection broke, or the other side took nothing or too little within the timeout.
        """
        source = Views([memoryview(view) for view in views])
        pace = _Pace(self._timeout_s)
        send = self._send_tls if self._tls else self.socket.sendmsg
        while batch := source.batch():
            count = _patiently(partial(send, batch), pace)
            self.sent_bytes += count
            source.advance(count)
            if not source.done:
                pace.passed(count)

    def _send_tls(self, batch: Sequence[memoryview]) -> int:
        if len(batch[0]) >= _TLS_BATCH_BYTES or len(batch) == 1:
            return self.socket.send(batch[0])
        data = bytearray()  # a record for each small tensor would cost more than the copy
        for view in batch:
            data += view[: _TLS_BATCH_BYTES - len(data)]
            if len(data) >= _TLS_BATCH_BYTES:
                break
        return self.socket.send(data)

    def abort(self) -> None:
        """A thread that connects, reads or writes gets an error at once. Any thread."""
        self._aborted = True
        with contextlib.suppress(OSError):  # the other side may have closed it
            # Not SSLSocket's own: after that one a reader would take what is left of the cipher text for plain data.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Only for the thread that uses it: the number of a closed descriptor is used
        again."""
        self.abort()
        self.socket.close()


def _patiently(call: Callable[[], _T], pace: _Pace) -> _T:
    """What ``call`` gives, once the kernel does not give up after a tick. Raises OSError."""
    while True:
        try:
            return call()
        except BlockingIOError:
            pace.waited()


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[IPv6]:port".

    Raises:
        ValueError: it is no such text.
    """
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+)):([0-9]{1,5})", address)
    if match is None or int(match[3]) > 65535:
        raise ValueError(f"address {address[:120]!r} is not host:port")
    return match[1] or match[2], int(match[3])


def join_address(host: str, port: int) -> str:
    """Inverse of ``split_address``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
