"""What the Lighthouse knows, for the wire and for people."""

from __future__ import annotations

from lighthouse import wire
from lighthouse.core.words import JobView, PeerView
from lighthouse.pb import lighthouse_pb2 as pb
from lighthouse.torchft.words import JOB_ID as TORCHFT_JOB


def job_status(job_id: str, view: JobView) -> pb.JobStatus:
    """One job as a message."""
    return pb.JobStatus(
        job_id=job_id,
        epoch=view.epoch,
        quorum=wire.quorum_out(view.quorum) if view.quorum is not None else None,
        round=view.round,
        waiting=view.waiting,
        peers=[_peer_status(peer) for peer in view.peers],
        story=view.story,
    )


def _peer_status(peer: PeerView) -> pb.PeerStatus:
    return pb.PeerStatus(
        process=wire.process_out(peer.process),
        connected=peer.connected,
        asked=peer.asked,
        state=peer.state,
        position=wire.position_out(peer.position) if peer.position is not None else None,
        address=peer.address,
        silent_ms=peer.silent_ms,
    )


def describe(reply: pb.StatusReply) -> str:
    """The status as a few lines for people."""
    return "\n".join(line for job in reply.jobs for line in _describe_job(job)) or "no job is known"


def _describe_job(job: pb.JobStatus) -> list[str]:
    theirs = job.job_id == TORCHFT_JOB
    speech = " (torchft's managers: they ask at every step)" if theirs else ""
    lines = [f"job {job.job_id}{speech}, epoch {job.epoch}"]
    if job.HasField("quorum"):
        names = ", ".join(m.process.replica_id for m in job.quorum.members)
        lines.append(f"  quorum {job.quorum.id}: {names}; base step {job.quorum.base.step}")
        lines.append(f"  formed because: {job.quorum.reason}")
    else:
        lines.append("  no quorum yet")
    if job.round:
        lines.append(f"  a new one is being formed: {job.round}")
    if job.waiting:
        lines.append(f"  waiting {job.waiting}")
    for peer in job.peers:
        name = (
            peer.process.replica_id if theirs else f"{peer.process.replica_id}/{peer.process.incarnation[:6]}"
        )
        place = f"{name} at {peer.address}"
        step = max(peer.position.head.step, peer.position.progress.step)  # heads are said with asks only
        progress = f"step {step}, {peer.position.progress.phase or 'no phase'}"
        asked = ", has asked" if peer.asked else ""
        lines.append(f"  {peer.state:9} {place}: {progress}, heard {peer.silent_ms} ms ago{asked}")
    return lines
