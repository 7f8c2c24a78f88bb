"""Disk checkpoints of a run with several groups: one writer at a time, and a head that a restart can name."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from lighthouse.messages import Head
from torchft_plus.titan.outer_state import OuterState

logger = logging.getLogger(__name__)

KEY = "torchft_plus"
"""Our entry in torchtitan's ``train_state``."""
OUTER = "torchft_plus_outer"
"""Our entry beside torchtitan's own states, in a run with windows of inner steps."""


@dataclass(frozen=True, slots=True)
class SavedHead:
    """What a checkpoint says of the lineage, beside torchtitan's own states."""

    step: int
    quorum_id: int
    shares: int = 1
    """Number of shares the data was cut into (groups x data-parallel ranks of a group)."""
    positions: Mapping[str, int] = field(default_factory=dict[str, int])
    """Share -> batches of it that were committed."""
    steps_per_commit: int = 1
    """torchtitan's steps that one step of the head stands for."""

    def for_shares(self, shares: int) -> SavedHead:
        """The same for a run that cuts its data into ``shares``: other cuts start at the beginning, and say so."""
        if self.shares == shares and (self.positions or self.step == 0):
            return self
        logger.warning(
            "the checkpoint of step %d holds no data positions for %d shares: every group reads its share from the"
            " beginning",
            self.step,
            shares,
        )
        return replace(self, shares=shares, positions={})

    def for_steps_per_commit(self, steps_per_commit: int) -> SavedHead:
        """The same in other units: the last head that is not ahead of it."""
        if self.steps_per_commit == steps_per_commit:
            return self
        step = self.step * self.steps_per_commit // steps_per_commit
        return replace(self, step=step, steps_per_commit=steps_per_commit)

    def to_text(self) -> str:
        """One line of JSON: a torch checkpoint holds it as it is, under one key, whatever changes inside."""
        return json.dumps(
            {
                "step": self.step,
                "quorum_id": self.quorum_id,
                "shares": self.shares,
                "positions": dict(self.positions),
                "steps_per_commit": self.steps_per_commit,
            }
        )

    @classmethod
    def from_text(cls, text: str) -> SavedHead:
        """Inverse of ``to_text``."""
        value = json.loads(text)
        positions = {str(name): int(count) for name, count in value["positions"].items()}
        return cls(
            int(value["step"]),
            int(value["quorum_id"]),
            int(value["shares"]),
            positions,
            int(value.get("steps_per_commit", 1)),
        )


class CommittedCheckpoints:
    """Loading for a trainer whose ``train_state`` may hold a ``SavedHead``.

    torchtitan's entry for the dataloader is taken out: it holds the reader of the one group that wrote, and no other
    group finds its own in it. ``SavedHead.positions`` holds the place of every group.

    Args:
        checkpointer: torchtitan's checkpoint manager.
    """

    def __init__(self, checkpointer: Any) -> None:
        self._checkpointer = checkpointer
        self._noted = False
        self.expects_head = True
        """Whether the trainer's ``state_dict`` shall ask the checkpoint for our entry."""
        self.outer: OuterState | None = None
        """What a run with windows of inner steps saves, too."""
        self._states: dict[str, Any] = getattr(checkpointer, "states", {})
        states = self._states
        if states.pop("dataloader", None) is not None:
            excluded: list[str] = getattr(checkpointer, "exclude_from_loading", [])
            if "dataloader" in excluded:
                excluded.remove("dataloader")

    def save(
        self,
        stock_save: Callable[..., Any],
        step: int,
        last_step: bool,
        head: Head | None,
        saved: Callable[[Head], None],
    ) -> Any:
        """Save with torchtitan's own function, if this group is the writer.

        Args:
            stock_save: the checkpoint manager's ``save``; it decides whether a checkpoint is due.
            step, last_step: its arguments.
            head: what is saved; None if another group writes.
            saved: told of ``head`` when the checkpoint is complete on disk.
        """
        if head is None:
            return False
        self._noted = False
        result = stock_save(step, last_step=last_step)
        if self._noted:
            self._when_complete(lambda: saved(head))
        return result

    def note_saved(self) -> None:
        """The trainer's ``train_state`` was asked for: what is written now can be resumed from."""
        self._noted = True

    def _when_complete(self, done: Callable[[], None]) -> None:
        upload: Future[Any] | None = getattr(self._checkpointer, "save_future", None)
        if upload is None or upload.done():
            done()
        else:
            upload.add_done_callback(lambda ended: None if ended.exception() else done())

    def load(self, stock_load: Callable[..., bool], step: int) -> bool:
        """Load with torchtitan's own function; a checkpoint of a run without this plugin is welcome too.

        Args:
            stock_load: the checkpoint manager's ``load``.
            step: as torchtitan's ``checkpoint.load_step``.

        Returns:
            Whether there was anything to load.
        """
        if self.outer is not None:
            self._states[OUTER] = self.outer
        try:
            while True:
                try:
                    return stock_load(step)
                except CheckpointException as error:  # torch refuses before it has changed anything
                    if OUTER in self._states and f"{OUTER}." in str(error):
                        del self._states[OUTER]
                    elif self.expects_head and f"train_state.{KEY}" in str(error):
                        self.expects_head = False
                    else:
                        raise
        finally:
            self.expects_head = True
            if self.outer is not None:
                self._states[OUTER] = self.outer
