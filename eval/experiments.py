"""Experiments that change one variable: a baseline and arms that differ from it in exactly one setting each.

An arm holds at most one ``Setting``, so two cannot be changed together by construction. Ready-made experiments name the
settings that people ask about; any other key of the configuration can be varied by its path.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BASELINE = "baseline"
AGAIN = "baseline again"
"""Identical with the baseline; must tie with it, or the experiment proves nothing."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the gateway's configuration and its value."""

    path: str
    """Segments joined by dots, as in TOML: ``engine.scheduler.policy``."""
    value: Any

    def environment(self) -> dict[str, str]:
        """The environment variable that sets it.

        >>> Setting("engine.scheduler.policy", "fixed_count").environment()
        {'FIRSTTOKEN__ENGINE__SCHEDULER__POLICY': 'fixed_count'}
        """
        value = self.value if isinstance(self.value, str) else json.dumps(self.value)
        return {"FIRSTTOKEN__" + self.path.upper().replace(".", "__"): value}


@dataclass(frozen=True, slots=True)
class AblationArm:
    """A baseline with at most one setting changed."""

    name: str
    setting: Setting | None = None


@dataclass(frozen=True, slots=True)
class Experiment:
    """The arms of one question."""

    variable: str
    arms: tuple[AblationArm, ...]

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        if len(set(names)) != len(names):
            raise ValueError(f"two arms have the same name: {', '.join(names)}")
        if len(self.arms) < 2:
            raise ValueError(f"{self.variable}: an experiment needs a baseline and another arm, got {len(self.arms)}")

    @property
    def baseline(self) -> AblationArm:
        """What every arm is compared with."""
        return self.arms[0]

    def with_twin(self) -> "Experiment":
        """The same with an arm that is identical with the baseline."""
        twin = AblationArm(AGAIN, self.baseline.setting)
        return Experiment(self.variable, (self.baseline, twin, *self.arms[1:]))


@dataclass(frozen=True, slots=True)
class _Variable:
    path: str
    values: tuple[Any, ...]
    """The first is the baseline."""
    about: str


VARIABLES: dict[str, _Variable] = {
    "chunk-size": _Variable(
        "engine.scheduler.max_num_batched_tokens",
        (512, 128, 256, 1024),
        "tokens of one step, prefill chunks among them",
    ),
    "batching-policy": _Variable(
        "engine.scheduler.policy", ("token_budget", "fixed_count", "length_bucket"), "how sequences share a step"
    ),
    "attention-backend": _Variable(
        "engine.model.attention_backend", ("auto", "native", "tiled", "sdpa", "reference"), "kernels of attention"
    ),
    "dtype": _Variable("engine.model.dtype", ("auto", "fp32", "bf16"), "weights, activations and KV cache"),
    "prefix-cache": _Variable("engine.cache.enable_prefix_caching", (True, False), "blocks of equal prefixes shared"),
    "document-order": _Variable(
        "reducer.template.document_order", ("input", "best_first", "best_last", "cache"), "order of the passages"
    ),
}

STAGES: dict[str, Setting] = {
    "clean": Setting("reducer.clean.enabled", False),
    "dedup": Setting("reducer.dedup.enabled", False),
    "semantic dedup": Setting("reducer.dedup.semantic", False),
    "stitching": Setting("reducer.dedup.stitch", False),
    "embeddings": Setting("encoder.enabled", False),
    "links": Setting("reducer.rank.link_weight", 0.0),
    "siblings": Setting("reducer.rank.sibling_weight", 0.0),
    "selection": Setting("reducer.selection.min_passages", 1_000_000),
    "history": Setting("reducer.history.max_tokens", 1_000_000),
    "canonical tools": Setting("reducer.template.canonical_tools", False),
}
"""Each stage of the reducer by the one key that switches it off (or takes its effect away)."""

STAGES_VARIABLE = "stages"
READY_MADE = (*VARIABLES, STAGES_VARIABLE)


def parse_experiment(texts: Sequence[str]) -> Experiment:
    """``chunk-size``, ``chunk-size=128,512`` or ``engine.scheduler.policy=token_budget,fixed_count``.

    The first value is the baseline. Raises ``ValueError`` for more than one variable: of two changes made together
    nobody can say which one did it.
    """
    if len(texts) != 1:
        named = " and ".join(text.partition("=")[0] for text in texts) or "none"
        raise ValueError(f"exactly one variable at a time, got {named}")
    name, has_values, listed = texts[0].partition("=")
    values = [_parse(value.strip()) for value in listed.split(",") if value.strip()]
    if has_values and not values:
        raise ValueError(f"{texts[0]!r} names no value")
    if name == STAGES_VARIABLE:
        return _stages([str(value) for value in values])
    if name in VARIABLES:
        return _values(name, VARIABLES[name].path, values or list(VARIABLES[name].values))
    if "." not in name:
        raise ValueError(f"no variable is called {name!r}; known: {', '.join(READY_MADE)}, or a key such as engine.x.y")
    return _values(name, name, values)


def _values(name: str, path: str, values: Sequence[Any]) -> Experiment:
    if len(values) < 2:
        raise ValueError(f"{name} needs a baseline and another value, got {len(values)}")
    for first, second in itertools.combinations(values, 2):
        if first == second and type(first) is type(second):
            raise ValueError(f"{name} has the value {first!r} twice; the identical arm is added by itself")
    first, *others = values
    return Experiment(
        name,
        (
            AblationArm(f"{first} ({BASELINE})", Setting(path, first)),
            *(AblationArm(str(value), Setting(path, value)) for value in others),
        ),
    )


def _stages(names: Sequence[str]) -> Experiment:
    for name in names:
        if name not in STAGES:
            raise ValueError(f"no stage is called {name!r}; known: {', '.join(STAGES)}")
    arms = [AblationArm(f"without {name}", STAGES[name]) for name in names or STAGES]
    return Experiment(STAGES_VARIABLE, (AblationArm(BASELINE), *arms))


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
