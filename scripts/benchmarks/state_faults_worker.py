"""One process of ``bench state``, part *faults*: a joiner whose donors fail, or a donor that trains while it is read.

A command names what is to be done; the answer is what was measured.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import threading
import time
from typing import Any

import torch

from benchmarks.channel import Channel
from benchmarks.state_memory import PeakMemory
from benchmarks.state_worker import is_the_donors, make_state, plus_registry
from lighthouse.messages import Head
from torchft_plus.state import StateServer, fetch_state

STEP_S = 0.03
MB = 1 << 20


def fetch(size_bytes: int, step: int, donors: list[str], kill: int = 0) -> dict[str, Any]:
    """Fetch a state; with ``kill`` that process (a donor) is killed when half of it has come."""
    state = make_state(size_bytes, filled=False)
    registry = plus_registry(state)
    killed = threading.Event()

    def on_progress(done: int, total: int) -> None:
        if kill and 2 * done >= total and not killed.is_set():
            killed.set()
            os.kill(kill, signal.SIGKILL)

    report = fetch_state(registry, Head(step, 1), donors, on_progress=on_progress)
    registry.apply_values(report.plan.manifest.values)
    registry.apply_tensors(report.plan)
    return {
        "seconds": report.seconds,
        "refetched": report.refetched_bytes / size_bytes,
        "notes": list(report.notes),
        "right": is_the_donors(state),
    }


class FlippingProxy:
    """Passes one donor's bytes on and flips one bit of them, at a random place of the data."""

    def __init__(self, target: str, size_bytes: int, seed: int) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._lock = threading.Lock()
        self._until_flip = random.Random(seed).randrange(MB, size_bytes)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                threading.Thread(target=self._pump, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, damages: bool) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 18)):
                if damages:
                    self._damage(data)
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _damage(self, data: bytearray) -> None:
        with self._lock:
            if 0 <= self._until_flip < len(data):
                data[self._until_flip] ^= 1 << 3
            self._until_flip -= len(data)

    def close(self) -> None:
        """Accept no more."""
        self._listener.close()


def fetch_flipped(size_bytes: int, step: int, donors: list[str], seed: int) -> dict[str, Any]:
    """Fetch a state of which one bit comes wrong."""
    proxy = FlippingProxy(donors[0], size_bytes, seed)
    try:
        return fetch(size_bytes, step, [proxy.address])
    finally:
        proxy.close()


def train_while_read(size_bytes: int, steps: int, stopped_s: float) -> dict[str, Any]:
    """Steps of a donor without a reader, and with one that asks for everything and reads nothing."""
    state = make_state(size_bytes, filled=True)
    server = StateServer(plus_registry(state))
    small = torch.zeros(1 << 16)

    def run_step(step: int) -> tuple[float, float, int]:
        start = time.perf_counter()
        server.publish(Head(step, 1))
        time.sleep(STEP_S)
        before = time.perf_counter()
        copied_bytes = server.before_update()
        copy_s = time.perf_counter() - before
        small.add_(1)
        next(iter(state.values())).add_(1)
        return time.perf_counter() - start, copy_s, copied_bytes

    normal = [run_step(step)[0] for step in range(steps)]
    server.pin(Head(steps, 1))
    host, _, port = server.address.rpartition(":")
    peak = PeakMemory()
    with socket.create_connection((host, int(port))) as reader:
        reader.sendall(f"GET /v1/state/{steps}-1?reader=deaf HTTP/1.1\r\nHost: donor\r\n\r\n".encode())
        end = time.monotonic() + stopped_s
        first, copy_s, copied_bytes = run_step(steps)
        meanwhile: list[float] = []
        while time.monotonic() < end:
            meanwhile.append(run_step(steps + 1 + len(meanwhile))[0])
    extra_bytes = peak.extra_bytes()
    server.close()
    return {
        "normal_s": normal,
        "meanwhile_s": meanwhile,
        "first_s": first,
        "copy_s": copy_s,
        "copied_bytes": copied_bytes,
        "extra_bytes": extra_bytes,
    }


def main() -> None:
    """Serve commands until the channel closes."""
    channel = Channel()
    torch.set_num_threads(1)
    calls = {"fetch": fetch, "flip": fetch_flipped, "train": train_while_read}
    while (command := channel.receive()) is not None:
        channel.send(**calls[command.pop("call")](**command))
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
