"""Reads a scenario: one event or expectation a line, matched against sentences with blanks.

Blanks of a sentence are NAME, NAMES, MEMBERS, TIME, NUMBER, WORD, HOW and TEXT; a sentence may be known in several forms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Argument = str | int | list[str]

_NAME = r"[a-z]\d?"
_BLANKS: dict[str, str] = {
    "NAMES": rf"({_NAME}(?: {_NAME})*)",
    "NAME": rf"({_NAME})",
    "MEMBERS": r"\{([a-z0-9 ()]+)\}",
    "TIME": r"(\d+(?:ms|s|min|h))",
    "NUMBER": r"(\d+)",
    "WORD": r"(\w+)",
    "HOW": r"(now|boundary)",
    "TEXT": r"(.+)",
}
_UNITS_MS = {"ms": 1, "s": 1_000, "min": 60_000, "h": 3_600_000}


@dataclass(frozen=True, slots=True)
class Line:
    """A line that says something, and where it stands."""

    number: int
    text: str


class ScenarioError(Exception):
    """The scenario itself makes no sense: what to mend, in one sentence."""


def read_lines(path: Path) -> list[Line]:
    """All lines but comments and empty ones. A comment runs from ``#`` to the end of its line."""
    lines = (line.partition("#")[0].strip() for line in path.read_text("utf-8").splitlines())
    return [Line(number, text) for number, text in enumerate(lines, 1) if text]


def heading(path: Path) -> str:
    """The comment at the top: what the scenario shows."""
    taken: list[str] = []
    for line in path.read_text("utf-8").splitlines():
        if not line.startswith("#"):
            break
        taken.append(line.lstrip("# "))
    return " ".join(taken)


class Grammar:
    """Sentences and what they mean."""

    def __init__(self, sentences: Mapping[str, Callable[..., None]]) -> None:
        self._forms = [(*_compile(sentence), action) for sentence, action in sentences.items()]
        self._sentences = list(sentences)

    def action(self, text: str) -> Callable[[object], None]:
        """What ``text`` asks for, to be called with the one who does it.

        Raises:
            ScenarioError: no sentence has this form.
        """
        for pattern, blanks, action in self._forms:
            match = pattern.fullmatch(text)
            if match is not None:
                values = [_value(blank, group) for blank, group in zip(blanks, match.groups(), strict=True)]
                return lambda actor: action(actor, *values)
        known = "\n  ".join(self._sentences)
        raise ScenarioError(f"no sentence has this form; these are known:\n  {known}")


def _compile(sentence: str) -> tuple[re.Pattern[str], Sequence[str]]:
    blanks = [word for word in sentence.split() if word in _BLANKS]
    words = [_BLANKS.get(word, re.escape(word)) for word in sentence.split()]
    return re.compile(" ".join(words)), blanks


def _value(blank: str, group: str) -> Argument:
    match blank:
        case "NAMES":
            return group.split()
        case "NUMBER":
            return int(group)
        case "TIME":
            number, unit = re.fullmatch(r"(\d+)(\w+)", group).groups()  # type: ignore[union-attr]
            return int(number) * _UNITS_MS[unit]
        case _:
            return group
