"""A state dict over HTTP, under torchft's names: a state server and a fetch of ours."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

from lighthouse.messages import Head
from lighthouse.security import Security
from torchft_plus.checkpointing.portable import put_together, take_apart
from torchft_plus.checkpointing.transport import CheckpointTransport
from torchft_plus.state.errors import StateError
from torchft_plus.state.fetch import fetch_state
from torchft_plus.state.registry import StateRegistry
from torchft_plus.state.server import StateServer

T = TypeVar("T")
_NAME = "checkpoint"
_QUORUM = 1
"""A head has two parts; here the step says all."""


class HTTPTransport(CheckpointTransport[T]):
    """Serves a state dict of tensors and plain values (no pickle: other objects are refused with a sentence).

    Args:
        timeout: a reader or a donor that moves nothing for so long is given up.
        num_chunks: accepted for torchft's sake: a fetch is always cut into pieces.
        bind: "host:port" to listen on; port 0 takes a free one.

    Raises:
        StateError: it cannot listen there.
    """

    def __init__(self, timeout: timedelta, num_chunks: int, *, bind: str = "127.0.0.1:0") -> None:
        del num_chunks
        self._stall_ms = max(1, round(timeout.total_seconds() * 1000))
        self._security = Security.resolve()
        self._state: Any = {}
        self._head: Head | None = None
        self._registry = StateRegistry()
        self._registry.register_state_dict(_NAME, lambda: self._state, lambda _: None)
        self._server = StateServer(
            self._registry, bind=bind, transfer_stall_ms=self._stall_ms, security=self._security
        )

    def address(self) -> str:
        """ "host:port" of the server."""
        return self._server.address

    def metadata(self) -> str:
        """The address."""
        return self._server.address

    def send_checkpoint(self, dst_ranks: Sequence[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Have ``state_dict`` ready under ``step``, until ``disallow_checkpoint`` or the next; returns at once.

        Raises:
            StateError: something in it is neither a tensor nor a plain value.
        """
        del timeout
        self.disallow_checkpoint()
        self._state = take_apart(state_dict)
        head = self._head = Head(step, _QUORUM)
        self._server.pin(head, max(1, len(dst_ranks)))
        self._server.publish(head)

    def disallow_checkpoint(self) -> None:
        """What was sent may change from now on. Repeatable; never waits for a reader."""
        if self._head is not None:
            self._server.unpin(self._head)
            self._server.before_update()
            self._server.withdraw()
            self._head = None

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """The state dict that the sender at ``metadata`` has under ``step``.

        Raises:
            TimeoutError: it was not there in time.
            StateError: the sender refused or broke off; the sentence says why.
        """
        del src_rank
        received: list[Any] = []
        registry = StateRegistry(growth_floor_bytes=None)
        registry.register_state_dict(_NAME, dict, received.append)
        wait_ms = round(timeout.total_seconds() * 1000)
        end_s = time.monotonic() + timeout.total_seconds()
        try:
            report = fetch_state(
                registry,
                Head(step, _QUORUM),
                [metadata],
                transfer_stall_ms=self._stall_ms,
                wait_ms=wait_ms,
                security=self._security,
            )
        except StateError as error:
            if time.monotonic() >= end_s:
                raise TimeoutError(f"timed out after {timeout}: {error}") from error
            raise
        registry.apply_tensors(report.plan)
        return put_together(received[0])

    def shutdown(self, wait: bool = True) -> None:
        """Stop serving."""
        del wait
        self._server.close()
