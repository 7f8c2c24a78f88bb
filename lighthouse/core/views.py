"""The roster as people and tools see it."""

from __future__ import annotations

from lighthouse.core.blame import Blame
from lighthouse.core.roster import Peer, Roster
from lighthouse.core.words import PeerView


def peer_views(roster: Roster, blame: Blame, now_ms: int) -> tuple[PeerView, ...]:
    """All processes that are known, new incarnations that wait for their place included."""
    peers = [_peer_view(peer, roster, blame, now_ms) for peer in roster.peers.values()]
    waiting = [
        PeerView(p.process, True, p.ask is not None, "pending", p.hello.position, p.hello.address, 0)
        for p in roster.pending.values()
    ]
    return (*peers, *waiting)


def _peer_view(peer: Peer, roster: Roster, blame: Blame, now_ms: int) -> PeerView:
    if peer.lost is not None:
        state = "lost"
    elif peer.overdue:
        state = "overdue"
    elif blame.out_until_ms(peer.replica_id) > now_ms:
        state = "excluded"
    else:
        state = "member" if roster.is_member(peer) else "joiner"
    asked, silent_ms = peer.ask is not None, max(0, now_ms - peer.heard_ms)
    return PeerView(peer.process, peer.connected, asked, state, peer.position, peer.address, silent_ms)
