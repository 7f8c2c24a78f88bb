"""A Lighthouse in a thread of this process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from dataclasses import replace
from pathlib import Path

from lighthouse.core.words import CoreConfig
from lighthouse.daemon import DEFAULT_TICK_MS, LighthouseDaemon
from lighthouse.events import EventLog
from lighthouse.security import Security
from lighthouse.storage import MemoryStorage, SqliteStorage, Storage
from lighthouse.timeouts import DEFAULT_TIMEOUT_MS, Timeouts

logger = logging.getLogger(__name__)


class LighthouseServer:
    """A Lighthouse in a thread of this process, as torchft has it; for tests and for single-node runs.

    Args:
        bind: "host:port"; port 0 chooses a free one.
        min_replicas: no quorum has fewer members.
        join_timeout_ms: how long a round waits for those who are there and have not asked.
        quorum_tick_ms: at most so long between two looks at the clock.
        heartbeat_timeout_ms: silence after which a process is lost; by default a twelfth of ``timeout_ms``.
        expected_replicas: the first quorum forms at once when so many have asked.
        timeout_ms: how long a healthy member may let the others wait.
        store: SQLite file; None: in memory.
        events: the event log; None: the one of ``TORCHFT_PLUS_EVENTS``.
        security: token and TLS; None: those of the environment.

    Raises:
        ValueError, BindError, StorageError: with one sentence.
    """

    def __init__(
        self,
        bind: str = "[::]:0",
        min_replicas: int = 1,
        join_timeout_ms: int | None = None,
        quorum_tick_ms: int | None = None,
        heartbeat_timeout_ms: int | None = None,
        *,
        expected_replicas: int | None = None,
        restart_timeout_ms: int | None = None,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
        store: Path | None = None,
        events: EventLog | None = None,
        security: Security | None = None,
    ) -> None:
        timeouts = Timeouts(timeout_ms, heartbeat_override_ms=heartbeat_timeout_ms)
        given = {"join_timeout_ms": join_timeout_ms, "restart_timeout_ms": restart_timeout_ms}
        config = replace(
            CoreConfig(min_replicas, expected_replicas, timeouts=timeouts),
            **{name: value for name, value in given.items() if value is not None},
        )
        self._bind = bind
        self._security = Security.resolve() if security is None else security
        self._ready: concurrent.futures.Future[tuple[LighthouseDaemon, asyncio.AbstractEventLoop]]
        self._ready = concurrent.futures.Future()
        arguments = (config, store, events, quorum_tick_ms or DEFAULT_TICK_MS)
        self._thread = threading.Thread(target=self._run, args=arguments, name="lighthouse", daemon=True)
        self._thread.start()
        self._daemon, self._loop = self._ready.result()

    def address(self) -> str:
        """ "http://host:port" under which it is reached."""
        return f"http://{self._daemon.address}"

    def shutdown(self) -> None:
        """Stop serving; members train on. Returns when the thread has ended."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._daemon.stop)
            self._thread.join()

    def __enter__(self) -> LighthouseServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _run(self, config: CoreConfig, store: Path | None, events: EventLog | None, tick_ms: int) -> None:
        try:
            storage = SqliteStorage(store) if store is not None else MemoryStorage()
            own_events = events or EventLog.from_environment("lighthouse", "lighthouse")
            try:
                asyncio.run(self._serve(config, storage, own_events, tick_ms))
            finally:
                storage.close()
                if events is None:
                    own_events.close()
        except BaseException as error:
            # Whoever waits for the constructor gets it there; later there is nobody to raise it to.
            if not self._ready.done():
                self._ready.set_exception(error)
            else:
                logger.exception("the Lighthouse stops")

    async def _serve(self, config: CoreConfig, storage: Storage, events: EventLog, tick_ms: int) -> None:
        daemon = LighthouseDaemon(config, storage, events, tick_ms, self._security)
        server = await daemon.start(self._bind)
        self._ready.set_result((daemon, asyncio.get_running_loop()))
        await daemon.serve(server)
