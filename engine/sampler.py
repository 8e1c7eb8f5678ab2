"""Chooses the next token of every sequence from its logits.

A random choice takes the token with the largest ``probability / noise``, noise drawn from Exp(1) for every token id
(the Gumbel-max trick): exactly a draw from the distribution, and one that hardly reacts when the probabilities move by
a rounding error. With a seed, the noise depends on the seed and the index of the token alone, so the same request gets
the same tokens whatever else is in the batch and however its prompt was cut into chunks.

Filters apply in the usual order: temperature, then the ``top_k`` most likely, then of these the smallest set whose
probabilities add up to ``top_p``.
"""

import hashlib
from collections.abc import Sequence

import torch

from engine.sampling_params import SamplingParams

# Below this, dividing by the temperature overflows before it changes the choice.
_MIN_TEMPERATURE = 1e-5
# Most likely tokens among which top_p looks first; the whole vocabulary is only sorted when they do not reach it.
_NUM_CANDIDATES = 256


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
            logits: (num_rows, vocab_size), fp32, finite.
            sampling: how, one per row.
            num_output_tokens: index of the token among the outputs of its sequence, one per row.

        Returns:
            Token ids, one per row.
        """
        tokens: list[int] = logits.argmax(dim=-1).tolist()
        random = [row for row, params in enumerate(sampling) if params.temperature >= _MIN_TEMPERATURE]
        plain = [row for row in random if not _is_filtered(sampling[row], logits.shape[1])]
        filtered = [row for row in random if _is_filtered(sampling[row], logits.shape[1])]
        for rows, choose in ((plain, self._choose), (filtered, self._choose_filtered)):
            if rows:
                params = [sampling[row] for row in rows]
                noise = self._noise(params, [num_output_tokens[row] for row in rows], logits.shape[1])
                scaled = logits[rows] / self._column([param.temperature for param in params])
                for row, token in zip(rows, choose(scaled, params, noise), strict=True):
                    tokens[row] = token
        return tokens

    def _choose(self, logits: torch.Tensor, params: list[SamplingParams], noise: torch.Tensor) -> list[int]:
        """Among all tokens. In logarithms, so that tiny probabilities keep their order."""
        chosen: list[int] = (logits - noise.log()).argmax(dim=-1).tolist()
        return chosen

    def _choose_filtered(self, logits: torch.Tensor, params: list[SamplingParams], noise: torch.Tensor) -> list[int]:
        """Among the tokens that top_k and top_p leave."""
        vocab_size = logits.shape[1]
        top_k = [param.top_k if 0 < param.top_k < vocab_size else vocab_size for param in params]
        largest_k = max((k for k in top_k if k < vocab_size), default=0)
        num_candidates = min(vocab_size, max(largest_k, _NUM_CANDIDATES))
        values, token_ids, probabilities = self._candidates(logits, top_k, num_candidates)
        top_p = self._column([param.top_p for param in params])
        # A row that has top_k is complete with its k candidates; one without must reach top_p within them.
        is_short = (probabilities.sum(dim=-1, keepdim=True) < top_p).squeeze(-1).tolist()
        if num_candidates < vocab_size and any(
            short and k == vocab_size for short, k in zip(is_short, top_k, strict=True)
        ):
            values, token_ids, probabilities = self._candidates(logits, top_k, vocab_size)
        # Kept: those before which top_p was not reached yet. The first one always is.
        before = probabilities.cumsum(dim=-1) - probabilities
        is_dropped = (before >= top_p) | (probabilities == 0)
        is_dropped[:, 0] = False
        scores = (values - noise.gather(1, token_ids).log()).masked_fill_(is_dropped, float("-inf"))
        chosen: list[int] = token_ids.gather(1, scores.argmax(dim=-1, keepdim=True)).squeeze(1).tolist()
        return chosen

    def _candidates(
        self, logits: torch.Tensor, top_k: list[int], num_candidates: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The most likely tokens of each row: logits, ids, and probabilities after top_k (0 beyond it)."""
        vocab_size = logits.shape[1]
        values, token_ids = logits.topk(num_candidates, dim=-1)
        beyond = torch.arange(num_candidates, device=self._device) >= self._column(top_k)
        kept = values.masked_fill(beyond, float("-inf"))
        has_top_k = self._column(top_k) < vocab_size
        total = torch.where(has_top_k, kept.logsumexp(-1, keepdim=True), logits.logsumexp(-1, keepdim=True))
        return values, token_ids, (kept - total).exp()

    def _noise(self, params: list[SamplingParams], indices: list[int], vocab_size: int) -> torch.Tensor:
        """Exp(1), (num_rows, vocab_size)."""
        noise = torch.empty(len(params), vocab_size, device=self._device)
        generator = torch.Generator(device=self._device)
        for row, (param, index) in enumerate(zip(params, indices, strict=True)):
            if param.seed is None:
                noise[row].exponential_(generator=self._generator)
            else:
                generator.manual_seed(_noise_seed(param.seed, index))
                noise[row].exponential_(generator=generator)
        return noise

    def _column(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, device=self._device).unsqueeze(1)


def _is_filtered(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size or params.top_p < 1.0


def _noise_seed(seed: int, index: int) -> int:
    """63 well-mixed bits: neighbouring seeds and indices must not give related noise."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
