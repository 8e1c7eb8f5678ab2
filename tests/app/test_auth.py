"""Keys become principals; salts isolate tenants."""

import pytest
from factories_app import ACME_KEY, GLOBEX_KEY, OUTSIDER_KEY, make_settings

from app.auth import Authenticator, cache_salt
from app.errors import AuthenticationError


def test_a_key_names_tenant_and_groups() -> None:
    authenticator = Authenticator(make_settings())
    principal = authenticator.authenticate(f"Bearer {ACME_KEY}")
    assert (principal.tenant_id, principal.groups) == ("acme", frozenset({"staff", "public"}))
    assert authenticator.authenticate(f"bearer  {OUTSIDER_KEY} ").groups == frozenset()


@pytest.mark.parametrize("header", [None, "", " ", "Bearer", "Bearer ", ACME_KEY, f"Basic {ACME_KEY}", "Bearer sk-no"])
def test_anything_else_is_refused_without_repeating_the_key(header: str | None) -> None:
    with pytest.raises(AuthenticationError) as caught:
        Authenticator(make_settings()).authenticate(header)
    assert "sk-" not in str(caught.value)


def test_salts_are_stable_and_differ_between_tenants_and_installations() -> None:
    first, again = (Authenticator(make_settings()) for _ in range(2))
    acme = first.authenticate(f"Bearer {ACME_KEY}").cache_salt
    assert again.authenticate(f"Bearer {ACME_KEY}").cache_salt == acme
    assert first.authenticate(f"Bearer {OUTSIDER_KEY}").cache_salt == acme
    assert first.authenticate(f"Bearer {GLOBEX_KEY}").cache_salt != acme
    assert cache_salt("acme", "secret") not in (acme, cache_salt("acme", "other secret"))
