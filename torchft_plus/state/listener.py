"""Where a state server is asked: a listening socket that paces nothing for peers on its own host."""

from __future__ import annotations

import contextlib
import socket

from torchft_plus.state.errors import StateError

_NAME_BYTES = 16
_UNPACED = b"reno"


class Listener:
    """A listening socket.

    Congestion control by BBR, the default of some systems, sends by timers, to spare the queues of a network. Between two
    processes of one host there is none, and the timers take a quarter of the sender's time. Pacing begins when a connection is
    established and does not end with another algorithm, so the socket listens with one that does not pace, and peers elsewhere
    get the system's back.

    Args:
        host: to listen on.
        port: 0 takes a free one.
        backlog: connections that may wait.

    Raises:
        StateError: it cannot listen there.
    """

    def __init__(self, host: str, port: int, backlog: int) -> None:
        try:
            family, _, _, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._socket = socket.create_server(address[:2], family=family, backlog=backlog)
        except OSError as error:
            raise StateError(f"the state server cannot listen on {host!r}, port {port}: {error}") from error
        self.port: int = self._socket.getsockname()[1]
        self._default: bytes | None = None
        with contextlib.suppress(OSError, AttributeError):  # another system
            default = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)
            self._default = default.rstrip(b"\0")

    def accept(self) -> socket.socket:
        """The next connection. Raises OSError."""
        connection, peer = self._socket.accept()
        if self._default is not None:
            with contextlib.suppress(OSError):  # the peer is gone already
                if peer[0] != connection.getsockname()[0]:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self._default)
        return connection

    def close(self) -> None:
        """End; a thread that accepts gets an error. Any thread."""
        with contextlib.suppress(OSError):  # not every system lets a listener be shut down
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
