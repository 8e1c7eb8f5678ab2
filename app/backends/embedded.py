"""The embedded engine as a backend: prompts are encoded here, computed in the engine's own process."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec

from app.backends.base import BackendRequest, PromptEncoder
from app.settings import DisaggregationSettings
from app.waterfall import TimedJob
from app.workers import WorkerPool
from engine.chat_template import ChatTokenizer
from engine.config import EngineConfig, KVRole
from engine.disaggregated_client import DisaggregatedClient
from engine.errors import AdmissionError, EngineDeadError, PromptTooLongError
from engine.outputs import EngineStats, GenerateRequest, ModelInfo, RequestOutput
from engine.process import EngineClient
from engine.process_logs import LogStyle


class ChatEncoder:
    """The engine's chat tokenizer as the gateway sees it."""

    counting = "exact"

    def __init__(self, chat: ChatTokenizer) -> None:
        self._chat = chat

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **kwargs: Any
    ) -> list[int]:
        """Token ids of the rendered prompt."""
        return self._chat.encode_chat(messages, tools, **kwargs)

    def count_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **kwargs: Any
    ) -> int:
        """Exact tokens of the rendered prompt."""
        return self._chat.count_prompt(messages, tools, **kwargs)

    def count_text(self, text: str) -> int:
        """Tokens of a text on its own."""
        return self._chat.count_text(text)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text on its own."""
        return self._chat.tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, control tokens included."""
        return self._chat.tokenizer.decode(token_ids, skip_special=False)

    @property
    def max_token_bytes(self) -> int:
        """UTF-8 bytes of the longest token."""
        return self._chat.tokenizer.max_token_bytes


class EmbeddedBackend:
    """Owns the engine process, or those of prefill and decode, from ``start`` to ``close``."""

    def __init__(
        self,
        config: EngineConfig,
        workers: WorkerPool,
        disaggregation: DisaggregationSettings | None = None,
        logs: LogStyle | None = None,
    ) -> None:
        """``logs`` is how the engine's process logs."""
        self._config = config
        self._logs = logs
        self._workers = workers
        self._disaggregation = disaggregation or DisaggregationSettings()
        self._client: EngineClient | DisaggregatedClient | None = None
        self._encoder: ChatEncoder | None = None

    async def start(self) -> None:
        """Starts the engine and waits until it serves. Raises ``ModelError`` where it cannot."""
        assert self._client is None, "the backend starts once"
        client = await self._start_client()
        self._client = client
        self._encoder = ChatEncoder(client.chat)

    async def _start_client(self) -> EngineClient | DisaggregatedClient:
        if not self._disaggregation.is_on:
            return await EngineClient.start(self._config, logs=self._logs)
        return await DisaggregatedClient.start(
            [self._with_role("prefill")] * self._disaggregation.num_prefill_engines,
            [self._with_role("decode")] * self._disaggregation.num_decode_engines,
            logs=self._logs,
        )

    def _with_role(self, role: KVRole) -> EngineConfig:
        kv_transfer = msgspec.structs.replace(self._config.kv_transfer, role=role)
        return msgspec.structs.replace(self._config, kv_transfer=kv_transfer)

    async def close(self) -> None:
        """Ends the engine process."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    @property
    def is_alive(self) -> bool:
        """Whether the engine process answers."""
        return self._client is not None and self._client.is_alive

    @property
    def info(self) -> ModelInfo:
        """What the engine serves. Raises ``EngineDeadError`` before the start."""
        return self._running().info

    @property
    def encoder(self) -> PromptEncoder:
        """Counts and encodes with the engine's own chat tokenizer."""
        if self._encoder is None:
            raise EngineDeadError("it has not been started")
        return self._encoder

    @property
    def stats(self) -> EngineStats | None:
        """The latest state that the engine pushed."""
        return None if self._client is None else self._client.stats

    async def generate(self, request: BackendRequest) -> AsyncIterator[RequestOutput]:
        """The outputs of one request; leaving early aborts it in the engine."""
        client = self._running()
        job = TimedJob()
        encode = partial(self.encoder.encode_chat, request.messages, request.tools, **request.template_kwargs)
        prompt_token_ids = await self._workers.run(partial(job, encode))
        if request.timeline is not None:
            request.timeline.lap_job(job, "tokenize")
        if len(prompt_token_ids) >= client.info.max_model_len:
            raise PromptTooLongError(len(prompt_token_ids), client.info.max_model_len)
        outputs = client.generate(
            GenerateRequest(
                request_id=request.request_id,
                prompt_token_ids=prompt_token_ids,
                sampling=request.sampling,
                cache_salt=request.cache_salt,
                priority=request.priority,
                deadline_ms=request.deadline_ms,
            )
        )
        # Closing the client's iterator aborts in the engine; it does so without waiting, so that a cancelled task can.
        async with aclosing(outputs):
            async for output in outputs:
                if output.is_expired:
                    raise AdmissionError(output.error or "the deadline passed", reason="deadline", retry_after_s=1.0)
                if output.transfer_failure is not None:
                    raise EngineDeadError(output.error or output.transfer_failure, retry_after_s=1.0)
                yield output

    def _running(self) -> EngineClient | DisaggregatedClient:
        if self._client is None:
            raise EngineDeadError("it has not been started")
        return self._client
