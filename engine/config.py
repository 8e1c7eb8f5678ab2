"""Engine configuration: one Struct per concern, read once at the edge and passed to constructors."""

from typing import Literal

import msgspec

DType = Literal["auto", "fp32", "bf16", "fp16"]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which weights to serve and how."""

    model: str = "smollm2-135m-instruct"
    """A name of the catalogue (``firsttoken models list``), a local folder, a ``.gguf`` file or a Hugging Face id."""
    dtype: DType = "auto"
    """Weights, activations and KV cache; ``auto`` is bf16 where the processor computes it natively, else fp32."""
    max_model_len: int | None = None
    """Window in tokens, prompt and output together; ``None`` takes the model's own."""

    def __post_init__(self) -> None:
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, got {self.max_model_len}")


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Paged KV cache."""

    block_size: int = 16
    """Tokens per KV block."""
    num_blocks: int | None = None
    """Size of the pool in blocks; ``None`` derives it from ``memory_gib``."""
    memory_gib: float = 1.5
    """Memory for KV blocks in GiB, used when ``num_blocks`` is not given."""
    enable_prefix_caching: bool = True
    """Share blocks of equal prefixes within a tenant."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {self.num_blocks}")
        if self.memory_gib <= 0:
            raise ValueError(f"memory_gib must be positive, got {self.memory_gib}")


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Token-budget scheduling."""

    max_num_batched_tokens: int = 512
    """Token budget of one step: decode tokens and prefill chunks together. A step is the least time between two tokens
    of a stream and before a cancelled request is let go: half a second on two cores for the default."""
    max_num_seqs: int = 64
    """Most sequences running at once."""
    long_prefill_token_threshold: int = 0
    """Most tokens one sequence may prefill in one step (the chunk size); 0 is no limit but the token budget."""
    max_num_waiting: int = 512
    """Most sequences waiting; a further one is refused at once."""

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < 1:
            raise ValueError(f"max_num_batched_tokens must be at least 1, got {self.max_num_batched_tokens}")
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")
        if self.long_prefill_token_threshold < 0:
            raise ValueError(
                f"long_prefill_token_threshold must be 0 (off) or positive, got {self.long_prefill_token_threshold}"
            )
        if self.max_num_waiting < 1:
            raise ValueError(f"max_num_waiting must be at least 1, got {self.max_num_waiting}")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the engine process is started with."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    num_threads: int | None = None
    """Torch threads of the engine process; ``None`` takes one per core."""
