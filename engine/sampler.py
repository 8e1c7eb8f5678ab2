"""Chooses the next token of every sequence from its logits.

Filters apply in the usual order: temperature, ``min_p``, then the ``top_k`` most likely, then of these the smallest set
whose probabilities add up to ``top_p``. All rows of a kind are one batch of tensor operations, and a whole vocabulary
is hardly ever sorted: 64 candidates are enough for most rows, and are found through the largest values of short runs of
the vocabulary; where a distribution is so flat that they do not reach top_p, tokens are drawn until one lies within it.

With a seed, a random choice takes the token with the largest ``probability / noise``, noise drawn from Exp(1) for every
token id (the Gumbel-max trick): exactly a draw from the distribution, and one that hardly reacts when the probabilities
move by a rounding error. The noise is a hash of the seed, the index of the output token and the token id, so the same
request gets the same tokens whatever else is in the batch and however its prompt was cut into chunks.
"""

import hashlib
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from engine.sampling_params import SamplingParams
from engine.scheduler_output import SampledLogprobs

# Below this, dividing by the temperature overflows before it changes the choice.
_MIN_TEMPERATURE = 1e-5
# Most likely tokens among which top_p looks, in turn; the whole vocabulary is sorted for rows that none suffices for.
_NUM_CANDIDATES = (64, 1024)
# Draws from a flat distribution before it is sorted after all.
_NUM_DRAWS = 8
# Neighbouring tokens of which the largest value stands for all while candidates are looked for.
_RUN = 64
# Odd multipliers that mix bits well, as signed 64-bit integers (those of SplitMix64).
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)


class _Row(NamedTuple):
    number: int
    params: SamplingParams
    num_output_tokens: int


