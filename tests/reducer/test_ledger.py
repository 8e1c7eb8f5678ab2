"""What the ledger pins, and what a summary lost."""

import pytest

from reducer.ledger import Fact, find_facts, missing_facts, nested_keys, statement_key
from reducer.stage import Span


def stated(text: str, role: str = "user", quoted: tuple[Span, ...] = ()) -> list[tuple[str, str]]:
    return [(fact.kind, text[fact.start : fact.end]) for fact in find_facts(text, role, quoted)]


def texts(text: str, role: str = "user") -> set[str]:
    return {found for _, found in stated(text, role)}


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("Book 2 rooms for March 6th at Abercorn House.", {"2 rooms", "March 6th", "Abercorn House"}),
        ("It costs $2,650 per month, call +44 20 8563 8692.", {"$2,650 per month", "+44 20 8563 8692"}),
        ("Unit QX-417-KD, bob@example.org, see src/app/main.py", {"QX-417-KD", "bob@example.org", "src/app/main.py"}),
        ("We meet at 7:40 am at 601 van ness avenue.", {"7:40 am", "601 van ness avenue"}),
        ("Der Termin ist am 5. März um 14:30 Uhr für 1.200 Euro.", {"5. März", "14:30 Uhr", "1.200 Euro"}),
        ("La reunión es el 5 de marzo a las 10:30, cuesta 300 euros.", {"5 de marzo", "10:30", "300 euros"}),
        ("Встреча 5 марта в 14:30, цена 300 рублей.", {"5 марта", "14:30", "300 рублей"}),
        ("会议在3月5日下午三点，预算是两千元。", {"3月5日", "下午三点", "两千元"}),
        ("会議は3月5日午後3時、予算は5万円です。", {"3月5日", "午後3時", "5万円"}),
        ("3월 5일 오후 3시에 김민수 씨와, 2명.", {"3월 5일", "오후 3시", "김민수", "2명"}),
        ("서울역에서 만나요. 예산은 5만 원입니다.", {"서울역", "5만 원"}),
        ("田中さんと3名、5月3日午後7時30分。", {"田中さん", "3名", "5月3日", "午後7時30分"}),
        ("Wir kommen um halb acht.", {"halb acht"}),
        ("Nos vemos a las tres y media.", {"a las tres y media"}),
        ("Встретимся в половине восьмого.", {"в половине восьмого"}),
        ("We run three times a week, and met a few years ago.", {"three times a week", "a few years ago"}),
    ],
)  # fmt: skip
def test_figures_dates_names_and_identifiers_in_many_languages(text: str, facts: set[str]) -> None:
    found = texts(text)
    assert all(any(fact in whole for whole in found) for fact in facts), found


@pytest.mark.parametrize(
    "text",
    [
        "Do not push and do not open a PR.",
        "Please never delete the backups, and don't touch prod.",
        "Bitte nicht pushen und keinen PR öffnen.",
        "No hagas push y no abras un PR.",
        "Не пушь и не открывай PR.",
        "不要推送，也不要开PR。",
        "プッシュしないでください。",
        "From now on answer in French.",
        "푸시하지 마세요.",
        "앞으로는 한국어로만 답해 주세요.",
        "A partir de ahora responde en español.",
        "Отныне отвечай по-русски.",
    ],
)
def test_what_the_user_forbids_is_one_fact_with_both_halves(text: str) -> None:
    assert stated(text) == [("prohibition", text)]


def test_only_the_users_own_words_forbid() -> None:
    text = "The page says: never use lists."
    assert stated(text) == [("prohibition", text)]
    assert "prohibition" not in {kind for kind, _ in stated(text, quoted=(Span(14, len(text)),))}
    assert "prohibition" not in {kind for kind, _ in stated("Do not push.", role="assistant")}


@pytest.mark.parametrize("text", ["I don't know.", "No problem, thanks.", "Can't wait!", "Do not worry."])
def test_small_talk_is_no_fact(text: str) -> None:
    assert {kind for kind, _ in stated(text)} <= {"name"}


@pytest.mark.parametrize(
    "text",
    [
        "We decided on PostgreSQL.",
        "Let's go with the blue one.",
        "决定用蓝色的。",
        "Wir haben beschlossen zu warten.",
        "Wir haben uns für PostgreSQL entschieden.",
        "우리는 파란색으로 결정했습니다.",
        "Лучше в шесть часов.",
        "赤に決めました。",
    ],
)
def test_decisions_are_pinned(text: str) -> None:
    assert stated(text)[0] == ("decision", text)


