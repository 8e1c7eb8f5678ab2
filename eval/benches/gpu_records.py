"""What the GPU bench writes down."""

import msgspec

from eval.manifest import MachineManifest


class PrefillRate(msgspec.Struct, frozen=True, kw_only=True):
    """Attention of one prompt."""

    backend: str
    num_tokens: int
    tflops: float
    share_of_product: float


class DecodeRate(msgspec.Struct, frozen=True, kw_only=True):
    """Attention of one step of decodes."""

    backend: str
    batch_size: int
    num_context_tokens: int
    gb_per_s: float
    share_of_copy: float


class ModelRate(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt through the whole model."""

    backend: str
    num_tokens: int
    tokens_per_s: float
    ttft_ms: float
    tflops: float


class GpuReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the bench."""

    manifest: MachineManifest
    gpu: str
    product_tflops: float
    copy_gb_per_s: float
    error_over_plain: dict[str, float]
    """Largest error of a backend over that of plain torch."""
    prefill: list[PrefillRate]
    decode: list[DecodeRate]
    model: list[ModelRate]
    skipped: list[str]
    """What the time limit left out."""
