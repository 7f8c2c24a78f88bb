"""Settings: arguments before environment, and one sentence for each mistake."""

from __future__ import annotations

import pytest

from torchft_plus.manager.settings import Settings, SettingsError

LOCAL = {"TORCHFT_LIGHTHOUSE": "http://127.0.0.1:29510"}


def resolve(environment: dict[str, str], **arguments: object) -> Settings:
    return Settings.resolve(min_replica_size=1, environment=environment, **arguments)  # type: ignore[arg-type]


def test_a_local_run_stays_on_loopback() -> None:
    settings = resolve(LOCAL)
    assert settings.bind_host == "127.0.0.1"
    assert (settings.group_rank, settings.group_world_size) == (0, 1)
    assert settings.timeouts.heartbeat_timeout_ms == 5_000


def test_arguments_win_over_the_environment() -> None:
    environment = {
        **LOCAL,
        "REPLICA_ID": "from_env",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }
    assert resolve(environment).replica_id == "from_env"
    settings = resolve(
        environment, replica_id="given", group_rank=0, lighthouse_address="127.0.0.1:1", bind_host="127.0.0.9"
    )
    assert (settings.replica_id, settings.group_rank, settings.bind_host) == ("given", 0, "127.0.0.9")
    assert settings.store_address == "h:1"


def test_each_start_is_a_new_incarnation_unless_the_launcher_names_it() -> None:
    assert resolve(LOCAL).incarnation != resolve(LOCAL).incarnation
    assert resolve({**LOCAL, "TORCHFT_PLUS_INCARNATION": "abc"}).incarnation == "abc"


@pytest.mark.parametrize(
    ("environment", "arguments", "sentence"),
    [
        ({}, {}, "TORCHFT_LIGHTHOUSE"),
        ({"TORCHFT_LIGHTHOUSE": "nowhere"}, {}, "host:port"),
        ({**LOCAL, "RANK": "2", "WORLD_SIZE": "2"}, {}, "rank 2"),
        ({**LOCAL, "RANK": "x"}, {}, "RANK is 'x'"),
        ({**LOCAL, "RANK": "0", "WORLD_SIZE": "2"}, {}, "MASTER_ADDR"),
        (LOCAL, {"replica_id": "a b"}, "replica_id"),
        (LOCAL, {"job_id": "x/y"}, "job_id"),
        (LOCAL, {"timeout_ms": 10}, "timeout_ms"),
        (LOCAL, {"timeout_ms": 5_000, "outage_limit_ms": 2_000}, "outage_limit_ms"),
    ],
)
def test_a_mistake_is_one_sentence(
    environment: dict[str, str], arguments: dict[str, object], sentence: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve(environment, **arguments)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_the_bind_host_may_be_an_interface() -> None:
    assert resolve({"TORCHFT_LIGHTHOUSE": "127.0.0.1:1", "TORCHFT_PLUS_BIND": "lo"}).bind_host == "127.0.0.1"
    with pytest.raises(SettingsError, match="TORCHFT_PLUS_BIND"):
        resolve({"TORCHFT_LIGHTHOUSE": "127.0.0.1:1", "TORCHFT_PLUS_BIND": "no such.interface"})


def test_security_comes_from_the_environment() -> None:
    token = "0123456789abcdef"
    found = resolve({"TORCHFT_LIGHTHOUSE": "https://127.0.0.1:1", "TORCHFT_PLUS_TOKEN": token})
    assert found.security.token == token
    assert token not in repr(found)
    with pytest.raises(SettingsError, match="TORCHFT_PLUS_TOKEN holds no token"):
        resolve({"TORCHFT_LIGHTHOUSE": "127.0.0.1:1", "TORCHFT_PLUS_TOKEN": "short"})
