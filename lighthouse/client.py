"""A member's stream to the Lighthouse, and the two calls that launchers and tools make."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable

import grpc

from lighthouse import wire
from lighthouse.messages import Beat, Down, Hello, Process, Progress, Up
from lighthouse.pb import lighthouse_pb2 as pb
from lighthouse.rpc import REPORT_EXIT, SESSION, STATUS, call_metadata, open_channel, target_of
from lighthouse.security import Security
from lighthouse.timeouts import Timeouts
from lighthouse.tls_probe import tls_mismatch

logger = logging.getLogger(__name__)

FIRST_BACKOFF_MS = 20
MAX_BACKOFF_MS = 1_000
STABLE_SESSION_MS = 1_000
"""A session that lasted this long was a good one: after it the backoff starts anew."""
ANSWER_EVERY = 2
"""So many heartbeats to an answer. Five fit into the limit, so that two answers at least may be late before it is over."""
MIN_SILENCE_MS = 1_000
"""A Lighthouse that is silent for less than this may just be busy."""


class LighthouseUnreachable(ConnectionError):
    """The Lighthouse did not answer a call in time; the text says which one and why."""


class LighthouseRefused(RuntimeError):
    """The Lighthouse is there, but token or TLS settings do not fit: trying again cannot help; the text says what does."""


class _Stream:
    """One gRPC stream, read by a thread of its own and handed to the event loop that made it.

    Not ``grpc.aio``: that shares one poller among all event loops of a process and loses events of the others when
    one of them is closed, and a process may hold several clients and a Lighthouse.
    """

    def __init__(self, target: str, name: str, security: Security) -> None:
        self._loop = asyncio.get_running_loop()
        self._received: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._to_send: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = open_channel(target, security)
        method = self._channel.stream_stream(SESSION)
        self._call = method(iter(self._to_send.get, None), metadata=call_metadata(security))
        self._reader = threading.Thread(target=self._read_all, name=name, daemon=True)
        self._reader.start()

    def send(self, data: bytes) -> None:
        """Send a message, or lose it with the stream."""
        self._to_send.put(data)

    async def receive(self) -> bytes:
        """The next message. Raises the error that ended the stream."""
        item = await self._received.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def close(self) -> None:
        """End the stream and its thread."""
        self._call.cancel()
        self._to_send.put(None)
        await self._ended.wait()
        self._reader.join()
        self._channel.close()

    def _read_all(self) -> None:
        try:
            for data in self._call:
                self._loop.call_soon_threadsafe(self._received.put_nowait, data)
            error: Exception = ConnectionError(self._call.details() or "the Lighthouse ended the stream")
        except grpc.RpcError as failure:
            error = failure
        self._loop.call_soon_threadsafe(self._received.put_nowait, error)
        self._loop.call_soon_threadsafe(self._ended.set)


class LighthouseClient:
    """Keeps one stream to the Lighthouse for as long as :meth:`run` runs, and reconnects for ever.

    Everything happens in the event loop of :meth:`run`: the callbacks are called there, and :meth:`send`
    and :meth:`close` must be.

    Args:
        address: "host:port", "http://host:port" or "[ipv6]:port". A bad one raises ValueError.
        job_id: the job; several share one Lighthouse.
        process: who speaks.
        greet: called at each (re)connection; returns the whole state, a Hello and, if an ask stands, an Ask.
        on_message: called with each word of the Lighthouse, in order.
        on_connected: called with True when the Lighthouse answered a new stream, with False when it ended.
        progress: called for each heartbeat.
        timeouts: heartbeat interval and limit.
        security: token and certificate of this process.
    """

    def __init__(
        self,
        address: str,
        *,
        job_id: str,
        process: Process,
        greet: Callable[[], list[Up]],
        on_message: Callable[[Down], None],
        on_connected: Callable[[bool], None],
        progress: Callable[[], Progress],
        timeouts: Timeouts,
        security: Security | None = None,
    ) -> None:
        self.address = address
        self.connected = False
        self.last_heard = time.monotonic()
        """``time.monotonic()`` of the last word from the Lighthouse; at first, of the creation."""
        self.last_answered = self.last_heard
        """``time.monotonic()`` when the newest word was sent that the Lighthouse has answered: until then at least it has
        heard this process (rule M8). The answer itself may have lain in a socket for as long as this process was paused."""
        self._unanswered: deque[float] = deque()
        self._target = target_of(address)
        self._job_id = job_id
        self._process = process
        self._greet = greet
        self._on_message = on_message
        self._on_connected = on_connected
        self._progress = progress
        self._timeouts = timeouts
        self._security = security or Security()
        self._was_connected = False
        self._session_number = 0
        self._stream: _Stream | None = None
        self._running: asyncio.Task[None] | None = None
        self._closed = False
        self._complained = False

    async def run(self) -> None:
        """Connect, stay connected, reconnect, until :meth:`close`. Exceptions of callbacks come out here.

        Raises:
            LighthouseRefused: token or TLS do not fit. Not after the Lighthouse has once let this process in: whoever
                answers at its address then is no reason to give up training (P7), only one to complain.
        """
        self._running = asyncio.create_task(self._reconnect_forever())
        try:
            await self._running
        except asyncio.CancelledError:
            if not self._closed:
                self._running.cancel()
                raise

    def send(self, message: Up) -> None:
        """Send a word on the current stream. Without one it is dropped: the next greeting says it again."""
        if self._stream is not None:
            self._stream.send(wire.encode_up(self._stamp(message)))

    async def close(self) -> None:
        """End the stream and :meth:`run`; returns when both have ended."""
        self._closed = True
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    # --- one connection after the other ---------------------------------------------------------------------

    async def _reconnect_forever(self) -> None:
        backoff_ms = FIRST_BACKOFF_MS
        while not self._closed:
            started = time.monotonic()
            try:
                await self._one_session()
            except (grpc.RpcError, TimeoutError, wire.WireError, OSError) as error:
                if isinstance(error, grpc.RpcError) and not self._was_connected:
                    sentence = await asyncio.to_thread(_refusal, self.address, error, self._security)
                    if sentence:
                        raise LighthouseRefused(sentence) from error
                self._complain(error)
            lasted_ms = (time.monotonic() - started) * 1000
            stable = lasted_ms >= STABLE_SESSION_MS and self.last_heard >= started
            backoff_ms = FIRST_BACKOFF_MS if stable else min(2 * backoff_ms, MAX_BACKOFF_MS)
            await asyncio.sleep(backoff_ms * random.uniform(0.5, 1.0) / 1000)

    async def _one_session(self) -> None:
        self._session_number += 1
        stream = _Stream(self._target, f"lighthouse-{self._process.replica_id}", self._security)
        # From here on send() goes to this stream: what changes after the greeting was made must not be lost.
        self._stream = stream
        self._unanswered = deque([time.monotonic()])  # `open` is answered, then beats, in order
        beater = asyncio.create_task(self._beat())
        try:
            for message in self._greet():
                stream.send(wire.encode_up(self._stamp(message)))
            reader = asyncio.create_task(self._read(stream))
            try:
                await asyncio.wait({reader, beater}, return_when=asyncio.FIRST_COMPLETED)
                for task in (beater, reader):
                    if task.done():
                        task.result()
            finally:
                reader.cancel()
        finally:
            self._stream = None
            beater.cancel()
            await stream.close()
            if self.connected:
                self.connected = False
                self._on_connected(False)

    async def _read(self, stream: _Stream) -> None:
        silence_s = max(self._timeouts.heartbeat_timeout_ms, MIN_SILENCE_MS) / 1000
        while True:
            async with asyncio.timeout(silence_s):
                data = await stream.receive()
            self.last_heard = time.monotonic()
            message = wire.decode_down(data)
            if not self.connected:
                self.connected = self._was_connected = True
                self._complained = False
                # By it the Lighthouse knows that this stream is in use.
                self.send(Beat(self._progress(), quiet=True))
                logger.info("connected to the Lighthouse at %s", self.address)
                self._on_connected(True)
            match message:
                case wire.BeatAnswer():
                    if self._unanswered:
                        self.last_answered = self._unanswered.popleft()
                case wire.Ping():
                    stream.send(wire.encode_up(wire.Pong()))
                case _:
                    self._on_message(message)

    async def _beat(self) -> None:
        interval_s = self._timeouts.heartbeat_interval_ms / 1000
        for number in itertools.count(1):
            await asyncio.sleep(interval_s)
            if not self.connected:
                continue
            quiet = number % ANSWER_EVERY != 0
            if not quiet:
                self._unanswered.append(time.monotonic())
            self.send(Beat(self._progress(), quiet))

    def _stamp(self, message: Up) -> wire.SessionUp:
        if isinstance(message, Hello):
            return wire.Open(self._job_id, self._process, self._session_number, message)
        return message

    def _complain(self, error: Exception) -> None:
        """Say once per outage that the Lighthouse is away; training goes on without it."""
        if not self._complained and not self._closed:
            self._complained = True
            logger.warning("no Lighthouse at %s, trying again: %s", self.address, _why(error))


def fetch_status(
    address: str,
    job_id: str | None = None,
    *,
    timeout_s: float = 5.0,
    security: Security | None = None,
    wait: bool = True,
) -> pb.StatusReply:
    """Ask the Lighthouse what it knows, of one job or of all. ``wait``: also for one that is not there yet.

    Raises:
        ValueError: bad address.
        LighthouseRefused: token or TLS do not fit.
        LighthouseUnreachable: no answer within ``timeout_s``.
    """
    request = pb.StatusRequest(job_id=job_id or "").SerializeToString()
    reply = _call(address, STATUS, request, timeout_s, security or Security(), wait)
    return pb.StatusReply.FromString(reply)


def report_exit(
    address: str, job_id: str, process: Process, *, timeout_s: float = 5.0, security: Security | None = None
) -> bool:
    """Tell the Lighthouse that ``process`` will never act again: its exit (or PF_EXITING) was seen.

    An empty incarnation means whichever is in the last quorum (an operator's word).

    Returns:
        True if the job knows the process.

    Raises:
        ValueError: bad address, or the Lighthouse refused the request.
        LighthouseRefused: token or TLS do not fit.
        LighthouseUnreachable: no answer within ``timeout_s``.
    """
    request = pb.ReportExitRequest(job_id=job_id, process=wire.process_out(process))
    reply = _call(address, REPORT_EXIT, request.SerializeToString(), timeout_s, security or Security())
    return pb.ReportExitReply.FromString(reply).known


def _call(
    address: str, method: str, request: bytes, timeout_s: float, security: Security, wait: bool = True
) -> bytes:
    with open_channel(target_of(address), security) as channel:
        try:
            return channel.unary_unary(method)(
                request, timeout=timeout_s, wait_for_ready=wait, metadata=call_metadata(security)
            )
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise ValueError(error.details()) from error
            sentence = _refusal(address, error, security)
            if sentence:
                raise LighthouseRefused(sentence) from error
            raise LighthouseUnreachable(
                f"the Lighthouse at {address} did not answer within {timeout_s:g} s: {_why(error)}"
            ) from error


def _refusal(address: str, error: grpc.RpcError, security: Security) -> str | None:
    """The sentence, if an error comes from token or TLS. May ask the Lighthouse's port, and block for that."""
    code = error.code() if isinstance(error, grpc.Call) else None
    reason = None
    if code is grpc.StatusCode.UNAUTHENTICATED:
        reason = _why(error)
    elif code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        reason = tls_mismatch(address, security)
    return None if reason is None else f"the Lighthouse at {address} cannot be used: {reason}"


def _why(error: Exception) -> str:
    if isinstance(error, grpc.Call):
        return error.details() or str(error.code())
    return str(error) or "it is silent"
