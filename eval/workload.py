"""What a load test sends: RAG requests built from cases, or prompts with the lengths and prefixes of a trace."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from eval.prompts import SYSTEM_PROMPT, case_documents, case_messages
from eval.samples import Case
from eval.traces import TraceLine

Target = Literal["firsttoken", "openai"]

_SYLLABLES = ["ba", "de", "fi", "go", "lu", "ma", "ne", "pi", "ro", "su", "ta", "ve", "zo", "ka", "li", "mu"]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request and when it is due."""

    id: str
    arrival_s: float
    body: dict[str, Any]
    case: Case | None = None
    input_tokens: int | None = None
    """Of the trace; ``None`` where the server's count decides."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How requests are written."""

    model: str = "default"
    target: Target = "firsttoken"
    """``firsttoken`` gets documents apart from the messages, any other server gets them inside the last message."""
    max_tokens: int = 32
    policy: str | None = None
    bypass: bool = False
    system_prompt: str | None = None


def case_requests(
    cases: Sequence[Case], arrivals: Sequence[float], options: RequestOptions, *, seed: int
) -> list[LoadRequest]:
    """One request an arrival, the cases in an order drawn anew for every pass over them."""
    rng = random.Random(seed)
    order: list[Case] = []
    while len(order) < len(arrivals):
        order += rng.sample(list(cases), len(cases))
    return [
        LoadRequest(id=f"{place}-{case.id}", arrival_s=due, body=case_body(case, options), case=case)
        for place, (due, case) in enumerate(zip(arrivals, order, strict=False))
    ]


def case_body(case: Case, options: RequestOptions) -> dict[str, Any]:
    """The request of a case; to a server that knows no documents they go into the last message, numbered."""
    messages: list[dict[str, Any]] = [dict(message) for message in case_messages(case)]
    if options.system_prompt is not None:
        messages[0]["content"] = options.system_prompt
    body = _body(messages, options.max_tokens, options)
    documents = case_documents(case)
    if options.target == "firsttoken":
        if documents:
            body["documents"] = documents
    elif documents:
        shown = "\n".join(_shown(place, document) for place, document in enumerate(documents, start=1))
        messages[-1]["content"] = f"<documents>\n{shown}\n</documents>\n\n{case.question}"
    return body


def _shown(place: int, document: dict[str, Any]) -> str:
    title = f"{document['title']}\n" if document.get("title") else ""
    return f"[{place}] {title}{document['text']}"


def trace_requests(
    lines: Sequence[TraceLine], arrivals: Sequence[float], options: RequestOptions, *, tokens_per_word: float, seed: int
) -> list[LoadRequest]:
    """Prompts of the trace's lengths; equal blocks become equal text, so a prefix cache finds what it found then."""
    found = []
    for place, (line, due) in enumerate(zip(lines, arrivals, strict=True)):
        text = trace_text(line, tokens_per_word=tokens_per_word, unique=f"{seed}/{place}")
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": text}]
        body = _body(messages, min(line.output_tokens, options.max_tokens), options)
        found.append(LoadRequest(id=str(place), arrival_s=due, body=body, input_tokens=line.input_tokens))
    return found


def trace_text(line: TraceLine, *, tokens_per_word: float, unique: str) -> str:
    """Words of about ``input_tokens`` tokens: each block's own, what is left over this request's own."""
    num_words = max(1, round(line.input_tokens / tokens_per_word))
    words: list[str] = []
    if line.prefix_blocks and line.block_tokens:
        per_block = max(1, round(line.block_tokens / tokens_per_word))
        for block in line.prefix_blocks:
            words += _words(f"block/{block}", per_block)
    words = words[:num_words]
    return " ".join([*words, *_words(unique, num_words - len(words))])


def _words(seed: str, num_words: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 3))) for _ in range(max(0, num_words))]


def _body(messages: list[dict[str, Any]], max_tokens: int, options: RequestOptions) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": options.model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.target == "firsttoken":
        own = {"policy": options.policy, "bypass": options.bypass or None, "waterfall": True}
        body["firsttoken"] = {name: value for name, value in own.items() if value is not None}
    return body
