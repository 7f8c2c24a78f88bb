"""Run by a Python that has torchft 0.2.0: prints its public names, one a line, as "torchft.module.Class.method"."""

import importlib
import inspect
import pkgutil

import torchft


def public_modules():
    yield "torchft"
    for found in pkgutil.walk_packages(torchft.__path__, "torchft."):
        words = found.name.split(".")
        if not any(word.startswith("_") or word.endswith(("_test", "_bench")) for word in words):
            yield found.name


def is_own(module, value):
    """Defined by torchft: classes and functions, and words in capitals (names of environment variables)."""
    home = getattr(value, "__module__", "") or ""
    if inspect.isclass(value) or inspect.isfunction(value):
        return home == module or (
            home.startswith(("torchft", "builtins")) and module in ("torchft", "torchft.coordination")
        )
    return isinstance(value, (str, bool))


def methods(cls):
    for name in dir(cls):
        owner = next((base for base in cls.__mro__ if name in vars(base)), object)
        own = owner is not object and owner.__module__.startswith(("torchft", "builtins"))
        if own and not name.startswith("_") and callable(getattr(cls, name)):
            yield name


for module_name in public_modules():
    try:
        module = importlib.import_module(module_name)
    except (ImportError, TypeError):  # its own needs are not met: triton, torchcomms, torchx
        print(module_name)
        continue
    for name, value in vars(module).items():
        if name.startswith("_") or name == "TYPE_CHECKING" or not is_own(module_name, value):
            continue
        print(f"{module_name}.{name}")
        if inspect.isclass(value):
            for method in methods(value):
                print(f"{module_name}.{name}.{method}")
