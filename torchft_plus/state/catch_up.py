"""Catch-up: a joiner records what its optimizer would have done, and does it when the state has arrived."""

from __future__ import annotations

import copy
import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.optim import Optimizer

from lighthouse.messages import Head
from torchft_plus.state.errors import StateError
from torchft_plus.state.fetch import FetchReport
from torchft_plus.state.load_plan import LoadPlan
from torchft_plus.state.manifest import head_name
from torchft_plus.state.memory import lies_on_host
from torchft_plus.state.registry import StateRegistry


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a DTensor lies on its mesh."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Gradient:
    """A copy of a gradient, on the host; for a DTensor of the local shard."""

    local: torch.Tensor
    device: torch.device
    layout: _Layout | None

    def restore(self) -> torch.Tensor:
        """The gradient where it was, on the stream that it was copied on."""
        local = self.local.to(self.device, non_blocking=True)
        layout = self.layout
        if layout is None:
            return local
        return DTensor.from_local(
            local, layout.mesh, layout.placements, run_check=False, shape=layout.shape, stride=layout.stride
        )


def _save_gradient(gradient: torch.Tensor | None) -> _Gradient | None:
    if gradient is None:
        return None
    if not isinstance(gradient, DTensor):
        return _Gradient(_to_host(gradient.detach()), gradient.device, None)
    layout = _Layout(
        gradient.device_mesh, tuple(gradient.placements), gradient.shape, tuple(gradient.stride())
    )
    with torch.no_grad():
        local = gradient.to_local()
    return _Gradient(_to_host(local), local.device, layout)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host; an accelerator makes it when its turn comes, and nobody waits: the others would, too."""
    if lies_on_host(tensor):
        return tensor.clone()
    try:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError:  # no pinned memory, or no more of it
        return tensor.to("cpu", copy=True)
    return host.copy_(tensor, non_blocking=True)


Options = dict[str, Any]
LEAST_STEPS = 2
"""Replayed at a boundary, however long they take."""


@dataclass(frozen=True, slots=True)
class _Update:
    """One call of an optimizer's step: the gradients and options that it would have used."""

    optimizer: Optimizer
    gradients: tuple[_Gradient | None, ...]
    options: tuple[Options, ...]

    def size_bytes(self) -> int:
        locals_ = [gradient.local for gradient in self.gradients if gradient is not None]
        return sum(local.numel() * local.element_size() for local in locals_)


@dataclass(frozen=True, slots=True)
class _Step:
    """A committed step; without updates if it was skipped."""

    head: Head | None
    updates: tuple[_Update, ...]

    def size_bytes(self) -> int:
        return sum(update.size_bytes() for update in self.updates)


def _save_update(optimizer: Optimizer) -> _Update:
    # A scheduler warns when it sees no call of step() before its own; the call is only put off.
    vars(optimizer)["_opt_called"] = True
    return _Update(
        optimizer,
        tuple(_save_gradient(parameter.grad) for parameter in _parameters(optimizer)),
        tuple(_copy_options(group) for group in optimizer.param_groups),
    )


