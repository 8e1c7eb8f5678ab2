"""What a prompt costs: operations and bytes by formula, seconds by measurement.

The formulas are the textbook ones for a decoder-only transformer with grouped-query attention and a gated MLP. One
multiply-add is two operations; a token at position p attends to p + 1 tokens, itself included::

    projections of one token      2 * parameters of the linear layers         grows with S * d**2
    attention of one (q, k) pair  4 * H * D_head per layer (q.k and p*v)      grows with S**2 * d
    KV cache of one token         2 * L * H_kv * D_head * bytes               keys and values

Seconds follow the same three terms, ``t = c0 * steps + c1 * tokens + c2 * pairs``, with coefficients that are fitted
while the engine runs: they differ between machines, kernels and loads, and one throughput figure would be wrong for
long prompts, where pairs rule, as well as for short ones, where the fixed part does.
"""

import itertools
import math
from typing import NamedTuple

from engine.outputs import ModelInfo

BYTES_PER_ELEMENT = {"fp32": 4, "bf16": 2, "fp16": 2}
QUANTIZED_SCALE_BYTES = 4
"""Of each head of each token in a quantized KV cache."""

DECAY = 0.97
"""Weight of an observation after one more: about the last 30 rule."""
PRIOR_WEIGHT = 1e-3
"""How strongly, against the evidence, both terms are believed to run at one rate and a step to have no fixed cost."""
MIN_OBSERVATIONS = 5
"""Before so many, nothing is an outlier."""
MAX_SURPRISE = 1.5
"""An outlier is an observation more than so many times slower or faster than predicted."""
NUM_SURPRISES_OF_CHANGE = 3
"""So many outliers in a row, all slow or all fast, are a change of speed."""
DECAY_OF_CHANGE = 0.3
"""Weight of what was learnt before a change, once it is rescaled to the new speed."""


def num_attention_pairs(num_new_tokens: int, num_context_tokens: int) -> int:
    """Query-key pairs of a causal step: each new token sees the context, the new ones before it, and itself."""
    return num_new_tokens * num_context_tokens + num_new_tokens * (num_new_tokens + 1) // 2


def linear_flops_per_token(info: ModelInfo) -> int:
    """Operations of one token in the linear layers of all blocks; without the output logits."""
    q_size = info.num_heads * info.head_dim
    kv_size = info.num_kv_heads * info.head_dim
    attention = info.hidden_size * (2 * q_size + 2 * kv_size)  # q, output; k, v
    mlp = 3 * info.hidden_size * info.intermediate_size  # gate, up, down
    return 2 * info.num_layers * (attention + mlp)


def attention_flops_per_pair(info: ModelInfo) -> int:
    """Operations of one query-key pair over all heads and layers: the score and the weighted sum."""
    return 4 * info.num_layers * info.num_heads * info.head_dim


def logits_flops(info: ModelInfo) -> int:
    """Operations of the output projection for one position; only sampled positions need it."""
    return 2 * info.hidden_size * info.vocab_size


def prefill_flops(info: ModelInfo, num_new_tokens: int, num_cached_tokens: int = 0) -> int:
    """Operations from a prompt to its first token, with the given number of tokens in the prefix cache already."""
    return (
        num_new_tokens * linear_flops_per_token(info)
        + num_attention_pairs(num_new_tokens, num_cached_tokens) * attention_flops_per_pair(info)
        + logits_flops(info)
    )


def kv_cache_bytes(info: ModelInfo, num_tokens: int) -> int:
    """Bytes of keys and values of so many tokens; where the cache is quantized, a byte each and a scale per head.

    Raises:
        ValueError: the size of the model's dtype is not known.
    """
    if info.dtype not in BYTES_PER_ELEMENT:
        raise ValueError(f"dtype must be one of {', '.join(BYTES_PER_ELEMENT)}, got {info.dtype!r}")
    head_bytes = info.head_dim * BYTES_PER_ELEMENT[info.dtype]
    if info.kv_cache_dtype != "auto":
        head_bytes = info.head_dim + QUANTIZED_SCALE_BYTES
    return 2 * info.num_layers * info.num_kv_heads * head_bytes * num_tokens