class Sampler:
    """Samples batches; holds the noise source of sequences without a seed."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._generator = torch.Generator(device=self._device)
        self._generator.seed()

    def sample(
        self, logits: torch.Tensor, sampling: Sequence[SamplingParams], num_output_tokens: Sequence[int]
    ) -> list[int]:
        """Choose one token per row.

        Args:
            logits: (num_rows, vocab_size), fp32; some may be ``-inf``, but not a whole row.
            sampling: how, one per row.
            num_output_tokens: index of the token among the outputs of its sequence, one per row.

        Returns:
            Token ids, one per row.
        """
        vocab_size = logits.shape[1]
        rows = [_Row(*row) for row in zip(range(len(sampling)), sampling, num_output_tokens, strict=True)]
        kinds: dict[Callable[[torch.Tensor, list[_Row]], torch.Tensor], list[_Row]] = {}
        for row in rows:
            kinds.setdefault(self._kind_of(row.params, vocab_size), []).append(row)
        if len(kinds) == 1:
            ((choose, rows),) = kinds.items()
            return [int(token) for token in choose(logits, rows).tolist()]
        tokens = [0] * len(rows)
        for choose, members in kinds.items():
            chosen = choose(logits[[row.number for row in members]], members).tolist()
            for row, token in zip(members, chosen, strict=True):
                tokens[row.number] = token
        return tokens

    def _kind_of(self, params: SamplingParams, vocab_size: int) -> Callable[[torch.Tensor, list[_Row]], torch.Tensor]:
        if params.temperature < _MIN_TEMPERATURE or params.top_k == 1:
            return self._greedy
        if 0 < params.top_k < vocab_size or params.top_p < 1.0:
            return self._filtered
        return self._plain if params.seed is None else self._seeded

    # Each: logits (len(rows), vocab_size) in the order of rows. Returns (len(rows),), token ids.

    def _greedy(self, logits: torch.Tensor, rows: list[_Row]) -> torch.Tensor:
        return logits.argmax(dim=-1)

    def _plain(self, logits: torch.Tensor, rows: list[_Row]) -> torch.Tensor:
        """Where a uniform number falls among the cumulated probabilities."""
        cumulated = self._scaled(logits, rows).softmax(dim=-1).cumsum(dim=-1)
        total = cumulated[:, -1:]
        uniform = torch.rand(total.shape, generator=self._generator, device=self._device)
        # strictly below the total, and searched from the right: a token of probability 0 is never hit
        point = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
        return torch.searchsorted(cumulated, point, right=True).squeeze(1)

    def _seeded(self, logits: torch.Tensor, rows: list[_Row]) -> torch.Tensor:
        token_ids = torch.arange(logits.shape[1], device=self._device)[None]
        chosen = []
        for place, row in enumerate(rows):  # one by one: their noise stays in the cache of the processor
            scores = self._scaled(logits[place : place + 1], [row]) - self._log_noise([row], token_ids)
            chosen.append(scores.argmax(dim=-1))
        return torch.cat(chosen)

    def _filtered(self, logits: torch.Tensor, rows: list[_Row]) -> torch.Tensor:
        """Among the tokens that top_k and top_p leave, the first number of candidates that suffices for a row."""
        vocab_size = logits.shape[1]
        scaled = self._scaled(logits, rows)
        probabilities = scaled.softmax(dim=-1)
        chosen = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        pending = list(range(len(rows)))
        for num_candidates in (*(number for number in _NUM_CANDIDATES if number < vocab_size), vocab_size):
            if num_candidates > _NUM_CANDIDATES[0]:
                pending = self._draw_from_nucleus(scaled, probabilities, rows, pending, chosen)
            if not pending:
                break
            is_all = len(pending) == len(rows)
            part = [rows[place] for place in pending]
            values, token_ids = top_values(scaled if is_all else scaled[pending], num_candidates)
            of_part = probabilities if is_all else probabilities[pending]
            kept, is_enough = self._kept(of_part.gather(1, token_ids), part, vocab_size)
            done = [place for place, enough in enumerate(is_enough) if enough]
            if done:
                scores = values.double() - self._log_noise(part, token_ids)
                best = scores.masked_fill_(~kept, float("-inf")).argmax(dim=-1, keepdim=True)
                picked = token_ids.gather(1, best).squeeze(1)
                chosen[[pending[place] for place in done]] = picked[done]
                pending = [place for at, place in enumerate(pending) if not is_enough[at]]
        return chosen

    def _draw_from_nucleus(
        self,
        scaled: torch.Tensor,
        probabilities: torch.Tensor,
        rows: list[_Row],
        pending: list[int],
        chosen: torch.Tensor,
    ) -> list[int]:
        """Try to choose without sorting: draw from the whole distribution until a token lies within top_p.

        A draw does so with a probability of at least top_p, and is then a draw from what top_p leaves. Rows with top_k
        are left alone, and so is the rare one of which no draw was taken.

        Returns:
            The places that are still pending; the tokens of the others are in ``chosen``.
        """
        vocab_size = scaled.shape[1]
        left = [place for place in pending if 0 < rows[place].params.top_k < vocab_size]
        token_ids = torch.arange(vocab_size, device=self._device)
        for place in (place for place in pending if place not in left):
            row = probabilities[place]
            if rows[place].params.seed is None:
                uniform = torch.rand(_NUM_DRAWS, generator=self._generator, device=self._device)
                draws = torch.searchsorted(row.cumsum(dim=-1), uniform, right=True).clamp_(max=vocab_size - 1)
            else:  # in the order of their noisy scores: what is left out of it is as if it had never been there
                scores = scaled[place : place + 1] - self._log_noise([rows[place]], token_ids[None])
                draws = top_values(scores, min(_NUM_DRAWS, vocab_size))[1][0]
            for token, probability in zip(draws.tolist(), row[draws].tolist(), strict=True):
                # equal probabilities count in the order of ids
                before = float(row[row > probability].sum() + (row[:token] == probability).sum() * probability)
                if probability > 0.0 and before < rows[place].params.top_p:
                    chosen[place] = token
                    break
            else:
                left.append(place)
        return left

    def _kept(self, probabilities: torch.Tensor, rows: list[_Row], vocab_size: int) -> tuple[torch.Tensor, list[bool]]:
        """Which candidates the filters leave, and for which rows there are enough of them.

        Args:
            probabilities: (num_rows, num_candidates), largest first, of the whole distribution.
        """
        num_candidates = probabilities.shape[1]
        top_k = [row.params.top_k if 0 < row.params.top_k < vocab_size else vocab_size for row in rows]
        is_in_k = torch.arange(num_candidates, device=self._device) < self._column(top_k)
        probabilities = probabilities.masked_fill(~is_in_k, 0.0)
        has_top_k = self._column(top_k) < vocab_size
        total = torch.where(has_top_k, probabilities.sum(dim=-1, keepdim=True), 1.0)
        top_p = self._column([row.params.top_p for row in rows])
        cumulated = probabilities.cumsum(dim=-1)
        # Kept: those before which top_p was not reached yet. The first one always is.
        kept = (cumulated - probabilities < top_p * total) & (probabilities > 0)
        kept[:, 0] = True
        has_reached = ((cumulated[:, -1:] >= top_p * total) | (top_p >= 1.0)).squeeze(1).tolist()
        is_enough = [
            num_candidates == vocab_size or (k <= num_candidates if k < vocab_size else reached)
            for k, reached in zip(top_k, has_reached, strict=True)
        ]
        return kept, is_enough

    def _scaled(self, logits: torch.Tensor, rows: list[_Row]) -> torch.Tensor:
        """Divided by the temperature; ``-inf`` where min_p drops a token."""
        scaled = logits
        if any(row.params.temperature != 1.0 for row in rows):
            scaled = logits / self._column([row.params.temperature for row in rows])
        if any(row.params.min_p > 0.0 for row in rows):
            least = scaled.amax(dim=-1, keepdim=True) + self._column([row.params.min_p for row in rows]).log()
            scaled = scaled.masked_fill(scaled < least, float("-inf"))
        return scaled

    def _log_noise(self, rows: list[_Row], token_ids: torch.Tensor) -> torch.Tensor:
        """Logarithms of Exp(1) noise, hashed from row and token id.

        Args:
            token_ids: (num_rows, num_columns), int64.

        Returns:
            (num_rows, num_columns), fp64: with the bits of fp32 the noise would end where rare tokens need it.
        """
        seeds = [_noise_seed(row.params.seed, row.num_output_tokens) for row in rows]
        bits = token_ids * _STEP
        bits += torch.tensor(seeds, device=self._device)[:, None]
        bits.bitwise_xor_(_shifted(bits, 30)).mul_(_MIX_1)
        bits.bitwise_xor_(_shifted(bits, 27)).mul_(_MIX_2)
        bits.bitwise_xor_(_shifted(bits, 31))
        uniform = _shifted(bits, 12).double().add_(0.5).mul_(2.0**-52)
        return uniform.log_().neg_().log_()

    def _column(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, device=self._device).unsqueeze(1)


class LogprobRows:
    """The log probabilities of some rows, taken before anything changes the logits."""

    def __init__(self, logits: torch.Tensor, sampling: Sequence[SamplingParams]) -> None:
        """Args:
        logits: (num_rows, vocab_size), fp32, as the model computed them.
        sampling: one per row; rows that ask for no log probabilities cost nothing.
        """
        self._num_top = {
            row: params.top_logprobs for row, params in enumerate(sampling) if params.top_logprobs is not None
        }
        rows = list(self._num_top)
        self._logprobs = logits[rows].log_softmax(dim=-1) if rows else None

    def of(self, tokens: Sequence[int]) -> dict[int, SampledLogprobs]:
        """Row to what is told about it, for the chosen tokens of all rows."""
        if self._logprobs is None:
            return {}
        rows = list(self._num_top)
        token_ids = torch.tensor([[tokens[row]] for row in rows], device=self._logprobs.device)
        chosen = self._logprobs.gather(1, token_ids).squeeze(1).tolist()
        most = max(self._num_top.values())
        values, ids = top_values(self._logprobs, most)
        return {
            row: SampledLogprobs(logprob, list(zip(ids_of_row[:num], values_of_row[:num], strict=True)))
            for (row, num), logprob, ids_of_row, values_of_row in zip(
                self._num_top.items(), chosen, ids.tolist(), values.tolist(), strict=True
            )
        }


def top_values(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` largest values of each row and where they are, largest first: ``torch.topk``, several times faster.

    The k largest values lie in the k runs with the largest maxima, so only these runs are searched.

    Args:
        logits: (num_rows, vocab_size).
        k: at most vocab_size.
    """
    num_rows, vocab_size = logits.shape
    num_runs = vocab_size // _RUN
    if k == 0 or k * _RUN * 2 > vocab_size:
        return logits.topk(k, dim=-1)
    whole = logits[:, : num_runs * _RUN].reshape(num_rows, num_runs, _RUN)
    runs = whole.amax(dim=-1).topk(min(k, num_runs), dim=-1).indices
    values = whole.gather(1, runs[:, :, None].expand(-1, -1, _RUN)).flatten(1)
    ids = (runs[:, :, None] * _RUN + torch.arange(_RUN, device=logits.device)).flatten(1)
    if num_runs * _RUN < vocab_size:
        rest = torch.arange(num_runs * _RUN, vocab_size, device=logits.device)
        values = torch.cat((values, logits[:, num_runs * _RUN :]), dim=1)
        ids = torch.cat((ids, rest.expand(num_rows, -1)), dim=1)
    top = values.topk(k, dim=-1)
    return top.values, ids.gather(1, top.indices)


def _shifted(bits: torch.Tensor, number: int) -> torch.Tensor:
    """``bits`` as if unsigned, shifted to the right."""
    return (bits >> number).bitwise_and_((1 << (64 - number)) - 1)


def _noise_seed(seed: int | None, index: int) -> int:
    """64 well-mixed bits, signed: neighbouring seeds and indices must not give related noise."""
    if seed is None:
        return secrets.randbits(64) - (1 << 63)
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
