"""How the next token of one sequence is chosen, and when the sequence ends."""

import msgspec

MAX_TOP_LOGPROBS = 20
MAX_ABS_LOGIT_BIAS = 100.0


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling and stopping of one request. Ranges are checked on construction and name the OpenAI field.

    The logits go through, in this order: grammar, ``min_tokens``, ``logit_bias``, penalties, temperature, ``min_p``,
    ``top_k``, ``top_p``.
    """

    max_tokens: int = 256
    """Most output tokens; the caller clamps it to the room left in the window."""
    min_tokens: int = 0
    """Output tokens before which neither an end-of-sequence id, a stop token id nor a stop string ends the output."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Sample among the k most likely tokens; 0 or -1 is all."""
    top_p: float = 1.0
    """Sample among the smallest set of tokens whose probabilities add up to top_p."""
    min_p: float = 0.0
    """Sample among tokens at least this many times as likely as the most likely one."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token that the output holds already."""
    frequency_penalty: float = 0.0
    """Subtracted as often as the output holds the token."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens that prompt or output hold; 1 is none."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these token ids."""
    seed: int | None = None
    """Same seed, prompt and parameters: same tokens, whatever else is in the batch."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output besides the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence id."""
    top_logprobs: int | None = None
    """Say the log probability of every output token, and of so many most likely ones beside it; ``None`` is neither.

    They are the model's own: before penalties, bias, grammar and temperature.
    """
    json_schema: str | None = None
    """A JSON schema, as JSON, that the output follows; see ``engine.grammar``."""
    visible_tokens: tuple[str, ...] = ()
    """Control tokens that are text of the output, by what they look like: those that mark calls of tools."""

    @property
    def needs_history(self) -> bool:
        """The choice depends on which tokens came before, beyond what the logits say."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    @property
    def changes_logits(self) -> bool:
        """The logits are changed before a token is chosen from them."""
        return self.needs_history or bool(self.logit_bias) or bool(self.min_tokens) or self.json_schema is not None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must not be negative, got {self.min_tokens}")
        if not 0.0 <= self.temperature <= 2.0:
            raise ValueError(f"temperature must be between 0 and 2, got {self.temperature}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be -1, 0 or positive, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be between 0 and 1, got {self.min_p}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise ValueError(f"{name} must be between -2 and 2, got {getattr(self, name)}")
        if not 0.0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty must be positive, got {self.repetition_penalty}")
        for token_id, bias in self.logit_bias.items():
            if token_id < 0:
                raise ValueError(f"logit_bias must name token ids of at least 0, got {token_id}")
            if not -MAX_ABS_LOGIT_BIAS <= bias <= MAX_ABS_LOGIT_BIAS:
                raise ValueError(f"logit_bias must be between -100 and 100, got {bias} for token {token_id}")
        if any(not text for text in self.stop):
            raise ValueError("stop must not hold an empty string")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}, got {self.top_logprobs}")
        if self.json_schema is not None and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise ValueError(f"{name} cannot be combined with response_format: the output ends where the JSON does")
