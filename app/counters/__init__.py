"""Counters of rate limits and token budgets: in this process, or in one store that several gateways share."""

from app.counters.base import AccountLimits, Balance, CounterStore, PeriodLimit, Refusal, WindowBalance
from app.counters.memory import MemoryCounterStore

__all__ = (
    "AccountLimits",
    "Balance",
    "CounterStore",
    "MemoryCounterStore",
    "PeriodLimit",
    "Refusal",
    "WindowBalance",
)
