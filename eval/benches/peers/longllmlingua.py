"""Compresses prompts by LongLLMLingua, one at a time as asked for on standard input.

    peers/bin/python longllmlingua.py peers/model --threads 2

A line of JSON ``{"question": ..., "passages": [...], "target_tokens": ...}`` is answered by one with the compressed
prompt, its tokens as the package counts them, and the seconds it took. The settings are those of the package's own
LongLLMLingua example. Runs in the environment of ``make_longllmlingua.sh`` and imports nothing of ours.
"""

import argparse
import json
import sys
import time


def main() -> None:
    """Answer until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()

    import tiktoken
    import torch
    from transformers import AutoTokenizer

    # The package counts with an encoding that it downloads; the model's own tokenizer counts what the model is sent.
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    setattr(tiktoken, "encoding_for_model", lambda name: tokenizer)  # noqa: B010
    import llmlingua

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    answers, sys.stdout = sys.stdout, sys.stderr  # the package prints; answers must stand alone
    compressor = llmlingua.PromptCompressor(arguments.model, device_map="cpu")
    print(json.dumps({"version": "0.2.2"}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        try:
            found = compressor.compress_prompt(
                asked["passages"],
                instruction="",
                question=asked["question"],
                target_token=asked["target_tokens"],
                condition_compare=True,
                condition_in_question="after",
                rank_method="longllmlingua",
                use_sentence_level_filter=False,
                context_budget="+100",
                dynamic_context_compression_ratio=0.4,
                reorder_context="sort",
            )
            answer = {"text": found["compressed_prompt"], "num_tokens": found["compressed_tokens"]}
        except Exception as error:  # a case that the package fails on is a result too
            answer = {"text": "", "num_tokens": 0, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps({**answer, "seconds": time.perf_counter() - started}), file=answers, flush=True)


if __name__ == "__main__":
    main()
