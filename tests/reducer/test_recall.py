"""Recall: what comes back beside the question, how much room it has, and what a question that finds nothing leaves."""

from typing import Any

import pytest
from factories_reducer import BrokenEncoder, HashEncoder, WordCounter

from reducer.blocks import RECALL_CLOSING, RECALL_OPENING
from reducer.config import HistoryConfig, RankConfig
from reducer.history import HistoryOutcome, make_query, read_conversation, reduce_history
from reducer.rank import Query
from reducer.recall import recall_room
from reducer.relevance import rate_turns
from reducer.template import message_text
from reducer.turns import Turn, read_turn

TALK = (
    "The garden behind the old mill is lovely when birds sing in tall trees",
    "Long walks along the shore help people rest after busy mornings",
    "Fresh bread with butter and honey makes a fine breakfast for guests",
    "Wooden boats drift slowly while gulls circle over quiet water",
    "Warm blankets and soft pillows are what tired travellers dream about",
    "Painted tiles cover every wall of the narrow kitchen near the stairs",
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def chat(question: str, **said: str) -> list[dict[str, Any]]:
    """Sixty turns of talk, ``t7="..."`` said in the turn with index 7, and a question."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for index in range(1, 61):
        text = f"{TALK[index % 6]}, {LETTERS[index % 26] * 4} {LETTERS[index * 7 % 26] * 5}."
        messages.append({"role": "user" if index % 2 else "assistant", "content": said.get(f"t{index}", text)})
    return [*messages, {"role": "user", "content": question}]


def reduce_chat(messages: list[dict[str, Any]], allowance: int = 420, **config: Any) -> HistoryOutcome:
    conversation = read_conversation(messages)
    counter = WordCounter()
    return reduce_history(
        messages,
        conversation.history,
        {i: counter.count_text(message_text(messages[i])) + 4 for i in conversation.history},
        allowance,
        make_query(messages, conversation),
        HistoryConfig(**config),
        RankConfig(),
        HashEncoder(),
        counter=counter,
    )


def read(text: str) -> Turn:
    return read_turn(1, {"role": "user", "content": text}, WordCounter())


QUESTION = "Which walrus of Bergen did you feed with purple clams?"
ANSWER = "A walrus of Bergen called Olaf ate purple clams."


def test_relevant_turn_is_back_whole_with_its_speaker() -> None:
    outcome = reduce_chat(chat(QUESTION, t20=ANSWER))
    assert f"assistant: {ANSWER}\n" in outcome.recalled
    assert {turn.index: turn.action for turn in outcome.decisions}[20] == "recalled"


def test_of_a_long_turn_the_relevant_sentence_is_back_without_the_rest() -> None:
    filler = " ".join(f"{text} of the {name} inn." for text in TALK for name in ("red", "blue", "green"))
    outcome = reduce_chat(chat(QUESTION, t20=f"{filler} {ANSWER} {filler}"))
    assert ANSWER.removesuffix(".") in outcome.recalled
    assert filler not in outcome.recalled
    decision = {turn.index: turn for turn in outcome.decisions}[20]
    assert decision.action == "summarised"
    assert "relevant sentences" in decision.reason
    assert outcome.num_tokens <= 420


def test_answer_is_as_relevant_as_the_question_it_replies_to() -> None:
    texts = ["Which walrus did you feed?", "Olaf, of course.", "It rains.", "Bread is fine."]
    query = Query("What walrus was fed?")
    plain = rate_turns([text.replace("?", ".") for text in texts], query, RankConfig(), HashEncoder()).scores
    lifted = rate_turns(texts, query, RankConfig(), HashEncoder()).scores
    assert lifted[1] == lifted[0] > plain[1]
    assert lifted[2:].tolist() == plain[2:].tolist()


def test_question_that_finds_nothing_recalls_no_turn() -> None:
    outcome = reduce_chat(chat("Sort seventeen integers ascending, please", t20=ANSWER))
    assert "recalled" not in {turn.action for turn in outcome.decisions}
    assert outcome.recalled.startswith(RECALL_OPENING)
    assert outcome.recalled.endswith(RECALL_CLOSING)


def test_what_only_fills_the_room_is_left_out_beside_passages() -> None:
    messages = chat("Sort seventeen integers ascending, please", t20=ANSWER)
    conversation = read_conversation(messages)
    counter = WordCounter()
    tokens = {i: counter.count_text(message_text(messages[i])) + 4 for i in conversation.history}
    outcome = reduce_history(
        messages, conversation.history, tokens, 420, make_query(messages, conversation), HistoryConfig(), RankConfig(),
        HashEncoder(), counter=counter, fill=False,
    )  # fmt: skip
    assert outcome.recalled == ""


def test_record_is_the_same_for_every_question() -> None:
    questions = (QUESTION, "Sort seventeen integers ascending, please", "Where do gulls circle?")
    assert len({reduce_chat(chat(question, t20=ANSWER)).record for question in questions}) == 1


@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("allowance", [60, 150, 420, 800])
def test_any_share_keeps_the_allowance(share: float, allowance: int) -> None:
    assert reduce_chat(chat(QUESTION, t20=ANSWER), allowance, recall_share=share).num_tokens <= allowance


def test_more_room_for_recall_brings_more_of_it_back() -> None:
    said = {f"t{index}": f"Walrus number {LETTERS[index] * 3} of Bergen ate purple clams." for index in range(8, 20)}
    counts = [
        sum(t.action == "recalled" for t in reduce_chat(chat(QUESTION, **said), recall_share=share).decisions)
        for share in (0.0, 0.3)
    ]
    assert counts[0] < counts[1]


def test_room_for_recall_shrinks_as_facts_grow_in_number() -> None:
    talk = [read(text) for text in TALK]
    facts = [read(f"Order AB-{n}{n} costs ${n * 7 + 1000} on 2024-05-{n % 28 + 1:02}.") for n in range(60)]
    rooms = [recall_room([*talk, *facts[:n]], 400, 0.15) for n in range(0, 60, 5)]
    assert rooms[0] == 60
    assert rooms == sorted(rooms, reverse=True)
    assert rooms[-1] == 0


def test_failing_encoder_leaves_words() -> None:
    relevance = rate_turns([*TALK, ANSWER], Query(QUESTION), RankConfig(), BrokenEncoder())
    assert relevance.is_found
    assert int(relevance.scores.argmax()) == len(TALK)
    assert "RuntimeError" in str(relevance.degraded)
    assert relevance.of_sentences([ANSWER, TALK[0]], [len(TALK), 0])[0] > 0.5


def test_nothing_is_found_among_no_turns() -> None:
    assert not rate_turns([], Query(QUESTION), RankConfig(), HashEncoder()).is_found
