"""An answer of an upstream on its way to the client: its bytes, and the same account as for one computed here.

``Relay`` is a ``Generation``: it ends once, settles the tenant's lease and is reported in the same way. What differs
is where its outputs come from, and that they are passed on instead of written.

    upstream   data: {"choices":[{"delta":{"content":"Hi"}}],"model":"m","usage":null}
    client     data: {"choices":[{"delta":{"content":"Hi"}}],"model":"default"}

Usage is always asked for, because the account needs it. A client that did not ask never sees it; one that did gets it
in one last chunk without choices, whichever chunk the upstream had put it in.
"""

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from app.admission import Lease
from app.answers import extension_of
from app.backends.chunk_template import ChunkTemplate, learn_template
from app.backends.replicas import Replica
from app.backends.upstream_answer import UpstreamAnswer, chunk_facts
from app.backends.upstream_body import RelayRequest
from app.backends.upstream_chunks import NULL, ChunkFacts, RawObject, complete_usage, raw_fields, read_chunk
from app.backends.upstream_errors import broken_stream
from app.compaction import Compaction
from app.drain import Drain
from app.errors import ShuttingDownError, UpstreamError
from app.generation import Generation, GenerationObserver
from app.waterfall import Timeline
from engine.outputs import RequestTimings

DONE_FRAME = b"data: [DONE]\n\n"
MAX_LEARNT = 8
"""Templates that one stream may try: one whose chunks all look different gains nothing by them."""


@runtime_checkable
class RelayBackend(Protocol):
    """A backend that passes requests on."""

    replicas: list[Replica]

    async def relay(self, request: RelayRequest) -> UpstreamAnswer:
        """Sends a request and waits until its answer begins."""
        ...


