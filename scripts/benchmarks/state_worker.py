"""One process of ``bench state``, part *transfer*: a donor or a receiver of a state that is held in memory.

A command names the transport ("ours", "raw", "memcpy", "http", "pg"), and the step, which is new each time. The donor
answers when its side can be asked; the receiver answers with the seconds that it took until the state was complete.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from benchmarks.channel import Channel
from benchmarks.state_memory import PeakMemory

TENSOR_BYTES = 4 << 20
DEADLINE = timedelta(seconds=120)


def make_state(size_bytes: int, filled: bool) -> dict[str, torch.Tensor]:
    """Tensors of 4 MiB, different from each other or zero; every page is touched."""
    state: dict[str, torch.Tensor] = {}
    for index in range(size_bytes // TENSOR_BYTES):
        state[f"{index:05}"] = torch.full((TENSOR_BYTES // 8,), index + 1 if filled else 0, dtype=torch.int64)
    return state


def is_the_donors(state: dict[str, torch.Tensor]) -> bool:
    """True if ``state`` is what ``make_state`` fills in."""
    return all(bool((tensor == index + 1).all()) for index, tensor in enumerate(state.values()))


def give_back_freed_memory() -> None:
    """A joiner receives once in its life: what a transport allocates is memory that the process did not have yet."""
    ctypes.CDLL(None).malloc_trim(0)


def views(state: dict[str, torch.Tensor]) -> list[memoryview]:
    """The memory of each tensor."""
    return [tensor.view(torch.uint8).numpy().data for tensor in state.values()]


class Donor:
    """Serves its state by the transport that is asked for; ``offer`` returns what the receiver must know."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._state = make_state(options["size_bytes"], filled=True)
        self._offers: dict[str, Callable[[int], str]] = {}
        if options["system"] == "torchft_plus":
            self._server = plus_server(self._state)
            self._raw = socket.create_server(("127.0.0.1", 0))
            self._offers = {"ours": self._offer_ours, "raw": self._offer_raw, "memcpy": lambda _: ""}
        else:
            checkpointing = importlib.import_module("torchft.checkpointing")
            self._http = checkpointing.HTTPTransport(timeout=DEADLINE, num_chunks=0)
            self._pg = torchft_transport(0, options["store"], self._state)
            self._offers = {"http": self._offer_http, "pg": lambda _: ""}

    def offer(self, mode: str, step: int) -> str:
        """Make the transport ready."""
        return self._offers[mode](step)

    def give(self, mode: str, step: int) -> None:
        """The donor's part while the receiver receives, for transports that take its thread."""
        if mode == "pg":
            self._pg.send_checkpoint([1], step, self._state, DEADLINE)
        elif mode == "raw":
            connection, _ = self._raw.accept()
            with connection:
                for view in views(self._state):
                    connection.sendall(view)
                connection.recv(1)  # the receiver closes

    def end(self, mode: str) -> None:
        """After the transfer."""
        if mode == "http":
            self._http.disallow_checkpoint()

    def _offer_ours(self, step: int) -> str:
        messages = importlib.import_module("lighthouse.messages")
        head = messages.Head(step, 1)
        self._server.before_update()
        self._server.pin(head, 1)
        self._server.publish(head)
        return self._server.address

    def _offer_raw(self, _step: int) -> str:
        return str(self._raw.getsockname()[1])

    def _offer_http(self, step: int) -> str:
        self._http.send_checkpoint([1], step, {"state": self._state}, DEADLINE)
        return self._http.metadata()


