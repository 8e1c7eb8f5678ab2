"""The arms of a recall run: which prompts of one case are compared with each other."""

from collections.abc import Sequence

from eval.records import Arm

FULL = Arm(name="full prompt", kind="full")
NO_BUDGET = "no budget"


def reduced_arms(budgets: Sequence[float], policies: Sequence[str] = ()) -> list[Arm]:
    """For each policy the arm without a limit, then one per budget. A single policy is not named in the arms."""
    arms = []
    for policy in policies or (None,):
        prefix = f"{policy}, " if len(policies) > 1 else ""
        arms.append(Arm(name=f"{prefix}{NO_BUDGET}", kind="reduced", policy=policy))
        arms += [
            Arm(name=f"{prefix}budget {budget:.4g}", kind="reduced", budget=budget, policy=policy) for budget in budgets
        ]
    return arms


def baseline_of(arm: Arm) -> Arm:
    """The first whole passages in the retriever's order, until they have at least as many tokens as ``arm`` kept."""
    return Arm(name=f"first passages, {arm.name}", kind="first", budget=arm.budget)


def method_arm(method: str, reduced: Arm) -> Arm:
    """The named baseline at the budget of a reduced arm; without one, at the tokens that the reduced arm kept."""
    return Arm(name=f"{method}, {reduced.name}", kind="baseline", budget=reduced.budget, method=method)


def matched_arms(arms: Sequence[Arm], policies: Sequence[str]) -> list[Arm]:
    """The reduced arms that baselines are matched with: those of the first policy."""
    first = policies[0] if policies else None
    return [arm for arm in arms if arm.kind == "reduced" and arm.policy == first]
