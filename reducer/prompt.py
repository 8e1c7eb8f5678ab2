"""What goes into the reducer: messages as received, tools, retrieved passages, and who asks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WireMessage = Mapping[str, Any]
"""An OpenAI chat message as decoded from JSON; unknown fields stay in it."""


@dataclass(frozen=True, slots=True)
class AccessRule:
    """Who may read a passage: one of ``any_of``, all of ``all_of``, none of ``deny``.

    A rule that names no reader, only who is denied, counts as unlabelled for everybody else.
    """

    any_of: tuple[str, ...] | None = None
    """Groups one of which the caller must have; ``None`` asks for none, an empty list admits nobody."""
    all_of: tuple[str, ...] = ()
    """Groups all of which the caller must have."""
    deny: tuple[str, ...] = ()
    """Groups none of which the caller may have, whatever else it has."""


@dataclass(frozen=True, slots=True)
class Passage:
    """One retrieved passage. The wire calls it a document."""

    id: str
    text: str
    title: str | None = None
    source: str | None = None
    score: float | None = None
    """The retriever's own score; any scale, higher is better."""
    acl: tuple[str, ...] | AccessRule | None = None
    """Groups any of which may read it, or a rule; ``None`` is unlabelled."""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, from the authenticated key and never from the body."""

    groups: frozenset[str] = frozenset()
    deny_unlabelled: bool = False
    """Passages without ``acl`` are denied instead of readable."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The most prompt tokens the rendered prompt may have, and which limit set it."""

    max_input_tokens: int
    source: str
    """``request``, ``tenant``, ``policy``, ``window`` or ``slo``."""


@dataclass(frozen=True, slots=True)
class PromptParts:
    """One request before reduction."""

    messages: tuple[WireMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    passages: tuple[Passage, ...] = ()
