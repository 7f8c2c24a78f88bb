"""The Lighthouse's door: only callers with the run's token get in."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from lighthouse.security import WRONG_TOKEN, Security

logger = logging.getLogger(__name__)

_HEALTH = "/grpc.health.v1.Health/"
_TORCHFT = "/torchft."
TORCHFT_HAS_NO_TOKEN = (
    "this Lighthouse wants a token, and torchft's managers can send none: give them a Lighthouse of their own without one, "
    "in a network that nobody else reaches, or train with torchft_plus"
)
_MAX_TOLD = 256

Context = grpc.aio.ServicerContext[Any, Any]


class TokenGuard(grpc.aio.ServerInterceptor):
    """Ends calls without the token as UNAUTHENTICATED, with one sentence.

    The health service answers everybody: what asks it (an orchestrator's probe) can send no token, and learns nothing.
    """

    def __init__(self, security: Security) -> None:
        self._security = security
        self._told: set[tuple[str, str]] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Let it through, or answer in its place."""
        details: Any = handler_call_details
        metadata = dict(details.invocation_metadata or ())
        if details.method.startswith(_HEALTH) or self._security.authorizes(metadata.get("authorization")):
            return await continuation(handler_call_details)
        theirs = details.method.startswith(_TORCHFT)
        return grpc.unary_unary_rpc_method_handler(self._refuse_torchft if theirs else self._refuse_caller)

    async def _refuse_caller(self, _request: object, context: Context) -> None:
        await self._refuse(context, WRONG_TOKEN)

    async def _refuse_torchft(self, _request: object, context: Context) -> None:
        await self._refuse(context, TORCHFT_HAS_NO_TOKEN)

    async def _refuse(self, context: Context, reason: str) -> None:
        caller = (context.peer().rpartition(":")[0], reason)
        if caller not in self._told and len(self._told) < _MAX_TOLD:
            self._told.add(caller)
            logger.warning("callers from %s are refused: %s", *caller)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)
