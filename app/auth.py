"""Who calls: an API key becomes a principal, the only source of tenant, groups and cache salt."""

import dataclasses
import hashlib
import hmac
from dataclasses import dataclass

from app.counters.base import AccountLimits, PeriodLimit
from app.errors import AuthenticationError
from app.settings import Settings, TenantSettings
from reducer.prompt import Caller


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller."""

    tenant_id: str
    tenant: TenantSettings
    key_name: str
    groups: frozenset[str]
    cache_salt: str
    """Isolates the tenant's prefixes in the engine's cache; stable, never taken from the request."""
    limits: AccountLimits
    """What counters keep of the tenant's limits."""

    @property
    def caller(self) -> Caller:
        """What the reducer's access stage needs to know."""
        return Caller(groups=self.groups, deny_unlabelled=self.tenant.deny_unlabelled)


class Authenticator:
    """Looks keys up by their digest, so that neither memory nor a timing difference gives a key away."""

    def __init__(self, settings: Settings) -> None:
        self._principals: dict[str, Principal] = {}
        for tenant_id, tenant in settings.tenants.items():
            limits, salt = account_limits(tenant), cache_salt(tenant_id, settings.server.salt_secret)
            for key in tenant.keys:
                self._principals[key.sha256] = Principal(
                    tenant_id=tenant_id,
                    tenant=tenant,
                    key_name=key.name,
                    groups=frozenset(key.groups),
                    cache_salt=salt,
                    limits=limits,
                )

    def authenticate(self, authorization: str | None) -> Principal:
        """The principal of an ``Authorization`` header. Raises ``AuthenticationError``; the key is never repeated."""
        principal = self.find(key_digest(authorization))
        if principal is None:
            raise unknown_key()
        return principal

    def find(self, digest: str) -> Principal | None:
        """The holder of the key with this digest, or ``None``."""
        return self._principals.get(digest)


def key_digest(authorization: str | None) -> str:
    """SHA-256 in hex of the key in an ``Authorization`` header. Raises ``AuthenticationError`` where there is none."""
    if not authorization or not authorization.strip():
        raise AuthenticationError(
            "You didn't provide an API key. Provide it in an Authorization header using Bearer auth "
            "(i.e. Authorization: Bearer YOUR_KEY)."
        )
    scheme, _, key = authorization.strip().partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise AuthenticationError("The Authorization header must have the form: Bearer YOUR_KEY.")
    return hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).hexdigest()


def unknown_key() -> AuthenticationError:
    """What the holder of any unknown key is told."""
    return AuthenticationError("Incorrect API key provided.")


def account_limits(tenant: TenantSettings) -> AccountLimits:
    """The limits that counters keep; ``tokens_per_day`` is part of the budget per day."""
    periods = [
        PeriodLimit(budget.period, budget.requests, budget.input_tokens, budget.output_tokens, budget.tokens)
        for budget in tenant.budgets
    ]
    if tenant.tokens_per_day is not None:
        of_day = next((limit for limit in periods if limit.period == "day"), PeriodLimit("day"))
        periods = [limit for limit in periods if limit.period != "day"]
        periods.append(dataclasses.replace(of_day, tokens=tenant.tokens_per_day))
    return AccountLimits(tenant.requests_per_minute, tenant.max_parallel_requests, tuple(periods))


def cache_salt(tenant_id: str, secret: str) -> str:
    """The tenant's salt: different for every tenant, the same for every request and every gateway with this secret."""
    assert tenant_id.strip(), "a tenant without a name would share its cache"
    return hmac.new(f"firsttoken:{secret}".encode(), tenant_id.encode(), hashlib.sha256).hexdigest()
