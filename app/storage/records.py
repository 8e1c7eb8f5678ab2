"""What operators send and get: the shapes of ``/admin/v1`` and of ``--json`` on the command line."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from app.operator_settings import BudgetSettings

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""1 to 64 letters, digits, dots, dashes or underscores."""
Count = Annotated[int, Meta(ge=1, le=2**53)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Duration = Annotated[float, Meta(gt=0, le=10 * 366 * 86400)]
DEFAULT_OVERLAP_S = 86400.0


class TenantChanges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of a tenant to set; absent ones stay, ``null`` lifts a limit."""

    policy: Name | UnsetType = UNSET
    deny_unlabelled: bool | UnsetType = UNSET
    is_blocked: bool | UnsetType = UNSET
    """A blocked tenant's keys are refused like unknown ones."""
    max_input_tokens: Count | UnsetType | None = UNSET
    ttft_slo_ms: Annotated[float, Meta(gt=0)] | UnsetType | None = UNSET
    recall_floor: Share | UnsetType | None = UNSET
    requests_per_minute: Count | UnsetType | None = UNSET
    max_parallel_requests: Count | UnsetType | None = UNSET

    def given(self) -> dict[str, Any]:
        """The fields that were sent."""
        values = {name: getattr(self, name) for name in TenantChanges.__struct_fields__}
        return {name: value for name, value in values.items() if value is not UNSET}


class NewTenant(TenantChanges, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant to create."""

    name: Name
    groups: list[Name] = []


class TenantInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant and its limits; ``null`` is no limit."""

    name: str
    source: Literal["database", "file"]
    """Those of the configuration file are changed there."""
    is_blocked: bool
    groups: list[str]
    policy: str
    deny_unlabelled: bool
    max_input_tokens: int | None
    ttft_slo_ms: float | None
    recall_floor: float | None
    requests_per_minute: int | None
    max_parallel_requests: int | None
    tokens_per_day: int | None
    budgets: list[BudgetSettings]


class NewKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key to create."""

    name: Name
    groups: list[Name] = []
    """Groups of the tenant whose documents the holder may read."""
    expires_in_s: Duration | None = None


class Rotation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a key is replaced."""

    overlap_s: Annotated[float, Meta(ge=0, le=366 * 86400)] = DEFAULT_OVERLAP_S
    """How long the old key works beside the new one."""
    expires_in_s: Duration | None = None
    """Of the new key; by default it lives as long as the old one was made to."""


class KeyInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its secret; times are Unix seconds."""

    id: str
    tenant: str
    name: str
    hint: str
    """First characters of the key."""
    groups: list[str]
    status: Literal["active", "expired", "revoked"]
    created: int
    expires: int | None
    revoked: int | None


class IssuedKey(msgspec.Struct, frozen=True, kw_only=True):
    """A new key; the only time that it is shown."""

    key: str
    info: KeyInfo


class PolicyVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a policy."""

    name: str
    version: int | None
    """``null`` for a policy of the configuration file."""
    is_active: bool
    settings: dict[str, Any]
    note: str
    created: int | None


class UsageDay(msgspec.Struct, frozen=True, kw_only=True):
    """What a key of a tenant used on a UTC day."""

    tenant: str
    day: str
    key: str
    requests: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    original_tokens: int
    """Prompt tokens before reduction."""
    saved_tokens: int


class ReceiptInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A kept reduction record."""

    id: str
    tenant: str
    created: int
    num_bytes: int
    """As kept, compressed."""
