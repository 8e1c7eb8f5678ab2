"""What the gateway needs of whatever generates the answers."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from app.backend_settings import BackendSettings
from app.waterfall import Timeline
from engine.outputs import EngineStats, ModelInfo, RequestOutput
from engine.sampling_params import SamplingParams


class PromptEncoder(Protocol):
    """Chat template and tokenizer of the served model. Must be safe to call from several threads."""

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **kwargs: Any
    ) -> list[int]:
        """Token ids of the rendered prompt, generation prompt included. Raises ``ValueError`` for odd messages."""
        ...

    def count_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **kwargs: Any
    ) -> int:
        """Length of ``encode_chat`` of the same arguments."""
        ...

    def count_text(self, text: str) -> int:
        """Tokens of a text on its own."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text on its own; what looks like a special token is ordinary text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, control tokens included. Raises ``GatewayError`` where no tokenizer is known."""
        ...

    @property
    def counting(self) -> str:
        """``exact``, or in which way the counts are never too low."""
        ...

    @property
    def max_token_bytes(self) -> int:
        """UTF-8 bytes of the longest token: ``n`` bytes of text have at least ``n / max_token_bytes`` tokens."""
        ...


@runtime_checkable
class Reconfigurable(Protocol):
    """A backend that takes other settings while it runs."""

    def check(self, settings: BackendSettings) -> None:
        """Raises ``ConfigError`` for settings that it could not take."""
        ...

    def use(self, settings: BackendSettings) -> None:
        """Takes settings that ``check`` has passed; requests that run go on as they are."""
        ...


@dataclass(frozen=True, slots=True)
class BackendRequest:
    """One prompt to answer."""

    request_id: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    sampling: SamplingParams
    cache_salt: str
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    priority: int = 0
    """A higher one goes first."""
    deadline_ms: float | None = None
    """Longest useful time to the first token; what cannot keep it is refused or ends with an error."""
    timeline: Timeline | None = None
    """Where to note what happens before the engine gets the prompt."""


class Backend(Protocol):
    """Generates answers; one per gateway process, shared by all requests."""

    async def start(self) -> None:
        """Makes the backend ready. Raises an ``EngineError`` that says what is missing."""
        ...

    async def close(self) -> None:
        """Ends it and everything it started; may be called twice."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether a request would be served now."""
        ...

    @property
    def info(self) -> ModelInfo:
        """What is served."""
        ...

    @property
    def encoder(self) -> PromptEncoder:
        """Counts and encodes exactly as the served model does."""
        ...

    @property
    def stats(self) -> EngineStats | None:
        """The latest known state of the engine."""
        ...

    def generate(self, request: BackendRequest) -> AsyncIterator[RequestOutput]:
        """The outputs of one request as they come; the last one carries ``finish_reason``.

        Closing the iterator, and cancelling a task that waits for it, frees what the request holds.
        Raises ``AdmissionError``, ``EngineDeadError``, ``PromptTooLongError`` or ``OutputTooLongError``.
        """
        ...
