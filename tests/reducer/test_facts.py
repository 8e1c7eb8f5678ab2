"""The fact guard: which differences keep two texts apart."""

import pytest

from reducer.facts import contains, state
from reducer.number_words import digits_for_words, parse_cjk_number


def same(first: str, second: str, **style: bool) -> bool:
    one, two = state(first, **style), state(second, **style)
    return contains(one, two) and contains(two, one)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("The plan costs $1,240 a month.", "the  plan costs $1240 a MONTH"),
        ("Revenue was １２０ million", "revenue was 120 million"),
        ("“It is open” - she said", '"It is open" — she said'),
        ("<p>It&nbsp;opened in <b>1990</b>.</p>", "It opened in 1990."),
        ("the song, which she also wrote", "a song that she additionally wrote"),
        ("二〇二五年发布", "2025年发布"),
        ("三百二十人", "320人"),
        ("北京的天气好", "北京天气好"),
    ],
)
def test_same_statement(first: str, second: str) -> None:
    assert same(first, second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("twice the rest energy is 1.022 MeV", "twice the rest energy is 1.032 MeV"),
        ("twice the rest energy is 1.022 MeV", "twice the rest energy is 1022 MeV"),
        ("the plan costs 240 dollars", "the plan costs 480 dollars"),
        ("policy of 2025", "policy of 2026"),
        ("costs $240", "costs €240"),
        ("it grew by 5%", "it grew by 5"),
        ("it was -5 degrees", "it was 5 degrees"),
        ("5 km away", "5 mi away"),
        ("a 5 MW plant", "a 5 mW plant"),
        ("an area of 10 m²", "an area of 10 m3"),
        ("1½ cups", "½ cup"),
        ("enable two-factor login", "disable two-factor login"),
        ("it is supported", "it is not supported"),
        ("you can leave", "you can't leave"),
        ("part QX-417-KD failed", "part QX-471-KD failed"),
        ("held in Tampa, Florida", "held in Glendale, Arizona"),
        ("on 3 May", "on 3 June"),
        ("opens before noon", "opens after noon"),
        ("Anna called Bob", "Bob called Anna"),
        ("会议已取消", "会议未取消"),
        ("价格是三百元", "价格是四百元"),
        ("2024年1月", "2024年2月"),
        ("彼は行く", "彼は行かない"),
        ("Der Vertrag ist gültig", "Der Vertrag ist nicht gültig"),
        ("El contrato es válido", "El contrato no es válido"),
        ("Договор действителен", "Договор не действителен"),
        ("계약은 유효하다", "계약은 유효하지 않다"),
        ("x > 5", "x < 5"),
    ],
)
def test_different_statement(first: str, second: str) -> None:
    assert not same(first, second)


def test_longer_text_contains_the_shorter_one() -> None:
    outer = state("Home > News\nThe plan costs 240 dollars.\nAll rights reserved 2024.")
    assert contains(outer, state("The plan costs 240 dollars."))
    assert not contains(state("The plan costs 240 dollars."), outer)


@pytest.mark.parametrize(
    ("longer", "shorter"),
    [
        ("It is not true that the plan is free.", "The plan is free."),
        ("The plan is free only for students.", "The plan is free."),
        ("The plan is free unless you cancel.", "The plan is free."),
        ("除非取消，计划免费", "取消，计划免费"),
    ],
)
def test_condition_in_the_same_sentence_keeps_both(longer: str, shorter: str) -> None:
    assert not contains(state(longer), state(shorter))


def test_condition_in_another_sentence_does_not_matter() -> None:
    assert contains(state("Do not worry. The plan is free. Only ask."), state("The plan is free."))


def test_text_cut_inside_a_word_is_contained() -> None:
    assert contains(state("The jet C919 flew on Sunday."), state("The jet C9…"))
    assert not contains(state("The jet C919 flew on Sunday."), state("The jet C8…"))


def test_empty_text_is_contained_nowhere() -> None:
    assert not contains(state("something"), state(" … "))


def test_white_space_inside_words_is_layout_where_scripts_write_none() -> None:
    assert same("2 009年，在 北京", "2009年，在北京", ignore_spaces=True)
    assert not same("2 009年", "2 008年", ignore_spaces=True)


def test_code_counts_every_sign_and_the_nesting() -> None:
    base = "def f(x):\n    if x:\n        return x - 1\n    return 0\n"
    assert same(base, base.replace("    ", "\t"), as_code=True)
    assert not same(base, base.replace("-", "+"), as_code=True)
    assert not same(base, base.replace("    return 0", "        return 0"), as_code=True)


@pytest.mark.parametrize(
    ("numeral", "digits"),
    [
        ("三百二十", "320"),
        ("二〇二五", "2025"),
        ("十二", "12"),
        ("一万二千", "12000"),
        ("三亿", "300000000"),
        ("两千", "2000"),
        ("三亿二千万", "320000000"),
        ("一万亿", "1000000000000"),
        ("十万", "100000"),
    ],
)
def test_cjk_numerals(numeral: str, digits: str) -> None:
    assert parse_cjk_number(numeral) == digits


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Two hundred and forty seats", "240 seats"),
        ("twenty-one of ninety nine", "21 of 99"),
        ("three million two hundred thousand and five", "3200005"),
        ("seven hundred thousand", "700000"),
        ("zero", "0"),
        ("one of them, no one", "one of them, no one"),
        ("rooms twenty, one and two", "rooms 20, one and two"),
        ("two three", "two three"),
        ("twenty twelve", "twenty twelve"),
        ("hundred", "hundred"),
        ("five and six", "five and six"),
        ("two million three billion", "two million three billion"),
        ("ten's, sixteenth, tenfold, non-zero", "ten's, sixteenth, tenfold, non-zero"),
        ("two hundred and", "200 and"),
    ],
)
def test_english_number_words(text: str, expected: str) -> None:
    assert digits_for_words(text) == expected
