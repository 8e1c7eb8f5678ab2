"""Puts log probabilities into the form that leaves the engine, in step with the text of their tokens.

A token's text may wait, because it could begin a stop string or end inside a character. What is told about the token
waits with it, and is never told if the stop string swallows the token.
"""

from collections import deque

from engine.scheduler_output import SampledLogprobs
from engine.token_logprobs import PositionLogprobs, TokenLogprob
from engine.tokenizer import Tokenizer


class LogprobsQueue:
    """The log probabilities of one sequence."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._waiting: deque[PositionLogprobs] = deque()
        self._num_told = 0

    def append(self, token_id: int, sampled: SampledLogprobs) -> None:
        """Take in what the model found of the token at the next position."""
        chosen = self._described(token_id, sampled.logprob)
        top = [self._described(other, logprob) for other, logprob in sampled.top]
        self._waiting.append(PositionLogprobs(chosen=chosen, top=top))

    def take(self, num_settled_tokens: int) -> list[PositionLogprobs]:
        """What can be told now: of the first ``num_settled_tokens`` tokens of the output, those not told before."""
        told = [self._waiting.popleft() for _ in range(min(num_settled_tokens - self._num_told, len(self._waiting)))]
        self._num_told += len(told)
        return told

    def _described(self, token_id: int, logprob: float) -> TokenLogprob:
        text = self._tokenizer.token_bytes(token_id, skip_special=False)
        return TokenLogprob(token_id=token_id, logprob=logprob, text=text)
