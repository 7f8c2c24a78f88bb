"""Token and TLS at the real gRPC server: who gets in, and what the others are told, on both sides."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from fake_member import START, FakeMember
from grpc_health.v1 import health_pb2, health_pb2_grpc
from run_security import OTHER_TOKEN, TOKEN, make_security, make_tls, mixed

from lighthouse.client import (
    LighthouseClient,
    LighthouseRefused,
    LighthouseUnreachable,
    fetch_status,
    report_exit,
)
from lighthouse.messages import Hello, Position, Process, Progress
from lighthouse.rpc import target_of
from lighthouse.security import Security, SecurityError, without_security
from lighthouse.server import LighthouseServer
from lighthouse.timeouts import Timeouts

LOOPBACK = "127.0.0.1:0"
MEND = "TORCHFT_PLUS_TOKEN_FILE"


def session_ends(address: str, security: Security) -> Exception | None:
    """How a member's client ends that never gets in; None: it goes on trying."""
    client = LighthouseClient(
        address,
        job_id="job",
        process=Process("x", "1"),
        greet=lambda: [Hello(Position(0, START, level=True), "127.0.0.1:9", 1, None)],
        on_message=lambda _: None,
        on_connected=lambda _: None,
        progress=Progress,
        timeouts=Timeouts(),
        security=security,
    )

    async def run() -> None:
        async with asyncio.timeout(8):
            await client.run()

    try:
        asyncio.run(run())
    except (LighthouseRefused, TimeoutError) as error:
        return error if isinstance(error, LighthouseRefused) else None
    return None


# --- token --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["", OTHER_TOKEN])
def test_a_wrong_token_is_final_and_told_on_both_sides(token: str, caplog: pytest.LogCaptureFixture) -> None:
    with LighthouseServer(LOOPBACK, security=Security(TOKEN)) as server, caplog.at_level(logging.INFO):
        started = time.monotonic()
        for ask in (
            lambda: fetch_status(server.address(), security=Security(token)),
            lambda: report_exit(server.address(), "job", Process("a", "1"), security=Security(token)),
        ):
            with pytest.raises(LighthouseRefused, match=MEND):
                ask()
        error = session_ends(server.address(), Security(token))
        assert error is not None
        assert MEND in str(error)
        assert time.monotonic() - started < 4, "nobody waited for a deadline"
        assert fetch_status(server.address(), security=Security(TOKEN)).jobs == []
    told = [record.getMessage() for record in caplog.records if "are refused" in record.getMessage()]
    assert len(told) == 1, "once for each host"
    assert MEND in told[0]
    assert not any(
        TOKEN in record.getMessage() or OTHER_TOKEN in record.getMessage() for record in caplog.records
    )


def test_with_the_token_members_get_in(caplog: pytest.LogCaptureFixture) -> None:
    with LighthouseServer(LOOPBACK, expected_replicas=1, security=Security(TOKEN)) as server:
        member = FakeMember(server.address(), "a", security=Security(TOKEN))
        try:
            member.wait_for(lambda m: m.quorum)
        finally:
            member.close()


def test_health_needs_no_token() -> None:
    with (
        LighthouseServer(LOOPBACK, security=Security(TOKEN)) as server,
        grpc.insecure_channel(target_of(server.address())) as channel,
    ):
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_another_lighthouse_at_the_address_does_not_end_training(tmp_path: Path) -> None:
    first = LighthouseServer(LOOPBACK, expected_replicas=1, security=Security(TOKEN))
    address = target_of(first.address())
    member = FakeMember(address, "a", security=Security(TOKEN))
    try:
        member.wait_for(lambda m: m.quorum)
        first.shutdown()
        with LighthouseServer(address, security=Security(OTHER_TOKEN)):
            member.wait_for(lambda m: False in m.connections)
            time.sleep(0.5)  # it is refused again and again meanwhile
        with LighthouseServer(address, expected_replicas=1, security=Security(TOKEN)):
            member.wait_for(lambda m: m.connections[-1])
    finally:
        first.shutdown()
        member.close()


# --- TLS ----------------------------------------------------------------------------------------------------------


def test_tls_and_token_let_members_in(tmp_path: Path) -> None:
    security = make_security(tmp_path)
    with LighthouseServer(LOOPBACK, expected_replicas=2, security=security) as server:
        members = [FakeMember(server.address(), name, security=security) for name in "ab"]
        try:
            for member in members:
                member.wait_for(lambda m: m.members() == ["a", "b"])
            assert fetch_status(server.address(), security=security).jobs[0].job_id == "job"
        finally:
            for member in members:
                member.close()


def test_every_mismatch_of_tls_is_final_and_named(tmp_path: Path) -> None:
    ours, theirs = make_tls(tmp_path / "ours"), make_tls(tmp_path / "theirs")
    odd = make_tls(tmp_path / "odd", name="something-else")
    cases = [
        (Security(tls=ours), Security(), "wants TLS"),
        (Security(tls=ours), Security(tls=theirs), "is not accepted"),
        (Security(tls=ours), Security(tls=mixed(theirs, ours)), "does not accept this process's certificate"),
        (Security(tls=odd), Security(tls=odd), "carry the name"),
        (Security(), Security(tls=ours), "speaks no TLS"),
    ]
    for server_side, client_side, words in cases:
        with LighthouseServer(LOOPBACK, security=server_side) as server:
            with pytest.raises(LighthouseRefused, match=words) as caught:
                fetch_status(server.address(), timeout_s=1, security=client_side)
            assert "TORCHFT_PLUS_TLS_" in str(caught.value), "it names the setting"
            error = session_ends(server.address(), client_side)
            assert error is not None, words
            assert words in str(error)