class CatchUp:
    """Brings a joiner level without anybody waiting for it; bit for bit what a level replica has.

    All of it on the training thread. The protocol, for a joiner that has adopted a quorum with base ``s``:

    1. ``begin(s)``; a background thread runs ``fetch_state``.
    2. *Plain values come first.* In ``start_step``, while this replica's head still is ``s``, ``take_values``
       waits for the donor's manifest and applies its plain values: optimizer options, schedulers, positions
       and all else that was registered with ``register_values`` are those of a level replica at ``s``. From
       there on the joiner runs the same code of the training loop in each step as everybody (schedulers
       step), so its values are right at every later head. They are never loaded again, and in particular not
       with the tensors.
    3. ``record(optimizers, head)`` in place of the optimizers' steps of a commit, after the user's clipping.
    4. When the tensors have arrived, ``replay`` loads them at a boundary, and runs the real optimizers over
       the recorded steps, with the recorded gradients and options; gradients and options of the moment are
       put back. True means level.

    Why it is sound: with the values of ``s`` and the gradients that all replicas have in common, the options
    of step s+1 are a function of what a level replica has, too; so are all later ones. The optimizer's state
    and the parameters come from one version, and are changed by nothing but optimizer steps: other registered
    tensors would stay at the version, and ``StateRegistry.obstacles_to_catch_up`` names them. Code between
    backward and optimizer step that reads parameters sees a mixture.

    Args:
        registry: the state.
        max_steps: how many steps may be recorded; each holds a copy of the gradients on the host.

    Raises:
        StateError: ``max_steps`` is not positive.
    """

    def __init__(self, registry: StateRegistry, max_steps: int) -> None:
        if max_steps < 1:
            raise StateError(f"max_steps is {max_steps}: at least 1 step must be recorded")
        self._registry = registry
        self._max_steps = max_steps
        self._advanced: set[tuple[int, int, str]] = set()
        self._steps: deque[_Step] = deque()
        self._size_bytes = self._peak_bytes = self._most_steps = 0
        self.reset()

    def begin(self, base: Head) -> None:
        """This replica joins at ``base``, again or for the first time: forget everything recorded."""
        self.reset()
        self._base = base

    def reset(self) -> None:
        """Forget everything: this replica is level, or will join somewhere else."""
        self._base: Head | None = None
        self._values_taken = False
        self._loaded: Head | None = None
        self._overflown = False
        self._clear()
        self._peak_bytes = self._most_steps = 0
        self._advanced.clear()

    def _clear(self) -> None:
        self._steps.clear()
        self._size_bytes = 0

    @property
    def values_taken(self) -> bool:
        """True once ``take_values`` was successful: steps can be recorded."""
        return self._values_taken

    @property
    def recorded_steps(self) -> int:
        """Steps that wait for the replay."""
        return len(self._steps)

    @property
    def size_bytes(self) -> int:
        """Memory of the recorded gradients."""
        return self._size_bytes

    @property
    def peak(self) -> tuple[int, int]:
        """Most steps that waited at once since ``begin``, and the most memory that they took, in bytes."""
        return self._most_steps, self._peak_bytes

    @property
    def max_steps(self) -> int:
        """How many steps may be recorded."""
        return self._max_steps

    def take_values(self, timeout_ms: int) -> bool:
        """Apply the plain values of the base as soon as a manifest is there. Only while at the base.

        Args:
            timeout_ms: how long to wait for the fetch to receive it; 0 only looks.

        Returns:
            True if they are applied (also if they had been before).

        Raises:
            StateError: ``begin`` was not called, or the values are not well formed.
        """
        if self._base is None:
            raise StateError("catch-up has not begun: there is no base whose values could be taken")
        if not self._values_taken:
            manifest = self._registry.wait_for_manifest(self._base, timeout_ms)
            if manifest is None:
                return False
            self._registry.apply_values(manifest.values)
            self._values_taken = True
        return True

    def record(self, optimizers: Sequence[Optimizer], head: Head | None = None) -> None:
        """In place of the optimizers' steps of a commit: keep the gradients and options that they would use
        now.

        Args:
            optimizers: in the order of their steps; none for a step that was skipped.
            head: as which the step was committed; if it is given, ``replay`` also takes the version of that
                head.

        Raises:
            StateError: the values of the base were not taken, so that options and schedules are not right; or
                the queue is full, which is said once: the queue is of no use any more, ``begin`` at another
                base.
        """
        if not self._values_taken:
            raise StateError(
                "a step cannot be recorded before take_values: the optimizer's options are not right yet"
            )
        if self._overflown:
            return
        if len(self._steps) == self._max_steps:
            self._overflown = True
            size_bytes = self._size_bytes
            self._clear()
            raise StateError(
                f"more than {self._max_steps} steps ({size_bytes / 1e6:.1f} MB of gradients) were committed while this "
                "replica fetched its state: raise catch_up_max_steps above the number of steps that a transfer "
                "takes, or make the transfer faster"
            )
        step = _Step(head, tuple(_save_update(optimizer) for optimizer in optimizers))
        self._steps.append(step)
        self._size_bytes += step.size_bytes()
        self._most_steps = max(self._most_steps, len(self._steps))
        self._peak_bytes = max(self._peak_bytes, self._size_bytes)

    @property
    def nearly_level(self) -> bool:
        """What is left to replay takes no longer than the steps that are replayed at a boundary in any case."""
        return len(self._steps) <= LEAST_STEPS

    def replay(self, received: FetchReport | LoadPlan, budget_ms: float | None = None) -> bool:
        """Load the version if it was not yet, and run recorded steps, at a boundary.

        Args:
            received: result of the fetch, of the base or of a head that was recorded.
            budget_ms: stop after the first step that ends later than this, but not before ``LEAST_STEPS``; call again at the
                next boundary. At each one a step is recorded, so that a single one would come to no end.

        Returns:
            True if this replica is level now.

        Raises:
            StateError: it is another version, the queue is of no use, the version's trees are not well
                formed, or an optimizer keeps counters among its options and the version is not that of the
                base.
        """
        started = time.monotonic()
        if self._loaded is None:
            self._load(received if isinstance(received, LoadPlan) else received.plan)
        for done in itertools.count(1):
            if not self._steps:
                break
            for update in self._steps[0].updates:
                self._run(update)
            self._forget_first()
            spent = budget_ms is not None and 1000 * (time.monotonic() - started) >= budget_ms
            if self._steps and spent and done >= LEAST_STEPS:
                return False
        return True

    def _load(self, plan: LoadPlan) -> None:
        version = plan.manifest.head
        if self._overflown or not self._values_taken:
            raise StateError(
                f"version {head_name(version)} cannot be caught up: "
                + (
                    "too many steps were committed"
                    if self._overflown
                    else "its plain values were never taken"
                )
            )
        contained = 0
        if version != self._base:
            heads = [step.head for step in self._steps]
            if version not in heads:
                raise StateError(f"version {head_name(version)} is neither the base nor a recorded head")
            contained = heads.index(version) + 1
        self._registry.apply_tensors(plan)
        for _ in range(contained):
            self._forget_first()
        self._loaded = version

    def _forget_first(self) -> None:
        self._size_bytes -= self._steps.popleft().size_bytes()

    def _run(self, update: _Update) -> None:
        """The real step with recorded gradients and options; those of the moment are put back."""
        optimizer = update.optimizer
        parameters = _parameters(optimizer)
        gradients = [parameter.grad for parameter in parameters]
        options = [_options(group) for group in optimizer.param_groups]
        for parameter, gradient in zip(parameters, update.gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.restore()
        self._set_options(optimizer, update.options)
        optimizer.step()
        for index, (group, recorded) in enumerate(zip(optimizer.param_groups, update.options, strict=True)):
            for key in _changed_options(group, recorded):
                # A counter that the step itself keeps among the options: it goes on from step to step.
                self._advanced.add((id(optimizer), index, key))
        if self._advanced and self._loaded != self._base:
            name = type(optimizer).__name__
            raise StateError(
                f"{name} keeps a counter among its options, so a version later than the base cannot be "
                "caught up: fetch the base"
            )
        self._set_options(optimizer, options)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    def _set_options(self, optimizer: Optimizer, options: Sequence[Options]) -> None:
        for index, (group, wanted) in enumerate(zip(optimizer.param_groups, options, strict=True)):
            kept = {key for key in group if (id(optimizer), index, key) in self._advanced} | {"params"}
            for key in group.keys() - kept - wanted.keys():
                del group[key]
            group.update({key: option for key, option in wanted.items() if key not in kept})


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _options(group: Options) -> Options:
    return {key: option for key, option in group.items() if key != "params"}


def _copy_options(group: Options) -> Options:
    """A tensor option (``lr``) is changed in place by schedulers, so it is copied like all others."""
    return {
        key: option.detach().clone() if isinstance(option, torch.Tensor) else copy.deepcopy(option)
        for key, option in _options(group).items()
    }


def _changed_options(group: Options, recorded: Options) -> list[str]:
    """Names of options that are not what was set before the step; a tensor that is the same object counts as
    the same."""
    return [
        key
        for key, option in _options(group).items()
        if option is not recorded.get(key)
        and (isinstance(option, torch.Tensor) or bool(option != recorded.get(key)))
    ]
