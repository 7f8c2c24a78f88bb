from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PeerHead(_message.Message):
    __slots__ = ("step", "quorum_id", "digest")
    STEP_FIELD_NUMBER: _ClassVar[int]
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    step: int
    quorum_id: int
    digest: str
    def __init__(self, step: _Optional[int] = ..., quorum_id: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class PeerFrame(_message.Message):
    __slots__ = ("hello", "block", "vote", "fenced", "refused")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    hello: PeerHello
    block: ControlBlock
    vote: PeerVote
    fenced: PeerFenced
    refused: Refused
    def __init__(self, hello: _Optional[_Union[PeerHello, _Mapping]] = ..., block: _Optional[_Union[ControlBlock, _Mapping]] = ..., vote: _Optional[_Union[PeerVote, _Mapping]] = ..., fenced: _Optional[_Union[PeerFenced, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class PeerHello(_message.Message):
    __slots__ = ("job_id", "quorum_id", "replica_id", "incarnation", "store_address", "state_addresses", "layout_digest", "token")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    quorum_id: int
    replica_id: str
    incarnation: str
    store_address: str
    state_addresses: _containers.RepeatedScalarFieldContainer[str]
    layout_digest: str
    token: str
    def __init__(self, job_id: _Optional[str] = ..., quorum_id: _Optional[int] = ..., replica_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., store_address: _Optional[str] = ..., state_addresses: _Optional[_Iterable[str]] = ..., layout_digest: _Optional[str] = ..., token: _Optional[str] = ...) -> None: ...

class ControlBlock(_message.Message):
    __slots__ = ("quorum_id", "step", "round", "head", "weight", "stale", "finite", "change_wanted", "scalars", "positions")
    class ScalarsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class PositionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    FINITE_FIELD_NUMBER: _ClassVar[int]
    CHANGE_WANTED_FIELD_NUMBER: _ClassVar[int]
    SCALARS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    step: int
    round: int
    head: PeerHead
    weight: float
    stale: bool
    finite: bool
    change_wanted: bool
    scalars: _containers.ScalarMap[str, float]
    positions: _containers.ScalarMap[str, int]
    def __init__(self, quorum_id: _Optional[int] = ..., step: _Optional[int] = ..., round: _Optional[int] = ..., head: _Optional[_Union[PeerHead, _Mapping]] = ..., weight: _Optional[float] = ..., stale: _Optional[bool] = ..., finite: _Optional[bool] = ..., change_wanted: _Optional[bool] = ..., scalars: _Optional[_Mapping[str, float]] = ..., positions: _Optional[_Mapping[str, int]] = ...) -> None: ...

class PeerVote(_message.Message):
    __slots__ = ("quorum_id", "step", "round")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    step: int
    round: int
    def __init__(self, quorum_id: _Optional[int] = ..., step: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class PeerFenced(_message.Message):
    __slots__ = ("quorum_id",)
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    def __init__(self, quorum_id: _Optional[int] = ...) -> None: ...

class Attempt(_message.Message):
    __slots__ = ("quorum_id", "step", "round")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    step: int
    round: int
    def __init__(self, quorum_id: _Optional[int] = ..., step: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class RankFrame(_message.Message):
    __slots__ = ("hello", "ready", "posted", "done", "configured", "boundary", "fetch_failed", "leave_wanted", "beat", "bye", "poll")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    POSTED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    CONFIGURED_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    FETCH_FAILED_FIELD_NUMBER: _ClassVar[int]
    LEAVE_WANTED_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    POLL_FIELD_NUMBER: _ClassVar[int]
    hello: RankHello
    ready: RankReady
    posted: RankPosted
    done: RankDone
    configured: RankConfigured
    boundary: RankBoundary
    fetch_failed: RankFetchFailed
    leave_wanted: RankLeaveWanted
    beat: RankBeat
    bye: RankBye
    poll: RankPoll
    def __init__(self, hello: _Optional[_Union[RankHello, _Mapping]] = ..., ready: _Optional[_Union[RankReady, _Mapping]] = ..., posted: _Optional[_Union[RankPosted, _Mapping]] = ..., done: _Optional[_Union[RankDone, _Mapping]] = ..., configured: _Optional[_Union[RankConfigured, _Mapping]] = ..., boundary: _Optional[_Union[RankBoundary, _Mapping]] = ..., fetch_failed: _Optional[_Union[RankFetchFailed, _Mapping]] = ..., leave_wanted: _Optional[_Union[RankLeaveWanted, _Mapping]] = ..., beat: _Optional[_Union[RankBeat, _Mapping]] = ..., bye: _Optional[_Union[RankBye, _Mapping]] = ..., poll: _Optional[_Union[RankPoll, _Mapping]] = ...) -> None: ...

class RankHello(_message.Message):
    __slots__ = ("job_id", "replica_id", "group_rank", "group_world_size", "token")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    GROUP_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    replica_id: str
    group_rank: int
    group_world_size: int
    token: str
    def __init__(self, job_id: _Optional[str] = ..., replica_id: _Optional[str] = ..., group_rank: _Optional[int] = ..., group_world_size: _Optional[int] = ..., token: _Optional[str] = ...) -> None: ...

class RankReady(_message.Message):
    __slots__ = ("initial_digest", "layout_digest", "state_address", "windowed")
    INITIAL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STATE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WINDOWED_FIELD_NUMBER: _ClassVar[int]
    initial_digest: str
    layout_digest: str
    state_address: str
    windowed: bool
    def __init__(self, initial_digest: _Optional[str] = ..., layout_digest: _Optional[str] = ..., state_address: _Optional[str] = ..., windowed: _Optional[bool] = ...) -> None: ...

class RankPosted(_message.Message):
    __slots__ = ("attempt", "stale", "finite", "weight", "scalars", "positions", "objects")
    class ScalarsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class PositionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    FINITE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SCALARS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    stale: bool
    finite: bool
    weight: float
    scalars: _containers.ScalarMap[str, float]
    positions: _containers.ScalarMap[str, int]
    objects: bool
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., stale: _Optional[bool] = ..., finite: _Optional[bool] = ..., weight: _Optional[float] = ..., scalars: _Optional[_Mapping[str, float]] = ..., positions: _Optional[_Mapping[str, int]] = ..., objects: _Optional[bool] = ...) -> None: ...

class RankDone(_message.Message):
    __slots__ = ("attempt", "failure", "peer_rank")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PEER_RANK_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    failure: str
    peer_rank: int
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., failure: _Optional[str] = ..., peer_rank: _Optional[int] = ...) -> None: ...

class RankConfigured(_message.Message):
    __slots__ = ("quorum_id", "failure", "peer_rank")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PEER_RANK_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    failure: str
    peer_rank: int
    def __init__(self, quorum_id: _Optional[int] = ..., failure: _Optional[str] = ..., peer_rank: _Optional[int] = ...) -> None: ...

class RankBoundary(_message.Message):
    __slots__ = ("fetched", "epoch", "step", "patient", "visit")
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PATIENT_FIELD_NUMBER: _ClassVar[int]
    VISIT_FIELD_NUMBER: _ClassVar[int]
    fetched: bool
    epoch: int
    step: int
    patient: bool
    visit: int
    def __init__(self, fetched: _Optional[bool] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., patient: _Optional[bool] = ..., visit: _Optional[int] = ...) -> None: ...

class RankPoll(_message.Message):
    __slots__ = ("count", "ready", "least_peers", "grace_ms")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    LEAST_PEERS_FIELD_NUMBER: _ClassVar[int]
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    count: int
    ready: bool
    least_peers: int
    grace_ms: int
    def __init__(self, count: _Optional[int] = ..., ready: _Optional[bool] = ..., least_peers: _Optional[int] = ..., grace_ms: _Optional[int] = ...) -> None: ...

class RankFetchFailed(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class RankLeaveWanted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankBeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankBye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Word(_message.Message):
    __slots__ = ("configure", "abort", "again", "commit", "join", "boundary", "pin", "left", "fatal", "beat", "donors", "poll", "refused")
    CONFIGURE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    FATAL_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    DONORS_FIELD_NUMBER: _ClassVar[int]
    POLL_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    configure: WordConfigure
    abort: WordAbort
    again: WordAgain
    commit: WordCommit
    join: WordJoin
    boundary: WordBoundary
    pin: WordPin
    left: WordLeft
    fatal: WordFatal
    beat: RankBeat
    donors: WordDonors
    poll: WordPoll
    refused: Refused
    def __init__(self, configure: _Optional[_Union[WordConfigure, _Mapping]] = ..., abort: _Optional[_Union[WordAbort, _Mapping]] = ..., again: _Optional[_Union[WordAgain, _Mapping]] = ..., commit: _Optional[_Union[WordCommit, _Mapping]] = ..., join: _Optional[_Union[WordJoin, _Mapping]] = ..., boundary: _Optional[_Union[WordBoundary, _Mapping]] = ..., pin: _Optional[_Union[WordPin, _Mapping]] = ..., left: _Optional[_Union[WordLeft, _Mapping]] = ..., fatal: _Optional[_Union[WordFatal, _Mapping]] = ..., beat: _Optional[_Union[RankBeat, _Mapping]] = ..., donors: _Optional[_Union[WordDonors, _Mapping]] = ..., poll: _Optional[_Union[WordPoll, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ...) -> None: ...

class WordConfigure(_message.Message):
    __slots__ = ("quorum_id", "replica_rank", "replica_world_size", "store_address", "members", "contributors", "base")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_RANK_FIELD_NUMBER: _ClassVar[int]
    REPLICA_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    replica_rank: int
    replica_world_size: int
    store_address: str
    members: _containers.RepeatedScalarFieldContainer[str]
    contributors: int
    base: PeerHead
    def __init__(self, quorum_id: _Optional[int] = ..., replica_rank: _Optional[int] = ..., replica_world_size: _Optional[int] = ..., store_address: _Optional[str] = ..., members: _Optional[_Iterable[str]] = ..., contributors: _Optional[int] = ..., base: _Optional[_Union[PeerHead, _Mapping]] = ...) -> None: ...

class WordAbort(_message.Message):
    __slots__ = ("quorum_id", "reason")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    reason: str
    def __init__(self, quorum_id: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class WordAgain(_message.Message):
    __slots__ = ("attempt", "objects")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    objects: bool
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., objects: _Optional[bool] = ...) -> None: ...

class WordCommit(_message.Message):
    __slots__ = ("head", "skip", "total_weight", "contributors", "contributed", "scalars", "positions", "leaving", "retries")
    class ScalarsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class PositionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    HEAD_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTED_FIELD_NUMBER: _ClassVar[int]
    SCALARS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    head: PeerHead
    skip: bool
    total_weight: float
    contributors: int
    contributed: bool
    scalars: _containers.ScalarMap[str, float]
    positions: _containers.ScalarMap[str, int]
    leaving: bool
    retries: int
    def __init__(self, head: _Optional[_Union[PeerHead, _Mapping]] = ..., skip: _Optional[bool] = ..., total_weight: _Optional[float] = ..., contributors: _Optional[int] = ..., contributed: _Optional[bool] = ..., scalars: _Optional[_Mapping[str, float]] = ..., positions: _Optional[_Mapping[str, int]] = ..., leaving: _Optional[bool] = ..., retries: _Optional[int] = ...) -> None: ...

class WordJoin(_message.Message):
    __slots__ = ("head", "epoch")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    head: PeerHead
    epoch: int
    def __init__(self, head: _Optional[_Union[PeerHead, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class WordDonors(_message.Message):
    __slots__ = ("head", "addresses")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    head: PeerHead
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, head: _Optional[_Union[PeerHead, _Mapping]] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class WordBoundary(_message.Message):
    __slots__ = ("replay",)
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    replay: bool
    def __init__(self, replay: _Optional[bool] = ...) -> None: ...

class WordPoll(_message.Message):
    __slots__ = ("count", "due")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DUE_FIELD_NUMBER: _ClassVar[int]
    count: int
    due: bool
    def __init__(self, count: _Optional[int] = ..., due: _Optional[bool] = ...) -> None: ...

class WordPin(_message.Message):
    __slots__ = ("head", "on", "readers")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    ON_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    head: PeerHead
    on: bool
    readers: int
    def __init__(self, head: _Optional[_Union[PeerHead, _Mapping]] = ..., on: _Optional[bool] = ..., readers: _Optional[int] = ...) -> None: ...

class WordLeft(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WordFatal(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...
