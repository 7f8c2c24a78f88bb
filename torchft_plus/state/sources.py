"""What can be registered as state: one class per kind, all with the same five methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchft_plus.state.allocate import allocate, fits
from torchft_plus.state.errors import StateError
from torchft_plus.state.manifest import MAX_NAME_CHARACTERS, TensorSpec
from torchft_plus.state.memory import dtype_name, local_tensor
from torchft_plus.state.values import DecodeTensor, Json, decode, encode, reference

# Options that choose an implementation: two of them may round differently, so they must be the same on all
# replicas.
IMPLEMENTATION_FLAGS = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True, slots=True)
class Entry:
    """A named tensor at this moment."""

    tensor: torch.Tensor
    """As the owner holds it, maybe a DTensor."""
    local: torch.Tensor
    """What this rank holds of it."""
    shared: bool
    """All replicas must hold the same bytes."""
    changes_in_forward: bool
    """May change at any time between two step boundaries: must be copied when it is captured."""


@dataclass(slots=True)
class Captured:
    """A source at this moment: references to tensors, copies of plain values."""

    entries: dict[str, Entry] = field(default_factory=dict[str, Entry])
    values: Json = None
    tree: Json = None

    def add(
        self, name: str, tensor: torch.Tensor, *, shared: bool = True, changes_in_forward: bool = False
    ) -> Json:
        """Add a tensor under its full name; gives the reference that stands for it in a tree."""
        if name in self.entries:
            raise StateError(
                f"two tensors have the name {name!r}: keys must differ also when written as text"
            )
        if len(name) > MAX_NAME_CHARACTERS:
            raise StateError(
                f"the name {name[:80]!r}... has more than {MAX_NAME_CHARACTERS} characters: shorten it"
            )
        self.entries[name] = Entry(tensor, local_tensor(tensor, name), shared, changes_in_forward)
        return reference(name)


class Source(Protocol):
    """A registered part of the state."""

    name: str
    shared: bool
    """Its plain values are the same on all replicas."""

    def capture(self) -> Captured:
        """References and values of this moment."""
        ...

    def signature(self) -> dict[str, str]:
        """Fields that replicas must have in common, by name."""
        ...

    def target(self, spec: TensorSpec, own: Entry | None) -> torch.Tensor:
        """The tensor to receive ``spec`` into: the own one, or a new one where the donor's state decides.

        Raises:
            StateError: nothing here has that name, shape or dtype.
        """
        ...

    def apply_values(self, values: Json) -> None:
        """Take over the plain values that follow the step."""
        ...

    def apply_tree(self, tree: Json, tensor: DecodeTensor) -> None:
        """Take over what belongs to the tensors, after all of them have arrived."""
        ...

    def obstacle_to_catch_up(self) -> str | None:
        """Why recorded optimizer steps do not bring this part up to date, one sentence; None if they do."""
        ...


def _require_own(spec: TensorSpec, own: Entry | None) -> torch.Tensor:
    if own is None:
        raise StateError(
            f"the donor has a tensor {spec.name!r} ({spec.describe()}) that is not registered here"
        )
    if not fits(own.local, spec):
        here = f"{dtype_name(own.local.dtype)}{list(own.local.shape)}"
        raise StateError(f"tensor {spec.name!r} is {spec.describe()} at the donor and {here} here")
    return own.tensor


class _Source:
    """What the kinds have in common."""

    def __init__(self, name: str, *, shared: bool = True) -> None:
        self.name = name
        self.shared = shared

    def signature(self) -> dict[str, str]:
        return {}

    def target(self, spec: TensorSpec, own: Entry | None) -> torch.Tensor:
        return _require_own(spec, own)

    def apply_values(self, values: Json) -> None:
        if values is not None:
            raise StateError(f"the donor sent plain values for {self.name!r}, which has none here")

    def apply_tree(self, tree: Json, tensor: DecodeTensor) -> None:
        if tree is not None:
            raise StateError(f"the donor sent a tree of state for {self.name!r}, which has none here")

    def obstacle_to_catch_up(self) -> str | None:
        return None


class ModuleSource(_Source):
    """Parameters and persistent buffers of a module."""

    def __init__(self, name: str, module: nn.Module, local_buffers: Sequence[str]) -> None:
        super().__init__(name)
        self._parameters = dict(module.named_parameters())
        self._buffers = _persistent_buffers(module)
        self._local_buffers = frozenset(local_buffers)
        for parameter_name, parameter in self._parameters.items():
            if is_lazy(parameter):
                raise StateError(
                    f"{name}/{parameter_name} has no memory yet: run the lazy module once, then register it"
                )
        unknown = self._local_buffers - self._buffers.keys()
        if unknown:
            raise StateError(
                f"local_buffers of {name!r} names {sorted(unknown)[0]!r}, which is no persistent buffer: "
                f"it has {sorted(self._buffers) or 'none'}"
            )

    def capture(self) -> Captured:
        captured = Captured()
        for name, parameter in self._parameters.items():
            captured.add(f"{self.name}/{name}", parameter)
        for name, (owner, key) in self._buffers.items():
            buffer = cast("torch.Tensor | None", getattr(owner, key))
            if buffer is not None:
                shared = name not in self._local_buffers
                captured.add(f"{self.name}/{name}", buffer, shared=shared, changes_in_forward=True)
        return captured


def _persistent_buffers(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Owner and attribute of each persistent buffer; the owner is asked again later, for a buffer may be
    re-bound."""
    buffers: dict[str, tuple[nn.Module, str]] = {}
    for prefix, owner in module.named_modules():
        transient = owner._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
        for key, _ in owner.named_buffers(recurse=False, remove_duplicate=False):
            if key not in transient:
                buffers[f"{prefix}.{key}" if prefix else key] = (owner, key)
    return buffers