class Relay(Generation):
    """``start()``, then ``frames()`` for a stream or ``read_answer()`` for a whole answer; always ``aclose()``."""

    is_counted_at_end = True

    def __init__(
        self,
        *,
        request_id: str,
        compaction: Compaction,
        max_tokens: int,
        backend: RelayBackend,
        request: RelayRequest,
        count_text: Any,
        lease: Lease,
        observer: GenerationObserver,
        drain: Drain,
        arrived_s: float,
        num_choices: int = 1,
        timeline: Timeline | None = None,
    ) -> None:
        """``count_text`` counts what was generated where an answer breaks off before its usage is told."""
        super().__init__(
            request_id=request_id,
            compaction=compaction,
            max_tokens=max_tokens,
            outputs=(held := _HeldAnswer()),
            lease=lease,
            observer=observer,
            drain=drain,
            arrived_s=arrived_s,
            num_choices=num_choices,
            timeline=timeline,
        )
        self._backend = backend
        self._request = request
        self._count_text = count_text
        self._held = held
        self._sent_s = 0.0
        self._texts: list[str] = []
        self._usage: msgspec.Raw | None = None
        self._usage_fields: RawObject | None = None
        self._num_output_tokens: int | None = None
        self._head: RawObject = {}
        self._template: ChunkTemplate | None = None
        self._num_learnt = 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all choices, as the upstream counted them; of a broken answer as they are counted here."""
        if self._num_output_tokens is None:
            self._num_output_tokens = self._count_text("".join(self._texts)) if self._texts else 0
        return self._num_output_tokens

    async def start(self) -> None:
        """Sends the request and waits until its answer begins. Raises ``UpstreamError`` with its HTTP status."""
        assert self._held.answer is None, "a relay starts once"
        self._sent_s = time.perf_counter()
        try:
            with self.drain.interruptible():
                self._held.answer = await self._backend.relay(self._request)
        except ShuttingDownError:
            await self._end("abort")
            raise
        except Exception:
            await self._end("error")
            raise
        except BaseException:
            await self._end("abort")
            raise
        # The prompt has been computed, or will be: it is charged as counted until the upstream says how long it was.
        self.num_prompt_tokens = self.compaction.result.prompt_tokens
        now = time.perf_counter()
        self.timings = _timings((now - self._sent_s) * 1000, 0.0, self.num_prompt_tokens, 0)

    async def read_answer(self, model: str) -> bytes:
        """The whole answer as the client gets it: ``model`` is the name it asked for, ``firsttoken`` is added."""
        assert self._held.answer is not None, "start comes before the answer"
        try:
            facts, fields = _whole_answer(self._held.answer.body)
            if facts.error is not None:
                raise broken_stream(facts.error)
            self._note(facts)
            for choice in self.choices:
                choice.finish_reason = choice.finish_reason or "stop"
        except Exception:
            await self._end("error")
            raise
        await self._finish()
        fields["model"] = _raw(model)
        if facts.has_usage:
            fields["usage"] = complete_usage(fields["usage"])
        return msgspec.json.encode({**fields, "firsttoken": extension_of(self)})

    async def frames(
        self, model: str, *, includes_usage: bool, repeats_usage: bool = False
    ) -> AsyncGenerator[bytes, None]:
        """The stream as the client gets it, to ``[DONE]``: one or more whole events at a time.

        Raises ``UpstreamError`` where it breaks off before.

        ``includes_usage`` says that the client asked for usage, ``repeats_usage`` that it wants it in every chunk.
        """
        assert self._held.answer is not None, "start comes before the frames"
        name = _raw(model)
        waiting = self.drain.interruptible()
        try:
            while True:
                with waiting:
                    chunks = await self._held.answer.next_chunks()
                if not chunks:
                    break
                # What came together goes on together: a write costs more than all that is done to a chunk.
                frames, failure = self._frames_of(chunks, name, includes_usage, repeats_usage)
                if frames:
                    yield b"".join(frames)
                if failure is not None:
                    raise failure
            if any(choice.finish_reason is None for choice in self.choices):
                text = "The upstream's stream ended without a finish reason."
                raise UpstreamError(text, status=502, type="server_error")
        except GeneratorExit:
            raise
        except ShuttingDownError:
            await self._end("abort")
            raise
        except Exception:
            await self._end("error")
            raise
        except BaseException:
            await self._end("abort")
            raise
        await self._finish()
        if includes_usage:
            yield self._totals(name)
        yield DONE_FRAME

    def _frames_of(
        self, chunks: Sequence[bytes], name: msgspec.Raw, includes_usage: bool, repeats_usage: bool
    ) -> tuple[list[bytes], Exception | None]:
        """Chunks as the client gets them, up to the first that is none or tells an error."""
        frames: list[bytes] = []
        try:
            for data in chunks:
                template = self._template
                if template is not None and (text := template.text_of(data)) is not None:
                    self._texts.append(text)
                    self._note_text(self.choices[template.choice])
                    frames.append(template.frame(text))
                    continue
                facts = chunk_facts(data)
                if facts.error is not None:
                    raise broken_stream(facts.error)
                self._note_texts(facts)
                frame = self._frame(data, facts, name, includes_usage, repeats_usage)
                if frame is None:
                    continue
                frames.append(frame)
                # Where the texts are to be told as well, every chunk is read.
                may_learn = self._num_learnt < MAX_LEARNT and self.captured is None
                if may_learn and (learnt := learn_template(data, frame, facts)) is not None:
                    self._template = learnt
                    self._num_learnt += 1
        except UpstreamError as error:
            return frames, error
        return frames, None

    def _frame(
        self, data: bytes, facts: ChunkFacts, name: msgspec.Raw, includes_usage: bool, repeats_usage: bool
    ) -> bytes | None:
        """One chunk as the client gets it; ``None`` for one that only told usage."""
        fields = raw_fields(data)
        usage = fields.get("usage")
        if facts.has_usage and usage is not None:
            self._usage, self._usage_fields = usage, None if facts.num_choices else fields
        self._note(facts)
        if facts.has_usage and not facts.num_choices:
            return None
        if not self._head:
            self._head = {key: fields[key] for key in ("id", "object", "created") if key in fields}
        fields["model"] = name
        if includes_usage:
            fields["usage"] = usage if repeats_usage and usage is not None else NULL
        else:
            fields.pop("usage", None)
        return b"data: " + _one_line(msgspec.json.encode(fields)) + b"\n\n"

    def _totals(self, name: msgspec.Raw) -> bytes:
        fields: dict[str, Any] = dict(self._usage_fields or self._head)
        fields["model"], fields["choices"] = name, []
        fields["usage"] = None if self._usage is None else complete_usage(self._usage)
        fields["firsttoken"] = extension_of(self)
        return b"data: " + _one_line(msgspec.json.encode(fields)) + b"\n\n"

    def _note(self, facts: ChunkFacts) -> None:
        self._texts += [text for _, text in facts.texts]
        if self.captured is not None:
            for index, text in facts.texts:
                self.captured[self._choice(index).index].append(text)
        for index, reason in facts.finished:
            self._choice(index).finish_reason = reason
        if facts.num_prompt_tokens is not None:
            self.num_prompt_tokens = facts.num_prompt_tokens
            self.num_cached_tokens = min(facts.num_cached_tokens or 0, facts.num_prompt_tokens)
            self._num_output_tokens = facts.num_output_tokens or 0
            self._texts.clear()

    def _note_texts(self, facts: ChunkFacts) -> None:
        """The time to the first text stands for the prefill: queue and prefill cannot be told apart from here."""
        if facts.texts and self.first_text_s is None:
            prefill_ms = (time.perf_counter() - self._sent_s) * 1000
            self.timeline.lap("upstream")
            self.timings = _timings(prefill_ms, 0.0, self.num_prompt_tokens, 0)
            self._observer.on_first_output(self)
        for index in dict.fromkeys(index for index, _ in facts.texts):
            self._note_text(self._choice(index))

    def _choice(self, index: int) -> Any:
        if not 0 <= index < len(self.choices):
            text = f"The upstream sent choice {index} of {len(self.choices)}."
            raise UpstreamError(text, status=502, type="server_error")
        return self.choices[index]

    async def _finish(self) -> None:
        total_ms = (time.perf_counter() - self._sent_s) * 1000
        prefill_ms = self.timings.prefill_ms if self.timings is not None else total_ms
        self.timings = _timings(prefill_ms, total_ms - prefill_ms, self.num_prompt_tokens, self.num_cached_tokens)
        self.choices[0].num_output_tokens = self.num_output_tokens
        await self._end(self.choices[0].finish_reason or "stop")


class _HeldAnswer:
    """The answer of the upstream, once there is one, as the outputs that a generation closes at its end."""

    def __init__(self) -> None:
        self.answer: UpstreamAnswer | None = None

    def __aiter__(self) -> "_HeldAnswer":
        return self

    async def __anext__(self) -> Any:
        raise AssertionError("a relay passes bytes on and has no outputs")

    async def aclose(self) -> None:
        """Ends the request at the upstream, which sees its connection close unless it has finished."""
        if self.answer is not None:
            await self.answer.aclose()


def _whole_answer(body: bytes) -> tuple[ChunkFacts, RawObject]:
    """Facts and fields of an answer that does not stream. Raises ``UpstreamError`` for what is none."""
    try:
        return read_chunk(body), raw_fields(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        text = f"The upstream's answer is no chat completion: {error}"
        raise UpstreamError(text, status=502, type="server_error") from None


def _timings(prefill_ms: float, decode_ms: float, num_prompt_tokens: int, num_cached_tokens: int) -> RequestTimings:
    return RequestTimings(
        queue_ms=0.0,
        prefill_ms=prefill_ms,
        decode_ms=decode_ms,
        num_chunks=1,
        num_preemptions=0,
        input_tokens=num_prompt_tokens,
        cached_tokens=num_cached_tokens,
    )


def _one_line(document: bytes) -> bytes:
    """JSON whose fields kept their bytes, without the line breaks between them that would end a line of the event."""
    if b"\n" in document or b"\r" in document:
        return document.replace(b"\r", b" ").replace(b"\n", b" ")
    return document


def _raw(value: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
