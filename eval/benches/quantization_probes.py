"""Asks two model runners the same: every position of texts, needles in them, questions over passages."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.chat_template import ChatTokenizer
from engine.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.scheduler_output import ScheduledSequence, SchedulerOutput
from engine.tokenizer import Tokenizer
from eval.errors import EvalError
from eval.prompts import SYSTEM_PROMPT
from eval.quantization import NeedleResult, PositionValues, RecallResult
from eval.samples import Case
from eval.scoring import SearchText, answer_score

ROWS_PER_PART = 128
_CITIES = ("Ankara", "Bergen", "Cusco", "Dakar", "Essen", "Fez", "Gdansk", "Hanoi", "Izmir", "Jaffa", "Kyoto", "Lima")

Step = Callable[[str], None]
"""Told what is done next."""


@dataclass(frozen=True, slots=True)
class ModelPair:
    """One model twice, with the same tokens and dtype."""

    reference: ModelRunner
    quantized: ModelRunner

    @property
    def both(self) -> tuple[ModelRunner, ModelRunner]:
        """Unquantized first."""
        return self.reference, self.quantized


def compare_text(pair: ModelPair, token_ids: Sequence[int]) -> PositionValues:
    """Both models' next-token distributions at every position of one text.

    Raises:
        EvalError: the unquantized model's logits are not finite.
    """
    rows = range(len(token_ids) - 1)
    targets = torch.tensor(token_ids[1:], dtype=torch.int64)
    parts: list[list[torch.Tensor]] = []
    for start, (reference, quantized) in zip(
        range(0, len(rows), ROWS_PER_PART),
        _in_step(runner.logits_in_parts(token_ids, rows, ROWS_PER_PART) for runner in pair.both),
        strict=True,
    ):
        parts.append(_compare_logits(reference, quantized, targets[start : start + ROWS_PER_PART]))
    nll_reference, nll_quantized, kl, deviation, is_same, is_finite = (
        torch.cat(columns).cpu() for columns in zip(*parts, strict=True)
    )
    return PositionValues(
        nll_reference=nll_reference.double().numpy(),
        nll_quantized=nll_quantized.double().numpy(),
        kl=kl.double().numpy(),
        max_deviation=deviation.double().numpy(),
        is_same_top1=is_same.numpy().astype(np.bool_),
        is_finite=is_finite.numpy().astype(np.bool_),
    )


def _in_step(streams: Iterator[Iterator[torch.Tensor]]) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*streams, strict=True)


def _compare_logits(reference: torch.Tensor, quantized: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    """reference, quantized: (num_rows, vocab_size). Returns six tensors of (num_rows,)."""
    if not torch.isfinite(reference).all():
        raise EvalError("the unquantized model's logits are not finite: there is nothing to compare with")
    is_finite = torch.isfinite(quantized).all(dim=-1)
    quantized = torch.nan_to_num(quantized)
    targets = targets.to(reference.device)[:, None]
    log_p, log_q = reference.log_softmax(dim=-1), quantized.log_softmax(dim=-1)
    difference = quantized - reference
    deviation = (difference - difference.mean(dim=-1, keepdim=True)).abs().amax(dim=-1)
    return [
        -log_p.gather(1, targets)[:, 0],
        -log_q.gather(1, targets)[:, 0],
        (log_p.exp() * (log_p - log_q)).sum(dim=-1),
        deviation,
        reference.argmax(dim=-1) == quantized.argmax(dim=-1),
        is_finite,
    ]


@dataclass(frozen=True, slots=True)
class Needle:
    """A prompt that ends with the answer to a question for one sentence in it."""

    length: int
    depth: float
    token_ids: list[int]
    num_answer_tokens: int


def make_needles(
    tokenizer: Tokenizer,
    filler: Sequence[int],
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    num_per_cell: int,
    seed: int,
) -> list[Needle]:
    """Needles in stretches of ``filler``, which is repeated where it is too short; all random choices follow ``seed``.

    Raises:
        EvalError: a length has no room for the sentence and the question.
    """
    rng = random.Random(seed)
    return [
        _make_needle(tokenizer, filler, length, depth, rng)
        for length in lengths
        for depth in depths
        for _ in range(num_per_cell)
    ]


def _make_needle(tokenizer: Tokenizer, filler: Sequence[int], length: int, depth: float, rng: random.Random) -> Needle:
    city, code = rng.choice(_CITIES), f"{rng.randrange(10_000, 100_000)}"
    bos = prompt_start(tokenizer)
    sentence = tokenizer.encode(f"\nThe access code of {city} is {code}.\n")
    question = tokenizer.encode(f"\nWhat is the access code of {city}?\nThe access code of {city} is")
    answer = tokenizer.encode(f" {code}")
    room = length - len(bos) - len(sentence) - len(question) - len(answer)
    if room < 0:
        raise EvalError(f"a needle and its question take {length - room} tokens, more than the length of {length}")
    start = rng.randrange(len(filler))
    text = [filler[(start + place) % len(filler)] for place in range(room)]
    place = round(depth * room)
    return Needle(
        length=length,
        depth=depth,
        token_ids=[*bos, *text[:place], *sentence, *text[place:], *question, *answer],
        num_answer_tokens=len(answer),
    )


def ask_needle(pair: ModelPair, needle: Needle) -> NeedleResult:
    """Whether each model would write the answer; one pass, the answer's own tokens given."""
    first = len(needle.token_ids) - needle.num_answer_tokens
    rows = range(first - 1, len(needle.token_ids) - 1)
    targets = torch.tensor(needle.token_ids[first:], dtype=torch.int64)
    found, nll = [], []
    for runner in pair.both:
        logits = torch.cat(list(runner.logits_in_parts(needle.token_ids, rows, ROWS_PER_PART))).cpu()
        is_finite = bool(torch.isfinite(logits).all())
        logits = torch.nan_to_num(logits)
        found.append(is_finite and bool((logits.argmax(dim=-1) == targets).all()))
        nll.append(-float(logits.log_softmax(dim=-1).gather(1, targets[:, None]).mean()))
    return NeedleResult(
        length=needle.length,
        depth=needle.depth,
        found_reference=found[0],
        found_quantized=found[1],
        nll_reference=nll[0],
        nll_quantized=nll[1],
    )


