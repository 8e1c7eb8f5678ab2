"""An asynchronous client of any OpenAI-compatible server that times every delta of a stream."""

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx
import msgspec

from eval.lengths import length_bucket
from eval.load_records import RequestRecord
from eval.scoring import SearchText, answer_score
from eval.workload import LoadRequest

_MEMORY_WORDS = ("out of memory", "oom", "allocation failed", "cannot allocate")


class Outcome(NamedTuple):
    """A record, and the text for scoring; the text is not written down."""

    record: RequestRecord
    text: str


class StreamingClient:
    """Sends load requests. One connection pool without limits: the client must not queue what the clock has sent."""

    def __init__(self, url: str, api_key: str = "", *, timeout_s: float = 600.0) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout_s, connect=30.0),
            limits=limits,
            trust_env=False,
        )

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def get(self, path: str) -> httpx.Response:
        """A plain GET."""
        return await self._http.get(path)

    async def send(self, request: LoadRequest, started_s: float, clock: Callable[[], float]) -> Outcome:
        """Sends one request that is due at ``started_s + arrival_s`` and reads it to its end."""
        due = started_s + request.arrival_s
        sent = clock()
        reader = _Reader(due)
        base = {"id": request.id, "arrival_s": request.arrival_s, "client_lag_ms": max(0.0, (sent - due) * 1000.0)}
        content = msgspec.json.encode(request.body)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._http.stream("POST", "/v1/chat/completions", content=content, headers=headers) as response:
                if not response.is_success:
                    await response.aread()
                    reason = refusal_reason(response.status_code, response.content)
                    return _unsuccessful(request, base, "refused", reason, clock() - due)
                async for line in response.aiter_lines():
                    reader.read(line, clock())
        except httpx.TimeoutException:
            return _unsuccessful(request, base, "failed", "timeout", clock() - due)
        except httpx.HTTPError as error:
            reason = "connection" if reader.first_chunk_s is None else "stream broken"
            return _unsuccessful(request, base, "failed", f"{reason}: {type(error).__name__}", clock() - due)
        except (msgspec.DecodeError, LookupError, TypeError) as error:
            return _unsuccessful(request, base, "failed", f"unreadable chunk: {type(error).__name__}", clock() - due)
        if reader.error is not None:
            return _unsuccessful(request, base, "failed", reader.error, clock() - due)
        if reader.finish_reason is None:
            return _unsuccessful(request, base, "failed", "stream broken: no finish_reason", clock() - due)
        return Outcome(reader.record(request, base, clock()), "".join(reader.pieces))


