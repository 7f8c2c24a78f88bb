"""gRPC shell of torchft's ``LighthouseService``: open calls are tickets, held heartbeats show a death at once."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from lighthouse import wire
from lighthouse.core.words import Effect
from lighthouse.events import EventLog
from lighthouse.job import Job
from lighthouse.storage import Storage
from lighthouse.torchft.core import TorchftCore
from lighthouse.torchft.wire import answer_out, heartbeat_in, question_in
from lighthouse.torchft.words import (
    JOB_ID,
    Answer,
    Asked,
    Beaten,
    Broken,
    Outcome,
    Refusal,
    TorchftEvent,
    Withdrawn,
)

SERVICE = "torchft.LighthouseService"
HEARTBEAT_ANSWER = b""
"""A LighthouseHeartbeatResponse: it has no fields."""

Context = grpc.aio.ServicerContext[Any, Any]


class TorchftJob(Job):
    """The job of torchft's managers: it also ends their calls."""

    def __init__(self, core: TorchftCore, storage: Storage, events: EventLog) -> None:
        super().__init__(JOB_ID, core, storage, events)
        self._torchft = core
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._created: tuple[int, float] = (0, 0.0)
        """Id of the newest quorum, and when it was first answered with (Unix time)."""

    def note_torchft(self, event: TorchftEvent, now_ms: int) -> None:
        """Take one of torchft's words; what came together is decided together, by ``settle``."""
        if self._torchft.note(event, now_ms):
            self.unsettled = True

    def open_call(self, ticket: int) -> asyncio.Future[bytes]:
        """The response to the question with this ticket, or CallRefused."""
        call = self._calls[ticket] = asyncio.get_running_loop().create_future()
        call.add_done_callback(lambda _: self._calls.pop(ticket, None))
        return call

    def carry_out(self, effects: list[Effect]) -> None:
        """See Job; calls are answered last, when everything is stored."""
        super().carry_out(effects)
        for outcome in self._torchft.take_outcomes():
            self._end_calls(outcome)

    def _end_calls(self, outcome: Outcome) -> None:
        match outcome:
            case Answer(tickets, quorum_id, participants):
                if quorum_id != self._created[0]:
                    self._created = (quorum_id, time.time())
                response = answer_out(quorum_id, participants, self._created[1])
                for call in self._open(tickets):
                    call.set_result(response)
            case Refusal(ticket, reason):
                for call in self._open((ticket,)):
                    call.set_exception(CallRefused(reason))

    def _open(self, tickets: tuple[int, ...]) -> list[asyncio.Future[bytes]]:
        calls = (self._calls.get(ticket) for ticket in tickets)
        return [call for call in calls if call is not None and not call.done()]


class CallRefused(RuntimeError):
    """A question ends without a quorum; the text says why."""


class TorchftService:
    """Handlers of torchft's two methods.

    Args:
        job: opens the job of torchft's managers at the first call, or ends the call.
        handle: gives an event to that job.
        hold_ms: so long the answer to a heartbeat waits. While it does, gRPC tells at once when the connection breaks;
            torchft's managers send the next one 0.1 s after the answer.
        stopping: done when the Lighthouse ends.
    """

    def __init__(
        self,
        job: Callable[[Context], Awaitable[TorchftJob]],
        handle: Callable[[TorchftJob, TorchftEvent], None],
        hold_ms: int,
        stopping: asyncio.Future[None],
    ) -> None:
        self._job = job
        self._handle = handle
        self._hold_s = hold_ms / 1000
        self._stopping = stopping
        self._numbers = itertools.count(1)

    def handlers(self) -> grpc.GenericRpcHandler:
        """To be added to the server."""
        methods = {
            "Quorum": grpc.unary_unary_rpc_method_handler(self._quorum),
            "Heartbeat": grpc.unary_unary_rpc_method_handler(self._heartbeat),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _quorum(self, data: bytes, context: Context) -> bytes:
        try:
            participant = question_in(data)
        except wire.WireError as error:
            return await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        job, ticket = await self._job(context), next(self._numbers)
        call = job.open_call(ticket)
        try:
            self._handle(job, Asked(ticket, participant))
            await asyncio.wait({call, self._stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                return await context.abort(grpc.StatusCode.UNAVAILABLE, "the Lighthouse stops")
            return call.result()
        except CallRefused as error:
            return await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        finally:
            if not call.done():  # its deadline is over, or its connection broke
                call.cancel()
                self._handle(job, Withdrawn(ticket))

    async def _heartbeat(self, data: bytes, context: Context) -> bytes:
        try:
            replica_id = heartbeat_in(data)
        except wire.WireError as error:
            return await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        job, number = await self._job(context), next(self._numbers)
        self._handle(job, Beaten(replica_id, number))
        if not _has_deadline(context):  # who sets a deadline wants to know whether it is heard, at once
            try:
                await asyncio.wait({self._stopping}, timeout=self._hold_s)
            except asyncio.CancelledError:
                self._handle(job, Broken(replica_id, number))
                raise
        return HEARTBEAT_ANSWER


def _has_deadline(context: Context) -> bool:
    call: Any = context  # time_remaining is annotated as a float, and None without a deadline
    return call.time_remaining() is not None
