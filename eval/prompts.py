"""Between a case and the wire: the requests that a case becomes, and the passages found in the messages sent back."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from eval.gateway import Compaction, PromptRequest
from eval.samples import Case, Chunk
from eval.scoring import SearchText, Span

SYSTEM_PROMPT = "Answer the question in a few words, using only the documents."
CITING_SYSTEM_PROMPT = f"{SYSTEM_PROMPT} Cite the documents you used by their numbers, like [2]."
HISTORY_SYSTEM_PROMPT = "You are a helpful assistant."


def case_messages(case: Case, *, with_history: bool = True, citations: bool = False) -> list[dict[str, str]]:
    """System prompt, earlier turns, question. With ``citations`` the system prompt asks for them."""
    system = CITING_SYSTEM_PROMPT if citations else SYSTEM_PROMPT
    history = [{"role": turn.role, "content": turn.content} for turn in case.history] if with_history else []
    return [
        {"role": "system", "content": HISTORY_SYSTEM_PROMPT if case.is_history else system},
        *history,
        {"role": "user", "content": case.question},
    ]


def case_documents(case: Case) -> list[dict[str, Any]]:
    """The chunks as the wire's documents, without their labels."""
    return [_document(chunk) for chunk in case.chunks]


def full_request(
    case: Case,
    *,
    policy: str | None = None,
    max_input_tokens: int | None = None,
    max_tokens: int | None = None,
    citations: bool = False,
) -> PromptRequest:
    """Everything the case has: history and documents."""
    return PromptRequest(
        messages=case_messages(case, citations=citations),
        documents=case_documents(case),
        policy=policy,
        max_input_tokens=max_input_tokens,
        max_tokens=max_tokens,
    )


def fixed_request(
    case: Case, *, policy: str | None = None, max_tokens: int | None = None, citations: bool = False
) -> PromptRequest:
    """The same without what a budget is about: the documents, or in history cases the history."""
    messages = case_messages(case, with_history=not case.is_history, citations=citations)
    return PromptRequest(messages=messages, policy=policy, max_tokens=max_tokens)


def bypassing(request: PromptRequest) -> PromptRequest:
    """The same request with nothing reduced."""
    return replace(request, policy=None, max_input_tokens=None, bypass=True)


def max_input_tokens(budget: float, *, fixed_tokens: int, full_tokens: int) -> int:
    """Prompt tokens that leave at most the share ``budget`` of ``full_tokens`` beside the fixed ones.

    >>> max_input_tokens(0.1, fixed_tokens=40, full_tokens=3999)
    439
    """
    return fixed_tokens + int(budget * full_tokens)


def message_text(message: Mapping[str, Any]) -> str:
    """The text of a message: its content, or the text parts of it."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if isinstance(part, dict) and part.get("type") == "text")
    return ""


def sent_context(compaction: Compaction, case: Case) -> str:
    """The text that the reduction chose: all messages without the request's own words.

    Without them an answer that the question itself names would count as found. Own words are the system prompt, the
    question and, where the passages are judged, the history.
    """
    own = [message["content"] for message in case_messages(case, with_history=not case.is_history)]
    own.append(CITING_SYSTEM_PROMPT)
    return "\n".join(_without_own(message_text(message), own) for message in compaction.messages)


def _without_own(text: str, own: Sequence[str]) -> str:
    if text in own:
        return ""
    for words in sorted(own, key=len, reverse=True):
        if not words:
            continue
        if text.endswith(words):  # the question stands behind the documents
            return text.removesuffix(words)
        if text.startswith(words):  # a summary stands behind the system prompt
            return text.removeprefix(words)
    for words in sorted(own, key=len, reverse=True):
        before, found, after = text.rpartition(words) if words else ("", "", text)
        if found:
            return f"{before}\n{after}"
    return text


class ProvenDocuments(NamedTuple):
    """The passages of a compaction, sorted by what the messages prove."""

    kept: dict[str, list[Span]]
    merged: dict[str, str]
    dropped: dict[str, str]
    unproven: list[str]


def prove_documents(compaction: Compaction, case: Case, context: SearchText) -> ProvenDocuments:
    """Checks every passage reported as kept against the text really sent."""
    chunks = {chunk.id: chunk for chunk in case.chunks}
    proven = ProvenDocuments({}, {}, {}, [])
    for decision in compaction.documents:
        chunk = chunks.get(decision.id)
        if chunk is None:
            proven.unproven.append(decision.id)
        elif decision.action in ("kept", "trimmed") or (decision.action == "merged" and decision.spans):
            # A merged passage with spans of its own was stitched to another: its text is still sent.
            spans = [(start, end) for start, end in decision.spans if 0 <= start < end <= len(chunk.text)]
            if spans and len(spans) == len(decision.spans) and all(_is_sent(chunk, span, context) for span in spans):
                proven.kept[decision.id] = spans
            else:
                proven.unproven.append(decision.id)
        elif decision.action == "merged":
            proven.merged[decision.id] = decision.merged_into or ""
        else:
            proven.dropped[decision.id] = decision.reason
    return proven


def _is_sent(chunk: Chunk, span: Span, context: SearchText) -> bool:
    text = chunk.text[span[0] : span[1]]
    # A span of signs alone (a rule, a bullet) leaves nothing to look up and nothing to doubt.
    return context.holds(text) or not any(char.isalnum() for char in text)


def _document(chunk: Chunk) -> dict[str, Any]:
    document: dict[str, Any] = {"id": chunk.id, "text": chunk.text}
    for name in ("title", "source", "score"):
        if (value := getattr(chunk, name)) is not None:
            document[name] = value
    return document
