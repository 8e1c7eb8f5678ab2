"""Builds cases for the evaluation's tests, and a small gateway that really listens."""

import gzip
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from eval.samples import Case, Chunk, Probe, Turn

REPOSITORY = Path(__file__).resolve().parent.parent
DATA_FOLDER = Path(os.environ.get("FIRSTTOKEN_EVAL_DATA", REPOSITORY.parent / "shared" / "data"))
"""The evaluation data; absent on most machines."""


def make_chunk(id: str, text: str | None = None, *, gold: bool = False, **fields: Any) -> Chunk:
    """A chunk with distinct text; gold ones are annotated."""
    kind = fields.pop("gold_kind", "annotated" if gold else None)
    return Chunk(id=id, text=f"Text of {id}." if text is None else text, gold=gold, gold_kind=kind, **fields)


def make_case(chunks: Sequence[Chunk] = (), **fields: Any) -> Case:
    """A case with defaults for everything a test does not name."""
    defaults: dict[str, Any] = {"id": "case-1", "question": "What is it?", "answers": ["answer"], "lang": "en"}
    return Case(**(defaults | {"chunks": list(chunks)} | fields))


def make_history_case(turns: Sequence[str], probes: Sequence[Probe], **fields: Any) -> Case:
    """A history case; user and assistant alternate."""
    history = [Turn(role=("user", "assistant")[index % 2], content=text) for index, text in enumerate(turns)]
    return make_case(history=history, probes=list(probes), evidence="history", **fields)


def write_cases(path: Path, cases: Sequence[dict[str, Any]]) -> Path:
    """A data file of raw cases."""
    lines = "".join(json.dumps(case, ensure_ascii=False) + "\n" for case in cases)
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))
    return path


def rag_case(
    id: str = "q-1", *, num_passages: int = 10, gold_at: int = 0, answer: str = "blue heron"
) -> dict[str, Any]:
    """A raw case: every passage has ten words, the one at ``gold_at`` states the answer."""
    filler = "one two three four five six seven eight"
    chunks = [
        {
            "id": f"{id}-p{place}",
            "title": None,
            "text": f"{filler} {answer if place == gold_at else f'word{place} end'}",
            "source": "s",
            "score": 10.0 - place,
            "gold": place == gold_at,
            "gold_kind": "annotated" if place == gold_at else None,
            "some_new_field": 1,
        }
        for place in range(num_passages)
    ]
    return {
        "id": id,
        "dataset": "made",
        "lang": "en",
        "question": "Which bird is it?",
        "answers": [answer],
        "reference": None,
        "history": [],
        "chunks": chunks,
        "evidence": "any",
        "answer_in_gold": True,
    }


def num_words(text: str) -> int:
    """The fake gateway's token count."""
    return len(text.split())


Choose = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


