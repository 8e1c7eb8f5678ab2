"""The outputs of one request that asks for several answers, as they come, each with the number of its choice.

All choices are handed to the engine at once. They have one prompt, which it computes once: the others take its blocks
from the prefix cache. The first error ends them all, and closing the iterator frees whatever still runs.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from engine.outputs import RequestOutput


class ChoiceOutput(NamedTuple):
    """One output of one choice."""

    choice: int
    output: RequestOutput


async def choice_outputs(sources: Sequence[AsyncIterator[RequestOutput]]) -> AsyncGenerator[ChoiceOutput, None]:
    """Outputs of all choices, to the last one's end. Raises what the first source that fails raises."""
    if len(sources) == 1:
        async with aclosing(_closable(sources[0])) as outputs:
            async for output in outputs:
                yield ChoiceOutput(0, output)
        return
    queue: asyncio.Queue[ChoiceOutput | Exception | None] = asyncio.Queue()
    tasks = [asyncio.ensure_future(_pump(index, source, queue)) for index, source in enumerate(sources)]
    num_open = len(tasks)
    try:
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int, source: AsyncIterator[RequestOutput], queue: "asyncio.Queue[ChoiceOutput | Exception | None]"
) -> None:
    try:
        async with aclosing(_closable(source)) as outputs:
            async for output in outputs:
                queue.put_nowait(ChoiceOutput(index, output))
    except Exception as error:
        queue.put_nowait(error)
    else:
        queue.put_nowait(None)


def _closable(source: AsyncIterator[RequestOutput]) -> Any:
    assert hasattr(source, "aclose"), "a backend's outputs are an asynchronous generator"
    return source