class _Reader:
    """Collects what a stream tells."""

    def __init__(self, due: float) -> None:
        self._due = due
        self.pieces: list[str] = []
        self.first_chunk_s: float | None = None
        self.content_s: list[float] = []
        self.usage: dict[str, Any] | None = None
        self.timings: dict[str, Any] = {}
        self.stages: dict[str, float] = {}
        self.original_tokens: int | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None

    def read(self, line: str, now: float) -> None:
        """One line of the event stream."""
        if not line.startswith("data:"):
            return
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        chunk: dict[str, Any] = msgspec.json.decode(data)
        if self.first_chunk_s is None:
            self.first_chunk_s = now
        if chunk.get("error"):
            message = str(chunk["error"].get("message", "")) if isinstance(chunk["error"], dict) else ""
            self.error = "out_of_memory" if _is_memory(message) else "stream error"
            return
        self.usage = chunk.get("usage") or self.usage
        if own := chunk.get("firsttoken"):
            self.timings = own.get("timings_ms") or {}
            told_stages = (own.get("waterfall") or {}).get("stages") or ()
            self.stages = {part["stage"]: part["ms"] for part in told_stages}
            self.original_tokens = own.get("original_prompt_tokens")
        elif told := chunk.get("metrics"):  # vLLM with per-request metrics
            self.timings = {"queue": told.get("queue_time_ms"), "prefill": told.get("time_to_first_token_ms")}
        for choice in chunk.get("choices", ())[:1]:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            delta = choice.get("delta") or {}
            text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
            if text or delta.get("tool_calls"):
                self.content_s.append(now)
                self.pieces.append(delta.get("content") or "")

    def record(self, request: LoadRequest, base: dict[str, Any], ended_s: float) -> RequestRecord:
        """The record of a stream that came to its end."""
        usage = self.usage or {}
        prompt_tokens = int(usage.get("prompt_tokens") or 0)
        input_tokens = request.input_tokens or self.original_tokens or prompt_tokens
        details = usage.get("prompt_tokens_details") or {}
        times = self.content_s
        contains = None
        if request.case is not None and request.case.answers:
            contains = answer_score(request.case, SearchText("".join(self.pieces)))
        return RequestRecord(
            **base,
            status="ok",
            bucket=length_bucket(input_tokens),
            input_tokens=input_tokens,
            prompt_tokens=prompt_tokens,
            cached_tokens=int(details.get("cached_tokens") or 0),
            output_tokens=int(usage.get("completion_tokens") or len(times)),
            ttft_ms=(times[0] - self._due) * 1000.0 if times else None,
            first_chunk_ms=None if self.first_chunk_s is None else (self.first_chunk_s - self._due) * 1000.0,
            e2el_ms=(ended_s - self._due) * 1000.0,
            itl_ms=[(b - a) * 1000.0 for a, b in itertools.pairwise(times)],
            queue_ms=self.timings.get("queue"),
            prefill_ms=self.timings.get("prefill"),
            reduce_ms=self.timings.get("reduce"),
            stages_ms=self.stages,
            contains=contains,
            finish_reason=self.finish_reason,
        )


def refusal_reason(status: int, content: bytes) -> str:
    """A short name of why a request was refused: status with OpenAI's code, or the type where there is no code.

    >>> refusal_reason(429, b'{"error": {"message": "slow down", "type": "requests", "code": "rate_limit_exceeded"}}')
    '429 rate_limit_exceeded'
    """
    try:
        error = msgspec.json.decode(content)["error"]
        message, name = str(error.get("message") or ""), error.get("code") or error.get("type")
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
        message, name = content[:200].decode(errors="replace"), None
    if _is_memory(message):
        return "out_of_memory"
    return f"{status} {name}" if name else str(status)


def _is_memory(message: str) -> bool:
    lower = message.lower()
    return any(word in lower for word in _MEMORY_WORDS)


def _unsuccessful(request: LoadRequest, base: dict[str, Any], status: Any, reason: str, elapsed_s: float) -> Outcome:
    input_tokens = request.input_tokens or 0
    bucket = length_bucket(input_tokens) if input_tokens else "unknown"
    record = RequestRecord(
        **base, status=status, reason=reason, bucket=bucket, input_tokens=input_tokens, e2el_ms=elapsed_s * 1000.0
    )
    return Outcome(record, "")


async def tokens_per_word(client: StreamingClient, body: dict[str, Any], texts: tuple[str, str]) -> float:
    """How many tokens one word of made text has for the server: the slope between a short and a long prompt.

    Raises ``ValueError`` where the server does not tell its counts.
    """
    counts = []
    for text in texts:
        messages = [*body["messages"][:-1], {"role": "user", "content": text}]
        request = LoadRequest("calibration", 0.0, body | {"messages": messages, "max_tokens": 1})
        outcome = await client.send(request, time.perf_counter(), time.perf_counter)
        if outcome.record.status != "ok" or outcome.record.prompt_tokens == 0:
            raise ValueError(f"the server told no token counts: {outcome.record.reason or 'no usage in the stream'}")
        counts.append(outcome.record.prompt_tokens)
        await asyncio.sleep(0)
    return (counts[1] - counts[0]) / (len(texts[1].split()) - len(texts[0].split()))
