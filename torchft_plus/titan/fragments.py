"""Which parameters of a model are synchronised together. Pure: names in, names out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from torchft_plus.strict_table import ConfigError

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing put into names."""


def plain_name(name: str) -> str:
    """A parameter's name as if nothing had been wrapped."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def split(
    names: Sequence[str], fragments: int, modules: Sequence[Sequence[str]] = ()
) -> list[tuple[str, ...]]:
    """Cut a model into fragments.

    Args:
        names: plain names of all trainable parameters, in the model's order.
        fragments: how many, if ``modules`` is empty: embeddings, layers and output are dealt out in order, as evenly as
            they come (torchtitan's rule: what stands before and after the layers counts as one layer each).
        modules: names of the modules of each fragment.

    Returns:
        The names of each fragment; every name is in exactly one.

    Raises:
        ConfigError: a module that holds nothing, a parameter that is in no fragment, a fragment without any.
    """
    if modules:
        return _by_modules(names, modules)
    units = [tuple(unit) for _, unit in groupby(names, _units(names).__getitem__)]
    if len(units) < fragments:
        raise ConfigError(
            f"fault_tolerance.num_fragments is {fragments}, but this model has {len(units)} parts to share out"
            " (its layers, what comes before and what comes after them): lower it."
        )
    share, more = divmod(len(units), fragments)
    result: list[tuple[str, ...]] = []
    for index in range(fragments):
        count = share + (index < more)
        result.append(tuple(name for unit in units[:count] for name in unit))
        del units[:count]
    return result


def _units(names: Sequence[str]) -> Mapping[str, str]:
    """Parameter -> the part that it belongs to: a layer, or all that stands before or after the layers."""
    found: dict[str, str] = {}
    layers = False
    for name in names:
        parts = name.split(".")
        layer = len(parts) > 2 and parts[1].isdecimal()
        layers = layers or layer
        found[name] = ".".join(parts[:2]) if layer else "after" if layers else "before"
    return found


def _by_modules(names: Sequence[str], modules: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    key = "fault_tolerance.module_fqns_per_model_fragment"
    owners: dict[str, int] = {}
    for index, own in enumerate(modules):
        for module in own:
            if module in owners:
                raise ConfigError(f"{key} names {module!r} twice: name each module in one fragment.")
            owners[module] = index
    result: list[list[str]] = [[] for _ in modules]
    used: set[str] = set()
    for name in names:
        # The innermost module that is named counts.
        prefixes = [name.rsplit(".", cut)[0] for cut in range(name.count(".") + 1)]
        owner = next((prefix for prefix in prefixes if prefix in owners), None)
        if owner is None:
            raise ConfigError(f"{key} leaves out {name!r}: every parameter must be in a fragment.")
        used.add(owner)
        result[owners[owner]].append(name)
    unknown = [module for module in owners if module not in used]
    if unknown:
        raise ConfigError(
            f"{key} names {unknown[0]!r}, which holds no parameter of this model: its modules are"
            f" {', '.join(dict.fromkeys(_module(name) for name in names))}."
        )
    if not all(result):
        raise ConfigError(f"{key} has an empty fragment: remove it.")
    return [tuple(own) for own in result]


def _module(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:2]) if len(parts) > 2 and parts[1].isdecimal() else parts[0]
