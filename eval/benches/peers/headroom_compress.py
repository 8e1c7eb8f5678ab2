"""Compresses prompts by headroom-ai, one at a time as asked for on standard input.

    peers/bin/python headroom_compress.py

A line of JSON ``{"question": ..., "passages": [...], "target_tokens": ...}`` is answered by one with the compressed
prompt and the seconds it took. The passages are what a search tool returned, which the package compresses by default.
Runs in the environment of ``make_headroom.sh`` and imports nothing of ours.
"""

import importlib
import json
import os
import sys
import time
from importlib import metadata

CHARS_PER_TOKEN = 4


def main() -> None:
    """Answer until the input ends."""
    os.environ.setdefault("HEADROOM_OFFLINE", "1")
    answers, sys.stdout = sys.stdout, sys.stderr  # the package may print; answers must stand alone
    headroom = importlib.import_module("headroom")  # of the peer's environment, unknown to ours
    print(json.dumps({"version": metadata.version("headroom-ai")}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        texts = "\n\n".join(asked["passages"])
        call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
        messages = [
            {"role": "user", "content": asked["question"]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": texts},
        ]
        share = min(1.0, asked["target_tokens"] / max(1, len(texts) // CHARS_PER_TOKEN))
        started = time.perf_counter()
        try:
            found = headroom.compress(messages, model="gpt-4o", protect_recent=0, target_ratio=share)
            answer = {"text": str(found.messages[-1]["content"])}
        except Exception as error:  # a case that the package fails on is a result too
            answer = {"text": "", "error": f"{type(error).__name__}: {error}"}
        print(json.dumps({**answer, "seconds": time.perf_counter() - started}), file=answers, flush=True)


if __name__ == "__main__":
    main()
