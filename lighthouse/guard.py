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
_MAX_TOLD = 256


class TokenGuard(grpc.aio.ServerInterceptor):
    """Ends calls without the token as UNAUTHENTICATED, with one sentence.

    The health service answers everybody: what asks it (an orchestrator's probe) can send no token, and learns nothing.
    """

    def __init__(self, security: Security) -> None:
        self._security = security
        self._told: set[str] = set()

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
        return grpc.unary_unary_rpc_method_handler(self._refuse)

    async def _refuse(self, _request: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        host = context.peer().rpartition(":")[0]
        if host not in self._told and len(self._told) < _MAX_TOLD:
            self._told.add(host)
            logger.warning("callers from %s are refused: %s", host, WRONG_TOKEN)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, WRONG_TOKEN)
