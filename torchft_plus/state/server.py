"""The state server of one rank: its versions over HTTP, as safetensors files."""

from __future__ import annotations

import json
import logging
import ssl
import threading

import xxhash

from lighthouse.messages import Head
from lighthouse.security import (
    HANDSHAKE_DEADLINE_S,
    NO_TLS_ALERT,
    SPEAKS_NO_TLS,
    SPEAKS_TLS,
    TLS_HANDSHAKE,
    WRONG_TOKEN,
    Security,
    Tls,
    describe_tls_error,
    server_context,
)
from torchft_plus.state.errors import StateError
from torchft_plus.state.http import (
    CHECKSUM_HEADER,
    HttpError,
    Request,
    Stream,
    Views,
    aligned_head,
    join_address,
    parse_range,
    parse_request,
    response_head,
    split_address,
)
from torchft_plus.state.listener import Listener
from torchft_plus.state.manifest import PIECE_BYTES, TORN, TRAILER_BYTES, head_name, parse_head, trailer
from torchft_plus.state.registry import StateRegistry
from torchft_plus.state.staging import Departure
from torchft_plus.state.version import Hold, Piece, Version
from torchft_plus.state.version_store import NotServed, NotYetServed, VersionStore

DEFAULT_TRANSFER_STALL_MS = 15_000
_MAX_CONNECTIONS = 64
_MAX_READER_CHARACTERS = 64
_LINGER_STALLS = 8
_HOT_BYTES = 1 << 20
"""Checksum and copy of so much at a time: the second one finds it in the processor's second cache."""
_log = logging.getLogger(__name__)