def test_correction_is_another_fact_behind_the_first() -> None:
    first, second = find_facts("It is at 5 pm.", "user"), find_facts("Sorry, make it 6 pm.", "user")
    assert {fact.key for fact in first}.isdisjoint({fact.key for fact in second})
    assert second[0].kind == "decision"


def test_missing_facts_are_found_word_for_word() -> None:
    text = "Pay $240 to Ms Olga Petrova on May 3rd, reference QX-417-KD."
    facts = find_facts(text, "user")
    assert missing_facts(facts, text) == []
    lost = missing_facts(facts, "Pay $2400 to Olga on may 3rd")
    assert {fact.key for fact in lost} == {"$240", "ms olga petrova", "qx-417-kd"}


def test_missing_facts_are_named_once_in_order() -> None:
    facts = [Fact("number", 0, 1, "7 bar"), Fact("number", 0, 1, "9 bar"), Fact("number", 0, 1, "7 bar")]
    assert [fact.key for fact in missing_facts(facts, "nothing")] == ["7 bar", "9 bar"]


def test_no_fact_lies_inside_another() -> None:
    facts = find_facts(
        "On 2024-05-03 at 12:15 pm we paid $1,240.50 for 3 tickets at 28-30 Bute Gardens, London.", "user"
    )
    for fact in facts:
        assert not any(o is not fact and o.start <= fact.start and fact.end <= o.end for o in facts)


def test_long_text_takes_linear_time() -> None:
    import time

    for unit in ("no ", "A. ", "1-", "Aa ", "a/", "二", '"x ', "not, ", "says: "):
        started = time.process_time()
        find_facts(unit * (40_000 // len(unit)), "user")
        assert time.process_time() - started < 60, unit


@pytest.mark.parametrize("text", ["You never shy away from a challenge.", "I'm here and they never quit."])
def test_praise_and_reports_forbid_nothing(text: str) -> None:
    assert "prohibition" not in {kind for kind, _ in stated(text)}


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("on March 9th", "on the 9th of March", True),
        ("on March 9th", "on March 19th", False),
        ("on March 9th", "on March 9th, 2024", False),
        ("at 6 pm", "at 6:00 pm", True),
        ("at 6 pm", "at 6 am", False),
    ],
)
def test_one_date_or_time_written_in_two_ways_is_one_statement(one: str, other: str, is_same: bool) -> None:
    keys = [{statement_key(fact) for fact in find_facts(text, "user")} for text in (one, other)]
    assert (keys[0] == keys[1]) is is_same


def test_a_name_states_the_names_inside_it() -> None:
    (fact,) = [fact for fact in find_facts("We saw Falcons vs Rams at Chase Field.", "user") if fact.kind == "name"]
    assert {"chase field", "falcons vs rams"} <= set(nested_keys(fact))
    assert nested_keys(Fact("number", 0, 1, "7 large boxes")) == []


def test_lone_capitals_are_names_where_a_record_goes_on() -> None:
    assert stated("Atherton") == []
    assert [fact.kind for fact in find_facts("Atherton", "user", is_extract=True)] == ["name"]


@pytest.mark.parametrize(
    ("text", "kind", "stated"),
    [
        ("Book a table in Oslo, not before 19:00.", "time", "not before 19:00"),
        ("I want Redis for storage, not Postgres.", "name", "not Postgres"),
        ("It isn't room 204.", "number", "It isn't room 204"),
        ("价格不是450元。 听起来很不错，谢谢。", "price", "价格不是450元"),
        ("合同金额不超过80万元", "price", "合同金额不超过80万元"),
        ("交货日期并非2024年6月9日", "date", "交货日期并非2024年6月9日"),
    ],
)
def test_a_negated_fact_is_one_with_its_negation(text: str, kind: str, stated: str) -> None:
    facts = find_facts(text, "user")
    assert (kind, stated) in [(fact.kind, text[fact.start : fact.end]) for fact in facts]


def test_small_talk_negates_nothing() -> None:
    facts = find_facts("No problem, see you at 5 pm.", "user")
    assert [fact.kind for fact in facts] == ["time"]
