"""Outputs of several choices come as one stream, and end together when one fails or nobody wants them any more."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from app.choices import choice_outputs
from engine.outputs import RequestOutput


def output(text: str) -> RequestOutput:
    return RequestOutput(
        request_id="r", text=text, new_token_ids=[1], num_prompt_tokens=1, num_cached_tokens=0, num_output_tokens=1
    )


class Source:
    """Gives its texts, each when it is told to, and remembers whether it was closed."""

    def __init__(self, *texts: str, error: Exception | None = None) -> None:
        self.texts = texts
        self.error = error
        self.is_closed = False

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        try:
            for text in self.texts:
                await asyncio.sleep(0)
                yield output(text)
            if self.error is not None:
                raise self.error
            if not self.texts:
                await asyncio.sleep(60)
        finally:
            self.is_closed = True


async def test_outputs_of_all_choices_come_with_their_numbers_and_in_their_order() -> None:
    sources = [Source("a", "b", "c"), Source("x"), Source("1", "2")]
    texts: dict[int, str] = {0: "", 1: "", 2: ""}
    async for choice, item in choice_outputs([source.outputs() for source in sources]):
        texts[choice] += item.text
    assert texts == {0: "abc", 1: "x", 2: "12"}
    assert all(source.is_closed for source in sources)


@pytest.mark.parametrize("others", [0, 2])
async def test_closing_frees_every_choice(others: int) -> None:
    sources = [Source("a", "b"), *(Source() for _ in range(others))]
    outputs = choice_outputs([source.outputs() for source in sources])
    assert (await anext(outputs)).output.text == "a"
    await outputs.aclose()
    assert all(source.is_closed for source in sources)


async def test_cancelling_who_waits_frees_every_choice() -> None:
    sources = [Source(), Source()]
    outputs = choice_outputs([source.outputs() for source in sources])
    waiting = asyncio.ensure_future(anext(outputs))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert all(source.is_closed for source in sources)


async def test_error_of_one_choice_ends_all() -> None:
    sources = [Source("a", error=ValueError("broken")), Source()]
    with pytest.raises(ValueError, match="broken"):
        async for _ in choice_outputs([source.outputs() for source in sources]):
            pass
    assert all(source.is_closed for source in sources)
