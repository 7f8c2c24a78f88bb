"""Words of ``lighthouse.messages`` to protobuf and back.

What comes from the network is checked here and nowhere else: strings and lists are bounded, numbers are sane,
a quorum names each replica once. A bad message raises :class:`WireError`: one sentence that names the field.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError as DecodeError
from google.protobuf.message import Message

from lighthouse.messages import (
    Announce,
    Ask,
    Beat,
    Down,
    Fault,
    Form,
    Head,
    Hello,
    Member,
    Position,
    Process,
    Progress,
    Quorum,
    Retired,
    Revoke,
    Up,
    Vote,
)
from lighthouse.pb import lighthouse_pb2 as pb

MAX_NAME_CHARS = 256
MAX_ADDRESS_CHARS = 512
MAX_TEXT_CHARS = 4096
MAX_MEMBERS = 4096
MAX_NUMBER = 2**63 - 1
MAX_GROUP_WORLD_SIZE = 1_000_000
MAX_MESSAGE_BYTES = 4 * 1024 * 1024

M = TypeVar("M", bound=Message)

_NAME = re.compile(r"[^\x00-\x1f\x7f]+")


class WireError(ValueError):
    """A message that breaks the rules of the wire; the text says which field and why."""


@dataclass(frozen=True, slots=True)
class Open:
    """First message of a session: who speaks, and its whole state."""

    job_id: str
    process: Process
    session: int
    hello: Hello


@dataclass(frozen=True, slots=True)
class Ping:
    """To be answered by :class:`Pong` at once."""


@dataclass(frozen=True, slots=True)
class Pong:
    """Answer to a ping: the process is alive."""


@dataclass(frozen=True, slots=True)
class BeatAnswer:
    """The Lighthouse answers ``open`` and each beat that is not quiet, so that a member knows that it is heard."""


SessionUp = Open | Ask | Beat | Fault | Pong
SessionDown = Down | Ping | BeatAnswer

# --- up -----------------------------------------------------------------------------------------------------


def encode_up(message: SessionUp) -> bytes:
    """Serialise a message of a member."""
    match message:
        case Open():
            up = pb.SessionUp(
                open=pb.Open(
                    job_id=message.job_id,
                    process=_process_out(message.process),
                    session=message.session,
                    hello=_hello_out(message.hello),
                )
            )
        case Ask():
            ask = pb.Ask(position=_position_out(message.position), leaving=message.leaving)
            up = pb.SessionUp(ask=ask)
        case Beat():
            up = pb.SessionUp(beat=pb.Beat(progress=_progress_out(message.progress), quiet=message.quiet))
        case Fault():
            fault = pb.Fault(
                quorum_id=message.quorum_id, peer=message.peer or "", reason=shorten(message.reason)
            )
            up = pb.SessionUp(fault=fault)
        case Pong():
            up = pb.SessionUp(pong=pb.Pong())
    return up.SerializeToString()


def decode_up(data: bytes) -> SessionUp:
    """Parse and check a message of a member; raises WireError."""
    up = _parse(pb.SessionUp, data)
    match up.WhichOneof("body"):
        case "open":
            return _open_in(up.open)
        case "ask":
            return Ask(_position_in(up.ask, "ask"), up.ask.leaving)
        case "beat":
            return Beat(_progress_in(up.beat.progress, "beat.progress"), up.beat.quiet)
        case "fault":
            peer = name_in(up.fault.peer, "fault.peer") if up.fault.peer else None
            return Fault(
                number_in(up.fault.quorum_id, "fault.quorum_id"), peer, _text(up.fault.reason, "fault.reason")
            )
        case "pong":
            return Pong()
        case _:
            raise WireError("a message of a member has no body that this Lighthouse knows: use one version")


def up_to_session(message: Up, job_id: str, process: Process, session: int) -> SessionUp:
    """A member's word as it goes on the stream: hello opens it, everything else goes as it is."""
    return Open(job_id, process, session, message) if isinstance(message, Hello) else message


# --- down ---------------------------------------------------------------------------------------------------


