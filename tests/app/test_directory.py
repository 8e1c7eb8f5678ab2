"""The directory of keys: one look-up per key and time span, bounded, nobody without a tenant."""

import asyncio
from dataclasses import dataclass, field

import pytest
from factories_app import ACME_KEY, make_settings

from app.auth import Authenticator, Principal, account_limits, cache_salt, key_digest
from app.directory import TenantDirectory
from app.errors import AuthenticationError
from app.settings import TenantSettings


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Keys:
    """A database of keys ``sk-0``, ``sk-1``, …, each of a tenant of its own."""

    num_tenants: int = 10_000
    revoked: set[str] = field(default_factory=set)
    num_reads: int = 0

    def __post_init__(self) -> None:
        self.digests = {key_digest(f"Bearer sk-{n}"): f"tenant-{n}" for n in range(self.num_tenants)}

    async def find_principal(self, digest: str) -> Principal | None:
        self.num_reads += 1
        await asyncio.sleep(0)
        tenant_id = self.digests.get(digest)
        if tenant_id is None or tenant_id in self.revoked:
            return None
        tenant = TenantSettings()
        limits, salt = account_limits(tenant), cache_salt(tenant_id, "")
        return Principal(tenant_id, tenant, "key", frozenset(), salt, limits)


def make_directory(keys: Keys, clock: Clock, max_entries: int = 20_000) -> TenantDirectory:
    return TenantDirectory(Authenticator(make_settings()), keys, ttl_s=10, max_entries=max_entries, clock=clock)


async def test_ten_thousand_tenants_are_read_once_each_and_then_come_from_memory() -> None:
    keys, clock = Keys(), Clock()
    directory = make_directory(keys, clock)
    for _ in range(3):
        for n in range(10_000):
            assert (await directory.authenticate(f"Bearer sk-{n}")).tenant_id == f"tenant-{n}"
    assert (keys.num_reads, directory.num_remembered) == (10_000, 10_000)


async def test_keys_of_the_file_are_never_looked_up() -> None:
    keys = Keys(0)
    assert (await make_directory(keys, Clock()).authenticate(f"Bearer {ACME_KEY}")).tenant_id == "acme"
    assert keys.num_reads == 0


async def test_requests_that_come_together_read_a_key_once_and_a_cancelled_one_spoils_nothing() -> None:
    keys = Keys(1)
    directory = make_directory(keys, Clock())
    tasks = [asyncio.create_task(directory.authenticate("Bearer sk-0")) for _ in range(10)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert [principal.tenant_id for principal in found[1:] if isinstance(principal, Principal)] == ["tenant-0"] * 9
    assert keys.num_reads == 1


async def test_a_revoked_key_stops_within_the_time_and_at_once_after_a_change_here() -> None:
    keys, clock = Keys(1), Clock()
    directory = make_directory(keys, clock)
    await directory.authenticate("Bearer sk-0")
    keys.revoked.add("tenant-0")
    clock.now_s = 9.9
    await directory.authenticate("Bearer sk-0")
    clock.now_s = 10
    with pytest.raises(AuthenticationError):
        await directory.authenticate("Bearer sk-0")
    keys.revoked.clear()
    directory.forget()
    await directory.authenticate("Bearer sk-0")


async def test_unknown_keys_are_remembered_too_and_what_is_remembered_is_bounded() -> None:
    keys = Keys(0)
    directory = make_directory(keys, Clock(), max_entries=100)
    for _ in range(2):
        for n in range(50):
            with pytest.raises(AuthenticationError):
                await directory.authenticate(f"Bearer guess-{n}")
    assert keys.num_reads == 50
    for n in range(500):
        with pytest.raises(AuthenticationError):
            await directory.authenticate(f"Bearer other-{n}")
    assert directory.num_remembered == 100


@pytest.mark.parametrize("tenant_id", ["", " ", "\t"])
def test_a_tenant_without_a_name_gets_no_salt(tenant_id: str) -> None:
    with pytest.raises(AssertionError):
        cache_salt(tenant_id, "")
