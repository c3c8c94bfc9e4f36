import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_STATE_UNSPECIFIED: _ClassVar[EngineState]
    ENGINE_STATE_STARTING: _ClassVar[EngineState]
    ENGINE_STATE_READY: _ClassVar[EngineState]
    ENGINE_STATE_SUSPECT: _ClassVar[EngineState]
    ENGINE_STATE_DEAD: _ClassVar[EngineState]
    ENGINE_STATE_BACKOFF: _ClassVar[EngineState]
    ENGINE_STATE_FAILED: _ClassVar[EngineState]
    ENGINE_STATE_STOPPING: _ClassVar[EngineState]
ENGINE_STATE_UNSPECIFIED: EngineState
ENGINE_STATE_STARTING: EngineState
ENGINE_STATE_READY: EngineState
ENGINE_STATE_SUSPECT: EngineState
ENGINE_STATE_DEAD: EngineState
ENGINE_STATE_BACKOFF: EngineState
ENGINE_STATE_FAILED: EngineState
ENGINE_STATE_STOPPING: EngineState

class GetModelInfoRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model", "model_type", "num_parameters", "vocab_size", "eos_token_ids", "limits", "sampling_defaults", "capabilities", "dtype")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_type: str
    num_parameters: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    limits: Limits
    sampling_defaults: SamplingDefaults
    capabilities: Capabilities
    dtype: str
    def __init__(self, model: _Optional[str] = ..., model_type: _Optional[str] = ..., num_parameters: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., sampling_defaults: _Optional[_Union[SamplingDefaults, _Mapping]] = ..., capabilities: _Optional[_Union[Capabilities, _Mapping]] = ..., dtype: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_model_len", "max_prompt_tokens", "max_output_tokens", "max_logprobs", "max_stop_strings", "max_stop_string_bytes", "max_stop_token_ids", "max_request_bytes", "max_chat_messages", "max_sequences", "max_guide_bytes", "max_guide_choices", "max_prompt_logprob_entries")
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_STRING_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_CHAT_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_GUIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_GUIDE_CHOICES_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_LOGPROB_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    max_model_len: int
    max_prompt_tokens: int
    max_output_tokens: int
    max_logprobs: int
    max_stop_strings: int
    max_stop_string_bytes: int
    max_stop_token_ids: int
    max_request_bytes: int
    max_chat_messages: int
    max_sequences: int
    max_guide_bytes: int
    max_guide_choices: int
    max_prompt_logprob_entries: int
    def __init__(self, max_model_len: _Optional[int] = ..., max_prompt_tokens: _Optional[int] = ..., max_output_tokens: _Optional[int] = ..., max_logprobs: _Optional[int] = ..., max_stop_strings: _Optional[int] = ..., max_stop_string_bytes: _Optional[int] = ..., max_stop_token_ids: _Optional[int] = ..., max_request_bytes: _Optional[int] = ..., max_chat_messages: _Optional[int] = ..., max_sequences: _Optional[int] = ..., max_guide_bytes: _Optional[int] = ..., max_guide_choices: _Optional[int] = ..., max_prompt_logprob_entries: _Optional[int] = ...) -> None: ...

class SamplingDefaults(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ...) -> None: ...

class Capabilities(_message.Message):
    __slots__ = ("chat", "multiple_sequences", "prompt_logprobs", "guided", "resume_on_engine_death", "time_limits", "stream_interval")
    CHAT_FIELD_NUMBER: _ClassVar[int]
    MULTIPLE_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GUIDED_FIELD_NUMBER: _ClassVar[int]
    RESUME_ON_ENGINE_DEATH_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMITS_FIELD_NUMBER: _ClassVar[int]
    STREAM_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    chat: bool
    multiple_sequences: bool
    prompt_logprobs: bool
    guided: bool
    resume_on_engine_death: bool
    time_limits: bool
    stream_interval: bool
    def __init__(self, chat: bool = ..., multiple_sequences: bool = ..., prompt_logprobs: bool = ..., guided: bool = ..., resume_on_engine_death: bool = ..., time_limits: bool = ..., stream_interval: bool = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "start_time", "uptime", "engines")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    version: str
    start_time: _timestamp_pb2.Timestamp
    uptime: _duration_pb2.Duration
    engines: _containers.RepeatedCompositeFieldContainer[EngineInfo]
    def __init__(self, version: _Optional[str] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., engines: _Optional[_Iterable[_Union[EngineInfo, _Mapping]]] = ...) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("index", "state", "pid", "device", "attention_backend", "attention_backend_note", "block_size", "num_kv_blocks", "startup", "deaths", "last_death_id", "load")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_NOTE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STARTUP_FIELD_NUMBER: _ClassVar[int]
    DEATHS_FIELD_NUMBER: _ClassVar[int]
    LAST_DEATH_ID_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    index: int
    state: EngineState
    pid: int
    device: str
    attention_backend: str
    attention_backend_note: str
    block_size: int
    num_kv_blocks: int
    startup: _duration_pb2.Duration
    deaths: int
    last_death_id: str
    load: EngineLoad
    def __init__(self, index: _Optional[int] = ..., state: _Optional[_Union[EngineState, str]] = ..., pid: _Optional[int] = ..., device: _Optional[str] = ..., attention_backend: _Optional[str] = ..., attention_backend_note: _Optional[str] = ..., block_size: _Optional[int] = ..., num_kv_blocks: _Optional[int] = ..., startup: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., deaths: _Optional[int] = ..., last_death_id: _Optional[str] = ..., load: _Optional[_Union[EngineLoad, _Mapping]] = ...) -> None: ...

class EngineLoad(_message.Message):
    __slots__ = ("running", "waiting", "kv_blocks_used", "streams", "generated_tokens_total", "step")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    kv_blocks_used: int
    streams: int
    generated_tokens_total: int
    step: _duration_pb2.Duration
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_blocks_used: _Optional[int] = ..., streams: _Optional[int] = ..., generated_tokens_total: _Optional[int] = ..., step: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("running", "waiting", "waiting_tokens", "kv_blocks_used", "kv_blocks_total", "preemptions_total", "generated_tokens_total", "live_calls")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    LIVE_CALLS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    waiting_tokens: int
    kv_blocks_used: int
    kv_blocks_total: int
    preemptions_total: int
    generated_tokens_total: int
    live_calls: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., kv_blocks_used: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., preemptions_total: _Optional[int] = ..., generated_tokens_total: _Optional[int] = ..., live_calls: _Optional[int] = ...) -> None: ...
