"""One connection of a joiner to a donor's state server."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from urllib.parse import quote

import xxhash

from lighthouse.messages import Head
from lighthouse.security import HANDSHAKE_DEADLINE_S, Security, client_context
from torchft_plus.state.errors import StateError
from torchft_plus.state.http import (
    BrokenOff,
    ProtocolError,
    Response,
    Stream,
    parse_response,
    request_head,
    split_address,
)
from torchft_plus.state.load_plan import LoadPlan
from torchft_plus.state.manifest import PIECE_BYTES, TORN, TRAILER_BYTES, head_name, trailer
from torchft_plus.state.staging import Landing
from torchft_plus.state.values import MAX_JSON_BYTES

_MAX_SENTENCE_BYTES = 4096
_RELEASE_S = 0.5


class DonorRefusal(StateError):
    """The donor answered with an error; ``status`` is that of HTTP."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Verdict(Enum):
    """How a piece came."""

    INTACT = "intact"
    DAMAGED = "damaged"
    """Its checksum is not what the donor sent."""
    TORN = "torn"
    """It changed at the donor while it was sent."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A range of data bytes that was asked for."""

    start: int
    end: int
    releases: int
    """How many releases were asked for before it."""

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Start and end of each piece."""
        return [
            (start, min(start + PIECE_BYTES, self.end)) for start in range(self.start, self.end, PIECE_BYTES)
        ]

    @property
    def content_bytes(self) -> int:
        """Length of the answer's body."""
        return self.end - self.start + len(self.pieces) * TRAILER_BYTES