def encode_down(message: SessionDown) -> bytes:
    """Serialise a message of the Lighthouse."""
    match message:
        case Revoke():
            revoke = pb.Revoke(quorum_id=message.quorum_id, now=message.now, reason=shorten(message.reason))
            down = pb.SessionDown(revoke=revoke)
        case Form():
            down = pb.SessionDown(form=pb.Form(quorum=quorum_out(message.quorum)))
        case Retired():
            down = pb.SessionDown(retired=pb.Retired(reason=shorten(message.reason), left=message.left))
        case Announce():
            down = pb.SessionDown(announce=pb.Announce(text=shorten(message.text)))
        case Ping():
            down = pb.SessionDown(ping=pb.Ping())
        case BeatAnswer():
            down = pb.SessionDown(beat=pb.Beat())
    return down.SerializeToString()


def decode_down(data: bytes) -> SessionDown:
    """Parse and check a message of the Lighthouse; raises WireError."""
    down = _parse(pb.SessionDown, data)
    match down.WhichOneof("body"):
        case "revoke":
            quorum_id = number_in(down.revoke.quorum_id, "revoke.quorum_id", least=1)
            return Revoke(quorum_id, down.revoke.now, _text(down.revoke.reason, "revoke.reason"))
        case "form":
            if not down.form.HasField("quorum"):
                raise WireError("form.quorum is missing")
            return Form(quorum_in(down.form.quorum, "form.quorum"))
        case "retired":
            return Retired(_text(down.retired.reason, "retired.reason"), down.retired.left)
        case "announce":
            return Announce(_text(down.announce.text, "announce.text"))
        case "ping":
            return Ping()
        case "beat":
            return BeatAnswer()
        case _:
            raise WireError("a message of the Lighthouse has no body that this member knows: use one version")


# --- quorum, also used by the store and the status ----------------------------------------------------------


def quorum_out(quorum: Quorum) -> pb.Quorum:
    """Quorum to protobuf."""
    members = [
        pb.Member(process=_process_out(m.process), address=m.address, contributor=m.contributor)
        for m in quorum.members
    ]
    return pb.Quorum(
        id=quorum.id,
        members=members,
        base=_head_out(quorum.base),
        reload=quorum.reload,
        reason=shorten(quorum.reason),
    )


def quorum_in(quorum: pb.Quorum, field: str = "quorum") -> Quorum:
    """Quorum from protobuf, checked; raises WireError."""
    if not 1 <= len(quorum.members) <= MAX_MEMBERS:
        raise WireError(f"{field}.members has {len(quorum.members)} entries: give 1 to {MAX_MEMBERS}")
    members = tuple(
        Member(
            process_in(m.process, f"{field}.members[{i}].process"),
            _address(m.address, f"{field}.members[{i}].address"),
            m.contributor,
        )
        for i, m in enumerate(quorum.members)
    )
    if len({m.process.replica_id for m in members}) != len(members):
        raise WireError(f"{field}.members names a replica_id twice: every member needs its own")
    return Quorum(
        number_in(quorum.id, f"{field}.id", least=1),
        members,
        _head_in(quorum.base, f"{field}.base"),
        quorum.reload,
        _text(quorum.reason, f"{field}.reason"),
    )


def position_out(position: Position) -> pb.Position:
    """Position to protobuf (for the status)."""
    return _position_out(position)


def process_out(process: Process) -> pb.Process:
    """Process to protobuf."""
    return _process_out(process)


def process_in(process: pb.Process, field: str = "process", *, any_incarnation: bool = False) -> Process:
    """Process from protobuf, checked; ``any_incarnation``: it may be empty. Raises WireError."""
    incarnation = process.incarnation
    if incarnation or not any_incarnation:
        incarnation = name_in(incarnation, f"{field}.incarnation")
    return Process(name_in(process.replica_id, f"{field}.replica_id"), incarnation)


def job_id_in(job_id: str) -> str:
    """Check a job_id; raises WireError."""
    return name_in(job_id, "job_id")


def shorten(text: str) -> str:
    """Cut a text for people to what the wire carries."""
    return text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 3] + "..."


# --- parts --------------------------------------------------------------------------------------------------


def _parse(kind: Callable[[], M], data: bytes) -> M:
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise WireError(f"a message is no valid {type(message).__name__}: {error}") from error
    return message


def _process_out(process: Process) -> pb.Process:
    return pb.Process(replica_id=process.replica_id, incarnation=process.incarnation)


def _head_out(head: Head) -> pb.Head:
    return pb.Head(step=head.step, quorum_id=head.quorum_id, digest=head.digest)


