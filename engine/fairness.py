"""Counts the tokens that each tenant was served, so that the one who got the fewest comes first.

A tenant that comes back from a pause starts at the least count of those who are active (the lift of virtual token
counters): being away earns no credit that could then shut out the others. Two tenants, chunks of 10 tokens, b joins::

    served   a  b
             0  -     a alone
            30  -     a computed 30 tokens
            30 30     b comes: lifted to 30, not 0
            30 40     from here on they take turns
"""

from collections import Counter


class TenantAccounts:
    """Tokens served per tenant, kept while anybody is active."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._num_sequences: Counter[str] = Counter()

    def served(self, tenant_id: str) -> int:
        """Tokens served so far, the lift included."""
        return self._served.get(tenant_id, 0)

    def enter(self, tenant_id: str) -> None:
        """A sequence of this tenant is queued."""
        if not self._num_sequences[tenant_id]:
            least = min((self._served[other] for other in self._num_sequences if other in self._served), default=0)
            self._served[tenant_id] = max(self.served(tenant_id), least)
        self._num_sequences[tenant_id] += 1

    def leave(self, tenant_id: str) -> None:
        """A sequence of this tenant has ended. When nobody is left, all counts begin again."""
        self._num_sequences[tenant_id] -= 1
        if not self._num_sequences[tenant_id]:
            del self._num_sequences[tenant_id]
        if not self._num_sequences:
            self._served.clear()

    def charge(self, tenant_id: str, num_tokens: int) -> None:
        """A step computed tokens of this tenant; what came from the cache is free."""
        self._served[tenant_id] = self.served(tenant_id) + num_tokens
