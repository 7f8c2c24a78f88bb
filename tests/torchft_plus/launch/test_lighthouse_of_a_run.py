"""The launcher beside a real Lighthouse, and the reports of exits over real gRPC."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
from launching import eventually, launch

from lighthouse.messages import Process
from lighthouse.pb import lighthouse_pb2 as pb
from lighthouse.rpc import SERVICE
from torchft_plus.launch.exit_reporter import ExitReporter
from torchft_plus.launch.ports import PortPicker


def test_a_lighthouse_that_dies_comes_back_at_the_same_address(tmp_path: Path) -> None:
    chaos = '[[chaos]]\nat_step = 4\nkill = "lighthouse"\n[[chaos]]\nat_step = 4\nkill = "replica_1"'
    run = launch(tmp_path, more=chaos, lighthouse=True, FAKE_STEPS="60")
    status, output = run.finish()
    assert status == 0, output
    listening = [event["address"] for event in run.events("listening")]
    assert len(listening) == 2 and listening[0] == listening[1]
    assert "The Lighthouse died and is restarted" in output
    assert [e["replica_id"] for e in run.events("spawn")].count("replica_0") == 1
    assert (run.folder / "lighthouse.sqlite").exists()
    assert not run.left_behind()


def test_a_lighthouse_that_cannot_listen_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bind = json.dumps(f"127.0.0.1:{taken.getsockname()[1]}")
        run = launch(tmp_path, more=f"[lighthouse]\nbind = {bind}", lighthouse=True)
        status, output = run.finish()
    assert status == 1
    assert "The Lighthouse did not come up" in output and "cannot listen on" in output
    assert [e["replica_id"] for e in run.events("spawn")] == ["lighthouse"]
    assert not run.left_behind()


@contextmanager
def listener(port: int, got: list[pb.ReportExitRequest]) -> Iterator[None]:
    """Something that takes reports of exits, as the Lighthouse does."""

    def take(request: bytes, context: grpc.ServicerContext) -> bytes:
        got.append(pb.ReportExitRequest.FromString(request))
        if got[-1].process.replica_id == "refused":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such thing")
        return pb.ReportExitReply(known=True).SerializeToString()

    server = grpc.server(ThreadPoolExecutor(2))
    handlers = {"ReportExit": grpc.unary_unary_rpc_method_handler(take)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


def test_reports_outlive_a_lighthouse_that_is_down() -> None:
    port = PortPicker().pick()
    got: list[pb.ReportExitRequest] = []
    reporter = ExitReporter(lambda: f"127.0.0.1:{port}", "job")
    try:
        for name in ("replica_1", "refused", "replica_2"):
            reporter.report(Process(name, "abc"))
        with listener(port, got):
            eventually(lambda: len(got) == 3, 20)
    finally:
        reporter.close()
    assert [(r.job_id, r.process.replica_id, r.process.incarnation) for r in got] == [
        ("job", "replica_1", "abc"),
        ("job", "refused", "abc"),  # a refusal is not tried again
        ("job", "replica_2", "abc"),
    ]


def test_closing_does_not_wait_for_a_lighthouse_that_never_comes() -> None:
    reporter = ExitReporter(lambda: "127.0.0.1:9", "job")
    reporter.report(Process("replica_1", "abc"))
    reporter.close()
    assert not [t for t in threading.enumerate() if t.name == "exit-reporter"]
