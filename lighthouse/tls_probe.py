"""Why no TLS connection to a gRPC server comes about: gRPC itself only says that there is none."""

from __future__ import annotations

import socket
import ssl
import time

from lighthouse.rpc import parse_address
from lighthouse.security import (
    SPEAKS_TLS,
    VARIABLES,
    Security,
    Tls,
    client_context,
    describe_tls_error,
    is_mismatch,
)

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How every HTTP/2 client begins; the server answers with its settings."""
_TRIES = 3
_PAUSE_S = 0.1


def tls_mismatch(address: str, security: Security, timeout_s: float = 2.0) -> str | None:
    """Find out whether the TLS settings of the two sides do not fit together. Blocks up to a few ``timeout_s``.

    Returns:
        One sentence, only if that is certain; None if all is well, nobody is there, or it stays unknown.
    """
    host, port = parse_address(address)
    try:
        if security.tls is None:
            return None if _answers(host, port, timeout_s) else _wants_tls(host, port, timeout_s)
        for _ in range(_TRIES):
            if _answers_tls(host, port, security.tls, timeout_s):
                return None
            time.sleep(_PAUSE_S)  # one that is just being killed is not there the next time
        # It has shown a good certificate and hung up without a word, again and again.
        return (
            f"it does not accept this process's certificate: the one in {VARIABLES['tls_cert']} must come from the "
            f"authority that the Lighthouse has in {VARIABLES['tls_ca']}"
        )
    except ssl.SSLError as error:
        return describe_tls_error(error) if is_mismatch(error) else None
    except OSError:
        return None


def _answers(host: str, port: int, timeout_s: float) -> bool:
    with socket.create_connection((host, port), timeout_s) as connection:
        connection.sendall(_PREFACE)
        return bool(connection.recv(16))


def _wants_tls(host: str, port: int, timeout_s: float) -> str | None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = (
        False,
        ssl.CERT_NONE,
    )  # nothing is said to it: only who it is matters
    with (
        socket.create_connection((host, port), timeout_s) as connection,
        context.wrap_socket(connection, do_handshake_on_connect=False) as wrapped,
    ):
        try:
            wrapped.do_handshake()
        except ssl.SSLError as error:
            return SPEAKS_TLS if "ALERT" in (error.reason or "") else None
        return SPEAKS_TLS


def _answers_tls(host: str, port: int, tls: Tls, timeout_s: float) -> bool:
    with (
        socket.create_connection((host, port), timeout_s) as connection,
        client_context(tls).wrap_socket(connection, server_hostname=tls.name) as wrapped,
    ):
        wrapped.sendall(_PREFACE)
        return bool(wrapped.recv(16))