class OptimizerSource(_Source):
    """State of every parameter (by its index over all groups) and the options of every group."""

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        super().__init__(name)
        self.optimizer = optimizer

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def gradient_bytes(self) -> int:
        """Size of one gradient of every parameter that can have one, of DTensors the local shard."""
        locals_ = [local_tensor(one, self.name) for one in self._parameters() if one.requires_grad]
        return sum(local.numel() * local.element_size() for local in locals_)

    def signature(self) -> dict[str, str]:
        kind = type(self.optimizer)
        groups = self.optimizer.param_groups
        fields = {
            f"{self.name}.class": f"{kind.__module__}.{kind.__qualname__}",
            f"{self.name}.parameters per group": str([len(group["params"]) for group in groups]),
        }
        for index, group in enumerate(groups):
            for flag in IMPLEMENTATION_FLAGS:
                if flag in group:
                    fields[f"{self.name}.group {index}.{flag}"] = str(group[flag])
        return fields

    def capture(self) -> Captured:
        captured = Captured()
        tree: dict[str, Json] = {}
        parameters = self._parameters()
        with_state = 0
        for index, parameter in enumerate(parameters):
            state = cast("Mapping[object, object] | None", self.optimizer.state.get(parameter))
            if state is None:
                continue
            with_state += 1
            if state:
                tree[str(index)] = encode(dict(state), f"{self.name}/{index}", captured.add)
        if with_state != len(self.optimizer.state):
            raise StateError(
                f"optimizer {self.name!r} keeps state under keys that are not its parameters: "
                "register that part with register_state_dict"
            )
        captured.tree = tree
        captured.values = [
            encode(
                {key: option for key, option in group.items() if key != "params"},
                f"{self.name}.group {index}",
            )
            for index, group in enumerate(self.optimizer.param_groups)
        ]
        return captured

    def target(self, spec: TensorSpec, own: Entry | None) -> torch.Tensor:
        parameter = self._parameter(spec.name.split("/")[1])
        if own is not None and fits(own.local, spec) and own.local.device.type == spec.device:
            return own.tensor
        return allocate(spec, parameter)

    def _parameter(self, index: str) -> torch.Tensor:
        parameters = self._parameters()
        if not index.isdecimal() or len(index) > 9 or int(index) >= len(parameters):
            raise StateError(
                f"the donor has state for parameter {index[:20]} of optimizer {self.name!r}, which has "
                f"{len(parameters)}"
            )
        return parameters[int(index)]

    def apply_values(self, values: Json) -> None:
        groups = self.optimizer.param_groups
        decoded: list[Any] = decode(values, self.name) if isinstance(values, list) else []
        if len(decoded) != len(groups) or not all(isinstance(options, dict) for options in decoded):
            raise StateError(
                f"the donor sent options for {len(decoded)} groups of optimizer {self.name!r}, it has "
                f"{len(groups)} here"
            )
        for group, options in zip(groups, cast("list[dict[str, Any]]", decoded), strict=True):
            for key in group.keys() - options.keys() - {"params"}:
                del group[key]
            for key, option in options.items():
                if key != "params":
                    group[key] = _option_in_place(group.get(key), option, group["params"])

    def apply_tree(self, tree: Json, tensor: DecodeTensor) -> None:
        decoded = decode(tree, self.name, tensor)
        if not isinstance(decoded, dict):
            raise StateError(f"the donor sent no state for optimizer {self.name!r}")
        states = {
            self._parameter(str(index)): state for index, state in cast("dict[Any, Any]", decoded).items()
        }
        if not all(isinstance(state, dict) for state in states.values()):
            raise StateError(f"the donor sent a state for optimizer {self.name!r} that is no dict")
        self.optimizer.state.clear()
        self.optimizer.state.update(states)


