"""An optional judge model behind the OpenAI API; what it says is reported beside the deterministic scores.

It sees the question, the accepted answers and the answer, and has to begin with YES or NO. An answer that is neither,
a failed call or an empty one is a failed verdict and counts as NO: a judge that breaks must not flatter anybody.
"""

import re
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import httpx
import msgspec

from eval.samples import Case

INSTRUCTION = (
    "You check answers. Say YES if the given answer agrees with one of the accepted answers, else NO. "
    "Say only YES or NO."
)
_VERDICT = re.compile(r"\W*(yes|no)\b", re.IGNORECASE)


class Verdict(NamedTuple):
    """1 for agreement, 0 for none, with the reason where there is no verdict."""

    score: float
    error: str | None = None


class Judge:
    """Asks one model, greedily."""

    def __init__(self, url: str, model: str, *, api_key: str = "", timeout_s: float = 120.0) -> None:
        self.model = model
        self._http = httpx.Client(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=timeout_s,
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def verdict(self, case: Case, answer: str) -> Verdict:
        """Whether the answer is right."""
        if not answer.strip():
            return Verdict(0.0)
        body = {
            "model": self.model,
            "messages": [
                {"role": "system", "content": INSTRUCTION},
                {"role": "user", "content": _question(case, answer)},
            ],
            "temperature": 0,
            "max_tokens": 8,
        }
        try:
            response = self._http.post("/v1/chat/completions", json=body)
            response.raise_for_status()
            text = _text(msgspec.json.decode(response.content))
        except (httpx.HTTPError, msgspec.DecodeError, LookupError, TypeError) as error:
            return Verdict(0.0, f"{type(error).__name__}: {error}")
        return parse_verdict(text)


def parse_verdict(text: str) -> Verdict:
    """
    >>> parse_verdict(" Yes, it does.")
    Verdict(score=1.0, error=None)
    >>> parse_verdict("NaN").error
    "neither YES nor NO: 'NaN'"
    """
    found = _VERDICT.match(text)
    if found is None:
        return Verdict(0.0, f"neither YES nor NO: {text[:80]!r}")
    return Verdict(float(found[1].lower() == "yes"))


def cohen_kappa(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Agreement of two raters on pass (1) or fail, beyond chance: 1 is perfect, 0 what chance gives.

    ``None`` where chance alone explains everything: both said the same of every case. Raises ``ValueError`` for none.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"agreement needs the same cases, at least one, got {len(first)} and {len(second)}")
    a, b = [value == 1.0 for value in first], [value == 1.0 for value in second]
    observed = sum(x == y for x, y in zip(a, b, strict=True)) / len(a)
    share_a, share_b = sum(a) / len(a), sum(b) / len(b)
    expected = share_a * share_b + (1 - share_a) * (1 - share_b)
    return None if expected == 1.0 else (observed - expected) / (1 - expected)


def _question(case: Case, answer: str) -> str:
    accepted = "\n".join(f"- {text}" for text in case.answers or [case.reference or ""])
    return f"Question: {case.question}\nAccepted answers:\n{accepted}\nGiven answer: {answer}"


def _text(decoded: Any) -> str:
    return str(decoded["choices"][0]["message"]["content"] or "")