def _progress_out(progress: Progress) -> pb.Progress:
    return pb.Progress(step=progress.step, phase=progress.phase, counter=progress.counter)


def _position_out(position: Position) -> pb.Position:
    voted = position.voted
    return pb.Position(
        floor=position.floor,
        head=_head_out(position.head),
        voted=pb.Vote(step=voted.step, quorum_id=voted.quorum_id) if voted is not None else None,
        level=position.level,
        disk_head=_head_out(position.disk_head) if position.disk_head is not None else None,
        progress=_progress_out(position.progress),
    )


def _hello_out(hello: Hello) -> pb.Hello:
    return pb.Hello(
        position=_position_out(hello.position),
        address=hello.address,
        group_world_size=hello.group_world_size,
        quorum=quorum_out(hello.quorum) if hello.quorum is not None else None,
    )


def _open_in(message: pb.Open) -> Open:
    if not message.HasField("hello"):
        raise WireError("open.hello is missing")
    hello = message.hello
    size = hello.group_world_size
    if not 1 <= size <= MAX_GROUP_WORLD_SIZE:
        raise WireError(f"hello.group_world_size is {size}: give 1 to {MAX_GROUP_WORLD_SIZE}")
    return Open(
        job_id_in(message.job_id),
        process_in(message.process),
        number_in(message.session, "open.session"),
        Hello(
            _position_in(hello, "hello"),
            _address(hello.address, "hello.address"),
            size,
            quorum_in(hello.quorum, "hello.quorum") if hello.HasField("quorum") else None,
        ),
    )


def _head_in(head: pb.Head, field: str) -> Head:
    digest = head.digest
    if len(digest) > MAX_NAME_CHARS:
        raise WireError(f"{field}.digest has {len(digest)} characters, more than {MAX_NAME_CHARS}")
    return Head(
        number_in(head.step, f"{field}.step"), number_in(head.quorum_id, f"{field}.quorum_id"), digest
    )


def _progress_in(progress: pb.Progress, field: str) -> Progress:
    if len(progress.phase) > MAX_NAME_CHARS:
        raise WireError(f"{field}.phase has {len(progress.phase)} characters, more than {MAX_NAME_CHARS}")
    counter = number_in(progress.counter, f"{field}.counter")
    return Progress(number_in(progress.step, f"{field}.step"), progress.phase, counter)


def _position_in(holder: pb.Hello | pb.Ask, field: str) -> Position:
    if not holder.HasField("position"):
        raise WireError(f"{field}.position is missing")
    position, field = holder.position, f"{field}.position"
    voted = None
    if position.HasField("voted"):
        voted = Vote(
            number_in(position.voted.step, f"{field}.voted.step", least=1),
            number_in(position.voted.quorum_id, f"{field}.voted.quorum_id", least=1),
        )
    disk_head = None
    if position.HasField("disk_head"):
        disk_head = _head_in(position.disk_head, f"{field}.disk_head")
    return Position(
        number_in(position.floor, f"{field}.floor"),
        _head_in(position.head, f"{field}.head"),
        voted,
        position.level,
        disk_head,
        _progress_in(position.progress, f"{field}.progress"),
    )


def number_in(value: int, field: str, least: int = 0) -> int:
    """Check a number; raises WireError."""
    if not least <= value <= MAX_NUMBER:
        raise WireError(f"{field} is {value}: give {least} to 2^63 - 1")
    return value


def name_in(value: str, field: str) -> str:
    """Check a name; raises WireError."""
    if not 0 < len(value) <= MAX_NAME_CHARS or _NAME.fullmatch(value) is None:
        raise WireError(
            f"{field} is {value[:40]!r}: give 1 to {MAX_NAME_CHARS} characters without control characters"
        )
    return value


def is_address(value: str) -> bool:
    """True for host:port, whatever the host looks like."""
    host, colon, port = value.rpartition(":")
    sane = 0 < len(value) <= MAX_ADDRESS_CHARS and _NAME.fullmatch(value) is not None
    return bool(sane and colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536)


def _address(value: str, field: str) -> str:
    if not is_address(value):
        raise WireError(f"{field} is {value[:60]!r}: give host:port")
    return value


def _text(value: str, field: str) -> str:
    if len(value) > MAX_TEXT_CHARS:
        raise WireError(f"{field} has {len(value)} characters, more than {MAX_TEXT_CHARS}")
    return value
