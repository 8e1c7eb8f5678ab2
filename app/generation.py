"""One request on its way to its answers: outputs of the engine as they come, and the account that is closed once.

There is one answer, or as many choices as were asked for; the prompt counts once. A generation ends by the last output
of its last choice, by a failure, or by ``aclose`` when the client has left. Each way frees what the
request holds in the engine, settles the tenant's lease with what was used, and is reported.
"""

import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import anyio

from app.admission import Lease
from app.choices import ChoiceOutput
from app.compaction import Compaction
from app.drain import Drain
from app.errors import GenerationError, ShuttingDownError
from app.waterfall import Timeline, Waterfall, WaterfallReport
from engine.outputs import RequestOutput, RequestTimings
from engine.token_logprobs import PositionLogprobs
from engine.tool_parsers import ToolCall, ToolParser


class GenerationObserver(Protocol):
    """Hears of the moments of a generation; metrics, logs and the cost model listen."""

    def on_first_output(self, generation: "Generation") -> None:
        """The engine has computed the prompt."""
        ...

    def on_first_text(self, generation: "Generation") -> None:
        """The first text has come."""
        ...

    def on_gap(self, gap_s: float) -> None:
        """Further text has come, ``gap_s`` seconds after the text before it in its choice."""
        ...

    def on_end(self, generation: "Generation") -> None:
        """The generation is over; ``outcome`` says how."""
        ...


class IdentifiedCall(NamedTuple):
    """A call of a tool, by which its result will be told."""

    id: str
    place: int
    """Among the calls of its choice."""
    call: ToolCall


class Delta(NamedTuple):
    """What one output adds to one choice: text, a call of a tool, or its end."""

    choice: int
    text: str
    logprobs: list[PositionLogprobs] | None
    """Of the tokens of the text; ``None`` where nobody asked for them."""
    finish_reason: str | None
    """As the client is told it: ``tool_calls`` where the answer has any and was not cut off."""
    tool_call: IdentifiedCall | None = None


@dataclass(slots=True)
class GeneratedChoice:
    """One answer so far."""

    index: int
    num_output_tokens: int = 0
    finish_reason: str | None = None
    texts: list[str] = field(default_factory=list)
    """Kept by ``read_to_end``."""
    logprobs: list[PositionLogprobs] | None = None
    """Kept by ``read_to_end``; ``None`` where nobody asked for them."""
    tool_calls: list[IdentifiedCall] = field(default_factory=list)
    last_text_s: float | None = None

    @property
    def told_finish_reason(self) -> str | None:
        """As the client is told it."""
        return "tool_calls" if self.tool_calls and self.finish_reason == "stop" else self.finish_reason


