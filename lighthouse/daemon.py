"""The Lighthouse daemon: gRPC around the quorum cores of the jobs."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from lighthouse import wire
from lighthouse.core.clock import RunningClock, tick_and_gap_ms
from lighthouse.core.quorum_core import QuorumCore
from lighthouse.core.words import (
    Connected,
    CoreConfig,
    Disconnected,
    ExitSeen,
    Ponged,
    Received,
    Resumed,
)
from lighthouse.events import EventLog
from lighthouse.guard import TokenGuard
from lighthouse.job import Job, Session, Superseded
from lighthouse.messages import Ask, Beat, Fault, Retired
from lighthouse.pb import lighthouse_pb2 as pb
from lighthouse.rpc import (
    SERVER_OPTIONS,
    SERVICE,
    is_loopback,
    join_address,
    parse_address,
    server_credentials,
)
from lighthouse.security import TOKEN_VARIABLE, Security
from lighthouse.status import job_status
from lighthouse.storage import Storage, StorageError
from lighthouse.torchft.core import TorchftCore
from lighthouse.torchft.service import SERVICE as TORCHFT_SERVICE
from lighthouse.torchft.service import TorchftJob, TorchftService
from lighthouse.torchft.words import JOB_ID as TORCHFT_JOB
from lighthouse.torchft.words import TorchftEvent, core_config

logger = logging.getLogger(__name__)

DEFAULT_TICK_MS = 100
OWNER_CHECK_MS = 1_000
"""How often the store is asked whether it is still ours: far below any outage limit."""
OPENING_DEADLINE_S = 5.0
DRAIN_DEADLINE_S = 1.0
STOP_GRACE_S = 0.5
SETTLE_PAUSE = 2
"""Between two decisions of a job: so many times the CPU time of the last one (0.5 ms with 128 members). When thousands
connect, deciding on each by itself would leave no time to read the others."""

NOT_OURS = (
    f"job_id {TORCHFT_JOB!r} is that of torchft's managers, and they cannot train with ours: give another job_id "
    "(TORCHFT_PLUS_JOB_ID)"
)

Context = grpc.aio.ServicerContext[Any, Any]


class BindError(RuntimeError):
    """The address cannot be listened on; the text says which one and why."""


class LighthouseDaemon:
    """Serves until told to stop, in the event loop that runs :meth:`serve`.

    Args:
        config: settings of the quorum cores.
        storage: where (epoch, last quorum) are kept; closed by the caller.
        events: the event log; closed by the caller.
        tick_ms: at most so long between two looks at the clock.
        security: what callers must show; default: nothing.
    """

    def __init__(
        self,
        config: CoreConfig,
        storage: Storage,
        events: EventLog,
        tick_ms: int = DEFAULT_TICK_MS,
        security: Security | None = None,
    ) -> None:
        self.address = ""
        """"host:port" under which others can reach it, once it listens."""
        self._config = config
        self._storage = storage
        self._events = events
        self._security = security or Security()
        self._jobs: dict[str, Job] = {}
        heartbeat_ms = config.timeouts.heartbeat_timeout_ms
        self._tick_ms, gap_ms = tick_and_gap_ms(heartbeat_ms, tick_ms)
        self._clock = RunningClock(gap_ms)
        self._wake = asyncio.Event()
        self._wake_at_ms = 0
        self._stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self, bind: str) -> grpc.aio.Server:
        """Listen on ``bind`` ("host:port", port 0 chooses one); raises ValueError, BindError."""
        host, port = parse_address(bind)
        security = self._security
        guards = [TokenGuard(security)] if security.token else []
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=guards)
        handlers = {
            "Session": grpc.stream_stream_rpc_method_handler(self._session),
            "Status": grpc.unary_unary_rpc_method_handler(self._status),
            "ReportExit": grpc.unary_unary_rpc_method_handler(self._report_exit),
        }
        hold_ms = 2 * self._config.timeouts.heartbeat_interval_ms
        torchft = TorchftService(self._torchft_job, self._handle_torchft, hold_ms, self._stopping)
        own = grpc.method_handlers_generic_handler(SERVICE, handlers)
        server.add_generic_rpc_handlers((own, torchft.handlers()))
        aio_health: Any = health.aio  # pyright: ignore[reportAttributeAccessIssue]
        health_servicer = aio_health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
        for service in ("", SERVICE, TORCHFT_SERVICE):
            await health_servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
        try:
            if security.tls is None:
                port = server.add_insecure_port(join_address(host, port))
            else:
                port = server.add_secure_port(join_address(host, port), server_credentials(security.tls))
        except RuntimeError as error:
            raise BindError(f"cannot listen on {bind}: {error}; is another Lighthouse there?") from error
        await server.start()
        self.address = join_address(reachable_host(host), port)
        self._events.emit("listening", address=self.address)
        place = join_address(host, port)
        logger.info("listening on %s, reachable at http://%s (%s)", place, self.address, security.describe())
        if not security.guarded and not is_loopback(host):
            logger.warning("whoever reaches %s can use this Lighthouse: set %s", place, TOKEN_VARIABLE)
        return server

    async def serve(self, server: grpc.aio.Server) -> None:
        """Work until :meth:`stop`; raises Superseded or StorageError if it must not go on."""
        ticker = asyncio.create_task(self._tick_forever())
        try:
            await asyncio.wait({ticker, self._stopping}, return_when=asyncio.FIRST_COMPLETED)
            if ticker.done():
                ticker.result()
            self._stopping.result()
        finally:
            ticker.cancel()
            if not self._stopping.done():
                self._stopping.set_result(None)
            self._stopping.exception()
            await server.stop(STOP_GRACE_S)

    def stop(self) -> None:
        """End :meth:`serve`; members train on (P7)."""
        if not self._stopping.done():
            self._stopping.set_result(None)

    # --- time -------------------------------------------------------------------------------------------------

    def _now_ms(self) -> int:
        now_ms, paused = self._clock.read(time.monotonic() * 1000)
        if paused:
            for job in self._jobs.values():
                job.handle(Resumed(), now_ms)
        return now_ms

    async def _tick_forever(self) -> None:
        checked_ms = 0
        while True:
            now_ms = self._now_ms()
            check = now_ms - checked_ms >= OWNER_CHECK_MS
            checked_ms = now_ms if check else checked_ms
            for job in list(self._jobs.values()):
                if check:
                    job.check_owner()
                job.tick(now_ms)
            self._wake.clear()
            deadlines = [d for job in self._jobs.values() if (d := job.core.deadline()) is not None]
            wait_ms = min([self._tick_ms, *(max(1, d - now_ms) for d in deadlines)])
            self._wake_at_ms = now_ms + wait_ms
            try:
                async with asyncio.timeout(wait_ms / 1000):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _handle(self, job: Job, event: Connected | Received | Ponged | Disconnected | ExitSeen) -> None:
        """Give an event to a core, which decides when all has been read that came together with it."""
        self._let(job, lambda: job.note(event, self._now_ms()))

    def _handle_torchft(self, job: TorchftJob, event: TorchftEvent) -> None:
        self._let(job, lambda: job.note_torchft(event, self._now_ms()))

    def _let(self, job: Job, note: Callable[[], None]) -> None:
        if self._stopping.done():
            return
        try:
            settling = job.unsettled
            note()
            if job.unsettled and not settling:
                asyncio.get_running_loop().call_later(SETTLE_PAUSE * job.settle_cpu_s, self._settle, job)
        except (Superseded, StorageError) as error:
            self._stopping.set_exception(error)

    def _settle(self, job: Job) -> None:
        """Let a core decide. If the store is lost the whole Lighthouse ends: it has no say any more."""
        if self._stopping.done():
            return
        before_s = time.thread_time()  # a slow disk is no reason to wait even longer
        try:
            job.settle(self._now_ms())
        except (Superseded, StorageError) as error:
            self._stopping.set_exception(error)
        job.settle_cpu_s = time.thread_time() - before_s
        deadline_ms = job.core.deadline()
        if deadline_ms is not None and deadline_ms < self._wake_at_ms:
            self._wake.set()

    def _job(self, job_id: str) -> Job:
        job = self._jobs.get(job_id)
        if job is None:
            record = self._storage.load(job_id)
            now_ms, unix_s = self._now_ms(), time.time()
            if job_id == TORCHFT_JOB:
                core = TorchftCore(QuorumCore(core_config(self._config), record, unix_s, now_ms))
                job = TorchftJob(core, self._storage, self._events)
            else:
                core = QuorumCore(self._config, record, unix_s, now_ms)
                job = Job(job_id, core, self._storage, self._events)
            job.start()
            self._jobs[job_id] = job
            logger.info("[%s] job opened, epoch %d", job_id, core.epoch)
        return job

    async def _torchft_job(self, context: Context) -> TorchftJob:
        job = await self._job_or_abort(TORCHFT_JOB, context)
        assert isinstance(job, TorchftJob)
        return job

    async def _job_or_abort(self, job_id: str, context: Context) -> Job:
        try:
            return self._job(job_id)
        except (Superseded, StorageError) as error:
            if not self._stopping.done():
                self._stopping.set_exception(error)
            return await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    # --- sessions -----------------------------------------------------------------------------------------------

    async def _session(self, _requests: object, context: Context) -> None:
        opening = await self._opening(context)
        if opening.job_id == TORCHFT_JOB:
            logger.warning("%s is turned away: %s", opening.process, NOT_OURS)
            await context.write(wire.encode_down(Retired(NOT_OURS)))
            return
        job = await self._job_or_abort(opening.job_id, context)
        key = (opening.process, opening.session)
        if key in job.sessions:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"session {opening.session} is open already"
            )
        session = job.sessions[key] = Session(*key)
        reader = asyncio.create_task(self._read(job, session, context))
        writer = asyncio.create_task(self._write(session, context))
        for task in (reader, writer):
            task.add_done_callback(
                _look_at
            )  # a broken stream may cancel this call, too, while it collects them
        try:
            self._handle(job, Connected(*key, opening.hello))
            job.answer(session)
            await asyncio.wait({reader, writer, self._stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reader.cancel()
            del job.sessions[key]
            self._handle(job, Disconnected(*key))
            # A write that is under way has to end before the status can be sent.
            session.end("the stream is over")
            await asyncio.wait({writer}, timeout=DRAIN_DEADLINE_S)
            writer.cancel()
            results = await asyncio.gather(reader, writer, return_exceptions=True)
        context.set_details(session.end_reason)
        for result in results:
            if isinstance(result, wire.WireError):
                logger.warning("[%s] %s sent a bad message: %s", job.job_id, session.process, result)
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(result))

    async def _opening(self, context: Context) -> wire.Open:
        try:
            async with asyncio.timeout(OPENING_DEADLINE_S):
                data = await context.read()
            opening = wire.decode_up(data) if isinstance(data, bytes) else None
        except TimeoutError:
            return await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no opening message came")
        except wire.WireError as error:
            logger.warning("a stream was refused: %s", error)
            return await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if not isinstance(opening, wire.Open):
            text = "the first message of a stream must be `open`"
            return await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        return opening

    async def _read(self, job: Job, session: Session, context: Context) -> None:
        process, number = session.process, session.number
        while True:
            data = await context.read()
            if not isinstance(data, bytes):
                return
            match wire.decode_up(data):
                case Beat() as beat:
                    self._handle(job, Received(process, number, beat))
                    if not beat.quiet:
                        job.answer(session)
                case (Ask() | Fault()) as message:
                    self._handle(job, Received(process, number, message))
                case wire.Pong():
                    self._handle(job, Ponged(process, number))
                case wire.Open():
                    raise wire.WireError("a stream is opened once: `open` came again")

    async def _write(self, session: Session, context: Context) -> None:
        while (data := await session.next()) is not None:
            await context.write(data)

    # --- calls of launchers and tools ----------------------------------------------------------------------------

    async def _status(self, data: bytes, context: Context) -> bytes:
        request = await self._request(pb.StatusRequest, data, context)
        now_ms = self._now_ms()
        jobs = [
            job_status(job.job_id, job.core.view(now_ms))
            for job in self._jobs.values()
            if request.job_id in ("", job.job_id)
        ]
        return pb.StatusReply(jobs=jobs).SerializeToString()

    async def _report_exit(self, data: bytes, context: Context) -> bytes:
        request = await self._request(pb.ReportExitRequest, data, context)
        try:
            job_id = wire.job_id_in(request.job_id)
            process = wire.process_in(request.process, any_incarnation=True)
        except wire.WireError as error:
            return await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if job_id not in self._jobs and self._storage.load(job_id) is None:
            return pb.ReportExitReply(known=False).SerializeToString()
        job = await self._job_or_abort(job_id, context)
        known = job.core.knows(process)
        self._handle(job, ExitSeen(process))
        return pb.ReportExitReply(known=known).SerializeToString()

    async def _request(self, kind: type[Any], data: bytes, context: Context) -> Any:
        try:
            return kind.FromString(data)
        except wire.DecodeError as error:
            text = f"the request is no valid {kind.__name__}: {error}"
            return await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)


def _look_at(task: asyncio.Task[None]) -> None:
    """Take note of how a task has ended, so that asyncio does not complain that nobody did."""
    if not task.cancelled():
        task.exception()


def reachable_host(host: str) -> str:
    """A numeric address for a wildcard: the one that traffic to other machines leaves from, else loopback."""
    if host not in ("0.0.0.0", "::"):
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET: only chooses a route, sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