def _option_in_place(own: object, option: Any, parameters: Sequence[torch.Tensor]) -> Any:
    """A tensor option (``lr``) keeps its identity, for a captured graph or a scheduler may hold it."""
    if not isinstance(option, torch.Tensor):
        return option
    if isinstance(own, torch.Tensor) and own.shape == option.shape and own.dtype == option.dtype:
        with torch.no_grad():
            own.copy_(option)
        return own
    on_device = isinstance(own, torch.Tensor) and own.device.type != "cpu" and len(parameters) > 0
    return option.to(parameters[0].device) if on_device else option


class ValuesSource(_Source):
    """Plain values behind a pair of callables."""

    def __init__(
        self, name: str, get: Callable[[], object], set_: Callable[[Any], object], *, shared: bool
    ) -> None:
        super().__init__(name, shared=shared)
        self._get = get
        self._set = set_

    def capture(self) -> Captured:
        return Captured(values=encode(self._get(), self.name))

    def apply_values(self, values: Json) -> None:
        self._set(decode(values, self.name))


class TensorsSource(_Source):
    """Named tensors of an algorithm."""

    def __init__(
        self,
        name: str,
        get: Callable[[], Mapping[str, torch.Tensor]],
        *,
        shared: bool,
        changes_in_forward: bool,
        advanced_by_optimizer: bool,
    ) -> None:
        super().__init__(name, shared=shared)
        self._get = get
        self._changes_in_forward = changes_in_forward
        self._advanced_by_optimizer = advanced_by_optimizer

    def capture(self) -> Captured:
        captured = Captured()
        for name, tensor in self._get().items():
            captured.add(
                f"{self.name}/{name}", tensor, shared=self.shared, changes_in_forward=self._changes_in_forward
            )
        return captured

    def obstacle_to_catch_up(self) -> str | None:
        if self._advanced_by_optimizer or not self.shared:
            return None
        return f"the tensors of {self.name!r} may change in a step by other code than a registered optimizer"


class StateDictSource(_Source):
    """A nested dict of tensors and plain values behind torchft's pair of callables."""

    def __init__(
        self,
        name: str,
        save: Callable[[], object],
        load: Callable[[Any], object],
        *,
        changes_in_forward: bool,
        shared: bool,
    ) -> None:
        super().__init__(name, shared=shared)
        self._save = save
        self._load = load
        self._changes_in_forward = changes_in_forward

    def capture(self) -> Captured:
        captured = Captured()

        def add(path: str, tensor: torch.Tensor) -> Json:
            return captured.add(path, tensor, shared=self.shared, changes_in_forward=self._changes_in_forward)

        captured.tree = encode(self._save(), self.name, add)
        return captured

    def target(self, spec: TensorSpec, own: Entry | None) -> torch.Tensor:
        if own is None:
            return allocate(spec, None)
        return own.tensor if fits(own.local, spec) else allocate(spec, own.tensor)

    def apply_tree(self, tree: Json, tensor: DecodeTensor) -> None:
        self._load(decode(tree, self.name, tensor))

    def obstacle_to_catch_up(self) -> str | None:
        if not self.shared:
            return None
        return f"the state behind the callables of {self.name!r} is loaded as a whole"
