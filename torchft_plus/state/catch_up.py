"""Catch-up: a joiner records what its optimizer would have done, and does it when the state has arrived."""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.optim import Optimizer

from lighthouse.messages import Head
from torchft_plus.state.errors import StateError
from torchft_plus.state.load_plan import LoadPlan
from torchft_plus.state.manifest import Manifest, head_name
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
        local = self.local.to(self.device)
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
    return tensor.clone() if tensor.device.type == "cpu" else tensor.to("cpu", copy=True)


Options = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Update:
    """One call of an optimizer's step: the gradients and options that it would have used."""

    optimizer: Optimizer
    gradients: tuple[_Gradient | None, ...]
    options: tuple[Options, ...]

    def size_bytes(self) -> int:
        locals_ = [gradient.local for gradient in self.gradients if gradient is not None]
        return sum(local.numel() * local.element_size() for local in locals_)


@dataclass(slots=True)
class _Step:
    """A committed step; without updates if it was skipped."""

    head: Head
    updates: list[_Update] = field(default_factory=list[_Update])


class CatchUp:
    """Brings a joiner level without anybody waiting for it; bit for bit what a level replica has.

    The protocol, for a joiner that has adopted a quorum with base ``s``:

    1. ``begin(s)``. A thread runs ``fetch_state(..., on_manifest=catch_up.offer_manifest)`` and then
    ``offer_state(report.plan)``. 2. *Plain values come first.* At head ``s``, before anything of step s+1 is
    recorded, the training thread calls
       ``take_values``: optimizer options, schedulers, positions and all other registered values are then
       those of a level replica at ``s``. From there on the joiner runs the same code of the training loop in
       each step as everybody (schedulers step), so its values are right at every later head and are never
       loaded again.
    3. Each committed step: ``advance(head)``, then ``record(optimizer)`` in place of each optimizer's step,
    after the user's
       clipping. A skipped step has only ``advance``.
    4. When the tensors of a version are there, of ``s`` or of any later head in the queue, ``replay`` loads
    them on the training
       thread at a boundary, leaves out what the version contains, and runs the real optimizers over the rest
       with the recorded gradients and options; gradients and options of the moment are put back. True means
       level.

    What is exact only this way: state that changes in optimizer steps. Registered tensors that other code
    changes in a step (a running average of weights) would stay at the version;
    ``StateRegistry.obstacles_to_catch_up`` names them. Code between backward and the optimizer step that
    reads parameters sees those of before the fetch, or a mixture.

    Args:
        registry: the state.
        max_steps: how many steps may be recorded; each holds a copy of the gradients on the host.
    """

    def __init__(self, registry: StateRegistry, max_steps: int) -> None:
        if max_steps < 1:
            raise StateError(f"max_steps is {max_steps}: at least 1 step must be recorded")
        self._registry = registry
        self._max_steps = max_steps
        self._changed = threading.Condition()
        self._base: Head | None = None
        self._end = Head()
        self._manifest: Manifest | None = None
        self._values_taken = False
        self._plan: LoadPlan | None = None
        self._loaded = False
        self._steps: deque[_Step] = deque()
        self._overflown = False
        self._size_bytes = 0
        self._advanced: set[tuple[int, int, str]] = set()

    # --- beginning ---

    def begin(self, base: Head) -> None:
        """This replica joins at ``base``: forget everything recorded. The fetch for an earlier base has
        ended."""
        with self._changed:
            self._restart(base)
            self._manifest = None
            self._values_taken = False

    def begin_again(self) -> None:
        """Join at the head that was reached, with an empty queue (after an overflow).

        The values are right there already, so only tensors have to be fetched.

        Raises:
            StateError: they are not, because ``take_values`` never was successful: ``begin`` is needed.
        """
        with self._changed:
            if not self._values_taken:
                raise StateError("catch-up cannot begin again: the plain values of its base were never taken")
            self._restart(self._end)

    def _restart(self, base: Head) -> None:
        self._base = base
        self._end = base
        self._plan = None
        self._loaded = False
        self._steps.clear()
        self._overflown = False
        self._size_bytes = 0
        self._advanced.clear()

    @property
    def end(self) -> Head:
        """The head that this replica will hold after the replay."""
        if self._base is None:
            raise StateError("catch-up has not begun")
        return self._end

    @property
    def recorded_steps(self) -> int:
        """Steps that wait for the replay."""
        return len(self._steps)

    @property
    def size_bytes(self) -> int:
        """Memory of the recorded gradients."""
        return self._size_bytes

    # --- what the fetch brings, any thread ---

    def offer_manifest(self, manifest: Manifest) -> None:
        """The values of a version have arrived; those of another head than the base are not needed. Any
        thread."""
        with self._changed:
            if manifest.head == self._base and not self._values_taken:
                self._manifest = manifest
                self._changed.notify_all()

    def offer_state(self, plan: LoadPlan) -> bool:
        """The tensors of a version have arrived. Any thread.

        Returns:
            False if it is not a version of this queue, and thus of no use.
        """
        with self._changed:
            heads = [self._base, *(step.head for step in self._steps)]
            if self._loaded or plan.manifest.head not in heads:
                return False
            self._plan = plan
            return True

    @property
    def state_offered(self) -> bool:
        """True if a replay can begin or go on."""
        return self._plan is not None

    # --- training thread ---

    def take_values(self, timeout_ms: int) -> bool:
        """Apply the plain values of the base, waiting for them up to ``timeout_ms``; True once they are
        applied.

        To be called while this replica is at its base, that is before the first ``record``.
        """
        with self._changed:
            if self._values_taken:
                return True
            if not self._changed.wait_for(lambda: self._manifest is not None, timeout_ms / 1000):
                return False
            manifest = self._manifest
            assert manifest is not None
        self._registry.apply_values(manifest.values)
        self._values_taken = True
        return True

    def advance(self, head: Head) -> None:
        """A step was committed (or skipped) as ``head``.

        Raises:
            StateError: more steps than ``max_steps`` would be recorded; ``begin`` or ``begin_again`` goes on
                from here.
        """
        with self._changed:
            if self._base is None:
                raise StateError("catch-up has not begun")
            self._steps.append(_Step(head))
            self._end = head
            if len(self._steps) > self._max_steps or self._overflown:
                if not self._overflown:
                    self._drop_gradients()
                raise StateError(
                    f"the others committed {len(self._steps)} steps while this replica fetched version "
                    f"{head_name(self._base)}, and max_steps is {self._max_steps}: raise max_steps above the "
                    "number of "
                    "steps that a transfer of the state takes, or speed the transfer up"
                )

    def _drop_gradients(self) -> None:
        self._overflown = True
        for step in self._steps:
            step.updates.clear()
        self._size_bytes = 0

    def record(self, optimizer: Optimizer) -> None:
        """In place of ``optimizer.step()``: keep the gradients and options that it would use now.

        Raises:
            StateError: the values of the base were not taken, so options and schedules are not right; or no
                step was committed.
        """
        if not self._values_taken:
            raise StateError(
                "a step cannot be recorded before take_values: the optimizer's options are not right yet"
            )
        if self._overflown:
            return
        if not self._steps:
            raise StateError("a step cannot be recorded before advance: no step was committed")
        parameters = _parameters(optimizer)
        update = _Update(
            optimizer,
            tuple(_save_gradient(parameter.grad) for parameter in parameters),
            tuple(_copy_options(group) for group in optimizer.param_groups),
        )
        # A scheduler warns when it sees no call of step() before its own; the call is only put off.
        vars(optimizer)["_opt_called"] = True
        self._steps[-1].updates.append(update)
        self._size_bytes += update.size_bytes()

    def replay(self, budget_ms: float | None = None) -> bool:
        """Load the version if it was not yet, and run recorded steps, at a boundary.

        Args:
            budget_ms: stop after the first step that ends later than this; the rest stays for the next call.

        Returns:
            True if this replica is level now: it holds the state of ``end``. False if the version has not
            arrived or steps are left.

        Raises:
            StateError: the version's trees are not well formed, or an optimizer keeps counters among its
                options and the version is not that of the base.
        """
        started = time.monotonic()
        with self._changed:
            plan = self._plan
        if plan is None or not self._values_taken:
            return False
        if not self._loaded:
            self._load(plan)
        while self._steps:
            for update in self._steps[0].updates:
                self._run(update, at_base=plan.manifest.head == self._base)
                self._size_bytes -= update.size_bytes()
            self._steps.popleft()
            if budget_ms is not None and self._steps and 1000 * (time.monotonic() - started) >= budget_ms:
                return False
        return True

    def _load(self, plan: LoadPlan) -> None:
        self._registry.apply_tensors(plan)
        contained = plan.manifest.head != self._base
        while contained:
            step = self._steps.popleft()
            self._size_bytes -= sum(update.size_bytes() for update in step.updates)
            contained = step.head != plan.manifest.head
        self._loaded = True

    def _run(self, update: _Update, *, at_base: bool) -> None:
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
        if self._advanced and not at_base:
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
