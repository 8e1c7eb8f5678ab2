"""Changes logits before a token is chosen: grammar, ``min_tokens``, ``logit_bias``, penalties, in this order.

Only the sequences that ask for it cost anything, and of those only the tokens concerned: a step gathers the logits of
all of them with one index, changes them, and puts them back::

    sequence 0, bias on 7            row 0: 7          -> flat indices     7, V + 3, V + 9, V + 12
    sequence 1, penalties, has       row 1: 3, 9, 12      values            gathered, changed, put back
      prompt 3 9 9, output 9 12      counts 0  1  1       counts of the output; the prompt counts for repetition alone

What a sequence has been given is remembered here and caught up with from its known tokens, so that nothing has to be
undone when a sequence is preempted.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.errors import GrammarError
from engine.grammar import GrammarCompiler, JsonMatcher
from engine.scheduler_output import ScheduledSequence

_MASK_BITS = 32


class TokenCounts:
    """The distinct tokens of one sequence and how often its output holds each."""

    __slots__ = ("_counts", "_ids", "_index", "_num_seen", "_size")

    def __init__(self) -> None:
        self._ids = np.empty(64, dtype=np.int64)
        self._counts = np.empty(64, dtype=np.float32)
        self._index: dict[int, int] = {}
        self._size = 0
        self._num_seen = 0

    def update(self, known_token_ids: Sequence[int], num_prompt_tokens: int, *, with_prompt: bool) -> None:
        """Catch up with what is known. Without the prompt only tokens of the output are held."""
        if self._num_seen == 0:
            if with_prompt:
                self._add_distinct(known_token_ids[:num_prompt_tokens])
            self._num_seen = num_prompt_tokens
        for token_id in known_token_ids[self._num_seen :]:
            place = self._place_of(token_id)  # may move the arrays
            self._counts[place] += 1
        self._num_seen = len(known_token_ids)

    @property
    def token_ids(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """(num_distinct,), in order of first appearance."""
        return self._ids[: self._size]

    @property
    def counts(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """(num_distinct,): occurrences in the output."""
        return self._counts[: self._size]

    def _add_distinct(self, token_ids: Sequence[int]) -> None:
        for token_id in dict.fromkeys(token_ids):
            self._place_of(token_id)

    def _place_of(self, token_id: int) -> int:
        place = self._index.get(token_id)
        if place is None:
            place = self._index[token_id] = self._size
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.empty_like(self._counts)))
            self._ids[place], self._counts[place] = token_id, 0
            self._size += 1
        return place


class _Penalised(NamedTuple):
    row: int
    sequence: ScheduledSequence
    counts: TokenCounts


class LogitsProcessors:
    """Keeps what the sequences of one model runner need. Belongs to one thread."""

    def __init__(
        self,
        *,
        eos_token_ids: Iterable[int] = (),
        grammars: GrammarCompiler | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """``eos_token_ids`` are kept out until ``min_tokens``; without ``grammars`` no JSON schema can be followed."""
        self._eos_token_ids = tuple(sorted(eos_token_ids))
        self._grammars = grammars
        self._device = torch.device(device)
        self._counts: dict[str, TokenCounts] = {}
        self._matchers: dict[str, JsonMatcher] = {}

    @property
    def num_tracked(self) -> int:
        """Sequences that something is remembered for."""
        return len(self._counts.keys() | self._matchers.keys())

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop what is remembered of sequences that have ended."""
        for request_id in request_ids:
            self._counts.pop(request_id, None)
            self._matchers.pop(request_id, None)

    def apply(self, logits: torch.Tensor, sequences: Sequence[ScheduledSequence]) -> dict[str, str]:
        """Change the logits in place.

        Args:
            logits: (num_rows, vocab_size), fp32, contiguous.
            sequences: one per row.

        Returns:
            Request id to error text, for sequences whose grammar cannot be followed; their rows are of no use.
        """
        changed = [(row, sequence) for row, sequence in enumerate(sequences) if sequence.sampling.changes_logits]
        if not changed:
            return {}
        failed = self._apply_grammars(logits, changed)
        self._apply_min_tokens(logits, changed)
        self._apply_bias(logits, changed)
        self._apply_penalties(logits, changed)
        return failed

    def _apply_grammars(self, logits: torch.Tensor, changed: list[tuple[int, ScheduledSequence]]) -> dict[str, str]:
        failed: dict[str, str] = {}
        guided = [(row, sequence) for row, sequence in changed if sequence.sampling.json_schema is not None]
        if not guided:
            return failed
        vocab_size = logits.shape[1]
        num_masked = self._num_masked(vocab_size)
        masks = np.zeros((len(guided), -(-vocab_size // _MASK_BITS)), dtype=np.int32)
        for mask, (_, sequence) in zip(masks, guided, strict=True):
            try:
                matcher = self._matcher_of(sequence)
                matcher.fill_mask(mask[: -(-num_masked // _MASK_BITS)])
            except GrammarError as error:
                failed[sequence.request_id] = str(error)
                mask.fill(-1)  # a row without any token could not be sampled
        is_allowed = np.unpackbits(masks.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        is_allowed[:, num_masked:] = 0
        rows = torch.tensor([row for row, _ in guided], device=self._device)
        is_hidden = torch.from_numpy(is_allowed == 0).to(self._device)
        if len(guided) == logits.shape[0]:
            logits.masked_fill_(is_hidden, float("-inf"))
        else:
            logits[rows] = logits[rows].masked_fill(is_hidden, float("-inf"))
        return failed

    def _num_masked(self, vocab_size: int) -> int:
        """Ids that a mask speaks of: models often have more logits than tokens."""
        return vocab_size if self._grammars is None else min(self._grammars.vocab_size, vocab_size)

    def _matcher_of(self, sequence: ScheduledSequence) -> JsonMatcher:
        if self._grammars is None:
            raise GrammarError("this engine has no grammars for JSON output")
        matcher = self._matchers.get(sequence.request_id)
        if matcher is None:
            assert sequence.sampling.json_schema is not None, f"{sequence.request_id} asks for no JSON"
            matcher = self._matchers[sequence.request_id] = self._grammars.compile(sequence.sampling.json_schema)
        num_new = sequence.num_output_tokens - matcher.num_accepted
        if num_new:
            matcher.accept(list(sequence.known_token_ids[-num_new:]))
        return matcher

    def _apply_min_tokens(self, logits: torch.Tensor, changed: list[tuple[int, ScheduledSequence]]) -> None:
        rows: list[int] = []
        token_ids: list[int] = []
        for row, sequence in changed:
            if sequence.num_output_tokens < sequence.sampling.min_tokens:
                ends = [*self._eos_token_ids, *sequence.sampling.stop_token_ids]
                token_ids += [token_id for token_id in ends if token_id < logits.shape[1]]
                rows += [row] * (len(token_ids) - len(rows))
        if rows:
            logits[self._tensor(rows), self._tensor(token_ids)] = float("-inf")

    def _apply_bias(self, logits: torch.Tensor, changed: list[tuple[int, ScheduledSequence]]) -> None:
        biased = [
            (row, token_id, bias)
            for row, sequence in changed
            for token_id, bias in sequence.sampling.logit_bias.items()
            if token_id < logits.shape[1]
        ]
        if biased:
            rows, token_ids, values = zip(*biased, strict=True)
            where = (self._tensor(rows), self._tensor(token_ids))
            logits.index_put_(where, torch.tensor(values, device=self._device), accumulate=True)

    def _apply_penalties(self, logits: torch.Tensor, changed: list[tuple[int, ScheduledSequence]]) -> None:
        penalised = [
            _Penalised(row, sequence, self._counts_of(sequence))
            for row, sequence in changed
            if sequence.sampling.needs_history
        ]
        sizes = [len(entry.counts.token_ids) for entry in penalised]
        if not sum(sizes):
            return
        vocab_size = logits.shape[1]
        indices = np.concatenate([entry.counts.token_ids + entry.row * vocab_size for entry in penalised])
        counts = torch.from_numpy(np.concatenate([entry.counts.counts for entry in penalised])).to(self._device)
        params = [entry.sequence.sampling for entry in penalised]
        repetition = self._repeat([param.repetition_penalty for param in params], sizes)
        frequency = self._repeat([param.frequency_penalty for param in params], sizes)
        presence = self._repeat([param.presence_penalty for param in params], sizes)
        flat = logits.view(-1)
        where = torch.from_numpy(indices).to(self._device)
        values = flat[where]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= frequency * counts + presence * (counts > 0)
        flat[where] = values

    def _counts_of(self, sequence: ScheduledSequence) -> TokenCounts:
        counts = self._counts.get(sequence.request_id)
        if counts is None:
            counts = self._counts[sequence.request_id] = TokenCounts()
        num_prompt_tokens = len(sequence.known_token_ids) - sequence.num_output_tokens
        with_prompt = sequence.sampling.repetition_penalty != 1.0
        counts.update(sequence.known_token_ids, num_prompt_tokens, with_prompt=with_prompt)
        return counts

    def _repeat(self, values: list[float], sizes: list[int]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), sizes)).to(self._device)

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
