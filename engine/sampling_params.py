"""How the next token of one sequence is chosen, and when the sequence ends."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling and stopping of one request. Ranges are checked on construction and name the OpenAI field."""

    max_tokens: int = 256
    """Most output tokens; the caller clamps it to the room left in the window."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Sample among the k most likely tokens; 0 or -1 is all."""
    top_p: float = 1.0
    """Sample among the smallest set of tokens whose probabilities add up to top_p."""
    seed: int | None = None
    """Same seed, prompt and parameters: same tokens, whatever else is in the batch."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output besides the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence id."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0.0 <= self.temperature <= 2.0:
            raise ValueError(f"temperature must be between 0 and 2, got {self.temperature}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be -1, 0 or positive, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if any(not text for text in self.stop):
            raise ValueError("stop must not hold an empty string")
