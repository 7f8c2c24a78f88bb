from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_member import FakeMember


@pytest.fixture
def members() -> Iterator[list[FakeMember]]:
    """Members put here are closed at the end."""
    started: list[FakeMember] = []
    yield started
    for member in started:
        member.close()
