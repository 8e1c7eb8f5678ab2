"""Serves OpenVINO GenAI's continuous-batching pipeline in OpenAI's shape, for load tests on the loopback.

    peers/bin/python openvino_server.py model.gguf --port 8000 --threads 2

Answers ``POST /v1/chat/completions`` with a stream, ``GET /v1/models`` and ``GET /health``. One thread steps the
pipeline while it has requests; every connection has a thread that waits for its tokens. Greedy decoding only. Runs in
the environment of ``make_openvino.sh`` and imports nothing of ours.
"""

import argparse
import importlib
import json
import queue
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REPLACEMENT = "\ufffd"


class Request:
    """One prompt on its way; ``tokens`` gets lists of new ids, and at the end the reason."""

    def __init__(self, input_ids: Any, config: Any) -> None:
        self.input_ids = input_ids
        self.config = config
        self.tokens: queue.SimpleQueue[list[int] | str] = queue.SimpleQueue()
        self.is_gone = False
        """Its client went away."""


class Engine:
    """Owns the pipeline; only its thread touches it."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._running: dict[int, tuple[Request, Any]] = {}
        self._next_id = 0
        self.failure: str | None = None

    def submit(self, request: Request) -> None:
        """Takes a request in before the next step."""
        self._waiting.put(request)

    def run(self) -> None:
        """Steps for ever; a step that fails ends the requests in it."""
        while True:
            if not self._running:
                self._add(self._waiting.get())
            while not self._waiting.empty():
                self._add(self._waiting.get())
            try:
                self._pipeline.step()
            except Exception as error:
                self.failure = f"{type(error).__name__}: {error}"
                for request, _ in self._running.values():
                    request.tokens.put(f"error: {self.failure}")
                self._running.clear()
                continue
            for number in list(self._running):
                self._collect(number)

    def _add(self, request: Request) -> None:
        self._next_id += 1
        try:
            handle = self._pipeline.add_request(self._next_id, request.input_ids, request.config)
        except Exception as error:
            request.tokens.put(f"error: {type(error).__name__}: {error}")
            return
        self._running[self._next_id] = request, handle

    def _collect(self, number: int) -> None:
        request, handle = self._running[number]
        if request.is_gone:
            handle.cancel()
            del self._running[number]
            return
        while handle.can_read():
            for output in handle.read().values():
                if output.generated_ids:
                    request.tokens.put(list(output.generated_ids))
                reason = output.finish_reason.name
                if reason != "NONE":
                    request.tokens.put("length" if reason == "LENGTH" else "stop")
                    del self._running[number]
                    return
        if handle.get_status().name not in ("RUNNING", "WAITING"):
            request.tokens.put(f"error: the pipeline gave the request up ({handle.get_status().name})")
            del self._running[number]


class Server(ThreadingHTTPServer):
    """Knows the engine and how to encode."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, port: int, genai: Any, pipeline: Any, max_model_len: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.genai = genai
        self.tokenizer = pipeline.get_tokenizer()
        self.stop_ids = set(pipeline.get_config().stop_token_ids)
        self.tokenizer_lock = threading.Lock()
        self.max_model_len = max_model_len
        self.engine = Engine(pipeline)
        threading.Thread(target=self.engine.run, daemon=True).start()

    def encode(self, messages: list[dict[str, str]]) -> Any:
        """Token ids of the conversation, ready for an answer: (1, num_tokens)."""
        with self.tokenizer_lock:
            text = self.tokenizer.apply_chat_template(messages, True)
            return self.tokenizer.encode(text, add_special_tokens=False).input_ids

    def decode(self, ids: list[int]) -> str:
        """Text of an answer so far, without its end token."""
        with self.tokenizer_lock:
            return str(self.tokenizer.decode([id_ for id_ in ids if id_ not in self.stop_ids]))


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line a request would be part of what is measured."""

    def do_GET(self) -> None:
        """Health and models."""
        if self.path == "/health":
            self._json(200 if self.server.engine.failure is None else 500, {"failure": self.server.engine.failure})
        elif self.path == "/v1/models":
            served = {"id": "default", "object": "model", "max_model_len": self.server.max_model_len}
            self._json(200, {"object": "list", "data": [served]})
        else:
            self._json(404, {"error": {"message": f"there is no {self.path}", "code": "not_found"}})

    def do_POST(self) -> None:
        """A completion, always as a stream."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        input_ids = self.server.encode(body["messages"])
        num_prompt, max_tokens = int(input_ids.shape[1]), int(body["max_tokens"])
        if num_prompt + max_tokens > self.server.max_model_len:
            message = f"{num_prompt} + {max_tokens} tokens are more than the window of {self.server.max_model_len}"
            self._json(400, {"error": {"message": message, "code": "context_length_exceeded"}})
            return
        config = self.server.genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.stop_token_ids = self.server.stop_ids
        config.apply_chat_template = False
        request = Request(input_ids, config)
        self.server.engine.submit(request)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            self._stream(request, num_prompt)
        except OSError:
            request.is_gone = True
            self.close_connection = True

    def _stream(self, request: Request, num_prompt: int) -> None:
        ids: list[int] = []
        sent = 0
        while True:
            item = request.tokens.get()
            if isinstance(item, list):
                ids += item
                text = self.server.decode(ids)
                if len(text) > sent and not text.endswith(REPLACEMENT):
                    self._event({"choices": [{"index": 0, "delta": {"content": text[sent:]}, "finish_reason": None}]})
                    sent = len(text)
                continue
            if item.startswith("error: "):
                self._event({"error": {"message": item.removeprefix("error: ")}})
            else:
                rest = self.server.decode(ids)[sent:]
                self._event({"choices": [{"index": 0, "delta": {"content": rest}, "finish_reason": item}]})
                self._event({"choices": [], "usage": {"prompt_tokens": num_prompt, "completion_tokens": len(ids)}})
                self._write(b"data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")
            return

    def _event(self, event: dict[str, Any]) -> None:
        self._write(b"data: " + json.dumps({"object": "chat.completion.chunk", **event}).encode() + b"\n\n")

    def _write(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
        self.wfile.flush()

    def _json(self, status: int, content: Any) -> None:
        encoded = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)


def main() -> None:
    """Load the model, then serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cache-gib", type=int, default=4)
    parser.add_argument("--max-num-batched-tokens", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=8192)
    arguments = parser.parse_args()
    genai = importlib.import_module("openvino_genai")  # of the peer's environment, unknown to ours
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = True
    scheduler.cache_size = arguments.cache_gib
    scheduler.max_num_batched_tokens = arguments.max_num_batched_tokens
    scheduler.max_num_seqs = arguments.max_num_seqs
    scheduler.dynamic_split_fuse = True
    properties = {"INFERENCE_NUM_THREADS": arguments.threads} if arguments.threads else {}
    pipeline = genai.ContinuousBatchingPipeline(arguments.model, scheduler, "CPU", properties, {})
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    with Server(arguments.port, genai, pipeline, arguments.max_model_len) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
