"""A server that opens a process group with each client that comes, under torchft's names."""

from __future__ import annotations

import json
import logging
import threading
import urllib.request
import uuid
from abc import ABC, abstractmethod
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from torch.distributed import TCPStore

from torchft_plus.process_group.wrappers import ProcessGroup

logger = logging.getLogger(__name__)

_SESSION_PATH = "/new_session"
_ANSWER_LIMIT_BYTES = 65_536
_CLIENT_TIMEOUT_S = 30.0


class ParameterServer(ABC):
    """Each session is a process group of two: the server is rank 0, the client rank 1. For trusted networks.

    Args:
        port: of the HTTP server that clients ask for a session; 0: a free one.
        store_port: of the TCP store where both meet; 0: a free one.
        host: to bind and to tell.
    """

    def __init__(self, port: int, store_port: int = 0, *, host: str = "127.0.0.1") -> None:
        self._host = host
        self._store = TCPStore(host, store_port, is_master=True, wait_for_workers=False)
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server._answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                logger.debug(format, *args)

        self._http = ThreadingHTTPServer((host, port), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, name="parameter-server", daemon=True)
        self._thread.start()

    def address(self) -> str:
        """Where clients ask for a session: pass it to ``new_session``."""
        return f"http://{self._host}:{self._http.server_port}{_SESSION_PATH}"

    def shutdown(self) -> None:
        """No new sessions; those that run go on."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @classmethod
    @abstractmethod
    def new_process_group(cls) -> ProcessGroup:
        """A process group that is not configured yet; called on both sides."""

    @abstractmethod
    def forward(self, session_id: str, pg: ProcessGroup) -> None:
        """Serve one session; on a thread of its own. When it returns or raises the session ends."""

    @classmethod
    def new_session(cls, address: str) -> ProcessGroup:
        """Open a session with the server at ``address``; the client's side.

        Raises:
            OSError: the server cannot be reached.
            LaneError: it did not come to the meeting point.
        """
        with urllib.request.urlopen(address, timeout=_CLIENT_TIMEOUT_S) as answer:
            session = json.loads(answer.read(_ANSWER_LIMIT_BYTES))
        pg = cls.new_process_group()
        pg.configure(session["store_addr"], f"client of {session['session_id']}", rank=1, world_size=2)
        return pg

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        if request.path != _SESSION_PATH:
            request.send_error(404, f"ask for {_SESSION_PATH}")
            return
        session_id = uuid.uuid4().hex
        store_addr = f"{self._host}:{self._store.port}/session/{session_id}"
        body = json.dumps({"session_id": session_id, "store_addr": store_addr}).encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)
        threading.Thread(
            target=self._serve, args=(session_id, store_addr), name=f"session-{session_id}", daemon=True
        ).start()

    def _serve(self, session_id: str, store_addr: str) -> None:
        pg = self.new_process_group()
        try:
            pg.configure(store_addr, f"server of {session_id}", rank=0, world_size=2)
            self.forward(session_id, pg)
        except Exception:  # one session's failure must not end the others
            logger.exception("session %s failed", session_id)
        finally:
            pg.shutdown()
