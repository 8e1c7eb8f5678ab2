"""Prefills and decodes by OpenVINO GenAI on the GGUF file itself, one at a time as asked for on standard input.

    peers/bin/python openvino_prefill.py model.gguf --threads 2

A line ``512 1`` asks for 512 random ids and one new token; the answer is a line of JSON with the seconds it took, by
the clock and of the processor. Runs in the environment of ``make_openvino.sh`` and imports nothing of ours.
"""

import argparse
import importlib
import json
import random
import sys
import time


def main() -> None:
    """Answer until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--vocabulary", type=int, default=49_000)
    arguments = parser.parse_args()

    import numpy as np

    # of the peer's environment, unknown to ours
    openvino, openvino_genai = (importlib.import_module(name) for name in ("openvino", "openvino_genai"))
    properties = {"INFERENCE_NUM_THREADS": arguments.threads} if arguments.threads else {}
    started = time.perf_counter()
    pipeline = openvino_genai.LLMPipeline(arguments.model, "CPU", **properties)
    print(json.dumps({"version": openvino_genai.__version__, "load_s": time.perf_counter() - started}), flush=True)
    generator = random.Random(0)
    for line in sys.stdin:
        num_tokens, num_new = (int(field) for field in line.split())
        ids = np.array([[generator.randrange(100, arguments.vocabulary) for _ in range(num_tokens)]], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_new
        config.ignore_eos = True
        config.apply_chat_template = False
        started, processor_started = time.perf_counter(), time.process_time()
        pipeline.generate(inputs, config)
        answer = {
            "wall": time.perf_counter() - started,
            "processor": time.process_time() - processor_started,
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
