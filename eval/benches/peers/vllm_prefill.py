"""Prefills and decodes by vLLM on a CPU, one at a time as asked for on standard input.

    peers/bin/python vllm_prefill.py model-folder --threads 2

A line ``512 1 8`` asks for 512 random ids, one new token, for eight prompts at once; the answer is a line of JSON with
the seconds it took. Compiled, bf16, whole prompts in one step, no prefix cache. Runs in the environment of
``make_vllm_cpu.sh`` and imports nothing of ours.
"""

import argparse
import importlib
import json
import os
import random
import sys
import time


def main() -> None:
    """Answer until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=49_000)
    arguments = parser.parse_args()
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if arguments.threads:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{arguments.threads - 1}"

    answers, sys.stdout = sys.stdout, sys.stderr  # the package prints; answers must stand alone
    vllm = importlib.import_module("vllm")  # of the peer's environment, unknown to ours
    engine = vllm.LLM(
        model=arguments.model,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=arguments.max_model_len,
        max_num_batched_tokens=arguments.max_model_len,
        max_num_seqs=8,
    )
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    generator = random.Random(0)
    for line in sys.stdin:
        num_tokens, num_new, batch_size = (int(field) for field in line.split())
        prompts = [
            {"prompt_token_ids": [generator.randrange(100, arguments.vocabulary) for _ in range(num_tokens)]}
            for _ in range(batch_size)
        ]
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        print(json.dumps({"wall": time.perf_counter() - started}), file=answers, flush=True)


if __name__ == "__main__":
    main()
