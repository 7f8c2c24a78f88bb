"""The state registry: everything that a replica must hold to be level, by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from lighthouse.messages import Head
from torchft_plus.state.allocate import placement_names
from torchft_plus.state.errors import StateError
from torchft_plus.state.load_plan import LoadPlan
from torchft_plus.state.manifest import Manifest, TensorSpec
from torchft_plus.state.memory import CACHE_LINE_BYTES, contiguous_local, dtype_name, local_tensor, memory_of
from torchft_plus.state.sources import (
    Entry,
    ModuleSource,
    OptimizerSource,
    Source,
    StateDictSource,
    TensorsSource,
    ValuesSource,
)
from torchft_plus.state.values import Json, canonical

# A manifest may make the joiner allocate (optimizer state): at most this often what it holds itself, plus a
# floor.
_MAX_GROWTH = 32
_MAX_GROWTH_FLOOR_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state at one moment: references to tensors, copies of plain values."""

    entries: tuple[tuple[str, Entry], ...]
    """In the order of the manifest."""
    values: dict[str, Json]
    trees: dict[str, Json]

    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors as the manifest lists them."""
        specs: list[TensorSpec] = []
        offset = 0
        for name, entry in self.entries:
            local = entry.local
            size_bytes = local.numel() * local.element_size()
            placements = placement_names(entry.tensor)
            specs.append(
                TensorSpec(
                    name=name,
                    dtype=dtype_name(local.dtype),
                    shape=tuple(local.shape),
                    device=local.device.type,
                    offset=offset,
                    size_bytes=size_bytes,
                    global_shape=None if placements is None else tuple(entry.tensor.shape),
                    placements=placements,
                )
            )
            offset += size_bytes
        return tuple(specs)


def _place(entry: tuple[str, Entry]) -> tuple[bool, str]:
    """Where a named tensor comes in the manifest."""
    name, local = entry[0], entry[1].local
    return local.numel() * local.element_size() % CACHE_LINE_BYTES != 0, name


class StateRegistry:
    """Named tensors and plain values of one rank.

    References are taken once, at registration; they are looked at on the training thread at step boundaries,
    and, while this replica is behind and computes nothing, on the thread that fetches. No ``state_dict()`` of
    a module or an optimizer is ever called, no collective is run.

    Register modules after they were sharded, moved and materialised, and before the first forward.

    Args:
        shard: which part of the model this rank holds, for example "rank 1 of 4"; ranks of different replicas
            exchange state only if it is equal.
        growth_floor_bytes: state of a donor that is larger by more than this, and more than 32 times as large as what
            is registered here, is refused; None: no bound.
    """

    def __init__(self, shard: str = "", growth_floor_bytes: int | None = _MAX_GROWTH_FLOOR_BYTES) -> None:
        self._shard = shard
        self._growth_floor_bytes = growth_floor_bytes
        self._sources: dict[str, Source] = {}
        self._holds_state = True
        self._changed = threading.Condition()
        self._loading: Manifest | None = None

    # --- registration ---

    def register_module(self, name: str, module: nn.Module, local_buffers: Sequence[str] = ()) -> None:
        """Register the parameters and persistent buffers of ``module``; of DTensors the local shards.

        Args:
            name: first part of the tensors' names.
            module: not lazy, not on the meta device.
            local_buffers: names of persistent buffers that may differ between replicas (BatchNorm statistics
                that are not reduced): a joiner receives them, the digest leaves them out.

        Raises:
            StateError: the name is taken, a name of ``local_buffers`` is unknown, or a tensor's memory cannot
                be sent.
        """
        self._add(ModuleSource(name, module, local_buffers))

    def register_optimizer(self, name: str, optimizer: Optimizer) -> None:
        """Register the state and the options of any ``torch.optim`` optimizer; parameters are known by their
        index.

        Raises:
            StateError: the name is taken or it keeps something that is neither a tensor nor a plain value.
        """
        self._add(OptimizerSource(name, optimizer))

    def register_values(
        self, name: str, get: Callable[[], object], set: Callable[[Any], object], *, shared: bool = True
    ) -> None:
        """Register plain values: a scheduler's ``state_dict`` and ``load_state_dict``, data positions,
        counters.

        A joiner gets them first and then keeps them up to date itself, as the same code of the training loop
        runs in every step also while it is behind (``CatchUp``).

        Args:
            name: its name.
            get: gives dicts, lists, tuples, strings, numbers, bools, None and small tensors, as of the last
                step boundary.
            set: takes what ``get`` gave at the donor.
            shared: False leaves them out of the digest.

        Raises:
            StateError: the name is taken or ``get`` gives something that is not plain.
        """
        self._add(ValuesSource(name, get, set, shared=shared))

    def register_tensors(
        self,
        name: str,
        get: Callable[[], Mapping[str, torch.Tensor]],
        *,
        shared: bool = True,
        changes_in_forward: bool = False,
        advanced_by_optimizer: bool = False,
    ) -> None:
        """Register named tensors of an algorithm.

        Args:
            name: first part of the tensors' names.
            get: gives the tensors; always the same names, shapes and dtypes.
            shared: False leaves them out of the digest.
            changes_in_forward: True if they change between ``StateServer.publish`` and ``before_update``: a
                version then copies them at once.
            advanced_by_optimizer: True if they change in nothing but the steps of registered optimizers, so
                that the replay of recorded steps brings them up to date.

        Raises:
            StateError: the name is taken or a tensor's memory cannot be sent.
        """
        self._add(
            TensorsSource(
                name,
                get,
                shared=shared,
                changes_in_forward=changes_in_forward,
                advanced_by_optimizer=advanced_by_optimizer,
            )
        )

    def register_state_dict(
        self,
        name: str,
        save: Callable[[], object],
        load: Callable[[Any], object],
        *,
        changes_in_forward: bool = False,
        shared: bool = True,
    ) -> None:
        """Register a nested dict of tensors and plain values behind torchft's pair of callables.

        Args:
            name: first part of the tensors' names.
            save: gives the nested dict; must not run collectives.
            load: takes the nested dict of the donor, on the training thread, when all of it has arrived.
                Tensors that ``save`` gives at the joiner in the same shape and dtype have been received in
                place.
            changes_in_forward: as in ``register_tensors``.
            shared: False leaves it out of the digest.

        Raises:
            StateError: the name is taken or something in it is neither a tensor nor a plain value.
        """
        self._add(StateDictSource(name, save, load, changes_in_forward=changes_in_forward, shared=shared))

    def _add(self, source: Source) -> None:
        if not source.name or "/" in source.name or not source.name.isprintable() or len(source.name) > 200:
            raise StateError(
                f"{source.name[:80]!r} cannot be the name of registered state: "
                'use 1 to 200 printable characters without "/"'
            )
        if source.name in self._sources:
            raise StateError(f"state named {source.name!r} is registered already: choose another name")
        source.capture()  # raises for what could not be sent later
        self._sources[source.name] = source

    # --- reading ---

    @property
    def holds_state(self) -> bool:
        """False while the memory is a mixture: from the first byte of a fetch until its result is applied."""
        return self._holds_state

    def snapshot(self) -> Snapshot:
        """References to all tensors and copies of all plain values, at this moment.

        Raises:
            StateError: something registered has become what could not have been registered.
        """
        entries: dict[str, Entry] = {}
        values: dict[str, Json] = {}
        trees: dict[str, Json] = {}
        for name, source in self._sources.items():
            captured = source.capture()
            entries |= captured.entries
            if captured.values is not None:
                values[name] = captured.values
            if captured.tree is not None:
                trees[name] = captured.tree
        return Snapshot(tuple(sorted(entries.items(), key=_place)), values, trees)

    def digest(self) -> str:
        """xxh3_128 (hex) over names, dtypes, shapes and bytes of all that replicas must share, plain values
        included.

        Raises:
            StateError: a fetch has begun and not been applied.
        """
        if not self._holds_state:
            raise StateError("a fetch of state has begun and is not complete: there is no digest until it is")
        snapshot = self.snapshot()
        state = xxhash.xxh3_128()
        for name, entry in snapshot.entries:
            if entry.shared:
                state.update(f"{name}\0{dtype_name(entry.local.dtype)}\0{list(entry.local.shape)}\0".encode())
                state.update(memory_of(contiguous_local(entry.local, name).cpu()))
        shared = {name for name, source in self._sources.items() if source.shared}
        for part in (snapshot.values, snapshot.trees):
            state.update(canonical({name: value for name, value in part.items() if name in shared}).encode())
        return state.hexdigest()

    def signature(self) -> dict[str, str]:
        """Fields that replicas must have in common beside the state itself, for example each optimizer's
        ``fused``."""
        fields = {"shard": self._shard, "torch": torch.__version__.partition("+")[0]}
        for source in self._sources.values():
            fields |= source.signature()
        return fields

    def size_bytes(self) -> int:
        """Bytes of all registered tensors."""
        return sum(entry.local.numel() * entry.local.element_size() for _, entry in self.snapshot().entries)

    def gradient_bytes(self) -> int:
        """Bytes of the gradients of one step of all registered optimizers: what catch-up keeps of each step."""
        sources = self._sources.values()
        return sum(source.gradient_bytes() for source in sources if isinstance(source, OptimizerSource))

    def missing(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Names of those among ``tensors`` that no registered tensor shares memory with: a joiner would not get them."""
        held = {entry.local.untyped_storage().data_ptr() for _, entry in self.snapshot().entries}
        locals_ = [(name, local_tensor(tensor.detach(), name)) for name, tensor in tensors]
        return [
            name
            for name, local in locals_
            if local.numel() and local.untyped_storage().data_ptr() not in held
        ]

    def obstacles_to_catch_up(self) -> tuple[str, ...]:
        """Sentences that say what recorded optimizer steps would not bring up to date; empty if catch-up is
        sound."""
        obstacles = (source.obstacle_to_catch_up() for source in self._sources.values())
        return tuple(obstacle for obstacle in obstacles if obstacle is not None)

    # --- loading ---

    def plan_load(self, manifest: Manifest) -> LoadPlan:
        """Check a donor's manifest against what is registered here, and find or allocate the memory for its
        tensors.

        Changes nothing. For the thread that fetches, while nothing is computed here.

        Raises:
            StateError: names, shapes, dtypes or implementation differ, or it would take too much memory.
        """
        mismatch = describe_mismatch(self.signature(), manifest.signature)
        if mismatch is not None:
            raise StateError(mismatch)
        own = dict(self.snapshot().entries)
        held = sum(entry.local.numel() * entry.local.element_size() for entry in own.values())
        floor = self._growth_floor_bytes
        if floor is not None and manifest.size_bytes > _MAX_GROWTH * held + floor:
            raise StateError(
                f"the donor's state has {manifest.size_bytes} bytes, more than {_MAX_GROWTH} times our {held}"
            )
        targets: list[torch.Tensor] = []
        for spec in manifest.tensors:
            source = self._sources.get(spec.name.partition("/")[0])
            if source is None:
                raise StateError(f"the donor has a tensor {spec.name!r} that is not registered here")
            targets.append(source.target(spec, own.get(spec.name)))
        self._check_complete(own.keys() - {spec.name for spec in manifest.tensors}, manifest)
        return LoadPlan(manifest, targets)

    def _check_complete(self, missing: Iterable[str], manifest: Manifest) -> None:
        for name in sorted(missing):
            # Where a tree comes along, the donor decides which tensors there are.
            if not isinstance(self._sources[name.partition("/")[0]], OptimizerSource | StateDictSource):
                raise StateError(f"tensor {name!r} is registered here but the donor does not have it")
        for name, source in self._sources.items():
            if isinstance(source, OptimizerSource | ValuesSource) and name not in manifest.values:
                raise StateError(f"the donor has no plain values for {name!r}, which is registered here")
            if isinstance(source, OptimizerSource | StateDictSource) and name not in manifest.trees:
                raise StateError(f"the donor has no state for {name!r}, which is registered here")
        for name in [*manifest.values, *manifest.trees]:
            if name not in self._sources:
                raise StateError(f"the donor has state named {name[:80]!r}, which is not registered here")

    def begin_load(self, manifest: Manifest) -> None:
        """From now on the memory is a mixture, until ``apply_tensors``; called by ``fetch_state`` before the
        first byte."""
        with self._changed:
            self._holds_state = False
            self._loading = manifest
            self._changed.notify_all()

    def wait_for_manifest(self, head: Head, timeout_ms: int) -> Manifest | None:
        """The manifest of ``head``, as soon as a fetch has received and checked it; None if it has not in
        time. Any thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._loading_head() == head, timeout_ms / 1000)
            return self._loading if self._loading_head() == head else None

    def _loading_head(self) -> Head | None:
        return None if self._loading is None else self._loading.head

    def apply_values(self, values: Mapping[str, Json]) -> None:
        """Take over the plain values that follow the step. Training thread, with this replica at the
        version's head.

        Raises:
            StateError: they are not what ``snapshot`` makes.
        """
        for name, value in values.items():
            self._sources[name].apply_values(value)

    def apply_tensors(self, plan: LoadPlan) -> None:
        """Take over a complete and verified version's tensors and what belongs to them. Training thread.

        Raises:
            StateError: the plan is not complete, or a tree is not what ``snapshot`` makes.
        """
        tensors = plan.complete_tensors()

        def tensor(name: str) -> torch.Tensor:
            if name not in tensors:
                raise StateError(f"the donor's state refers to tensor {name[:80]!r}, which it did not send")
            return tensors[name]

        for name, tree in plan.manifest.trees.items():
            self._sources[name].apply_tree(tree, tensor)
        with self._changed:
            self._holds_state = True
            self._loading = None


def describe_mismatch(own: Mapping[str, str], other: Mapping[str, str], who: str = "the donor") -> str | None:
    """One sentence that names the first field in which two signatures differ, or None."""
    for field in sorted(own.keys() | other.keys()):
        if own.get(field) != other.get(field):
            return (
                f"{field!r} is {str(other.get(field))[:120]!r} at {who} and {own.get(field)!r} here: "
                "all replicas must use the same"
            )
    return None