class Generation:
    """One computed by a backend's outputs; ``app.relay`` has the one that passes an upstream's bytes on.

    Iterate over ``deltas()`` after ``start()``, or ``read_to_end()``; always ``aclose()``.
    """

    is_counted_at_end = False
    """Whether the backend tells the length of the prompt with the end of the answer only."""

    def __init__(
        self,
        *,
        request_id: str,
        compaction: Compaction,
        max_tokens: int,
        outputs: AsyncIterator[ChoiceOutput],
        lease: Lease,
        observer: GenerationObserver,
        drain: Drain,
        arrived_s: float,
        num_choices: int = 1,
        make_tool_parser: Callable[[], ToolParser | None] | None = None,
        max_tool_calls: int | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """``outputs`` are those of ``num_choices`` choices; ``drain`` breaks them off at shutdown.

        ``make_tool_parser`` makes the parser of one choice; calls beyond ``max_tool_calls`` are left out.
        ``arrived_s`` is the request's arrival on the ``time.perf_counter`` clock, ``timeline`` what happened since.
        """
        self.request_id = request_id
        self.completion_id = f"chatcmpl-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.compaction = compaction
        self.max_tokens = max_tokens
        self.drain = drain
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.choices = [GeneratedChoice(index) for index in range(num_choices)]
        self._parsers = [make_tool_parser() if make_tool_parser is not None else None for _ in self.choices]
        self._max_tool_calls = max_tool_calls
        self.outcome: str | None = None
        """``stop``, ``length``, ``abort`` or ``error``; ``None`` while it runs."""
        self.timings: RequestTimings | None = None
        self.first_text_s: float | None = None
        """Time from arrival to the first text, in seconds."""
        self.waterfall: Waterfall | None = None
        """Its stages, once it has come."""
        self.timeline = Timeline(arrived_s) if timeline is None else timeline
        wants_text = self.timeline.trace is not None and self.timeline.trace.wants_text
        self.captured: list[list[str]] | None = [[] for _ in self.choices] if wants_text else None
        """Texts of each choice, where a trace is to tell them."""
        self._outputs = outputs
        self._lease = lease
        self._observer = observer
        self._arrived_s = arrived_s
        self._first: ChoiceOutput | None = None
        self._ended_s: float | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(choice.num_output_tokens for choice in self.choices)

    @property
    def finish_reason(self) -> str | None:
        """Of the first choice, once all have ended; ``None`` before."""
        is_over = all(choice.finish_reason is not None for choice in self.choices)
        return self.choices[0].finish_reason if is_over else None

    @property
    def elapsed_s(self) -> float:
        """Time from arrival to now, or to the end."""
        return (time.perf_counter() if self._ended_s is None else self._ended_s) - self._arrived_s

    @property
    def told_waterfall(self) -> WaterfallReport | None:
        """The stages of the time to the first token, where the request asked for them and that token has come."""
        is_wanted = self.waterfall is not None and self.compaction.request.overrides.waterfall
        return self.waterfall.report() if is_wanted and self.waterfall is not None else None

    async def start(self) -> None:
        """Waits for the first output, so that what fails before it can still be told with an HTTP status."""
        assert self._first is None, "a generation starts once"
        self._first = await self._next()
        self.timeline.lap_engine(self.timings)
        self._observer.on_first_output(self)

    async def deltas(self) -> AsyncIterator[Delta]:
        """What comes, to the end of the last choice. Raises ``GenerationError``, an ``EngineError`` or
        ``ShuttingDownError`` where it breaks off."""
        item = self._first
        assert item is not None, "start comes before deltas"
        while True:
            index, output = item
            if output.text:
                self._note_text(self.choices[index])
                if self.captured is not None:
                    self.captured[index].append(output.text)
            if output.text or output.logprobs or output.finish_reason is not None:
                for delta in self._deltas_of(index, output):
                    yield delta
            if self.finish_reason is not None:
                break
            item = await self._next()
        await self._end(self.finish_reason)

    async def read_to_end(self) -> None:
        """Collects texts and log probabilities in ``choices``. Raises as ``deltas``."""
        async for delta in self.deltas():
            choice = self.choices[delta.choice]
            choice.texts.append(delta.text)  # the calls are there already
            if delta.logprobs is not None:
                choice.logprobs = [*(choice.logprobs or ()), *delta.logprobs]

    async def aclose(self) -> None:
        """Ends the generation if it has not ended: the client has left or nobody wants the rest."""
        await self._end("abort")

    async def _next(self) -> ChoiceOutput:
        try:
            with self.drain.interruptible():
                item = await anext(self._outputs, None)
            if item is None:
                raise GenerationError("The engine ended the output without a finish reason.")
            index, output = item
            choice = self.choices[index]
            choice.num_output_tokens = output.num_output_tokens
            self.num_prompt_tokens = output.num_prompt_tokens
            if index == 0:  # the one that computes the prompt; the others find it cached
                self.num_cached_tokens = output.num_cached_tokens
                self.timings = output.timings or self.timings
            if output.finish_reason in ("error", "abort"):
                raise GenerationError(f"The engine failed this request: {output.error or output.finish_reason}.")
        except ShuttingDownError:
            await self._end("abort")
            raise
        except Exception:
            await self._end("error")
            raise
        except BaseException:
            await self._end("abort")
            raise
        choice.finish_reason = output.finish_reason
        return item

    def _deltas_of(self, index: int, output: RequestOutput) -> Iterator[Delta]:
        """What one output adds; text that may become a call is held back by the parser."""
        parser = self._parsers[index]
        if parser is None:
            yield Delta(index, output.text, output.logprobs, output.finish_reason)
            return
        choice, logprobs = self.choices[index], output.logprobs
        pieces = parser.feed(output.text)
        if output.finish_reason is not None:
            pieces += parser.finish()
        for piece in pieces:
            if isinstance(piece, str):
                yield Delta(index, piece, logprobs, None)
            elif self._max_tool_calls is None or len(choice.tool_calls) < self._max_tool_calls:
                call = IdentifiedCall(parser.make_call_id(), len(choice.tool_calls), piece)
                choice.tool_calls.append(call)
                yield Delta(index, "", logprobs, None, call)
            else:
                continue
            logprobs = None
        if logprobs or output.finish_reason is not None:
            yield Delta(index, "", logprobs, choice.told_finish_reason)

    def _note_text(self, choice: GeneratedChoice) -> None:
        now = time.perf_counter()
        if self.first_text_s is None:
            self.first_text_s = now - self._arrived_s
            self.timeline.lap("first_token", now)
            self.waterfall = self.timeline.waterfall(now)
            self._observer.on_first_text(self)
        elif choice.last_text_s is not None:  # the first text of a further choice is no gap of any stream
            self._observer.on_gap(now - choice.last_text_s)
        choice.last_text_s = now

    async def _end(self, outcome: str) -> None:
        if self.outcome is not None:
            return
        self.outcome = outcome
        self._ended_s = time.perf_counter()
        # The prompt is charged from the first output on: before it the engine may not have touched it.
        self._lease.settle(self.num_prompt_tokens, self.num_output_tokens)
        close: Any = getattr(self._outputs, "aclose", None)
        if close is not None:
            with anyio.CancelScope(shield=True):
                await close()
        self._observer.on_end(self)
