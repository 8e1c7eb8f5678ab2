"""One answer on its way: the engine's outputs as they come, and the account that is closed exactly once.

A generation ends by its last output, by a failure, or by ``aclose`` when the client has left. Each way frees what the
request holds in the engine, settles the tenant's lease with what was used, and is reported.
"""

import secrets
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

import anyio

from app.admission import Lease
from app.compaction import Compaction
from app.drain import Drain
from app.errors import GenerationError, ShuttingDownError
from engine.outputs import RequestOutput, RequestTimings


class GenerationObserver(Protocol):
    """Hears of the moments of a generation; metrics, logs and the cost model listen."""

    def on_first_output(self, generation: "Generation") -> None:
        """The engine has computed the prompt."""
        ...

    def on_text(self, generation: "Generation", gap_s: float | None) -> None:
        """Text has come; ``gap_s`` is the time since the text before, ``None`` for the first."""
        ...

    def on_end(self, generation: "Generation") -> None:
        """The generation is over; ``outcome`` says how."""
        ...


class Generation:
    """Iterate over ``texts()`` after ``start()``; always ``aclose()``."""

    def __init__(
        self,
        *,
        request_id: str,
        compaction: Compaction,
        max_tokens: int,
        outputs: AsyncIterator[RequestOutput],
        lease: Lease,
        observer: GenerationObserver,
        drain: Drain,
        arrived_s: float,
    ) -> None:
        """``drain`` breaks it off at shutdown.

        ``arrived_s`` is the request's arrival on the ``time.perf_counter`` clock.
        """
        self.request_id = request_id
        self.completion_id = f"chatcmpl-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.compaction = compaction
        self.max_tokens = max_tokens
        self.drain = drain
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.finish_reason: str | None = None
        self.outcome: str | None = None
        """``stop``, ``length``, ``abort`` or ``error``; ``None`` while it runs."""
        self.timings: RequestTimings | None = None
        self.first_text_s: float | None = None
        """Time from arrival to the first text, in seconds."""
        self._outputs = outputs
        self._lease = lease
        self._observer = observer
        self._arrived_s = arrived_s
        self._last_text_s: float | None = None
        self._first: RequestOutput | None = None
        self._ended_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        """Time from arrival to now, or to the end."""
        return (time.perf_counter() if self._ended_s is None else self._ended_s) - self._arrived_s

    async def start(self) -> None:
        """Waits for the first output, so that what fails before it can still be told with an HTTP status."""
        assert self._first is None, "a generation starts once"
        self._first = await self._next()
        self._observer.on_first_output(self)

    async def texts(self) -> AsyncIterator[str]:
        """New text, never empty, to the end. Raises ``GenerationError``, an ``EngineError`` or ``ShuttingDownError``
        where it breaks off."""
        output = self._first
        assert output is not None, "start comes before texts"
        while True:
            if output.text:
                self._note_text()
                yield output.text
            if output.finish_reason is not None:
                break
            output = await self._next()
        await self._end(output.finish_reason)

    async def aclose(self) -> None:
        """Ends the generation if it has not ended: the client has left or nobody wants the rest."""
        await self._end("abort")

    async def _next(self) -> RequestOutput:
        try:
            with self.drain.interruptible():
                output = await anext(self._outputs, None)
            if output is None:
                raise GenerationError("The engine ended the output without a finish reason.")
            self.num_prompt_tokens = output.num_prompt_tokens
            self.num_cached_tokens = output.num_cached_tokens
            self.num_output_tokens = output.num_output_tokens
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
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
        return output

    def _note_text(self) -> None:
        now = time.perf_counter()
        if self.first_text_s is None:
            self.first_text_s = now - self._arrived_s
        self._observer.on_text(self, None if self._last_text_s is None else now - self._last_text_s)
        self._last_text_s = now

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
