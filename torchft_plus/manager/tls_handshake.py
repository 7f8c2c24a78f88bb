"""Server side of TLS for asyncio, which drops a connection whose handshake fails: here both sides are told why."""

from __future__ import annotations

import logging
import ssl
from typing import Any

from lighthouse.security import NO_TLS_ALERT, Tls, describe_tls_error, fill_context

logger = logging.getLogger(__name__)


class _Handshake(ssl.SSLObject):
    outgoing: ssl.MemoryBIO
    failure: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        if self.failure is not None:
            raise self.failure
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, ssl.SSLEOFError):
            raise
        except ssl.SSLError as error:
            logger.warning("a caller was refused: %s", describe_tls_error(error))
            self.failure = error
            if not self.outgoing.pending:
                self.outgoing.write(NO_TLS_ALERT)  # OpenSSL says nothing to a caller that speaks no TLS
            # On any other error asyncio would drop the alert that OpenSSL has for the caller. Now it sends it, and asks
            # again when the caller hangs up or says more; the deadline of handshakes holds all the same.
            raise ssl.SSLWantReadError from error


class _ServerContext(ssl.SSLContext):
    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *rest: Any, **more: Any) -> Any:
        handshake: Any = super().wrap_bio(incoming, outgoing, *rest, **more)
        handshake.outgoing = outgoing
        return handshake


def talking_server_context(tls: Tls) -> ssl.SSLContext:
    """As ``lighthouse.security.server_context``, for ``loop.create_server``."""
    context = _ServerContext(ssl.PROTOCOL_TLS_SERVER)
    context.sslobject_class = _Handshake
    return fill_context(context, tls)
