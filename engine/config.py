"""Engine configuration: one Struct per concern, read once at the edge and passed to constructors."""

from typing import Literal

import msgspec

from engine.tool_parsers import ToolParserName

DType = Literal["auto", "fp32", "bf16", "fp16"]
QuantizationName = Literal["none", "int8", "fp8"]
KVCacheDType = Literal["auto", "int8", "fp8"]
AttentionBackendName = Literal["auto", "flash", "triton", "native", "tiled", "sdpa", "reference"]
PolicyName = Literal["token_budget", "fixed_count", "length_bucket"]
KVRole = Literal["both", "prefill", "decode"]
TransferFailurePolicy = Literal["fail", "recompute"]
ToolParserSetting = Literal["auto", ToolParserName]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which weights to serve and how."""

    model: str = "smollm2-135m-instruct"
    """A name of the catalogue (``firsttoken models list``), a local folder, a ``.gguf`` file or a Hugging Face id."""
    dtype: DType = "auto"
    """Weights, activations and KV cache; ``auto`` is bf16 where the processor computes it natively, else fp32."""
    quantization: QuantizationName = "none"
    """``int8``: the layers' weights per output channel, their inputs per token; the output projection stays as it is. A
    loss that depends on the model buys up to twice the speed of the matrix products on a CPU. ``fp8``: the layers'
    weights per output channel as 8-bit floats, widened in every product: half the memory, no speed. Both need a passed
    record of ``firsttoken eval quantization``."""
    force_quantization: bool = False
    """Serve a quantized format, weights or KV cache, although it has no record or one that failed."""
    attention_backend: AttentionBackendName = "auto"
    """Which kernels compute attention; ``auto`` takes the fastest that this machine has."""
    max_model_len: int | None = None
    """Window in tokens, prompt and output together; ``None`` takes the model's own."""
    tool_call_parser: ToolParserSetting = "auto"
    """The format in which the model writes calls of tools; ``auto`` takes the one that its chat template teaches."""

    def __post_init__(self) -> None:
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, got {self.max_model_len}")


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Paged KV cache."""

    block_size: int = 16
    """Tokens per KV block."""
    num_blocks: int | None = None
    """Size of the pool in blocks; ``None`` derives it from the memory."""
    memory_gib: float | None = None
    """Memory for KV blocks in GiB, used when ``num_blocks`` is not given; ``None`` takes ``free_memory_share``."""
    free_memory_share: float = 0.3
    """Share, 0 to 1, of what is free after loading the weights; never more than ``max_num_seqs`` full windows need."""
    kv_cache_dtype: KVCacheDType = "auto"
    """``auto`` is the dtype of the computation. ``int8``, ``fp8``: 8 bits and a scale per token and head, a bit more
    than half of bf16's memory, for time (blocks are widened when read) and a loss that depends on the model; needs a
    passed record of ``firsttoken eval quantization``."""
    enable_prefix_caching: bool = True
    """Share blocks of equal prefixes within a tenant."""
    public_prefixes: tuple[str, ...] = ()
    """System messages that hold nothing private: their blocks are shared by all tenants. What follows them is not."""
    second_tier: Literal["none", "memory", "disk"] = "none"
    """Where evicted blocks are kept for later: nowhere, in memory of the host, or in a file that is mapped."""
    second_tier_gib: float = 4.0
    """Size of the second tier in GiB."""
    second_tier_folder: str | None = None
    """Folder of the file; ``None`` is the system's folder for temporary files. The file has no name and ends with the
    process."""
    verify_isolation: bool = True
    """Prove at start, with the real model, that a tenant hits its own prefix and misses another's."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {self.num_blocks}")
        if self.memory_gib is not None and self.memory_gib <= 0:
            raise ValueError(f"memory_gib must be positive, got {self.memory_gib}")
        if not 0.0 < self.free_memory_share <= 1.0:
            raise ValueError(f"free_memory_share must be above 0 and at most 1, got {self.free_memory_share}")
        if any(not text.strip() for text in self.public_prefixes):
            raise ValueError("public_prefixes must not hold an empty text")
        if self.second_tier_gib <= 0:
            raise ValueError(f"second_tier_gib must be positive, got {self.second_tier_gib}")


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a step computes and in which order."""

    policy: PolicyName = "token_budget"
    """``token_budget``: chunks under a token budget, short ones first, all age. ``fixed_count``: whole prompts, so many
    sequences at once. ``length_bucket``: whole prompts of similar length together. See ``engine.policies``."""
    max_num_batched_tokens: int = 512
    """Token budget of one step: decode tokens and prefill chunks together. A step is the least time between two tokens
    of a stream and before a cancelled request is let go: half a second on two cores for the default."""
    max_num_seqs: int = 64
    """Most sequences running at once."""
    long_prefill_token_threshold: int = 0
    """Most tokens one sequence may prefill in one step (the chunk size); 0 is no limit but the token budget."""
    max_decode_gap_ms: float | None = None
    """Longest step, in ms and as predicted, while streams decode; a prefill chunk shrinks to it, but never below a
    block. ``None`` leaves the gap between two tokens to the token budget."""
    fixed_count: int = 8
    """Sequences at once under the policy ``fixed_count``."""
    ageing_ms_per_token: float = 2.0
    """Patience of a prompt for each of its tokens, in ms: who has waited longest in terms of it goes first, so short
    ones overtake long ones, and nobody starves. It is weighed against deadlines; 0 is in order of arrival."""
    priority_ageing_s: float = 10.0
    """Waiting so long lifts a sequence by one priority."""
    fair_tenants: bool = True
    """Among sequences of one priority, the tenant that was served the fewest tokens comes first."""
    max_num_waiting: int = 512
    """Most sequences waiting; a further one is refused at once."""

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_num_waiting", "fixed_count"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.long_prefill_token_threshold < 0:
            raise ValueError(
                f"long_prefill_token_threshold must be 0 (off) or positive, got {self.long_prefill_token_threshold}"
            )
        if self.max_decode_gap_ms is not None and self.max_decode_gap_ms <= 0:
            raise ValueError(f"max_decode_gap_ms must be positive, got {self.max_decode_gap_ms}")
        if self.ageing_ms_per_token < 0:
            raise ValueError(f"ageing_ms_per_token must not be negative, got {self.ageing_ms_per_token}")
        if self.priority_ageing_s <= 0:
            raise ValueError(f"priority_ageing_s must be positive, got {self.priority_ageing_s}")

    @property
    def max_chunk_tokens(self) -> int:
        """Most tokens of one sequence in one step under the token budget."""
        return min(self.long_prefill_token_threshold or self.max_num_batched_tokens, self.max_num_batched_tokens)


class AdmissionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is refused at once instead of being queued. ``None`` is no limit."""

    max_input_tokens: int | None = None
    """Longest prompt; the window is the limit in any case."""
    max_num_waiting_tokens: int | None = 262_144
    """Most prompt tokens waiting, of all tenants together."""
    max_tenant_waiting_tokens: int | None = None
    """Most prompt tokens that one tenant may have waiting."""
    kv_watermark: float = 1.0
    """Share of KV blocks in use, 0 to 1, above which nothing new is taken in; 1 is off."""
    refuse_missed_deadlines: bool = True
    """Refuse a request whose predicted time to the first token is longer than its deadline."""
    max_tokens_overflow: Literal["clamp", "refuse"] = "clamp"
    """What happens to a ``max_tokens`` that the window has no room for: reduced, which the output says, or refused."""

    def __post_init__(self) -> None:
        for name in ("max_input_tokens", "max_num_waiting_tokens", "max_tenant_waiting_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0.0 < self.kv_watermark <= 1.0:
            raise ValueError(f"kv_watermark must be above 0 and at most 1, got {self.kv_watermark}")


class KVTransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prefill and decode in two engines, and the KV blocks that go from the one to the other."""

    role: KVRole = "both"
    """``both`` computes both phases itself and transfers nothing. ``prefill`` offers the blocks of prompts (a KV
    producer), ``decode`` fetches them (a KV consumer); either still serves ordinary requests as well."""
    endpoint: str = "tcp://127.0.0.1:0"
    """Where a prefill engine is asked for blocks: zmq, ``tcp`` (port 0 takes a free one) or ``ipc``. What goes over it
    is not encrypted: a network that others share is no place for it."""
    advertised_endpoint: str | None = None
    """The same as decode engines see it, where that differs; ``None`` is the endpoint itself."""
    kv_transfer_timeout_ms: float = 5000.0
    """Longest wait of a decode engine for the blocks of one prompt, from its arrival, other transfers included."""
    on_transfer_failure: TransferFailurePolicy = "fail"
    """What follows when the blocks do not come: ``fail`` ends the request with an error, which the router may try
    again; ``recompute`` computes the prompt in the decode engine, where it slows down the streams of others."""
    lease_ms: float = 30_000.0
    """Longest time for which a prefill engine keeps the blocks of an offer that nobody fetches."""
    max_leased_share: float = 0.5
    """Most of the pool, 0 to 1, that offers may hold; a prompt beyond it is computed, but not offered."""
    min_transfer_tokens: int = 64
    """Where fewer tokens than this are missing, they are computed at once instead of being fetched."""
    kv_buffer_size: int = 1 << 30
    """Bytes of blocks that a decode engine may have on the way or waiting for a place in its pool. Further transfers
    queue; one that is larger than this comes alone."""

    def __post_init__(self) -> None:
        for name in ("kv_transfer_timeout_ms", "lease_ms"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0.0 < self.max_leased_share <= 1.0:
            raise ValueError(f"max_leased_share must be above 0 and at most 1, got {self.max_leased_share}")
        if self.min_transfer_tokens < 0:
            raise ValueError(f"min_transfer_tokens must not be negative, got {self.min_transfer_tokens}")
        if self.kv_buffer_size < 1:
            raise ValueError(f"kv_buffer_size must be at least 1, got {self.kv_buffer_size}")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the engine process is started with."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    admission: AdmissionConfig = AdmissionConfig()
    kv_transfer: KVTransferConfig = KVTransferConfig()
    num_threads: int | None = None
    """Torch threads of the engine process; ``None`` takes one per core."""

    def __post_init__(self) -> None:
        if self.kv_transfer.role != "both" and not self.cache.enable_prefix_caching:
            raise ValueError(
                f"kv_transfer.role {self.kv_transfer.role!r} needs cache.enable_prefix_caching: "
                "blocks are offered and found by the keys of the prefix cache"
            )