def test_a_lighthouse_that_is_not_there_is_no_mismatch(tmp_path: Path) -> None:
    with pytest.raises(LighthouseUnreachable):
        fetch_status("127.0.0.1:1", timeout_s=0.3, security=make_security(tmp_path))


def test_a_silent_caller_keeps_nobody_waiting(tmp_path: Path) -> None:
    security = make_security(tmp_path)
    with LighthouseServer(LOOPBACK, security=security) as server:
        host, port = target_of(server.address()).split(":")
        silent = [socket.create_connection((host, int(port)), 10) for _ in range(20)]
        assert fetch_status(server.address(), security=security) is not None
        for connection in silent:
            with connection:
                assert connection.recv(1) == b"", "it is cut off"


# --- settings -----------------------------------------------------------------------------------------------------


def test_settings_come_from_the_environment_before_the_table(tmp_path: Path) -> None:
    tls = make_tls(tmp_path)
    secret = tmp_path / "token"
    secret.write_text(TOKEN + "\n")
    secret.chmod(0o600)
    table = {"token_file": str(secret), "tls_cert": str(tls.certificate), "tls_key": str(tls.key)}
    table |= {"tls_ca": str(tls.authority), "tls_name": ""}
    security = Security.resolve({}, table)
    assert security == Security(TOKEN, tls)
    assert Security.resolve(security.environment()) == security, "children get the same"
    assert Security.resolve({"TORCHFT_PLUS_TOKEN": OTHER_TOKEN}, table).token == OTHER_TOKEN
    assert Security.resolve({}) == Security()
    assert without_security(security.environment() | {"A": "b"}) == {"A": "b"}
    assert TOKEN not in repr(security)


def test_a_wrong_setting_gets_one_sentence(tmp_path: Path) -> None:
    tls = make_tls(tmp_path / "tls")
    other = make_tls(tmp_path / "other")
    secret = tmp_path / "token"
    secret.write_text(TOKEN)
    secret.chmod(0o644)
    empty = tmp_path / "empty"
    empty.write_text("\n")
    empty.chmod(0o600)
    files = {"TORCHFT_PLUS_TLS_CERT": str(tls.certificate), "TORCHFT_PLUS_TLS_KEY": str(tls.key)}
    whole = files | {"TORCHFT_PLUS_TLS_CA": str(tls.authority)}
    cases = [
        ({"TORCHFT_PLUS_TOKEN_FILE": str(secret)}, "chmod 600"),
        ({"TORCHFT_PLUS_TOKEN_FILE": str(empty)}, "is empty"),
        ({"TORCHFT_PLUS_TOKEN_FILE": str(tmp_path / "no")}, "cannot be read"),
        ({"TORCHFT_PLUS_TOKEN": "short"}, "TORCHFT_PLUS_TOKEN holds no token"),
        ({"TORCHFT_PLUS_TOKEN": TOKEN, "TORCHFT_PLUS_TOKEN_FILE": str(secret)}, "set one of them"),
        (files, "security.tls_ca is missing"),
        (whole | {"TORCHFT_PLUS_TLS_KEY": str(other.key)}, "do not work"),
        (whole | {"TORCHFT_PLUS_TLS_CA": str(empty)}, "do not work"),
    ]
    for environment, words in cases:
        with pytest.raises(SecurityError) as caught:
            Security.resolve(environment)
        assert words in str(caught.value)
        assert "short" not in str(caught.value), "no secret in a sentence"
        assert TOKEN not in str(caught.value)
    tls.key.chmod(0o644)
    with pytest.raises(SecurityError, match="chmod 600"):
        Security.resolve(whole)


# --- command line -------------------------------------------------------------------------------------------------


def test_the_daemon_and_its_tools_take_settings_from_the_environment(tmp_path: Path) -> None:
    security = make_security(tmp_path)
    base = without_security(os.environ)

    def cli(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "lighthouse", *words]
        env = base | environment
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)

    command = [sys.executable, "-m", "lighthouse", "--bind", "0.0.0.0:0", "--store", "memory"]
    daemon = subprocess.Popen(
        command, env=base | security.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert daemon.stdout is not None
        address = daemon.stdout.readline().split()[-1]
        assert TOKEN.encode() not in Path(f"/proc/{daemon.pid}/cmdline").read_bytes()
        assert cli("status", "--address", address, **security.environment()).returncode == 0
        refused = cli("status", "--address", address, **Security("", security.tls).environment())
        assert refused.returncode == 2
        assert MEND in refused.stderr
        assert refused.stderr.count("\n") == 1
        assert cli("gone", "--address", address, "job", "b").returncode == 2
        bad = cli("--bind", LOOPBACK, TORCHFT_PLUS_TOKEN="short")
        assert (bad.returncode, bad.stderr.count("\n")) == (2, 1)
        daemon.terminate()
        _, said = daemon.communicate(timeout=10)
        assert "(token, TLS)" in said
        assert "whoever reaches" not in said
        assert TOKEN not in said
    finally:
        daemon.kill()
        daemon.communicate()


def test_an_open_lighthouse_warns_once_unless_it_is_local(caplog: pytest.LogCaptureFixture) -> None:
    for bind, warnings in ((LOOPBACK, 0), ("0.0.0.0:0", 1)):
        caplog.clear()
        with LighthouseServer(bind, security=Security()):
            assert sum("whoever reaches" in record.getMessage() for record in caplog.records) == warnings