@dataclass(slots=True)
class FakeGateway:
    """A gateway in a few lines: keeps the first documents that fit, counts words as tokens, answers with ``reply``."""

    top_k: int = 3
    """Documents kept without a limit."""
    window: int = 10_000
    choose: Choose | None = None
    """Replaces the choice of documents."""
    text_of: Callable[[dict[str, Any]], str] = lambda document: document["text"]
    """What is sent of a kept document; its whole text by default, whatever the record says."""
    merged: dict[str, str] = field(default_factory=dict)
    reply: Callable[[str], str] = lambda prompt: "a blue heron" if "blue heron" in prompt else "no idea"
    status: int = 200
    """Another status makes every completion and compaction fail."""
    busy_answers: int = 0
    """So many answers of 429 before the first real one."""
    ready_after: int = 0
    requests: list[tuple[str, dict[str, Any], str]] = field(default_factory=list)
    """Path, body and key of every POST."""

    def reduce(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of ``/v1/compact``; raises OverflowError where the prompt does not fit."""
        options = body.get("firsttoken", {})
        documents = body.get("documents", [])
        fixed = sum(num_words(message["content"]) for message in body["messages"])
        total = fixed + sum(num_words(document["text"]) for document in documents)
        limit = min(options.get("max_input_tokens") or self.window, self.window)
        if options.get("bypass"):
            kept = documents
        elif self.choose is not None:
            kept = self.choose(documents)
        elif options.get("max_input_tokens") is None:
            kept = documents[: self.top_k]
        else:
            kept, used = [], fixed
            for document in documents:
                used += num_words(document["text"])
                if used <= limit:
                    kept.append(document)
        kept = [document for document in kept if document["id"] not in self.merged]
        messages = [dict(message) for message in body["messages"]]
        texts = [self.text_of(document) for document in kept]
        if texts:
            messages[-1]["content"] = "\n".join(texts) + "\n\n" + messages[-1]["content"]
        prompt_tokens = sum(num_words(message["content"]) for message in messages)
        if prompt_tokens > self.window:
            raise OverflowError(f"This model's maximum context length is {self.window} tokens.")
        ids = {document["id"] for document in kept}
        return {
            "receipt_id": "rcpt_1",
            "messages": messages,
            "prompt_tokens": prompt_tokens,
            "original_prompt_tokens": total,
            "budget": {"max_input_tokens": limit, "source": "request"},
            "documents": [self._decision(document, document["id"] in ids) for document in documents],
            "denied_documents": 0,
            "turns": [],
            "stages": [{"stage": "select", "tokens_before": total, "tokens_after": prompt_tokens, "ms": 1.5}],
        }

    def _decision(self, document: dict[str, Any], is_kept: bool) -> dict[str, Any]:
        merged_into = self.merged.get(document["id"])
        action = "merged" if merged_into else "kept" if is_kept else "dropped"
        return {
            "id": document["id"],
            "action": action,
            "reason": action,
            "tokens_before": num_words(document["text"]),
            "tokens_after": num_words(document["text"]) if is_kept else 0,
            "spans": [[0, len(document["text"])]] if action == "kept" else [],
            "merged_into": merged_into,
        }


@contextmanager
def running(gateway: FakeGateway) -> Iterator[str]:
    """Serves ``gateway`` on a loopback port; yields its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(gateway))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(gateway: FakeGateway) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/ready":
                gateway.ready_after -= 1
                self._json(200 if gateway.ready_after < 0 else 503, {})
            else:
                self._json(200, {"object": "list", "data": [{"id": "default", "max_model_len": gateway.window}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            gateway.requests.append((self.path, body, self.headers.get("Authorization", "").removeprefix("Bearer ")))
            if gateway.busy_answers > 0:
                gateway.busy_answers -= 1
                self._error(429, "slow down", "rate_limit_exceeded")
                return
            if gateway.status != 200:
                self._error(gateway.status, "engine is gone", None)
                return
            try:
                compaction = gateway.reduce(body)
            except OverflowError as error:
                self._error(400, str(error), "context_length_exceeded")
                return
            if self.path == "/v1/compact":
                self._json(200, compaction)
                return
            text = gateway.reply("\n".join(message["content"] for message in compaction["messages"]))
            usage = {
                "prompt_tokens": compaction["prompt_tokens"],
                "completion_tokens": num_words(text),
                "total_tokens": compaction["prompt_tokens"] + num_words(text),
                "prompt_tokens_details": {"cached_tokens": 0},
            }
            if body.get("stream"):
                self._stream(text, usage)
            else:
                message = {"role": "assistant", "content": text}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                self._json(200, {"choices": [choice], "usage": usage})

        def _stream(self, text: str, usage: dict[str, Any]) -> None:
            events: list[dict[str, Any]] = [_chunk({"role": "assistant", "content": ""}, None)]
            events += [_chunk({"content": piece}, None) for piece in re.findall(r"\s*\S+", text)]
            events.append(_chunk({}, "stop"))
            events.append({"choices": [], "usage": usage})
            payload = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
            self._send(200, "text/event-stream", payload.encode())

        def _error(self, status: int, message: str, code: str | None) -> None:
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
            self._json(status, {"error": error})

        def _json(self, status: int, body: dict[str, Any]) -> None:
            self._send(status, "application/json", json.dumps(body).encode())

        def _send(self, status: int, kind: str, payload: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(payload)))
            if status == 429:
                self.send_header("Retry-After", "7")
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the tests' output is the tests'."""

    return Handler


def _chunk(delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}], "usage": None}