class DonorConnection:
    """Asks one donor for parts of one version. Used by one thread.

    Args:
        address: "host:port" of the donor's state server.
        head: the version.
        reader: name under which the donor remembers what we have.
        stall_ms: limit for connecting and for every wait for bytes.
        security: what the donor is shown.

    Raises:
        ValueError: ``address`` is malformed.
        OSError: its host is not known.
    """

    def __init__(
        self, address: str, head: Head, reader: str, stall_ms: int, security: Security | None = None
    ) -> None:
        self._security = security or Security()
        self._stall_s = stall_ms / 1000
        self._host = address
        self._path = f"/v1/state/{head_name(head)}"
        self._reader = f"reader={quote(reader)}"
        self._asked: deque[_Asked] = deque()
        """Whose answers are on the way."""
        host, port = split_address(address)
        family, _, _, _, self._target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._stream = Stream(socket.socket(family, socket.SOCK_STREAM), self._stall_s)

    def open(self) -> None:
        """Connect. Raises OSError."""
        self._stream.connect(self._target)
        tls = self._security.tls
        if tls is None:
            return
        self._stream.limit(min(self._stall_s, HANDSHAKE_DEADLINE_S))
        self._stream.start_tls(client_context(tls), tls.name)
        self._stream.limit(self._stall_s)

    def abort(self) -> None:
        """Break off: the thread that uses this connection gets an OSError. Any thread."""
        self._stream.abort()

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()

    def manifest(self, wait_ms: int) -> bytearray:
        """The manifest's text; the donor may wait up to ``wait_ms`` for its next boundary.

        Raises:
            DonorRefusal: 404 never, 503 not yet.
            OSError: the connection broke or stalled.
        """
        self._stream.write([self._request("GET", f"/manifest?{self._reader}&wait_ms={wait_ms}")])
        return self._answer(MAX_JSON_BYTES)

    def ask(self, plan: LoadPlan, first: int, last: int, released: Sequence[tuple[int, int]]) -> None:
        """Ask for the pieces ``first <= i < last``. The next range may be asked for before this one is received, so
        that the donor never waits for us.

        Args:
            plan: of the version.
            first: index of the first piece.
            last: index behind the last piece.
            released: data bytes that were verified since the last call, which the donor need not keep.

        Raises:
            OSError: the connection broke or stalled.
        """
        requests = [self._request("POST", f"/release?{self._reader}&start={a}&end={b}") for a, b in released]
        requests.append(self._request("GET", f"/pieces?{self._reader}&first={first}&last={last}"))
        end = min(last * PIECE_BYTES, plan.manifest.size_bytes)
        asked = _Asked(first * PIECE_BYTES, end, len(released))
        self._stream.write([b"".join(requests)])
        self._stream.expect(asked.content_bytes)
        self._asked.append(asked)

    def receive(self, landing: Landing, received: Callable[[int], None]) -> Iterator[Verdict]:
        """Receive the range that was asked for first into ``landing`` and compare checksums.

        Args:
            landing: where the bytes go.
            received: called with the number of bytes that have come, as they come.

        Yields:
            For each piece, in order, whether it must be fetched again.

        Raises:
            DonorRefusal: the donor does not have them any more.
            OSError: the connection broke or stalled.
        """
        asked = self._asked.popleft()
        for _ in range(asked.releases):
            self._answer(0)
        self._begin_answer(200, asked.content_bytes)
        behind: list[memoryview] = []
        """Where the checksum of the piece before goes: it comes with the next piece, which spares a wait for so few bytes."""
        before = xxhash.xxh3_128()
        sent = bytearray(TRAILER_BYTES)
        for start, end in asked.pieces:
            checksum = xxhash.xxh3_128()
            memory = landing.memory(start, end)
            sent[:] = bytes(TRAILER_BYTES)
            try:
                self._receive_parts(behind, memory, checksum, received)
            except OSError:
                if behind and _verdict(sent, before) is Verdict.INTACT:
                    yield _settle(
                        landing, Verdict.INTACT
                    )  # the piece before came before the connection broke
                raise
            if behind:
                yield _settle(landing, _verdict(sent, before))
            behind, before = [memoryview(sent)], checksum
        self._stream.read_into(behind)
        yield _settle(landing, _verdict(sent, before))

    def _receive_parts(
        self,
        behind: list[memoryview],
        memory: list[memoryview],
        checksum: xxhash.xxh3_128,
        received: Callable[[int], None],
    ) -> None:
        left_bytes = sum(map(len, behind))

        def take(part: memoryview) -> None:
            nonlocal left_bytes
            if left_bytes:
                left_bytes -= len(part)
                return
            checksum.update(part)
            received(len(part))

        self._stream.read_into([*behind, *memory], take)

    def release(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Tell the donor what it need not keep for us, if it listens. Raises OSError."""
        self._stream.limit(min(self._stall_s, _RELEASE_S))
        requests = [self._request("POST", f"/release?{self._reader}&start={a}&end={b}") for a, b in ranges]
        self._stream.write([b"".join(requests)])
        for _ in ranges:
            self._answer(0)

    def _request(self, method: str, rest: str) -> bytes:
        headers = {"Authorization": self._security.authorization} if self._security.token else {}
        return request_head(method, self._path + rest, self._host, headers)

    def _begin_answer(self, status: int, content_bytes: int | None = None) -> Response:
        head = self._stream.read_head()
        if head is None:
            raise BrokenOff("the connection was closed before an answer came")
        response = parse_response(head)
        if response.status != status:
            text = self._stream.read(min(response.content_bytes, _MAX_SENTENCE_BYTES))
            sentence = text.decode("utf-8", "replace").strip()[:400]
            raise DonorRefusal(response.status, "".join(c if c.isprintable() else "?" for c in sentence))
        if content_bytes is not None and response.content_bytes != content_bytes:
            raise ProtocolError(
                f"the answer has {response.content_bytes} bytes, asked for were {content_bytes}"
            )
        return response

    def _answer(self, limit: int) -> bytearray:
        response = self._begin_answer(200)
        if response.content_bytes > limit:
            raise ProtocolError(f"the answer has {response.content_bytes} bytes, above the bound of {limit}")
        body = self._stream.read(response.content_bytes)
        if xxhash.xxh3_128_hexdigest(body) != response.checksum:
            raise ProtocolError("the answer came damaged")
        return body


def _settle(landing: Landing, verdict: Verdict) -> Verdict:
    landing.settle(verdict is Verdict.INTACT)
    return verdict


def _verdict(sent: bytearray, checksum: xxhash.xxh3_128) -> Verdict:
    said = bytes(sent)
    if said == trailer(TORN):
        return Verdict.TORN
    return Verdict.INTACT if said == trailer(checksum.digest()) else Verdict.DAMAGED
