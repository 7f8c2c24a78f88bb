"""The readable scenarios in ``scenarios/*.txt``, played on the real quorum core."""

from __future__ import annotations

from pathlib import Path

import pytest
from scenario_play import Play
from scenario_script import ScenarioError, heading, read_lines

SCENARIOS = sorted(Path(__file__).parent.joinpath("scenarios").glob("*.txt"))


def play(path: Path) -> None:
    """A line that fails is shown with the file, its number, and what the core has to say."""
    stage = Play()
    lines = read_lines(path)
    where = f"{path.name}: no line"
    try:
        for line in lines:
            where = f"{path.name}:{line.number}: {line.text}"
            stage.perform(line)
        where = f"{path.name}: at the end"
        stage.end()
    except ScenarioError as error:
        raise ScenarioError(f"{where}\n{error}") from error
    except AssertionError as error:
        story = "\n  ".join(["", *stage.story()])
        raise AssertionError(f"{where}\n{error}\nstory of the quorum core:{story}") from error


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    assert heading(path), "a scenario begins with a comment that says what it shows"
    assert any(line.text.startswith("expect") for line in read_lines(path))
    play(path)


def written(folder: Path, text: str) -> Path:
    path = folder / "broken.txt"
    path.write_text(text, "utf-8")
    return path


BEGIN = "given expected_replicas 2\njoin a b\nexpect quorum {a b}\n"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("expect still {a b c}", r"(?s)broken.txt:4: expect still .*\{a b\}.*story.*quorum \d+ of 2 formed"),
        ("expect quorum {a b}", "new quorums: none"),
        ("expect base 1", "the base is step 0"),
        ("exit b\nexpect revoke boundary", "broken.txt:5: expect revoke boundary"),
        ("exit b\nexpect revoke now to b", r"revoked: \['a'\]"),
        ("expect roll forward", "the reason is: first quorum"),
        ("expect announce total loss", r"announced: \[\]"),
        ("expect left a", "a: None"),
        ("exit b\nask a", r"at the end\na quorum was not mentioned: \{a\}"),
    ],
)
def test_an_expectation_that_is_not_met_names_the_line_and_tells_the_story(
    tmp_path: Path, lines: str, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        play(written(tmp_path, BEGIN + lines))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("dance a", r"(?s)broken.txt:4: dance a\nno sentence has this form.*join NAMES"),
        ("ask z", "z has not joined"),
        ("commit a 1", "b has not voted for step 1: nobody can have committed it"),
        ("ask a\nvote a 1", "a has no quorum in force"),
        ("vote a 2", "a is at step 0: it cannot vote for step 2"),
        ("exit a\nask a", "a is not alive any more"),
        ("given min_replicas 2", "settings come first"),
    ],
)
def test_a_scenario_that_makes_no_sense_is_refused_with_a_sentence(
    tmp_path: Path, lines: str, message: str
) -> None:
    with pytest.raises(ScenarioError, match=message):
        play(written(tmp_path, BEGIN + lines))
