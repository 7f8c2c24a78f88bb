"""The heads that were committed, one a step: a chain, and what a total loss makes of it."""

from __future__ import annotations

from lighthouse.messages import Head

Key = tuple[int, int, str]


def key_of(head: Head) -> Key:
    """A head as a whole; the digest counts at step 0 only."""
    return (head.step, head.quorum_id, head.digest if head.step == 0 else "")


class Lineage:
    """One chain. After a total loss training goes on in another one, which shares its beginning."""

    def __init__(self, heads: dict[int, Head] | None = None) -> None:
        self.head_of_step: dict[int, Head] = dict(heads or {})

    @property
    def last_step(self) -> int:
        """The newest committed step."""
        return max(self.head_of_step, default=0)

    def has(self, head: Head) -> bool:
        """True if ``head`` was committed in this chain; every start is in every chain."""
        here = self.head_of_step.get(head.step)
        return head.step == 0 or (here is not None and key_of(here) == key_of(head))

    def follows(self, head: Head) -> bool:
        """True if ``head`` would be its next step."""
        return head.step == self.last_step + 1

    def extend(self, head: Head) -> None:
        """``head`` was committed."""
        if head.step > 0:
            self.head_of_step[head.step] = head

    def until(self, base: Head) -> Lineage:
        """A new chain that begins like this one and ends with ``base``."""
        heads = {step: head for step, head in self.head_of_step.items() if step <= base.step}
        return Lineage(heads)
