"""The policies that requests may use: those of the configuration file and the active versions of the database."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from app.config_tree import merge, struct_of
from app.errors import ConfigError
from app.settings import DEFAULT_POLICY, PolicySettings, Settings
from reducer.config import ReducerConfig


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy as a request uses it, to its end."""

    name: str
    version: int | None
    """``None`` for a policy of the configuration file."""
    settings: PolicySettings
    reducer: ReducerConfig
    """``[reducer]`` with the changes of this policy."""

    def meets(self, recall_floor: float | None) -> bool:
        """Whether its measured recall reaches a floor; a recall that nobody measured reaches none."""
        if recall_floor is None:
            return True
        return self.settings.measured_recall is not None and self.settings.measured_recall >= recall_floor


class PolicyBook:
    """Looks policies up. Safe for many threads: what is stored is replaced as a whole."""

    def __init__(self, settings: Settings) -> None:
        self._base = settings.reducer
        self._of_file = {
            name: Policy(name, None, found, settings.reducer_config(name))
            for name in settings.policy_names
            if (found := settings.policy(name)) is not None
        }
        self._stored: Mapping[str, Policy] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names that ``firsttoken.policy`` may take."""
        return tuple(sorted({*self._of_file, *self._stored}))

    @property
    def file_names(self) -> tuple[str, ...]:
        """Names of the configuration file, ``default`` among them."""
        return tuple(sorted(self._of_file))

    def get(self, name: str) -> Policy | None:
        """The policy called ``name``, or ``None`` where there is none."""
        return self._of_file.get(name) or self._stored.get(name)

    def on(self, settings: Settings) -> "PolicyBook":
        """The policies of other settings, beside the same ones of the database.

        Raises ``ConfigError`` for a name that both have, and for a policy of the database that no longer fits.
        """
        book = PolicyBook(settings)
        if taken := sorted(set(book.file_names) & set(self._stored)):
            raise ConfigError(
                f"policies.{taken[0]} is in the database as well; rename it in the file", key=f"policies.{taken[0]}"
            )
        stored = {}
        for name, policy in self._stored.items():
            assert policy.version is not None, "stored policies have versions"
            stored[name] = book.make(name, policy.version, policy.settings)
        book.replace_stored(stored)
        return book

    def make(self, name: str, version: int, settings: PolicySettings) -> Policy:
        """A policy of the database. Raises ``ConfigError`` naming a reducer key that does not fit."""
        reducer = self._base
        if settings.reducer:
            changed = merge(msgspec.to_builtins(self._base), settings.reducer)
            reducer = struct_of(changed, ReducerConfig, f"policies.{name}.reducer")
        return Policy(name, version, settings, reducer)

    def replace_stored(self, policies: Mapping[str, Policy]) -> None:
        """Takes the active versions of the database in place of those before."""
        assert DEFAULT_POLICY not in policies, "the default policy is the configuration file's"
        self._stored = dict(policies)
