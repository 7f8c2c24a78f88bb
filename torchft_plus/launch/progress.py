"""What each replica group is doing, folded from the event logs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from torchft_plus.launch.event_follower import Event


class State(Enum):
    """What a replica group is doing, as people want to know it."""

    STARTING = "starting"
    JOINING = "joining"
    BEHIND = "behind"
    TRAINING = "training"
    FROZEN = "frozen"
    RESTARTING = "restarting"
    LEFT = "left"


@dataclass(slots=True)
class ReplicaProgress:
    """One replica group."""

    replica_id: str
    state: State = State.STARTING
    step: int = 0
    loss: float | None = None
    quorum_id: int = 0
    participants: int = 0
    lives: int = 0
    incarnation: str = ""
    """Of the life that the launcher started last."""
    logged_incarnation: str = ""
    """Of the life that wrote to the log last."""
    committed: bool = False
    """The present life has committed a step."""


@dataclass(slots=True)
class RunProgress:
    """All replica groups, and the run as a whole."""

    replicas: dict[str, ReplicaProgress] = field(default_factory=dict[str, ReplicaProgress])
    step: int = 0

    @classmethod
    def of(cls, replica_ids: Sequence[str]) -> RunProgress:
        """Nothing has happened yet."""
        return cls({replica_id: ReplicaProgress(replica_id) for replica_id in replica_ids})

    @property
    def training(self) -> list[str]:
        """Groups that are level and commit steps."""
        return [r.replica_id for r in self.replicas.values() if r.committed and r.state is State.TRAINING]

    def is_current(self, event: Event) -> bool:
        """The event, which was applied just now, was written by the present life of its group."""
        replica = self.replicas.get(event.replica_id)
        return replica is not None and replica.logged_incarnation == replica.incarnation

    def apply(self, event: Event) -> None:
        """Fold one event in."""
        if event.replica_id == "launcher":
            self._apply_launcher(event)
        replica = self.replicas.get(event.replica_id)
        if replica is None:
            return
        match event.kind:
            case "start":
                if event.group_rank == 0:
                    replica.logged_incarnation = event.text("incarnation")
                    replica.state = State.JOINING
            case "quorum":
                replica.quorum_id = event.integer("quorum_id")
                members = event.fields.get("members")
                replica.participants = len(members) if isinstance(members, list) else 0
                if event.fields.get("level") and replica.state is not State.TRAINING:
                    replica.state = State.TRAINING
            case "behind":
                replica.state = State.BEHIND
            case "level":
                replica.state = State.TRAINING
            case "commit":
                self._commit(replica, event)
            case "left":
                replica.state = State.LEFT
            case _:
                pass

    def _commit(self, replica: ReplicaProgress, event: Event) -> None:
        replica.committed = replica.logged_incarnation == replica.incarnation
        replica.step = event.integer("step")
        replica.quorum_id = event.integer("quorum_id")
        replica.participants = event.integer("contributors")
        replica.loss = loss_of(event)
        if event.fields.get("contributed"):
            replica.state = State.TRAINING
        self.step = max(self.step, replica.step)

    def _apply_launcher(self, event: Event) -> None:
        target = event.text("replica_id") or event.text("target").partition(".")[0]
        replica = self.replicas.get(target)
        if replica is None:
            return
        action = event.text("action")
        if event.kind == "spawn":
            replica.state = State.STARTING
            replica.lives += 1
            replica.incarnation = event.text("incarnation")
            replica.committed = False
        elif event.kind == "exit" and event.fields.get("first"):
            replica.state = State.RESTARTING
        elif action == "stop":
            replica.state = State.FROZEN
        elif action == "resume":
            replica.state = State.JOINING


def loss_of(event: Event) -> float | None:
    """Mean loss over the contributors of a committed step (the scalars are sums over them)."""
    scalars = event.fields.get("scalars")
    loss = scalars.get("loss") if isinstance(scalars, dict) else None
    contributors = event.integer("contributors")
    return float(loss) / contributors if isinstance(loss, int | float) and contributors > 0 else None
