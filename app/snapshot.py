"""What requests are served with: one immutable snapshot of the configuration, taken at the start and kept to the end.

A reload builds the next snapshot whole and puts it in the place of the one before by a single assignment. A request
that runs still holds its own; one that comes sees the new one.
"""

from dataclasses import dataclass

from app.auth import Authenticator
from app.policies import PolicyBook
from app.settings import Settings


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The settings and what is looked up in them for every request."""

    settings: Settings
    authenticator: Authenticator
    """Keys of the file's tenants."""
    policies: PolicyBook
    """Policies of the file on this snapshot's ``[reducer]``, and the active ones of the database."""


class LiveConfig:
    """Holds the snapshot in force. Written from the event loop only."""

    def __init__(self, settings: Settings) -> None:
        self._current = Snapshot(settings, Authenticator(settings), PolicyBook(settings))

    @property
    def current(self) -> Snapshot:
        """The snapshot for requests that begin now."""
        return self._current

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self._current.settings

    def next(self, settings: Settings, authenticator: Authenticator) -> Snapshot:
        """The snapshot that would follow; ``authenticator`` is of the same settings.

        Raises ``ConfigError`` where a policy of the database does not fit to them.
        """
        return Snapshot(settings, authenticator, self._current.policies.on(settings))

    def swap(self, snapshot: Snapshot) -> None:
        """Puts a snapshot in force."""
        self._current = snapshot
