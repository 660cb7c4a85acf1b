from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Purpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PURPOSE_UNSPECIFIED: _ClassVar[Purpose]
    ACTIVATION: _ClassVar[Purpose]
    GRADIENT: _ClassVar[Purpose]
    EVALUATION: _ClassVar[Purpose]
    FLUSH: _ClassVar[Purpose]

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    FP32: _ClassVar[DType]
    BF16: _ClassVar[DType]
    UINT8: _ClassVar[DType]

class Doing(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DOING_UNSPECIFIED: _ClassVar[Doing]
    COMPUTING: _ClassVar[Doing]
    FORWARD: _ClassVar[Doing]
    BACKWARD: _ClassVar[Doing]
    WAITING_FOR_PREVIOUS: _ClassVar[Doing]
    WAITING_FOR_NEXT: _ClassVar[Doing]
    OUTER_ROUND: _ClassVar[Doing]
    EVALUATING: _ClassVar[Doing]
    CATCHING_UP: _ClassVar[Doing]
    WAITING_FOR_ROUND: _ClassVar[Doing]

class MembershipEventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBERSHIP_EVENT_KIND_UNSPECIFIED: _ClassVar[MembershipEventKind]
    INCARNATION_OVER: _ClassVar[MembershipEventKind]
    SUSPENDED: _ClassVar[MembershipEventKind]
    LATE: _ClassVar[MembershipEventKind]
    PAUSED: _ClassVar[MembershipEventKind]
    WENT_ON: _ClassVar[MembershipEventKind]
    HEALED: _ClassVar[MembershipEventKind]
    RESTARTED: _ClassVar[MembershipEventKind]
    GIVEN_UP: _ClassVar[MembershipEventKind]
    SILENT: _ClassVar[MembershipEventKind]
    INJECTED: _ClassVar[MembershipEventKind]
    LEFT_OUT: _ClassVar[MembershipEventKind]
    SCALED: _ClassVar[MembershipEventKind]
    EXCLUDED: _ClassVar[MembershipEventKind]
    NOT_AWAITED: _ClassVar[MembershipEventKind]
    UNAUDITED: _ClassVar[MembershipEventKind]
    AUDITED: _ClassVar[MembershipEventKind]
    RESUMED: _ClassVar[MembershipEventKind]

class Awaited(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AWAITED_UNSPECIFIED: _ClassVar[Awaited]
    JOINING: _ClassVar[Awaited]
    CONTRIBUTING: _ClassVar[Awaited]
    FINISHING: _ClassVar[Awaited]
    STORING: _ClassVar[Awaited]
PURPOSE_UNSPECIFIED: Purpose
ACTIVATION: Purpose
GRADIENT: Purpose
EVALUATION: Purpose
FLUSH: Purpose
DTYPE_UNSPECIFIED: DType
FP32: DType
BF16: DType
UINT8: DType
DOING_UNSPECIFIED: Doing
COMPUTING: Doing
FORWARD: Doing
BACKWARD: Doing
WAITING_FOR_PREVIOUS: Doing
WAITING_FOR_NEXT: Doing
OUTER_ROUND: Doing
EVALUATING: Doing
CATCHING_UP: Doing
WAITING_FOR_ROUND: Doing
MEMBERSHIP_EVENT_KIND_UNSPECIFIED: MembershipEventKind
INCARNATION_OVER: MembershipEventKind
SUSPENDED: MembershipEventKind
LATE: MembershipEventKind
PAUSED: MembershipEventKind
WENT_ON: MembershipEventKind
HEALED: MembershipEventKind
RESTARTED: MembershipEventKind
GIVEN_UP: MembershipEventKind
SILENT: MembershipEventKind
INJECTED: MembershipEventKind
LEFT_OUT: MembershipEventKind
SCALED: MembershipEventKind
EXCLUDED: MembershipEventKind
NOT_AWAITED: MembershipEventKind
UNAUDITED: MembershipEventKind
AUDITED: MembershipEventKind
RESUMED: MembershipEventKind
AWAITED_UNSPECIFIED: Awaited
JOINING: Awaited
CONTRIBUTING: Awaited
FINISHING: Awaited
STORING: Awaited

class Frame(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Nothing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LinkHello(_message.Message):
    __slots__ = ("version", "token", "link", "sender", "generation", "session", "stream", "received", "goes_on", "cause")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    GOES_ON_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    version: int
    token: str
    link: str
    sender: str
    generation: int
    session: bytes
    stream: int
    received: int
    goes_on: bool
    cause: str
    def __init__(self, version: _Optional[int] = ..., token: _Optional[str] = ..., link: _Optional[str] = ..., sender: _Optional[str] = ..., generation: _Optional[int] = ..., session: _Optional[bytes] = ..., stream: _Optional[int] = ..., received: _Optional[int] = ..., goes_on: _Optional[bool] = ..., cause: _Optional[str] = ...) -> None: ...

class EnrolRequest(_message.Message):
    __slots__ = ("version", "request")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    version: int
    request: bytes
    def __init__(self, version: _Optional[int] = ..., request: _Optional[bytes] = ...) -> None: ...

class EnrolReply(_message.Message):
    __slots__ = ("slot", "certificate", "configuration", "tokenizer", "in_waiting_room")
    class TokenizerEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    SLOT_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    IN_WAITING_ROOM_FIELD_NUMBER: _ClassVar[int]
    slot: str
    certificate: str
    configuration: str
    tokenizer: _containers.ScalarMap[str, bytes]
    in_waiting_room: InWaitingRoom
    def __init__(self, slot: _Optional[str] = ..., certificate: _Optional[str] = ..., configuration: _Optional[str] = ..., tokenizer: _Optional[_Mapping[str, bytes]] = ..., in_waiting_room: _Optional[_Union[InWaitingRoom, _Mapping]] = ...) -> None: ...

class InWaitingRoom(_message.Message):
    __slots__ = ("here", "needed", "probed", "last_round", "rounds", "why")
    HERE_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    PROBED_FIELD_NUMBER: _ClassVar[int]
    LAST_ROUND_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    here: int
    needed: int
    probed: bool
    last_round: int
    rounds: int
    why: str
    def __init__(self, here: _Optional[int] = ..., needed: _Optional[int] = ..., probed: _Optional[bool] = ..., last_round: _Optional[int] = ..., rounds: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("name", "last_round", "rounds", "slots", "refusals", "in_waiting_room", "needed_in_lobby", "guests", "has_begun", "is_over", "paused", "missing", "store_error", "store_error_seconds", "rehearsal", "credits", "training_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAST_ROUND_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    IN_WAITING_ROOM_FIELD_NUMBER: _ClassVar[int]
    NEEDED_IN_LOBBY_FIELD_NUMBER: _ClassVar[int]
    GUESTS_FIELD_NUMBER: _ClassVar[int]
    HAS_BEGUN_FIELD_NUMBER: _ClassVar[int]
    IS_OVER_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    STORE_ERROR_FIELD_NUMBER: _ClassVar[int]
    STORE_ERROR_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REHEARSAL_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    TRAINING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    last_round: int
    rounds: int
    slots: _containers.RepeatedCompositeFieldContainer[SlotStatus]
    refusals: int
    in_waiting_room: int
    needed_in_lobby: int
    guests: _containers.RepeatedCompositeFieldContainer[Guest]
    has_begun: bool
    is_over: bool
    paused: str
    missing: _containers.RepeatedScalarFieldContainer[str]
    store_error: str
    store_error_seconds: float
    rehearsal: bool
    credits: _containers.RepeatedCompositeFieldContainer[Credit]
    training_seconds: float
    def __init__(self, name: _Optional[str] = ..., last_round: _Optional[int] = ..., rounds: _Optional[int] = ..., slots: _Optional[_Iterable[_Union[SlotStatus, _Mapping]]] = ..., refusals: _Optional[int] = ..., in_waiting_room: _Optional[int] = ..., needed_in_lobby: _Optional[int] = ..., guests: _Optional[_Iterable[_Union[Guest, _Mapping]]] = ..., has_begun: _Optional[bool] = ..., is_over: _Optional[bool] = ..., paused: _Optional[str] = ..., missing: _Optional[_Iterable[str]] = ..., store_error: _Optional[str] = ..., store_error_seconds: _Optional[float] = ..., rehearsal: _Optional[bool] = ..., credits: _Optional[_Iterable[_Union[Credit, _Mapping]]] = ..., training_seconds: _Optional[float] = ...) -> None: ...

class PreviewReply(_message.Message):
    __slots__ = ("version", "clock", "configuration", "vocabulary", "slots", "refusal", "tokens", "neighbours", "relay_port", "lost")
    class NeighboursEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEIGHBOURS_FIELD_NUMBER: _ClassVar[int]
    RELAY_PORT_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    version: int
    clock: float
    configuration: str
    vocabulary: int
    slots: _containers.RepeatedScalarFieldContainer[str]
    refusal: str
    tokens: str
    neighbours: _containers.ScalarMap[str, str]
    relay_port: int
    lost: str
    def __init__(self, version: _Optional[int] = ..., clock: _Optional[float] = ..., configuration: _Optional[str] = ..., vocabulary: _Optional[int] = ..., slots: _Optional[_Iterable[str]] = ..., refusal: _Optional[str] = ..., tokens: _Optional[str] = ..., neighbours: _Optional[_Mapping[str, str]] = ..., relay_port: _Optional[int] = ..., lost: _Optional[str] = ...) -> None: ...

class Guest(_message.Message):
    __slots__ = ("ticket", "seconds")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ticket: str
    seconds: float
    def __init__(self, ticket: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class SlotStatus(_message.Message):
    __slots__ = ("name", "replica", "held", "incarnation", "address", "holder", "relayed_bytes", "dials", "round", "device", "seconds", "cause")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    RELAYED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIALS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    name: str
    replica: str
    held: bool
    incarnation: int
    address: str
    holder: int
    relayed_bytes: int
    dials: str
    round: int
    device: str
    seconds: float
    cause: str
    def __init__(self, name: _Optional[str] = ..., replica: _Optional[str] = ..., held: _Optional[bool] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ..., holder: _Optional[int] = ..., relayed_bytes: _Optional[int] = ..., dials: _Optional[str] = ..., round: _Optional[int] = ..., device: _Optional[str] = ..., seconds: _Optional[float] = ..., cause: _Optional[str] = ...) -> None: ...

class RelayedLink(_message.Message):
    __slots__ = ("link",)
    LINK_FIELD_NUMBER: _ClassVar[int]
    link: str
    def __init__(self, link: _Optional[str] = ...) -> None: ...

class RelayPlace(_message.Message):
    __slots__ = ("port", "key")
    PORT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    port: int
    key: bytes
    def __init__(self, port: _Optional[int] = ..., key: _Optional[bytes] = ...) -> None: ...

class TensorHeader(_message.Message):
    __slots__ = ("dtype", "shape")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class LinkHeader(_message.Message):
    __slots__ = ("purpose", "round", "step", "micro_batch", "squared_norm", "gradient_norm", "tensors", "rows", "is_last", "statement")
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCH_FIELD_NUMBER: _ClassVar[int]
    SQUARED_NORM_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_NORM_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    purpose: Purpose
    round: int
    step: int
    micro_batch: int
    squared_norm: float
    gradient_norm: float
    tensors: _containers.RepeatedCompositeFieldContainer[TensorHeader]
    rows: int
    is_last: bool
    statement: Statement
    def __init__(self, purpose: _Optional[_Union[Purpose, str]] = ..., round: _Optional[int] = ..., step: _Optional[int] = ..., micro_batch: _Optional[int] = ..., squared_norm: _Optional[float] = ..., gradient_norm: _Optional[float] = ..., tensors: _Optional[_Iterable[_Union[TensorHeader, _Mapping]]] = ..., rows: _Optional[int] = ..., is_last: _Optional[bool] = ..., statement: _Optional[_Union[Statement, _Mapping]] = ...) -> None: ...

class Statement(_message.Message):
    __slots__ = ("certificate", "signature")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    signature: bytes
    def __init__(self, certificate: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class StageMessages(_message.Message):
    __slots__ = ("records", "from_previous", "from_next")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    FROM_PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    FROM_NEXT_FIELD_NUMBER: _ClassVar[int]
    records: bytes
    from_previous: Statement
    from_next: Statement
    def __init__(self, records: _Optional[bytes] = ..., from_previous: _Optional[_Union[Statement, _Mapping]] = ..., from_next: _Optional[_Union[Statement, _Mapping]] = ...) -> None: ...

class BlobEntry(_message.Message):
    __slots__ = ("block", "sha256", "size", "kept_values", "norm", "peak", "steps")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    KEPT_VALUES_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    PEAK_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    block: str
    sha256: bytes
    size: int
    kept_values: int
    norm: float
    peak: float
    steps: int
    def __init__(self, block: _Optional[str] = ..., sha256: _Optional[bytes] = ..., size: _Optional[int] = ..., kept_values: _Optional[int] = ..., norm: _Optional[float] = ..., peak: _Optional[float] = ..., steps: _Optional[int] = ...) -> None: ...

class ContributionEntry(_message.Message):
    __slots__ = ("replica", "weight", "digest", "blobs", "generation", "steps", "tokens", "scale", "commitments", "restarts")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOBS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    COMMITMENTS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    replica: str
    weight: float
    digest: bytes
    blobs: _containers.RepeatedCompositeFieldContainer[BlobEntry]
    generation: int
    steps: int
    tokens: int
    scale: float
    commitments: _containers.RepeatedCompositeFieldContainer[Commitment]
    restarts: _containers.RepeatedCompositeFieldContainer[Restart]
    def __init__(self, replica: _Optional[str] = ..., weight: _Optional[float] = ..., digest: _Optional[bytes] = ..., blobs: _Optional[_Iterable[_Union[BlobEntry, _Mapping]]] = ..., generation: _Optional[int] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., scale: _Optional[float] = ..., commitments: _Optional[_Iterable[_Union[Commitment, _Mapping]]] = ..., restarts: _Optional[_Iterable[_Union[Restart, _Mapping]]] = ...) -> None: ...

class Commitment(_message.Message):
    __slots__ = ("member", "before", "after", "text", "messages", "holder", "rest", "first")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    REST_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    member: str
    before: bytes
    after: bytes
    text: bytes
    messages: bytes
    holder: int
    rest: bytes
    first: int
    def __init__(self, member: _Optional[str] = ..., before: _Optional[bytes] = ..., after: _Optional[bytes] = ..., text: _Optional[bytes] = ..., messages: _Optional[bytes] = ..., holder: _Optional[int] = ..., rest: _Optional[bytes] = ..., first: _Optional[int] = ...) -> None: ...

class Judgement(_message.Message):
    __slots__ = ("round", "replica", "losses", "recomputed", "copies", "agreement")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    round: int
    replica: str
    losses: Losses
    recomputed: Recomputed
    copies: str
    agreement: float
    def __init__(self, round: _Optional[int] = ..., replica: _Optional[str] = ..., losses: _Optional[_Union[Losses, _Mapping]] = ..., recomputed: _Optional[_Union[Recomputed, _Mapping]] = ..., copies: _Optional[str] = ..., agreement: _Optional[float] = ...) -> None: ...

class Losses(_message.Message):
    __slots__ = ("assigned_before", "assigned_after", "other_before", "other_after", "error")
    ASSIGNED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    ASSIGNED_AFTER_FIELD_NUMBER: _ClassVar[int]
    OTHER_BEFORE_FIELD_NUMBER: _ClassVar[int]
    OTHER_AFTER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    assigned_before: float
    assigned_after: float
    other_before: float
    other_after: float
    error: float
    def __init__(self, assigned_before: _Optional[float] = ..., assigned_after: _Optional[float] = ..., other_before: _Optional[float] = ..., other_after: _Optional[float] = ..., error: _Optional[float] = ...) -> None: ...

class Recomputed(_message.Message):
    __slots__ = ("is_equal", "difference", "member", "cause", "evidence")
    IS_EQUAL_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    is_equal: bool
    difference: float
    member: str
    cause: str
    evidence: str
    def __init__(self, is_equal: _Optional[bool] = ..., difference: _Optional[float] = ..., member: _Optional[str] = ..., cause: _Optional[str] = ..., evidence: _Optional[str] = ...) -> None: ...

class ShownFile(_message.Message):
    __slots__ = ("round", "name", "size")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    round: int
    name: str
    size: int
    def __init__(self, round: _Optional[int] = ..., name: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class JudgeRequest(_message.Message):
    __slots__ = ("judgements",)
    JUDGEMENTS_FIELD_NUMBER: _ClassVar[int]
    judgements: _containers.RepeatedCompositeFieldContainer[Judgement]
    def __init__(self, judgements: _Optional[_Iterable[_Union[Judgement, _Mapping]]] = ...) -> None: ...

class Scores(_message.Message):
    __slots__ = ("round", "scores")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    round: int
    scores: _containers.RepeatedCompositeFieldContainer[Score]
    def __init__(self, round: _Optional[int] = ..., scores: _Optional[_Iterable[_Union[Score, _Mapping]]] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("replica", "rating", "average", "synchronisation", "final", "evaluations", "excluded", "uptime", "reliability", "share")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    RATING_FIELD_NUMBER: _ClassVar[int]
    AVERAGE_FIELD_NUMBER: _ClassVar[int]
    SYNCHRONISATION_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    RELIABILITY_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    replica: str
    rating: float
    average: float
    synchronisation: float
    final: float
    evaluations: int
    excluded: str
    uptime: float
    reliability: float
    share: float
    def __init__(self, replica: _Optional[str] = ..., rating: _Optional[float] = ..., average: _Optional[float] = ..., synchronisation: _Optional[float] = ..., final: _Optional[float] = ..., evaluations: _Optional[int] = ..., excluded: _Optional[str] = ..., uptime: _Optional[float] = ..., reliability: _Optional[float] = ..., share: _Optional[float] = ...) -> None: ...

class RoundRecord(_message.Message):
    __slots__ = ("round", "contributions", "sha256", "late", "left_out", "tokens")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    round: int
    contributions: _containers.RepeatedCompositeFieldContainer[ContributionEntry]
    sha256: bytes
    late: _containers.RepeatedScalarFieldContainer[str]
    left_out: _containers.RepeatedScalarFieldContainer[str]
    tokens: int
    def __init__(self, round: _Optional[int] = ..., contributions: _Optional[_Iterable[_Union[ContributionEntry, _Mapping]]] = ..., sha256: _Optional[bytes] = ..., late: _Optional[_Iterable[str]] = ..., left_out: _Optional[_Iterable[str]] = ..., tokens: _Optional[int] = ...) -> None: ...

class AgreeRequest(_message.Message):
    __slots__ = ("configuration", "tokens")
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    configuration: str
    tokens: str
    def __init__(self, configuration: _Optional[str] = ..., tokens: _Optional[str] = ...) -> None: ...

class AgreeReply(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("version", "address", "rounds", "damaged", "process")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    version: int
    address: str
    rounds: _containers.RepeatedScalarFieldContainer[int]
    damaged: _containers.RepeatedScalarFieldContainer[str]
    process: str
    def __init__(self, version: _Optional[int] = ..., address: _Optional[str] = ..., rounds: _Optional[_Iterable[int]] = ..., damaged: _Optional[_Iterable[str]] = ..., process: _Optional[str] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    def __init__(self, incarnation: _Optional[int] = ...) -> None: ...

class LastRoundRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LastRoundReply(_message.Message):
    __slots__ = ("last_round", "changes")
    LAST_ROUND_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    last_round: int
    changes: str
    def __init__(self, last_round: _Optional[int] = ..., changes: _Optional[str] = ...) -> None: ...

class AssignRequest(_message.Message):
    __slots__ = ("holds", "address", "trained", "kept", "differs")
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    DIFFERS_FIELD_NUMBER: _ClassVar[int]
    holds: int
    address: str
    trained: int
    kept: KeptSteps
    differs: bool
    def __init__(self, holds: _Optional[int] = ..., address: _Optional[str] = ..., trained: _Optional[int] = ..., kept: _Optional[_Union[KeptSteps, _Mapping]] = ..., differs: _Optional[bool] = ...) -> None: ...

class AssignReply(_message.Message):
    __slots__ = ("round", "generation", "downstream", "heals", "is_first", "elapsed", "upstream", "trained", "changed", "upstream_holder", "downstream_holder", "shows", "committed", "resumption")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DOWNSTREAM_FIELD_NUMBER: _ClassVar[int]
    HEALS_FIELD_NUMBER: _ClassVar[int]
    IS_FIRST_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_FIELD_NUMBER: _ClassVar[int]
    UPSTREAM_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    UPSTREAM_HOLDER_FIELD_NUMBER: _ClassVar[int]
    DOWNSTREAM_HOLDER_FIELD_NUMBER: _ClassVar[int]
    SHOWS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    RESUMPTION_FIELD_NUMBER: _ClassVar[int]
    round: int
    generation: int
    downstream: str
    heals: bool
    is_first: bool
    elapsed: float
    upstream: str
    trained: int
    changed: int
    upstream_holder: int
    downstream_holder: int
    shows: Asked
    committed: bytes
    resumption: Resumption
    def __init__(self, round: _Optional[int] = ..., generation: _Optional[int] = ..., downstream: _Optional[str] = ..., heals: _Optional[bool] = ..., is_first: _Optional[bool] = ..., elapsed: _Optional[float] = ..., upstream: _Optional[str] = ..., trained: _Optional[int] = ..., changed: _Optional[int] = ..., upstream_holder: _Optional[int] = ..., downstream_holder: _Optional[int] = ..., shows: _Optional[_Union[Asked, _Mapping]] = ..., committed: _Optional[bytes] = ..., resumption: _Optional[_Union[Resumption, _Mapping]] = ...) -> None: ...

class KeptSteps(_message.Message):
    __slots__ = ("round", "generation", "applied", "has_next", "restarts", "changed")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    HAS_NEXT_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    round: int
    generation: int
    applied: int
    has_next: bool
    restarts: _containers.RepeatedCompositeFieldContainer[Restart]
    changed: int
    def __init__(self, round: _Optional[int] = ..., generation: _Optional[int] = ..., applied: _Optional[int] = ..., has_next: _Optional[bool] = ..., restarts: _Optional[_Iterable[_Union[Restart, _Mapping]]] = ..., changed: _Optional[int] = ...) -> None: ...

class Restart(_message.Message):
    __slots__ = ("slot", "step")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    slot: str
    step: int
    def __init__(self, slot: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class Resumption(_message.Message):
    __slots__ = ("step", "generation", "restarts")
    STEP_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    generation: int
    restarts: _containers.RepeatedCompositeFieldContainer[Restart]
    def __init__(self, step: _Optional[int] = ..., generation: _Optional[int] = ..., restarts: _Optional[_Iterable[_Union[Restart, _Mapping]]] = ...) -> None: ...

class Asked(_message.Message):
    __slots__ = ("round", "sequences")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    round: int
    sequences: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, round: _Optional[int] = ..., sequences: _Optional[_Iterable[int]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("round", "generation", "progress", "computes", "resumption")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_FIELD_NUMBER: _ClassVar[int]
    RESUMPTION_FIELD_NUMBER: _ClassVar[int]
    round: int
    generation: int
    progress: int
    computes: bool
    resumption: Resumption
    def __init__(self, round: _Optional[int] = ..., generation: _Optional[int] = ..., progress: _Optional[int] = ..., computes: _Optional[bool] = ..., resumption: _Optional[_Union[Resumption, _Mapping]] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("is_over", "suspended", "cause", "differs")
    IS_OVER_FIELD_NUMBER: _ClassVar[int]
    SUSPENDED_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    DIFFERS_FIELD_NUMBER: _ClassVar[int]
    is_over: bool
    suspended: int
    cause: str
    differs: bool
    def __init__(self, is_over: _Optional[bool] = ..., suspended: _Optional[int] = ..., cause: _Optional[str] = ..., differs: _Optional[bool] = ...) -> None: ...

class BrokenRequest(_message.Message):
    __slots__ = ("generation", "cause", "blames")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    BLAMES_FIELD_NUMBER: _ClassVar[int]
    generation: int
    cause: str
    blames: str
    def __init__(self, generation: _Optional[int] = ..., cause: _Optional[str] = ..., blames: _Optional[str] = ...) -> None: ...

class DiedRequest(_message.Message):
    __slots__ = ("member", "cause", "incarnation")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    member: str
    cause: str
    incarnation: int
    def __init__(self, member: _Optional[str] = ..., cause: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class NewestCheckpointRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NewestCheckpointReply(_message.Message):
    __slots__ = ("round", "names")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    round: int
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, round: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class StayRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ("names", "round", "reaches_store")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REACHES_STORE_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    round: int
    reaches_store: bool
    def __init__(self, names: _Optional[_Iterable[str]] = ..., round: _Optional[int] = ..., reaches_store: _Optional[bool] = ...) -> None: ...

class CheckpointHeader(_message.Message):
    __slots__ = ("names", "tensors", "url", "starts", "sha256")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorHeader]
    url: str
    starts: _containers.RepeatedScalarFieldContainer[int]
    sha256: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, names: _Optional[_Iterable[str]] = ..., tensors: _Optional[_Iterable[_Union[TensorHeader, _Mapping]]] = ..., url: _Optional[str] = ..., starts: _Optional[_Iterable[int]] = ..., sha256: _Optional[_Iterable[bytes]] = ...) -> None: ...

class BlobHeader(_message.Message):
    __slots__ = ("round", "replica", "block", "size", "generation", "steps", "url", "sha256", "commitment", "following", "resumption")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    COMMITMENT_FIELD_NUMBER: _ClassVar[int]
    FOLLOWING_FIELD_NUMBER: _ClassVar[int]
    RESUMPTION_FIELD_NUMBER: _ClassVar[int]
    round: int
    replica: str
    block: str
    size: int
    generation: int
    steps: int
    url: str
    sha256: bytes
    commitment: Commitment
    following: _containers.RepeatedCompositeFieldContainer[FollowingBlob]
    resumption: Resumption
    def __init__(self, round: _Optional[int] = ..., replica: _Optional[str] = ..., block: _Optional[str] = ..., size: _Optional[int] = ..., generation: _Optional[int] = ..., steps: _Optional[int] = ..., url: _Optional[str] = ..., sha256: _Optional[bytes] = ..., commitment: _Optional[_Union[Commitment, _Mapping]] = ..., following: _Optional[_Iterable[_Union[FollowingBlob, _Mapping]]] = ..., resumption: _Optional[_Union[Resumption, _Mapping]] = ...) -> None: ...

class FollowingBlob(_message.Message):
    __slots__ = ("replica", "size", "block")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    replica: str
    size: int
    block: str
    def __init__(self, replica: _Optional[str] = ..., size: _Optional[int] = ..., block: _Optional[str] = ...) -> None: ...

class DepositReply(_message.Message):
    __slots__ = ("exchange", "url")
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    exchange: str
    url: str
    def __init__(self, exchange: _Optional[str] = ..., url: _Optional[str] = ...) -> None: ...

class RecordRequest(_message.Message):
    __slots__ = ("round", "exchange")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    round: int
    exchange: str
    def __init__(self, round: _Optional[int] = ..., exchange: _Optional[str] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("round", "replica", "block", "reaches_store")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    REACHES_STORE_FIELD_NUMBER: _ClassVar[int]
    round: int
    replica: str
    block: str
    reaches_store: bool
    def __init__(self, round: _Optional[int] = ..., replica: _Optional[str] = ..., block: _Optional[str] = ..., reaches_store: _Optional[bool] = ...) -> None: ...

class HashReport(_message.Message):
    __slots__ = ("round", "sha256")
    class Sha256Entry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    round: int
    sha256: _containers.ScalarMap[str, bytes]
    def __init__(self, round: _Optional[int] = ..., sha256: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class InnerStep(_message.Message):
    __slots__ = ("replica", "round", "step", "loss", "gradient_norm", "learning_rate", "tokens", "is_last")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_NORM_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    replica: str
    round: int
    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    is_last: bool
    def __init__(self, replica: _Optional[str] = ..., round: _Optional[int] = ..., step: _Optional[int] = ..., loss: _Optional[float] = ..., gradient_norm: _Optional[float] = ..., learning_rate: _Optional[float] = ..., tokens: _Optional[int] = ..., is_last: _Optional[bool] = ...) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("replica", "round", "loss", "tokens")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    replica: str
    round: int
    loss: float
    tokens: int
    def __init__(self, replica: _Optional[str] = ..., round: _Optional[int] = ..., loss: _Optional[float] = ..., tokens: _Optional[int] = ...) -> None: ...

class LinkUse(_message.Message):
    __slots__ = ("link", "direction", "round", "payload_bytes", "wire_bytes", "messages", "busy_seconds")
    LINK_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    link: str
    direction: str
    round: int
    payload_bytes: int
    wire_bytes: int
    messages: int
    busy_seconds: float
    def __init__(self, link: _Optional[str] = ..., direction: _Optional[str] = ..., round: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., wire_bytes: _Optional[int] = ..., messages: _Optional[int] = ..., busy_seconds: _Optional[float] = ...) -> None: ...

class StateSaving(_message.Message):
    __slots__ = ("round", "failure")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    round: int
    failure: str
    def __init__(self, round: _Optional[int] = ..., failure: _Optional[str] = ...) -> None: ...

class MemberRound(_message.Message):
    __slots__ = ("round", "compute_seconds", "wait_seconds", "outer_seconds", "evaluation_seconds", "blocked_seconds", "wait_previous_seconds", "wait_next_seconds", "device_bytes")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OUTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_PREVIOUS_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_NEXT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    round: int
    compute_seconds: float
    wait_seconds: float
    outer_seconds: float
    evaluation_seconds: float
    blocked_seconds: float
    wait_previous_seconds: float
    wait_next_seconds: float
    device_bytes: int
    def __init__(self, round: _Optional[int] = ..., compute_seconds: _Optional[float] = ..., wait_seconds: _Optional[float] = ..., outer_seconds: _Optional[float] = ..., evaluation_seconds: _Optional[float] = ..., blocked_seconds: _Optional[float] = ..., wait_previous_seconds: _Optional[float] = ..., wait_next_seconds: _Optional[float] = ..., device_bytes: _Optional[int] = ...) -> None: ...

class Computes(_message.Message):
    __slots__ = ("device",)
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    device: str
    def __init__(self, device: _Optional[str] = ...) -> None: ...

class MeasuredLine(_message.Message):
    __slots__ = ("up", "down")
    UP_FIELD_NUMBER: _ClassVar[int]
    DOWN_FIELD_NUMBER: _ClassVar[int]
    up: float
    down: float
    def __init__(self, up: _Optional[float] = ..., down: _Optional[float] = ...) -> None: ...

class Activity(_message.Message):
    __slots__ = ("doing",)
    DOING_FIELD_NUMBER: _ClassVar[int]
    doing: Doing
    def __init__(self, doing: _Optional[_Union[Doing, str]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("cause", "consequence")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    CONSEQUENCE_FIELD_NUMBER: _ClassVar[int]
    cause: str
    consequence: bool
    def __init__(self, cause: _Optional[str] = ..., consequence: _Optional[bool] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("sender", "reason", "kind", "count")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    sender: str
    reason: str
    kind: str
    count: int
    def __init__(self, sender: _Optional[str] = ..., reason: _Optional[str] = ..., kind: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class RoundVerified(_message.Message):
    __slots__ = ("round", "replica", "parameters_sha256")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_SHA256_FIELD_NUMBER: _ClassVar[int]
    round: int
    replica: str
    parameters_sha256: bytes
    def __init__(self, round: _Optional[int] = ..., replica: _Optional[str] = ..., parameters_sha256: _Optional[bytes] = ...) -> None: ...

class Joined(_message.Message):
    __slots__ = ("address", "incarnation")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: int
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class MembershipEvent(_message.Message):
    __slots__ = ("what", "slot", "replica", "incarnation", "round", "cause", "scale", "has_left", "step")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    HAS_LEFT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    what: MembershipEventKind
    slot: str
    replica: str
    incarnation: int
    round: int
    cause: str
    scale: float
    has_left: bool
    step: int
    def __init__(self, what: _Optional[_Union[MembershipEventKind, str]] = ..., slot: _Optional[str] = ..., replica: _Optional[str] = ..., incarnation: _Optional[int] = ..., round: _Optional[int] = ..., cause: _Optional[str] = ..., scale: _Optional[float] = ..., has_left: _Optional[bool] = ..., step: _Optional[int] = ...) -> None: ...

class Begun(_message.Message):
    __slots__ = ("last_round", "damaged", "changes", "note")
    LAST_ROUND_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    last_round: int
    damaged: _containers.RepeatedScalarFieldContainer[str]
    changes: str
    note: str
    def __init__(self, last_round: _Optional[int] = ..., damaged: _Optional[_Iterable[str]] = ..., changes: _Optional[str] = ..., note: _Optional[str] = ...) -> None: ...

class Over(_message.Message):
    __slots__ = ("round", "rounds", "finishing")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    FINISHING_FIELD_NUMBER: _ClassVar[int]
    round: int
    rounds: int
    finishing: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, round: _Optional[int] = ..., rounds: _Optional[int] = ..., finishing: _Optional[_Iterable[str]] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("awaited", "round", "missing", "seconds", "store_error")
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    STORE_ERROR_FIELD_NUMBER: _ClassVar[int]
    awaited: Awaited
    round: int
    missing: _containers.RepeatedCompositeFieldContainer[Missing]
    seconds: float
    store_error: str
    def __init__(self, awaited: _Optional[_Union[Awaited, str]] = ..., round: _Optional[int] = ..., missing: _Optional[_Iterable[_Union[Missing, _Mapping]]] = ..., seconds: _Optional[float] = ..., store_error: _Optional[str] = ...) -> None: ...

class Reading(_message.Message):
    __slots__ = ("what", "share")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    what: str
    share: float
    def __init__(self, what: _Optional[str] = ..., share: _Optional[float] = ...) -> None: ...

class SoFar(_message.Message):
    __slots__ = ("seconds", "training_seconds", "last_round", "credits", "carried", "refusals")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRAINING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LAST_ROUND_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    CARRIED_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    training_seconds: float
    last_round: int
    credits: _containers.RepeatedCompositeFieldContainer[Credit]
    carried: _containers.RepeatedCompositeFieldContainer[LinkUse]
    refusals: int
    def __init__(self, seconds: _Optional[float] = ..., training_seconds: _Optional[float] = ..., last_round: _Optional[int] = ..., credits: _Optional[_Iterable[_Union[Credit, _Mapping]]] = ..., carried: _Optional[_Iterable[_Union[LinkUse, _Mapping]]] = ..., refusals: _Optional[int] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("replica", "included", "missed", "tokens", "bytes")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    INCLUDED_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    replica: str
    included: int
    missed: int
    tokens: int
    bytes: int
    def __init__(self, replica: _Optional[str] = ..., included: _Optional[int] = ..., missed: _Optional[int] = ..., tokens: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class Missing(_message.Message):
    __slots__ = ("member", "silent_seconds", "computes")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    SILENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_FIELD_NUMBER: _ClassVar[int]
    member: str
    silent_seconds: float
    computes: bool
    def __init__(self, member: _Optional[str] = ..., silent_seconds: _Optional[float] = ..., computes: _Optional[bool] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("time", "member", "inner_step", "evaluation", "link_use", "member_round", "failure", "refusal", "round_closed", "round_verified", "joined", "finished", "begun", "waiting", "reading", "membership_event", "over", "state_saving", "computes", "activity", "scores", "judged", "measured_line", "so_far", "sent")
    TIME_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    INNER_STEP_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    LINK_USE_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ROUND_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    ROUND_CLOSED_FIELD_NUMBER: _ClassVar[int]
    ROUND_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    READING_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_EVENT_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    STATE_SAVING_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    JUDGED_FIELD_NUMBER: _ClassVar[int]
    MEASURED_LINE_FIELD_NUMBER: _ClassVar[int]
    SO_FAR_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    time: float
    member: str
    inner_step: InnerStep
    evaluation: Evaluation
    link_use: LinkUse
    member_round: MemberRound
    failure: Failure
    refusal: Refusal
    round_closed: RoundRecord
    round_verified: RoundVerified
    joined: Joined
    finished: Nothing
    begun: Begun
    waiting: Waiting
    reading: Reading
    membership_event: MembershipEvent
    over: Over
    state_saving: StateSaving
    computes: Computes
    activity: Activity
    scores: Scores
    judged: Judgement
    measured_line: MeasuredLine
    so_far: SoFar
    sent: float
    def __init__(self, time: _Optional[float] = ..., member: _Optional[str] = ..., inner_step: _Optional[_Union[InnerStep, _Mapping]] = ..., evaluation: _Optional[_Union[Evaluation, _Mapping]] = ..., link_use: _Optional[_Union[LinkUse, _Mapping]] = ..., member_round: _Optional[_Union[MemberRound, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., round_closed: _Optional[_Union[RoundRecord, _Mapping]] = ..., round_verified: _Optional[_Union[RoundVerified, _Mapping]] = ..., joined: _Optional[_Union[Joined, _Mapping]] = ..., finished: _Optional[_Union[Nothing, _Mapping]] = ..., begun: _Optional[_Union[Begun, _Mapping]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ..., reading: _Optional[_Union[Reading, _Mapping]] = ..., membership_event: _Optional[_Union[MembershipEvent, _Mapping]] = ..., over: _Optional[_Union[Over, _Mapping]] = ..., state_saving: _Optional[_Union[StateSaving, _Mapping]] = ..., computes: _Optional[_Union[Computes, _Mapping]] = ..., activity: _Optional[_Union[Activity, _Mapping]] = ..., scores: _Optional[_Union[Scores, _Mapping]] = ..., judged: _Optional[_Union[Judgement, _Mapping]] = ..., measured_line: _Optional[_Union[MeasuredLine, _Mapping]] = ..., so_far: _Optional[_Union[SoFar, _Mapping]] = ..., sent: _Optional[float] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("reports",)
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    reports: _containers.RepeatedCompositeFieldContainer[Report]
    def __init__(self, reports: _Optional[_Iterable[_Union[Report, _Mapping]]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("members", "so_far")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SO_FAR_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedScalarFieldContainer[str]
    so_far: bool
    def __init__(self, members: _Optional[_Iterable[str]] = ..., so_far: _Optional[bool] = ...) -> None: ...
