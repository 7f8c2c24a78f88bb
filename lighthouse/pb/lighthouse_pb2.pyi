from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Process(_message.Message):
    __slots__ = ("replica_id", "incarnation")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    incarnation: str
    def __init__(self, replica_id: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class Head(_message.Message):
    __slots__ = ("step", "quorum_id", "digest")
    STEP_FIELD_NUMBER: _ClassVar[int]
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    step: int
    quorum_id: int
    digest: str
    def __init__(self, step: _Optional[int] = ..., quorum_id: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class Vote(_message.Message):
    __slots__ = ("step", "quorum_id")
    STEP_FIELD_NUMBER: _ClassVar[int]
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    step: int
    quorum_id: int
    def __init__(self, step: _Optional[int] = ..., quorum_id: _Optional[int] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("process", "address", "contributor")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTOR_FIELD_NUMBER: _ClassVar[int]
    process: Process
    address: str
    contributor: bool
    def __init__(self, process: _Optional[_Union[Process, _Mapping]] = ..., address: _Optional[str] = ..., contributor: _Optional[bool] = ...) -> None: ...

class Quorum(_message.Message):
    __slots__ = ("id", "members", "base", "reload", "reason")
    ID_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    RELOAD_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    id: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    base: Head
    reload: bool
    reason: str
    def __init__(self, id: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., base: _Optional[_Union[Head, _Mapping]] = ..., reload: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("step", "phase", "counter")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    step: int
    phase: str
    counter: int
    def __init__(self, step: _Optional[int] = ..., phase: _Optional[str] = ..., counter: _Optional[int] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("floor", "head", "voted", "level", "disk_head", "progress")
    FLOOR_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    VOTED_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    DISK_HEAD_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    floor: int
    head: Head
    voted: Vote
    level: bool
    disk_head: Head
    progress: Progress
    def __init__(self, floor: _Optional[int] = ..., head: _Optional[_Union[Head, _Mapping]] = ..., voted: _Optional[_Union[Vote, _Mapping]] = ..., level: _Optional[bool] = ..., disk_head: _Optional[_Union[Head, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("position", "address", "group_world_size", "quorum")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GROUP_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    position: Position
    address: str
    group_world_size: int
    quorum: Quorum
    def __init__(self, position: _Optional[_Union[Position, _Mapping]] = ..., address: _Optional[str] = ..., group_world_size: _Optional[int] = ..., quorum: _Optional[_Union[Quorum, _Mapping]] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("position", "leaving")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    position: Position
    leaving: bool
    def __init__(self, position: _Optional[_Union[Position, _Mapping]] = ..., leaving: _Optional[bool] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("progress", "quiet")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    QUIET_FIELD_NUMBER: _ClassVar[int]
    progress: Progress
    quiet: bool
    def __init__(self, progress: _Optional[_Union[Progress, _Mapping]] = ..., quiet: _Optional[bool] = ...) -> None: ...

class Fault(_message.Message):
    __slots__ = ("quorum_id", "peer", "reason")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    peer: str
    reason: str
    def __init__(self, quorum_id: _Optional[int] = ..., peer: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("job_id", "process", "session", "hello")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    process: Process
    session: int
    hello: Hello
    def __init__(self, job_id: _Optional[str] = ..., process: _Optional[_Union[Process, _Mapping]] = ..., session: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionUp(_message.Message):
    __slots__ = ("open", "ask", "beat", "fault", "pong")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    open: Open
    ask: Ask
    beat: Beat
    fault: Fault
    pong: Pong
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., ask: _Optional[_Union[Ask, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., fault: _Optional[_Union[Fault, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ...) -> None: ...

class Revoke(_message.Message):
    __slots__ = ("quorum_id", "now", "reason")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    now: bool
    reason: str
    def __init__(self, quorum_id: _Optional[int] = ..., now: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class Form(_message.Message):
    __slots__ = ("quorum",)
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    quorum: Quorum
    def __init__(self, quorum: _Optional[_Union[Quorum, _Mapping]] = ...) -> None: ...

class Retired(_message.Message):
    __slots__ = ("reason", "left")
    REASON_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    left: bool
    def __init__(self, reason: _Optional[str] = ..., left: _Optional[bool] = ...) -> None: ...

class Announce(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionDown(_message.Message):
    __slots__ = ("revoke", "form", "retired", "announce", "ping", "beat")
    REVOKE_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    revoke: Revoke
    form: Form
    retired: Retired
    announce: Announce
    ping: Ping
    beat: Beat
    def __init__(self, revoke: _Optional[_Union[Revoke, _Mapping]] = ..., form: _Optional[_Union[Form, _Mapping]] = ..., retired: _Optional[_Union[Retired, _Mapping]] = ..., announce: _Optional[_Union[Announce, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[JobStatus]
    def __init__(self, jobs: _Optional[_Iterable[_Union[JobStatus, _Mapping]]] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("job_id", "epoch", "quorum", "round", "waiting", "peers", "story")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    STORY_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    epoch: int
    quorum: Quorum
    round: str
    waiting: str
    peers: _containers.RepeatedCompositeFieldContainer[PeerStatus]
    story: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, job_id: _Optional[str] = ..., epoch: _Optional[int] = ..., quorum: _Optional[_Union[Quorum, _Mapping]] = ..., round: _Optional[str] = ..., waiting: _Optional[str] = ..., peers: _Optional[_Iterable[_Union[PeerStatus, _Mapping]]] = ..., story: _Optional[_Iterable[str]] = ...) -> None: ...

class PeerStatus(_message.Message):
    __slots__ = ("process", "connected", "asked", "state", "position", "address", "silent_ms")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SILENT_MS_FIELD_NUMBER: _ClassVar[int]
    process: Process
    connected: bool
    asked: bool
    state: str
    position: Position
    address: str
    silent_ms: int
    def __init__(self, process: _Optional[_Union[Process, _Mapping]] = ..., connected: _Optional[bool] = ..., asked: _Optional[bool] = ..., state: _Optional[str] = ..., position: _Optional[_Union[Position, _Mapping]] = ..., address: _Optional[str] = ..., silent_ms: _Optional[int] = ...) -> None: ...

class ReportExitRequest(_message.Message):
    __slots__ = ("job_id", "process")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    process: Process
    def __init__(self, job_id: _Optional[str] = ..., process: _Optional[_Union[Process, _Mapping]] = ...) -> None: ...

class ReportExitReply(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: _Optional[bool] = ...) -> None: ...
