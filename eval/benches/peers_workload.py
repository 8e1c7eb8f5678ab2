"""The workload of the bench of peers: RAG applications whose users ask about the same passages again and again.

Made of nq-redundant and the questions of nq: a *corpus* is the passages of one case, copies and near copies included,
and its questions are all those of both sets whose annotated passage lies among them. Every application has a system
prompt and some corpora of its own. Which corpus a request is about follows Zipf's law; which of its questions is drawn
evenly, so some come back word for word. For each question the retriever (BM25) hands over all passages of the corpus
in an order of its own, as retrievers do.

The trace is written once, with the texts and with the messages as an application without firsttoken would send them:
rendered by the gateway itself with nothing reduced. All servers get their requests from this file.
"""

import gzip
import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from eval.baselines import bm25, by_score, with_title
from eval.datasets import Dataset
from eval.errors import DataError
from eval.gateway import PromptRequest
from eval.prompts import case_documents
from eval.samples import Case
from eval.workload import LoadRequest

SYSTEM_PROMPTS = (
    "Answer the question in a few words, using only the documents.",
    "You are the help desk of an encyclopedia. Use nothing but the documents to answer, in one short sentence.",
    "You answer quiz questions for a radio show. The documents hold the answer. Say it in a few words, without asides.",
)
"""One an application."""
NUM_CORPORA = 9
MAX_QUESTIONS = 12
"""Of a corpus."""
ZIPF_EXPONENT = 1.0


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request: what firsttoken gets, and the same for a server that knows no documents."""

    id: str
    due: float
    """Arrival at one request a second, seconds; a rate scales it."""
    system_prompt: str
    case: Case
    """Question, accepted answers, and the passages in the retriever's order."""
    messages: list[dict[str, Any]]
    """Unreduced, with every document in them."""
    prompt_tokens: int
    """Of ``messages``."""
    is_repeated: bool
    """The same request came before."""
    max_tokens: int


class PeerTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The whole workload."""

    seed: int
    warm_up: list[TraceRequest]
    """About other corpora; nothing of it can help the measured ones."""
    requests: list[TraceRequest]


Render = Callable[[PromptRequest], tuple[list[dict[str, Any]], int]]
"""Messages with every document in them, and their tokens."""


def make_corpora(redundant: Dataset, questions: Dataset, *, num_corpora: int, seed: int) -> list[list[Case]]:
    """The corpora with the most questions that share none, in drawn order; each as its cases.

    Raises DataError where the sets do not have so many.
    """
    asked: dict[str, list[Case]] = {}
    for case in (*redundant.cases, *questions.cases):
        for chunk in case.chunks:
            if chunk.gold_kind == "annotated" and case.answers:
                asked.setdefault(chunk.id, []).append(case)
    found: list[tuple[Case, list[Case]]] = []
    for corpus in redundant.cases:
        members = {case.question: case for chunk in corpus.chunks for case in asked.get(chunk.id, ())}
        found.append((corpus, list(members.values())[:MAX_QUESTIONS]))
    found.sort(key=lambda item: -len(item[1]))
    corpora: list[list[Case]] = []
    taken: set[str] = set()
    for corpus, cases in found:
        if len(corpora) < num_corpora and not taken.intersection(case.question for case in cases):
            taken.update(case.question for case in cases)
            corpora.append([_about(corpus, case) for case in cases])
    if len(corpora) < num_corpora or min(map(len, corpora)) < 2:
        raise DataError(f"{redundant.name} and {questions.name} do not make {num_corpora} corpora with two questions")
    random.Random(f"{seed}/corpora").shuffle(corpora)
    return corpora


def _about(corpus: Case, asked: Case) -> Case:
    """A question on the passages of a corpus, in the order and with the scores of BM25."""
    scores = bm25(asked.question, [with_title(chunk) for chunk in corpus.chunks])
    chunks = [replace(corpus.chunks[place], score=round(float(scores[place]), 4)) for place in by_score(scores)]
    return Case(
        id=f"{corpus.id}/{asked.id}",
        question=asked.question,
        answers=asked.answers,
        lang=asked.lang,
        chunks=chunks,
        answer_in_gold=True,
    )


def make_trace(
    corpora: Sequence[Sequence[Case]],
    render: Render,
    *,
    num_requests: int,
    num_warm_up: int,
    max_tokens: int,
    seed: int,
) -> PeerTrace:
    """Draws the requests; the last corpora warm the servers up, the others are asked about."""
    rng = random.Random(seed)
    num_kept = max(1, len(corpora) - -(-num_warm_up // MAX_QUESTIONS)) if num_warm_up else len(corpora)
    rendered: dict[str, tuple[list[dict[str, Any]], int]] = {}

    def request(place: int, name: str, due: float, corpus: int, case: Case, is_repeated: bool) -> TraceRequest:
        system_prompt = SYSTEM_PROMPTS[corpus % len(SYSTEM_PROMPTS)]
        if case.id not in rendered:
            rendered[case.id] = render(prompt_request(system_prompt, case, max_tokens))
        messages, prompt_tokens = rendered[case.id]
        return TraceRequest(
            id=f"{name}-{place}",
            due=due,
            system_prompt=system_prompt,
            case=case,
            messages=messages,
            prompt_tokens=prompt_tokens,
            is_repeated=is_repeated,
            max_tokens=max_tokens,
        )

    spare = [(corpus, case) for corpus in range(num_kept, len(corpora)) for case in corpora[corpus]]
    warm_up = [
        request(place, "low", float(place), corpus, case, False)
        for place, (corpus, case) in enumerate(spare[:num_warm_up])
    ]
    requests: list[TraceRequest] = []
    seen: set[str] = set()
    due = 0.0
    for place in range(num_requests):
        corpus = _zipf(rng, num_kept)
        case = rng.choice(corpora[corpus])
        requests.append(request(place, "load", due, corpus, case, case.id in seen))
        seen.add(case.id)
        due += rng.expovariate(1.0)
    return PeerTrace(seed=seed, warm_up=warm_up, requests=requests)


def _zipf(rng: random.Random, size: int) -> int:
    return rng.choices(range(size), [1.0 / (rank + 1) ** ZIPF_EXPONENT for rank in range(size)])[0]


def prompt_request(system_prompt: str, case: Case, max_tokens: int) -> PromptRequest:
    """A request with documents, as an application sends it."""
    messages = [{"role": "system", "content": system_prompt}, {"role": "user", "content": case.question}]
    return PromptRequest(messages=messages, documents=case_documents(case), max_tokens=max_tokens)


def load_request(item: TraceRequest, *, knows_documents: bool, model: str, rate: float) -> LoadRequest:
    """What a server is sent, and when at ``rate`` requests a second; ``rate`` 0 is at once."""
    body: dict[str, Any] = {
        "model": model,
        "messages": item.messages,
        "max_tokens": item.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if knows_documents:
        asked = prompt_request(item.system_prompt, item.case, item.max_tokens)
        body |= {"messages": list(asked.messages), "documents": list(asked.documents)}
    due = item.due / rate if rate else 0.0
    return LoadRequest(id=item.id, arrival_s=due, body=body, case=item.case, input_tokens=item.prompt_tokens)


def write_peer_trace(path: Path, trace: PeerTrace) -> str:
    """Writes the trace and returns its SHA-256."""
    content = msgspec.json.encode(trace)
    path.write_bytes(gzip.compress(content, mtime=0))
    return hashlib.sha256(content).hexdigest()


def read_peer_trace(path: Path) -> tuple[PeerTrace, str]:
    """The trace and its SHA-256. Raises DataError."""
    try:
        content = gzip.decompress(path.read_bytes())
        return msgspec.json.decode(content, type=PeerTrace), hashlib.sha256(content).hexdigest()
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        raise DataError(f"{path}: no trace of the bench of peers: {error}") from None


def figures(requests: Sequence[TraceRequest]) -> Mapping[str, float]:
    """What the workload is like."""
    tokens = sorted(item.prompt_tokens for item in requests)
    return {
        "num_requests": len(requests),
        "num_system_prompts": len({item.system_prompt for item in requests}),
        "num_questions": len({item.case.id for item in requests}),
        "num_repeated": sum(item.is_repeated for item in requests),
        "num_passages": len({chunk.id for item in requests for chunk in item.case.chunks}),
        "prompt_tokens_median": tokens[len(tokens) // 2],
        "prompt_tokens_max": tokens[-1],
    }