class CostCoefficients(NamedTuple):
    """Seconds per step, per new token, and per attention pair; none is negative."""

    step_s: float
    token_s: float
    pair_s: float

    def step_time_s(self, num_tokens: int, num_pairs: int) -> float:
        """Predicted time of one step of any composition."""
        return self.step_s + self.token_s * num_tokens + self.pair_s * num_pairs

    def max_tokens_within(self, seconds: float, num_context_tokens: int) -> float:
        """Most further tokens after a context whose own part of a step takes at most ``seconds``; may be infinite."""
        if seconds <= 0:
            return 0.0
        # pair_s * (n * context + n * (n + 1) / 2) + token_s * n <= seconds, solved for n
        square = self.pair_s / 2
        linear = self.pair_s * (num_context_tokens + 0.5) + self.token_s
        if square == 0:
            return seconds / linear if linear > 0 else math.inf
        return (math.sqrt(linear * linear + 4 * square * seconds) - linear) / (2 * square)


class PrefillCostModel:
    """Learns online how long prefills take, and answers how long one will take or how much fits into a time.

    Least squares on relative errors, so that short steps count as much as long ones; older observations fade. An
    outlier (a page fault, a busy neighbour) is clipped to ``MAX_SURPRISE`` times what was predicted, while several in
    a row are taken for a change of speed: then all that was learnt is rescaled at once. Coefficients are kept
    non-negative, hence predictions grow with every token. Before the data can tell the terms apart, the operation
    counts do.
    """

    def __init__(
        self,
        *,
        flops_per_token: float = 1.0,
        flops_per_pair: float = 0.0005,
        max_tokens_per_step: int | None = None,
    ) -> None:
        """Start without knowledge.

        Args:
            flops_per_token: cost of a token in the linear layers; only its ratio to the next one matters.
            flops_per_pair: cost of an attention pair. The default ratio is that of a small model.
            max_tokens_per_step: chunk size: longer prompts pay the fixed part once per chunk. ``None`` is no chunks.
        """
        if flops_per_token <= 0 or flops_per_pair <= 0:
            raise ValueError(f"operation counts must be positive, got {flops_per_token} and {flops_per_pair}")
        if max_tokens_per_step is not None and max_tokens_per_step < 1:
            raise ValueError(f"max_tokens_per_step must be at least 1, got {max_tokens_per_step}")
        self.num_observations = 0
        self._surprises: list[float] = []  # observed to predicted time of the outliers in a row
        self._scales = (1.0, float(flops_per_token), float(flops_per_pair))
        self._max_tokens_per_step = max_tokens_per_step
        # Decayed sums of the weighted normal equations A c = b, features scaled to operations.
        self._a = [[0.0] * 3 for _ in range(3)]
        self._b = [0.0] * 3
        self._coefficients: tuple[float, ...] | None = None

    @classmethod
    def from_model_info(cls, info: ModelInfo, max_tokens_per_step: int | None = None) -> "PrefillCostModel":
        """A model that knows the operation counts of this architecture."""
        return cls(
            flops_per_token=linear_flops_per_token(info),
            flops_per_pair=attention_flops_per_pair(info),
            max_tokens_per_step=max_tokens_per_step,
        )

    @property
    def coefficients(self) -> CostCoefficients | None:
        """The current fit; ``None`` before the first observation."""
        if self._coefficients is None:
            return None
        step_s, token_s, pair_s = (c * scale for c, scale in zip(self._coefficients, self._scales, strict=True))
        return CostCoefficients(step_s, token_s, pair_s)

    def observe(self, num_new_tokens: int, num_context_tokens: int, seconds: float) -> None:
        """Learn from one step that computed new tokens of one sequence after ``num_context_tokens`` computed ones."""
        self.observe_step(num_new_tokens, num_attention_pairs(num_new_tokens, num_context_tokens), seconds)

    def observe_step(self, num_new_tokens: int, num_pairs: int, seconds: float) -> None:
        """Learn from one step of any composition, given its new tokens and attention pairs over all sequences.

        Raises:
            ValueError: a count or the time is not positive.
        """
        if num_new_tokens < 1 or num_pairs < num_new_tokens or seconds <= 0:
            raise ValueError(
                f"a step needs tokens, as many pairs, and time, got {num_new_tokens}, {num_pairs}, {seconds} s"
            )
        features = (1.0, num_new_tokens * self._scales[1], num_pairs * self._scales[2])
        expected_s = seconds
        if self._coefficients is not None and self.num_observations >= MIN_OBSERVATIONS:
            expected_s = sum(c * x for c, x in zip(self._coefficients, features, strict=True))
            expected_s *= self._follow_change(seconds / expected_s)
            seconds = min(max(seconds, expected_s / MAX_SURPRISE), expected_s * MAX_SURPRISE)
        # Errors relative to what was expected: relative to what was observed, slow steps would weigh less than fast.
        weighted = [x / expected_s for x in features]
        for i in range(3):
            self._b[i] = DECAY * self._b[i] + weighted[i] * seconds / expected_s
            for j in range(3):
                self._a[i][j] = DECAY * self._a[i][j] + weighted[i] * weighted[j]
        self.num_observations += 1
        self._coefficients = _solve_non_negative(self._with_prior(), self._b)

    def predict_s(self, num_new_tokens: int, num_cached_tokens: int) -> float | None:
        """Seconds to prefill ``num_new_tokens`` after ``num_cached_tokens``; ``None`` before any observation."""
        coefficients = self.coefficients
        if coefficients is None:
            return None
        if num_new_tokens <= 0:
            return 0.0
        num_steps = -(-num_new_tokens // self._max_tokens_per_step) if self._max_tokens_per_step else 1
        return (
            coefficients.step_s * num_steps
            + coefficients.token_s * num_new_tokens
            + coefficients.pair_s * num_attention_pairs(num_new_tokens, num_cached_tokens)
        )

    def max_new_tokens(self, seconds: float, num_cached_tokens: int, *, limit: int = 1 << 20) -> int | None:
        """Most new tokens, up to ``limit``, whose predicted prefill takes at most ``seconds``.

        0 where not even one does, ``None`` before any observation.
        """
        if self._coefficients is None:
            return None

        def fits(num_new_tokens: int) -> bool:
            predicted_s = self.predict_s(num_new_tokens, num_cached_tokens)
            return predicted_s is not None and predicted_s <= seconds

        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if fits(middle):
                low = middle
            else:
                high = middle - 1
        return low

    def _follow_change(self, ratio: float) -> float:
        """Rescale what was learnt if ``ratio``, observed to predicted time, completes a row of outliers.

        Returns:
            By what factor predictions have changed.
        """
        is_slow = ratio > 1
        if max(ratio, 1 / ratio) <= MAX_SURPRISE:
            self._surprises.clear()
            return 1.0
        if self._surprises and (self._surprises[-1] > 1) != is_slow:
            self._surprises.clear()
        self._surprises.append(ratio)
        if len(self._surprises) < NUM_SURPRISES_OF_CHANGE:
            return 1.0
        factor = math.prod(self._surprises) ** (1 / len(self._surprises))
        self._surprises.clear()
        # As if all old observations had taken ``factor`` times as long, and been weighted accordingly.
        self._b = [DECAY_OF_CHANGE * value / factor for value in self._b]
        self._a = [[DECAY_OF_CHANGE * value / factor**2 for value in row] for row in self._a]
        return factor

    def _with_prior(self) -> list[list[float]]:
        """Normal equations plus ``PRIOR_WEIGHT * ((c1 - c2)**2 + c0**2)``, in units of the evidence so far."""
        a = [row.copy() for row in self._a]
        same_rate = PRIOR_WEIGHT * a[1][1]
        a[0][0] *= 1 + PRIOR_WEIGHT
        a[1][1] += same_rate
        a[2][2] += same_rate
        a[1][2] -= same_rate
        a[2][1] -= same_rate
        return a


def _solve_non_negative(a: list[list[float]], b: list[float]) -> tuple[float, ...]:
    """Minimise ``c.A.c - 2 b.c`` over c >= 0 for three unknowns: try every set of unknowns that may be positive.

    ``a`` is symmetric and positive definite, so the best non-negative one of the eight restricted optima is exact.
    """
    best, best_value = (0.0, 0.0, 0.0), 0.0
    for size in (3, 2, 1):
        for active in itertools.combinations(range(3), size):
            solution = _solve([[a[i][j] for j in active] for i in active], [b[i] for i in active])
            if solution is None or min(solution) < 0:
                continue
            c = [0.0, 0.0, 0.0]
            for index, value in zip(active, solution, strict=True):
                c[index] = value
            # At a restricted optimum the objective is -b.c.
            value = -sum(b[i] * c[i] for i in range(3))
            if value < best_value:
                best, best_value = (c[0], c[1], c[2]), value
    return best


def _solve(a: list[list[float]], b: list[float]) -> list[float] | None:
    """Gaussian elimination of a symmetric positive definite system, scaled to a unit diagonal; ``None`` if singular."""
    size = len(b)
    scales = [a[i][i] ** 0.5 for i in range(size)]
    rows = [[a[i][j] / (scales[i] * scales[j]) for j in range(size)] + [b[i] / scales[i]] for i in range(size)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda i: abs(rows[i][column]))
        if abs(rows[pivot][column]) < 1e-12:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for i in range(column + 1, size):
            factor = rows[i][column] / rows[column][column]
            rows[i] = [x - factor * y for x, y in zip(rows[i], rows[column], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - rest) / rows[i][i]
    return [value / scale for value, scale in zip(solution, scales, strict=True)]
