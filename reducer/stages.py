"""The stages as the pipeline runs them: each takes its input from the run and puts its output back.

``STAGES`` is their order as data, ``IN_HASTE`` what each does instead when the deadline does not leave it its time.
What a stage decides is in its own module, as a pure function.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from reducer.budget import split_allowance
from reducer.canonical import canonical_json
from reducer.clean import clean
from reducer.config import ReducerConfig
from reducer.deadline import select_whole
from reducer.dedup import deduplicate
from reducer.encoder import Encoder
from reducer.failures import keep_recent
from reducer.fitting import fit_documents, render_messages
from reducer.history import reduce_history
from reducer.lexical import words
from reducer.ordering import make_arrange, prefix_key
from reducer.passage_extracts import Extractor
from reducer.rank import rank
from reducer.run import Run, document_tokens_of
from reducer.selection import SelectionOutcome, cost, select, shortlist
from reducer.semantic import merge_similar
from reducer.stage import Selected
from reducer.stitching import stitch
from reducer.template import CLOSING, OPENING, message_text, render_documents

PIECES_EXCESS = 0.1
"""Most by which the tokens of all pieces may exceed those of the whole prompt, as a share."""


def _run_clean(run: Run, config: ReducerConfig, encoder: Encoder | None) -> str | None:
    outcome = clean(run.running, run.query.text, config.clean, run.counter)
    run.running = outcome.kept
    run.filtered.extend(outcome.filtered)
    run.document_tokens = document_tokens_of(run.running)
    return outcome.degraded


def _run_dedup(run: Run, config: ReducerConfig, encoder: Encoder | None) -> str | None:
    asked = frozenset(words(run.query.text))
    distinct = deduplicate(run.running, config.dedup, asked)
    outcome = merge_similar(distinct.kept, config.dedup, config.rank, encoder, asked, distinct.filtered)
    run.running = outcome.kept
    moved = {gone.candidate.passage.id: gone.merged_into for gone in outcome.filtered}
    run.filtered.extend(
        replace(gone, merged_into=moved.get(str(gone.merged_into), gone.merged_into)) for gone in distinct.filtered
    )
    run.filtered.extend(outcome.filtered)
    run.document_tokens = document_tokens_of(run.running)
    return "; ".join(filter(None, (distinct.degraded, outcome.degraded))) or None


def _run_rank(run: Run, config: ReducerConfig, encoder: Encoder | None) -> str | None:
    outcome = rank(run.running, run.query, config.rank, encoder, run.reranker)
    run.running = outcome.kept
    return outcome.degraded


def _run_history(run: Run, config: ReducerConfig, encoder: Encoder | None) -> str | None:
    allowance = split_allowance(run.num_free, run.history_tokens, run.document_tokens, config.history)
    _keep_history(run, allowance.history, config, encoder)
    return run.history.degraded


def _run_select(run: Run, config: ReducerConfig, encoder: Encoder | None) -> str | None:
    if run.is_unranked:
        why = "whole passages in order while they fit"
        return _fit(
            run, config, None, lambda allowance, num_block: _choose_in_order(run, allowance, num_block, config, why)
        )
    extractor = Extractor(run.query, config.rank, run.counter, encoder)
    listed = shortlist(
        run.running,
        run.num_free - run.history_tokens,
        config.selection,
        lambda left: (
            left if run.deadline.is_expired else rank(left, run.query, config.rank, encoder, run.reranker).kept
        ),
    )
    run.running = listed.candidates
    run.filtered.extend(listed.filtered)

    def choose(allowance: int, num_block_tokens: int) -> SelectionOutcome:
        if run.deadline.is_expired:
            return _choose_in_haste(run, allowance, num_block_tokens, config)
        return select(listed, allowance, num_block_tokens, extractor, config.selection.min_trimmed_tokens)

    return _fit(run, config, encoder, choose)


def _fit(
    run: Run, config: ReducerConfig, encoder: Encoder | None, choose: Callable[[int, int], SelectionOutcome]
) -> str | None:
    """Fit the prompt into the budget with passages chosen by ``choose(allowance, tokens of the empty block)``."""

    def choose_stitched(allowance: int) -> SelectionOutcome:
        outcome = choose(allowance, num_block_tokens)
        return replace(outcome, selected=stitch(outcome.selected, config.dedup, run.counter))

    num_block_tokens = run.counter.count_text(OPENING) + run.counter.count_text(CLOSING)
    while True:
        run.arrange = _make_arrange(run, config)
        run.fitted = fit_documents(
            choose_stitched,
            lambda selected: render_messages(
                run.parts.messages,
                run.history,
                run.conversation,
                render_documents(run.arrange(selected)) + run.prepared.moved_text,
            ),
            lambda messages: run.counter.count_prompt(messages, run.parts.tools),
            allowance=_first_allowance(run, num_block_tokens),
            max_tokens=run.budget.max_input_tokens,
        )
        if run.fitted is not None:
            break
        # Turns and blocks are counted piece by piece; where that was too little, the history gives up the excess.
        assert run.history_tokens > 0, "without history and passages the prompt is its protected part, which fits"
        messages = render_messages(run.parts.messages, run.history, run.conversation, run.prepared.moved_text)
        excess = run.counter.count_prompt(messages, run.parts.tools) - run.budget.max_input_tokens
        _keep_history(run, run.history_tokens - max(excess, 1), config, encoder)
    selection = run.fitted.selection
    run.arranged = run.arrange(selection.selected)
    run.filtered.extend(selection.filtered)
    run.document_tokens = sum(kept.num_tokens + kept.candidate.num_label_tokens for kept in selection.selected)
    return selection.degraded


def _first_allowance(run: Run, num_block_tokens: int) -> int:
    """Tokens to select for first: what is free, or what all passages take, where that may just fit.

    Pieces add up to a little more than the whole. A prompt that fits as it is must not be cut for that.
    """
    free = run.num_free - run.history_tokens
    whole = num_block_tokens + sum(cost(candidate) for candidate in run.running)
    return whole if free < whole <= free * (1 + PIECES_EXCESS) else free


STAGES: tuple[tuple[str, Callable[[Run, ReducerConfig, Encoder | None], str | None]], ...] = (
    ("clean", _run_clean),
    ("dedup", _run_dedup),
    ("rank", _run_rank),
    ("history", _run_history),
    ("select", _run_select),
)
"""The stages after access, in order; each returns why it fell back to a cheaper method, if it did."""


def _skip(run: Run, config: ReducerConfig, encoder: Encoder | None) -> str | None:
    return f"{run.deadline}: passages stay as they are"


def _rank_in_haste(run: Run, config: ReducerConfig, encoder: Encoder | None) -> str | None:
    return f"{run.deadline}: passages stay in retriever order"


def _history_in_haste(run: Run, config: ReducerConfig, encoder: Encoder | None) -> str | None:
    run.summarizer = None
    degraded = _run_history(run, config, None)
    return f"{run.deadline}: {degraded or 'no model for the history'}"


def _select_in_haste(run: Run, config: ReducerConfig, encoder: Encoder | None) -> str | None:
    return _fit(run, config, None, lambda allowance, num_block: _choose_in_haste(run, allowance, num_block, config))


def _choose_in_haste(run: Run, allowance: int, num_block_tokens: int, config: ReducerConfig) -> SelectionOutcome:
    run.is_late = True
    why = f"{run.deadline}: whole passages in order while they fit"
    return _choose_in_order(run, allowance, num_block_tokens, config, why)


def _choose_in_order(
    run: Run, allowance: int, num_block_tokens: int, config: ReducerConfig, why: str
) -> SelectionOutcome:
    extractor = Extractor(run.query, config.rank, run.counter, None)
    return select_whole(run.running, allowance, num_block_tokens, extractor, why)


IN_HASTE: dict[str, Callable[[Run, ReducerConfig, Encoder | None], str | None]] = {
    "clean": _skip,
    "dedup": _skip,
    "rank": _rank_in_haste,
    "history": _history_in_haste,
    "select": _select_in_haste,
}
"""What each stage does instead when the deadline does not leave it its time."""

SECONDS_PER_CHAR = {"clean": 0.3e-6, "dedup": 1e-6, "rank": 0.5e-6, "select": 0.3e-6}
"""Least time of a stage without its model; with less than that left it is not begun."""


def expected_s(name: str, run: Run) -> float:
    if run.deadline.limit_s is None:
        return 0.0
    return SECONDS_PER_CHAR.get(name, 0.0) * sum(len(candidate.passage.text) for candidate in run.running)


def _make_arrange(run: Run, config: ReducerConfig) -> Callable[[Sequence[Selected]], list[Selected]]:
    """How this request writes its passages; what was served before is looked up once."""
    order, max_rank_loss = config.template.document_order, config.template.max_rank_loss
    if order != "cache" or run.order_memory is None:
        return make_arrange(order, (), max_rank_loss)
    messages = render_messages(run.parts.messages, run.history, run.conversation, OPENING)
    question = next(i for i in range(len(messages) - 1, -1, -1) if messages[i].get("role") == "user")
    front = message_text(messages[question]).partition(OPENING)[0]
    run.order_prefix = prefix_key(run.order_scope, canonical_json([messages[:question], run.parts.tools, front]))
    return make_arrange(order, run.order_memory.recent(run.order_prefix), max_rank_loss)


def _keep_history(run: Run, allowance: int, config: ReducerConfig, encoder: Encoder | None) -> None:
    if run.keeps_recent:
        keep_recent(run, allowance)
        return
    planned = allowance if run.planned_history is None else run.planned_history
    run.planned_history = planned
    run.history = reduce_history(
        run.parts.messages,
        run.conversation.history,
        run.turn_tokens,
        max(allowance, 0),
        run.query,
        config.history,
        config.rank,
        encoder,
        counter=run.counter,
        memory=run.memory,
        summarizer=run.summarizer,
        fill=not run.running,
        planned_allowance=planned,
    )
    run.history_tokens = run.history.num_tokens
