"""Donor processes and a TCP proxy that damages or delays, for the tests of the state room."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import threading
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event

import torch

from lighthouse.messages import Head
from torchft_plus.state import StateRegistry, StateServer
from torchft_plus.state.http import join_address, split_address

TENSOR_BYTES = 3 << 20  # no multiple of a piece

Transform = Callable[[bytes, int], bytes]


def big_registry(size_mb: int, filled: bool) -> tuple[StateRegistry, dict[str, torch.Tensor]]:
    """Tensors of altogether ``size_mb`` MB, random or zero."""
    generator = torch.Generator().manual_seed(5)
    tensors: dict[str, torch.Tensor] = {}
    for index in range(size_mb // 3):
        tensor = torch.zeros(TENSOR_BYTES // 8, dtype=torch.int64)
        if filled:
            tensor.random_(generator=generator)
        tensors[f"{index:03}"] = tensor
    registry = StateRegistry()
    registry.register_tensors("big", lambda: tensors)
    return registry, tensors


# Children are forked from one process that has imported torch: a fresh interpreter each would take seconds.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torchft_plus.state"])


@contextlib.contextmanager
def donor_processes(count: int, size_mb: int, head: Head) -> Iterator[tuple[list[BaseProcess], list[str]]]:
    """Processes that serve ``big_registry`` as ``head``, and their addresses."""
    addresses, stop = _CONTEXT.Queue(), _CONTEXT.Event()
    processes = [
        _CONTEXT.Process(target=_donate, args=(size_mb, head, addresses, stop)) for _ in range(count)
    ]
    for process in processes:
        process.start()
    try:
        named = dict(addresses.get(timeout=60) for _ in processes)
        yield list(processes), [named[process.pid] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _donate(size_mb: int, head: Head, addresses: Queue[tuple[int, str]], stop: Event) -> None:
    registry, _ = big_registry(size_mb, filled=True)
    server = StateServer(registry)
    server.pin(head, readers=100)
    server.publish(head)
    addresses.put((os.getpid(), server.address))
    stop.wait()


class Proxy:
    """Passes connections on to ``target``; ``transform`` gets what the target sends and where in the
    connection it is.

    It may block to delay, change bytes, or raise ``ConnectionError`` to break the connection off.
    """

    def __init__(self, target: str, transform: Transform) -> None:
        self._target = split_address(target)
        self._transform = transform
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self.address = join_address("127.0.0.1", self._listener.getsockname()[1])
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                for source, sink, change in ((near, far, None), (far, near, self._transform)):
                    thread = threading.Thread(target=self._pump, args=(source, sink, change), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, change: Transform | None) -> None:
        offset = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(change(data, offset) if change else data)
                offset += len(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        for end in self._sockets:
            end.close()