class Receiver:
    """Receives into its own warm tensors where the transport can."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._state = make_state(options["size_bytes"], filled=False)
        if options["system"] == "torchft_plus":
            self._registry = plus_registry(self._state)
            self._source = list(make_state(options["size_bytes"], filled=True).values())
        else:
            checkpointing = importlib.import_module("torchft.checkpointing")
            self._http = checkpointing.HTTPTransport(timeout=DEADLINE, num_chunks=0)
            self._pg = torchft_transport(1, options["store"], self._state)
        self._modes: dict[str, Callable[[int, str], Any]] = {
            "ours": self._ours,
            "raw": self._receive_raw,
            "memcpy": self._memcpy,
            "http": self._receive_http,
            "pg": self._receive_pg,
        }

    def receive(self, mode: str, step: int, offer: str) -> dict[str, Any]:
        """One transfer. Returns its seconds, the memory it took at most, and whether the content is right."""
        for tensor in self._state.values():
            tensor.zero_()
        give_back_freed_memory()
        peak = PeakMemory()
        start, cpu = time.perf_counter(), time.process_time()
        got = self._modes[mode](step, offer)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        extra_bytes = peak.extra_bytes()
        right = is_the_donors(got or self._state)
        return {"seconds": seconds, "cpu_s": cpu, "extra_bytes": extra_bytes, "right": right}

    def _ours(self, step: int, offer: str) -> None:
        state = importlib.import_module("torchft_plus.state")
        messages = importlib.import_module("lighthouse.messages")
        report = state.fetch_state(self._registry, messages.Head(step, 1), [offer])
        self._registry.apply_values(report.plan.manifest.values)
        self._registry.apply_tensors(report.plan)

    def _receive_raw(self, _step: int, offer: str) -> None:
        with socket.create_connection(("127.0.0.1", int(offer))) as connection:
            for view in views(self._state):
                done = 0
                while done < len(view):
                    count = connection.recv_into(view[done:])
                    if not count:
                        raise ConnectionError("the donor closed the raw connection")
                    done += count

    def _memcpy(self, _step: int, _offer: str) -> None:
        for tensor, source in zip(self._state.values(), self._source, strict=True):
            tensor.copy_(source)

    def _receive_http(self, step: int, offer: str) -> dict[str, torch.Tensor]:
        return self._http.recv_checkpoint(0, offer, step, DEADLINE)["state"]

    def _receive_pg(self, step: int, _offer: str) -> None:
        self._pg.recv_checkpoint(0, "", step, DEADLINE)


def plus_registry(state: dict[str, torch.Tensor]) -> Any:
    """Our registry of a state."""
    registry = importlib.import_module("torchft_plus.state").StateRegistry()
    registry.register_tensors("state", lambda: state)
    return registry


def plus_server(state: dict[str, torch.Tensor]) -> Any:
    """Our state server."""
    return importlib.import_module("torchft_plus.state").StateServer(plus_registry(state))


def torchft_transport(rank: int, store: str, state: dict[str, torch.Tensor]) -> Any:
    """torchft's transport over a process group, receiving in place."""
    torchft = importlib.import_module("torchft")
    checkpointing = importlib.import_module("torchft.checkpointing.pg_transport")
    group = torchft.ProcessGroupGloo(timeout=DEADLINE)
    group.configure(store, f"replica_{rank}", rank, 2)
    return checkpointing.PGTransport(group, DEADLINE, torch.device("cpu"), state_dict=lambda: state)


def main() -> None:
    """Serve commands until the channel closes."""
    channel = Channel()
    options = channel.receive()
    assert options is not None
    torch.set_num_threads(1)
    if options["role"] == "donor":
        donate(channel, options)
    else:
        receiver = Receiver(options)
        channel.send(ready=True, torch=torch.__version__)
        while (command := channel.receive()) is not None:
            channel.send(**receiver.receive(**command))
    os._exit(0)  # a transport's threads must not hold up the bench


def donate(channel: Channel, options: dict[str, Any]) -> None:
    """The donor's loop; it opens the store that torchft's process group meets at."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=DEADLINE)
    channel.send(store=f"127.0.0.1:{store.port}/state")
    donor = Donor({**options, "store": f"127.0.0.1:{store.port}/state"})
    channel.send(ready=True)
    while (command := channel.receive()) is not None:
        mode, step = command["mode"], command["step"]
        offer = donor.offer(mode, step)
        peak, cpu = PeakMemory(), time.process_time()
        channel.send(offer=offer)
        donor.give(mode, step)
        ended = channel.receive()
        if ended is None:
            break
        channel.send(extra_bytes=peak.extra_bytes(), cpu_s=time.process_time() - cpu)
        donor.end(mode)


if __name__ == "__main__":
    main()
