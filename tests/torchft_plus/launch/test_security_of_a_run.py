"""The token and certificates of a run: made, handed on, refused."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from launching import eventually, launch
from run_security import OTHER_TOKEN, TOKEN, make_security, make_tls

from lighthouse.client import LighthouseRefused, fetch_status
from lighthouse.security import Security
from lighthouse.server import LighthouseServer
from torchft_plus.config import ConfigError, RunFile


def test_a_local_run_makes_a_token_of_its_own(tmp_path: Path) -> None:
    run = launch(tmp_path, lighthouse=True, FAKE_STEPS="40")
    eventually(lambda: run.events("listening"))
    [listening] = run.events("listening")
    path = run.folder / "token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    token = path.read_text().strip()
    with pytest.raises(LighthouseRefused):
        fetch_status(listening["address"])
    assert fetch_status(listening["address"], security=Security(token)) is not None
    status, output = run.finish()
    assert status == 0, output
    everything = [
        p.read_text(errors="replace") for d in ("logs", "events") for p in (run.folder / d).iterdir()
    ]
    assert not any(token in text for text in [output, *everything])


def test_the_file_s_settings_reach_lighthouse_and_ranks(tmp_path: Path) -> None:
    security = make_security(tmp_path / "tls")
    tls = security.tls
    assert tls is not None
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text(TOKEN)
    table = {"token_file": secret, "tls_cert": tls.certificate, "tls_key": tls.key, "tls_ca": tls.authority}
    more = "[security]\n" + "".join(f"{key} = {json.dumps(str(value))}\n" for key, value in table.items())
    run = launch(tmp_path, more=more, lighthouse=True, FAKE_STEPS="40")
    eventually(lambda: run.events("listening"))
    [listening] = run.events("listening")
    assert fetch_status(listening["address"], security=security) is not None
    assert not (run.folder / "token").exists()
    status, output = run.finish()
    assert status == 0, output


def test_a_lighthouse_that_does_not_let_the_run_in_ends_it_before_it_begins(tmp_path: Path) -> None:
    with LighthouseServer("127.0.0.1:0", security=Security(TOKEN)) as server:
        run = launch(tmp_path, address=server.address(), TORCHFT_PLUS_TOKEN=OTHER_TOKEN)
        status, output = run.finish()
    assert status == 2, output
    assert "TORCHFT_PLUS_TOKEN_FILE" in output
    assert OTHER_TOKEN not in output
    assert not run.left_behind()


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ('tls_certt = "x"', r"security\.tls_certt is not a known key; did you mean security\.tls_cert\?"),
        (
            'token = "0123456789abcdef"',
            r"security\.token is not a known key; did you mean security\.token_file",
        ),
        ("token_file = 3", "expected a string"),
    ],
)
def test_a_wrong_key_names_the_nearest(tmp_path: Path, table: str, words: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"[security]\n{table}\n")
    with pytest.raises(ConfigError, match=words):
        RunFile.load(path)


def test_a_wrong_file_is_a_sentence_about_the_key(tmp_path: Path) -> None:
    tls = make_tls(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(f'[security]\ntls_cert = "{tls.certificate}"\n')
    with pytest.raises(ConfigError, match=r"security\.tls_key is missing"):
        RunFile.load(path).security.resolve({})
    overrides = ["--security.tls_key", str(tls.key), "--security.tls_ca", str(tls.authority)]
    found = RunFile.load(path, overrides).security.resolve(dict(os.environ))
    assert found.tls == tls
