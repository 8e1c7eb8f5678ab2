"""Counting once."""

from factories_reducer import WordCounter

from reducer.tokens import CachedCounter


class CountingCounter(WordCounter):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def count_text(self, text: str) -> int:
        self.texts.append(text)
        return super().count_text(text)


def test_each_text_is_counted_once() -> None:
    inner = CountingCounter()
    counter = CachedCounter(inner)
    assert [counter.count_text(text) for text in ("a b", "a b", "", "你好")] == [2, 2, 0, 2]
    assert inner.texts == ["a b", "你好"]


def test_prompts_are_counted_exactly() -> None:
    messages = [{"role": "user", "content": "a b"}]
    assert CachedCounter(WordCounter()).count_prompt(messages) == WordCounter().count_prompt(messages) == 9