class StateServer:
    """Serves versions of the registered state; donors never wait for readers.

    What the Manager calls, on the way of a step:

    - ``publish(head)`` at the boundary in ``start_step`` and again in ``finish_step`` while nothing has
      changed yet. A microsecond if nobody wants this head. If somebody does (``pin``, or a request that is
      waiting), references to the tensors and copies of the plain values of this moment are taken, and buffers
      that a forward may change are copied. In ``finish_step`` (``update_follows``) a thread begins to copy what
      lies on the host and readers have not verified, while the training thread waits for the others.
    - ``before_update()`` before anything registered changes: the optimizer step, schedulers, positions. It is
      a last chance to capture the published head, and then copies what readers have not verified and nobody has
      copied yet; a microsecond if nobody reads.
    - ``pin(head, readers)`` when a quorum with joiners is adopted, on any thread: the next of the calls above
      captures ``head``; until then a thread has the kernel give the memory for the copies (after the first update).
      ``unpin(head)`` when the joiners are level or gone; a pin that no reader uses for
      eight times ``transfer_stall_ms`` is void by itself.
    - ``withdraw()`` when this replica is not level any more: nothing is served until the next ``publish``.

    Addresses (all answers have a length; JSON comes with a checksum in ``Body-XXH3-128``; errors are one
    sentence of text):

    - ``GET /v1/state``: heads that can be read, as JSON.
    - ``GET /v1/state/{step}-{quorum_id}``: the safetensors file, with ``Range`` and ``HEAD``.
    - ``GET .../manifest?reader=NAME&wait_ms=N``: the manifest; waits for a boundary.
    - ``GET .../pieces?reader=NAME&first=I&last=J``: pieces of the data, behind each its
      xxh3_128 (16 bytes) and 48 zeros; a checksum of zeros means that the piece changed while it was sent and must be asked
      for again.
    - ``POST .../release?reader=NAME&start=A&end=B``: the reader has verified these data bytes.

    With a token, each request must carry it (``Authorization: Bearer TOKEN``), or gets a 401. With TLS, readers must
    show a certificate.

    Statuses: 404 will never be served, 410 these bytes were let go, 503 not yet.

    Args:
        registry: the state.
        bind: "host:port" to listen on, IPv6 as "[host]:port"; port 0 takes a free one. A wildcard host needs
            ``advertise``.
        advertise: host that readers are told; default: ``bind``.
        transfer_stall_ms: a reader that takes no byte for this long, or less than 1 MiB, is cut off.
        security: what readers must show; default: nothing.

    Raises:
        StateError: it cannot listen there.
        ValueError: ``bind`` is no address.
    """

    def __init__(
        self,
        registry: StateRegistry,
        *,
        bind: str = "127.0.0.1:0",
        advertise: str | None = None,
        transfer_stall_ms: int = DEFAULT_TRANSFER_STALL_MS,
        security: Security | None = None,
    ) -> None:
        self._security = security or Security()
        host, port = split_address(bind)
        if host in ("0.0.0.0", "::") and advertise is None:
            raise StateError(
                f"bind {bind!r} is a wildcard: say with advertise which host readers are to be told"
            )
        self._store = VersionStore(registry, _LINGER_STALLS * transfer_stall_ms)
        self._stall_ms = transfer_stall_ms
        self._listener = Listener(host, port, _MAX_CONNECTIONS)
        self.address = join_address(advertise or host, self._listener.port)
        """"host:port" for readers."""
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, Stream] = {}
        self._closed = threading.Event()
        self._acceptor = threading.Thread(target=self._accept, name="state-server", daemon=True)
        self._acceptor.start()

    # --- training side ---

    def publish(self, head: Head, *, update_follows: bool = False) -> None:
        """From now on the registered state is that of ``head``, until ``before_update``. Training thread.

        Args:
            head: whose state it is.
            update_follows: what comes next is ``before_update``, maybe after a wait in which the processor has time to
                copy what readers need.

        Raises:
            StateError: a fetch has begun and not been applied, so there is no state to publish.
        """
        self._store.publish(head, update_follows=update_follows)

    def before_update(self) -> int:
        """The registered state is about to change. Training thread; never waits for a reader.

        Returns:
            Bytes that were copied for readers, now or since ``publish``.
        """
        return self._store.before_update()

    def pin(self, head: Head, readers: int = 1) -> None:
        """``readers`` readers will come for ``head``: keep it for them. Any thread, never blocks."""
        self._store.pin(head, readers)

    def unpin(self, head: Head) -> None:
        """Nobody will come for ``head`` any more. Any thread, never blocks."""
        self._store.unpin(head)

    def withdraw(self) -> None:
        """No more readers are served until the next ``publish``. Any thread."""
        self._store.withdraw()

    def close(self) -> None:
        """Stop serving and end all threads. Any thread but the server's own."""
        self._store.withdraw()
        with self._lock:
            self._closed.set()
            threads = dict(self._connections)
        self._listener.close()
        for stream in threads.values():
            stream.abort()
        for thread in [self._acceptor, *threads]:
            thread.join(self._stall_ms / 1000)
        self._store.close()

    # --- connections ---

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError as error:
                # Out of descriptors, or a reader that left at once: serve the next one. Closing comes here,
                # too.
                if self._closed.wait(0.05):
                    return
                _log.warning("a reader of state could not be accepted: %s", error)
                continue
            stream = Stream(connection, min(self._stall_ms / 1000, HANDSHAKE_DEADLINE_S))
            thread = threading.Thread(target=self._serve, args=(stream,), name="state-reader", daemon=True)
            with self._lock:
                if self._closed.is_set() or len(self._connections) >= _MAX_CONNECTIONS:
                    stream.close()
                    continue
                self._connections[thread] = stream
                thread.start()

    def _serve(self, stream: Stream) -> None:
        try:
            if not self._admit(stream):
                return
            while (head := stream.read_head()) is not None:
                if not self._answer(stream, head):
                    break
        except OSError as error:
            _log.info("a reader of state is gone: %s", error)
        finally:
            stream.close()
            with self._lock:
                self._connections.pop(threading.current_thread(), None)

    def _admit(self, stream: Stream) -> bool:
        """Shake hands; False if the reader speaks TLS and we do not, or the other way round."""
        tls, offered = self._security.tls, stream.first_byte() == TLS_HANDSHAKE
        if tls is not None and offered:
            return _handshake(stream, tls)
        if offered:
            _log.warning("a reader of state was refused: %s", SPEAKS_TLS)
            stream.write([NO_TLS_ALERT])
            return False
        if tls is not None:
            _log.warning("a reader of state was refused: %s", SPEAKS_NO_TLS)
            _send_text(stream, 400, SPEAKS_TLS, True)
            return False
        return True

    def _answer(self, stream: Stream, head: bytes) -> bool:
        """Answer one request; False if the connection cannot be used any more."""
        try:
            request = parse_request(head)
        except HttpError as error:
            _send_text(stream, error.status, str(error), True)
            return False
        body = request.method != "HEAD"
        if not self._security.authorizes(request.headers.get("authorization")):
            _log.warning("a reader of state was refused: %s", WRONG_TOKEN)
            _send_text(stream, 401, WRONG_TOKEN, body, {"WWW-Authenticate": "Bearer"})
            return False
        stream.limit(self._stall_ms / 1000)
        keep = request.headers.get("connection", "").lower() != "close"
        try:
            return self._route(stream, request) and keep
        except HttpError as error:
            _send_text(stream, error.status, str(error), body)
        except NotServed as error:
            _send_text(stream, 404, str(error), body)
        except NotYetServed as error:
            _send_text(stream, 503, str(error), body)
        return keep

    def _route(self, stream: Stream, request: Request) -> bool:
        parts = request.path.strip("/").split("/")
        action = parts[3] if len(parts) == 4 else ""
        if (
            parts[:2] != ["v1", "state"]
            or len(parts) > 4
            or action not in ("", "manifest", "pieces", "release")
        ):
            raise HttpError(404, "there is nothing here: ask for /v1/state or /v1/state/{step}-{quorum_id}")
        if request.method not in (("POST",) if action == "release" else ("GET", "HEAD")):
            raise HttpError(405, f"{request.method[:16]} is not how this is asked for")
        if len(parts) == 2:
            published, served = self._store.served()
            names = {
                "published": None if published is None else head_name(published),
                "served": [head_name(head) for head in served],
            }
            _send(stream, json.dumps(names).encode(), "application/json", request)
            return True
        head = parse_head(parts[2])
        if head is None:
            raise HttpError(404, f"{parts[2][:80]!r} is not the name of a version, {{step}}-{{quorum_id}}")
        reader = request.query.get("reader")
        if reader is not None and not 0 < len(reader) <= _MAX_READER_CHARACTERS:
            raise HttpError(400, f"reader must have 1 to {_MAX_READER_CHARACTERS} characters")
        wait_ms = min(request.integer("wait_ms", self._stall_ms // 2), self._stall_ms // 2)
        version = self._store.acquire(head, wait_ms, reader)
        if not action:
            return self._send_file(stream, request, version)
        if action == "manifest":
            _send(stream, version.manifest(), "application/json", request)
        elif action == "pieces":
            return self._send_pieces(stream, request, version)
        elif reader is None:
            raise HttpError(400, "what is released is kept per reader: add ?reader=NAME")
        else:
            start, end = request.integer("start"), request.integer("end")
            with self._store.changed:
                version.release(reader, start, end)
            _send(stream, b"", "text/plain", request)
        return True

    def _send_file(self, stream: Stream, request: Request, version: Version) -> bool:
        """Send the file or a range of it; False if it had to break off."""
        header = version.header()
        size_bytes = len(header) + version.size_bytes
        wanted = parse_range(request.headers.get("range"), size_bytes)
        start, end = wanted or (0, size_bytes)
        headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
        if wanted is not None:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size_bytes}"
        answer = response_head(206 if wanted else 200, end - start, headers)
        first = max(0, start - len(header))
        if request.method == "HEAD":
            stream.write([answer])
            return True
        with version.hold(first, end - len(header)) as hold:
            self._require(version, hold)
            stream.write([answer, header[start:end]])
            departure = Departure()
            while hold.start < hold.end:
                # Whoever reads the file could not ask for torn pieces again: it comes from a copy.
                piece = self._look_up(version, hold, copy=True)
                if piece is None:
                    return False
                stream.write(departure.memory(piece.spans, piece.written))
                hold.start = _end_of_piece(hold)
        return True

    def _send_pieces(self, stream: Stream, request: Request, version: Version) -> bool:
        """Send pieces with their checksums; False if it had to break off."""
        first, last = request.integer("first"), request.integer("last")
        if not first < last <= -(-version.size_bytes // PIECE_BYTES):
            raise HttpError(416, f"the version has no pieces {first} <= i < {last}")
        start, end = first * PIECE_BYTES, min(last * PIECE_BYTES, version.size_bytes)
        content_bytes = end - start + (last - first) * TRAILER_BYTES
        ahead = aligned_head(content_bytes, stream.sent_bytes)
        if request.method == "HEAD":
            stream.write([ahead])
            return True
        with version.hold(start, end) as hold:
            self._require(version, hold)
            departure = Departure()
            while hold.start < hold.end:
                piece = self._look_up(version, hold, copy=False)
                if piece is None:
                    return False
                memory = Views(departure.memory(piece.spans, piece.written))
                checksum = xxhash.xxh3_128()
                while part := memory.advance(_HOT_BYTES):
                    for view in part:
                        checksum.update(view)
                    stream.write([ahead, *part])
                    ahead = b""
                with self._store.changed:
                    intact = version.is_intact(piece)
                ahead = trailer(checksum.digest() if intact else TORN)
                hold.start = _end_of_piece(hold)
            stream.write([ahead])
        return True

    def _require(self, version: Version, hold: Hold) -> None:
        """Refuse what was let go while the answer can still say so."""
        try:
            with self._store.changed:
                version.read(hold.start, _end_of_piece(hold), copy=False)
        except StateError as error:
            raise HttpError(410, str(error)) from error

    def _look_up(self, version: Version, hold: Hold, *, copy: bool) -> Piece | None:
        """The next piece; None if it was let go in the middle of the answer."""
        try:
            with self._store.changed:
                return version.read(hold.start, _end_of_piece(hold), copy=copy)
        except StateError as error:
            _log.info("an answer breaks off: %s", error)
            return None


def _end_of_piece(hold: Hold) -> int:
    return min(hold.end, (hold.start // PIECE_BYTES + 1) * PIECE_BYTES)


def _handshake(stream: Stream, tls: Tls) -> bool:
    try:
        stream.start_tls(server_context(tls))
    except ssl.SSLError as error:
        _log.warning("a reader of state was refused: %s", describe_tls_error(error))
        stream.linger()
        return False
    return True


def _send(stream: Stream, body: bytes, content_type: str, request: Request) -> None:
    headers = {"Content-Type": content_type, CHECKSUM_HEADER: xxhash.xxh3_128_hexdigest(body)}
    head = response_head(200, len(body), headers)
    stream.write([head] if request.method == "HEAD" else [head, body])


def _send_text(
    stream: Stream, status: int, text: str, with_body: bool, headers: dict[str, str] | None = None
) -> None:
    body = (text + "\n").encode()
    headers = {"Content-Type": "text/plain; charset=utf-8"} | (headers or {})
    head = response_head(status, len(body), headers)
    stream.write([head, body] if with_body else [head])
