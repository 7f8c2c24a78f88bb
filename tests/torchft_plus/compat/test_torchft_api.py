"""Name by name: what a script imports from torchft 0.2.0 is here, and takes its arguments."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torchft_api

ROOT = Path(__file__).resolve().parents[3]
OWN_PYTHON = ROOT / ".venv-torchft" / "bin" / "python"
TORCHFT_PYTHON = os.environ.get("TORCHFT_PYTHON") or (str(OWN_PYTHON) if OWN_PYTHON.exists() else None)


def ours(name: str) -> Any:
    module, _, attribute = name.replace("torchft", "torchft_plus", 1).rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def parameters(function: Any, bound: bool) -> list[inspect.Parameter]:
    found = list(inspect.signature(function).parameters.values())
    return found[1:] if bound else found


def check_call(name: str, function: Any, theirs: str, bound: bool) -> None:
    """Whatever is a call of theirs is a call of ours: by position and by keyword."""
    found = parameters(function, bound)
    kinds = inspect.Parameter
    any_keyword = any(one.kind is kinds.VAR_KEYWORD for one in found)
    any_position = any(one.kind is kinds.VAR_POSITIONAL for one in found)
    by_position = [one.name for one in found if one.kind is kinds.POSITIONAL_OR_KEYWORD]
    words = theirs.split()
    for place, word in enumerate(words):
        if word.startswith("*"):
            assert any_keyword or any_position, f"{name} takes no further arguments"
            continue
        argument = word.rstrip("=")
        if any_position and place >= len(by_position):
            continue
        assert argument in by_position, f"{name} has no argument {argument}"
        assert by_position.index(argument) == place, f"{name}: {argument} is at another place"
        if word.endswith("="):
            default = next(one for one in found if one.name == argument).default
            assert default is not kinds.empty, f"{name}: {argument} has a default in torchft"
    known = {word.rstrip("=") for word in words}
    for one in found:
        needed = one.default is kinds.empty and one.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
        assert one.name in known or not needed, f"{name} needs {one.name}, which torchft does not have"


@pytest.mark.parametrize("name", torchft_api.CLASSES)
def test_a_class_has_their_methods_and_arguments(name: str) -> None:
    cls = ours(name)
    for method, theirs in torchft_api.CLASSES[name].items():
        function = inspect.getattr_static(cls, method)
        plain = inspect.isfunction(function)
        check_call(f"{name}.{method}", function if plain else getattr(cls, method), theirs, bound=plain)


@pytest.mark.parametrize("name", torchft_api.FUNCTIONS)
def test_a_function_has_their_arguments(name: str) -> None:
    check_call(name, ours(name), torchft_api.FUNCTIONS[name], bound=False)


@pytest.mark.parametrize("name", torchft_api.VALUES)
def test_a_value_is_there(name: str) -> None:
    assert ours(name) is not None


def test_what_is_not_offered_is_in_the_guide() -> None:
    guide = (ROOT / "docs" / "from-torchft.md").read_text()
    missing = [name for name in torchft_api.NOT_OFFERED if f"`{name.removeprefix('torchft.')}`" not in guide]
    assert not missing, f"docs/from-torchft.md does not say what to do instead of {missing}"


@pytest.mark.skipif(
    TORCHFT_PYTHON is None, reason="no torchft: set TORCHFT_PYTHON to a Python with torchft 0.2.0"
)
def test_the_list_of_names_is_whole() -> None:
    """Each public name of the real torchft is one of the list, or belongs to one that is not offered."""
    assert TORCHFT_PYTHON is not None
    walk = Path(__file__).with_name("torchft_walk.py")
    done = subprocess.run([TORCHFT_PYTHON, str(walk)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    names = done.stdout.split()
    known = {*torchft_api.FUNCTIONS, *torchft_api.VALUES, *torchft_api.CLASSES}
    known |= {f"{name}.{method}" for name, cls in torchft_api.CLASSES.items() for method in cls}
    absent = tuple(f"{name}." for name in torchft_api.NOT_OFFERED)
    assert len(names) > 200
    assert not [name for name in names if name not in known and not f"{name}.".startswith(absent)]


def test_a_name_that_is_not_offered_can_be_imported_and_says_what_to_do() -> None:
    server = ours("torchft.coordination.ManagerServer")
    with pytest.raises(RuntimeError, match=r"ManagerServer has no counterpart .* pass lighthouse_addr"):
        server(replica_id="a")
    assert not isinstance(object(), ours("torchft.ProcessGroupXCCL")), "its branch is not taken"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_under_the_alias_both_names_are_one_module() -> None:
    said = run(
        "import torchft_plus.compat.install\n"
        "import importlib.util, torchft, torchft.process_group as group\n"
        "from torchft.local_sgd import DiLoCo\n"
        "import torchft_plus, torchft_plus.process_group, torchft_plus.semi_sync.diloco as diloco\n"
        "assert torchft is torchft_plus and group is torchft_plus.process_group and DiLoCo is diloco.DiLoCo\n"
        "assert torchft.process_group.ManagedProcessGroup is torchft_plus.ManagedProcessGroup\n"
        "assert importlib.util.find_spec('torchft') is not None\n"
        "assert torchft_plus.__spec__.name == 'torchft_plus'\n"
        "assert importlib.util.find_spec('torchft.nothing') is None\n"
        "print(torchft._torchft.__name__ if hasattr(torchft, '_torchft') else '-')\n"
        "from torchft._torchft import LighthouseServer\n"
    )
    assert said == "-"


def test_the_alias_refuses_to_come_too_late() -> None:
    said = run(
        "import sys, types\n"
        "sys.modules['torchft'] = types.ModuleType('torchft')\n"
        "try:\n"
        "    import torchft_plus.compat.install\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    assert said.startswith("torchft is imported already")


SPAWNING = """
import multiprocessing, sys, torchft

class Answer:
    def __init__(self): self.name = torchft.ProcessGroupGloo.__module__

def work(queue):
    queue.put(Answer())

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        child = context.Process(target=work, args=(queue,))
        child.start()
        answer = queue.get()
        child.join()
        assert isinstance(answer, Answer)
        print(method, answer.name.partition(".")[0], child.exitcode)
    sys.exit(7)
"""


@pytest.mark.parametrize("words", [["script.py"], ["-m", "folder.script"]])
def test_processes_that_a_script_starts_have_the_alias(tmp_path: Path, words: list[str]) -> None:
    for name in ("script.py", "folder/script.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(SPAWNING)
    command = [sys.executable, "-m", "torchft_plus.compat", *words]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=90,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    said = done.stdout.splitlines()
    assert said == [f"{method} torchft_plus 0" for method in ("fork", "spawn", "forkserver")], done.stderr
    assert done.returncode == 7, "the script's own status"