def prompt_start(tokenizer: Tokenizer) -> list[int]:
    """What every prompt begins with."""
    return [tokenizer.bos_token_id] if tokenizer.add_bos_token and tokenizer.bos_token_id is not None else []


def case_prompt(chat: ChatTokenizer, case: Case, max_tokens: int) -> list[int]:
    """Question and passages: those with the answer and as many others, in their order, as fit into ``max_tokens``."""
    gold = {chunk.id for chunk in case.chunks if chunk.gold}
    others = [chunk.id for chunk in case.chunks if chunk.id not in gold]
    prompt = _encode_case(chat, case, gold)
    for num_others in range(1, len(others) + 1):
        longer = _encode_case(chat, case, gold | set(others[:num_others]))
        if len(longer) > max_tokens:
            break
        prompt = longer
    return prompt


def _encode_case(chat: ChatTokenizer, case: Case, kept: set[str]) -> list[int]:
    chunks = [chunk for chunk in case.chunks if chunk.id in kept]
    passages = "\n\n".join(f"[{place}] {chunk.text}" for place, chunk in enumerate(chunks, start=1))
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": f"{passages}\n\n{case.question}"},
    ]
    return chat.encode_chat(messages)


def answer_cases(
    pair: ModelPair, chat: ChatTokenizer, cases: Sequence[Case], *, max_prompt_tokens: int, max_tokens: int, step: Step
) -> list[RecallResult]:
    """Greedy answers of both models; cases whose prompt is longer than ``max_prompt_tokens`` are left out."""
    prompts = [case_prompt(chat, case, max_prompt_tokens) for case in cases]
    fitting = [place for place, prompt in enumerate(prompts) if len(prompt) <= max_prompt_tokens]
    texts = []
    for runner, name in zip(pair.both, ("unquantized", "quantized"), strict=True):
        answers = []
        for place in fitting:
            step(f"answers, {name}")
            answers.append(chat.tokenizer.decode(generate(runner, prompts[place], max_tokens, chat.tokenizer)))
        texts.append(answers)
    results = []
    for place, reference, quantized in zip(fitting, *texts, strict=True):
        case = cases[place]
        contained = [answer_score(case, SearchText(text)) == 1.0 for text in (reference, quantized)]
        results.append(
            RecallResult(
                case=case.id,
                num_prompt_tokens=len(prompts[place]),
                contained_reference=contained[0],
                contained_quantized=contained[1],
                is_same_text=reference == quantized,
            )
        )
    return results


def generate(runner: ModelRunner, prompt: Sequence[int], max_tokens: int, tokenizer: Tokenizer) -> list[int]:
    """Greedy tokens up to the end of the answer; none more where the logits are not finite."""
    known, num_computed = list(prompt), 0
    for num_output_tokens in range(max_tokens):
        output = runner.execute(
            SchedulerOutput(
                scheduled=[
                    ScheduledSequence(
                        request_id="answer",
                        token_ids=known[num_computed:],
                        start=num_computed,
                        block_ids=list(range(-(-(len(prompt) + max_tokens) // runner.kv_cache.block_size))),
                        sampling=SamplingParams(temperature=0.0),
                        needs_sample=True,
                        num_output_tokens=num_output_tokens,
                        known_token_ids=known,
                    )
                ]
            )
        )
        num_computed = len(known)
        token_id = output.sampled.get("answer")
        if token_id is None or token_id in tokenizer.eos_token_ids:
            break
        known.append(token_id)
    return known[len(prompt) :]
