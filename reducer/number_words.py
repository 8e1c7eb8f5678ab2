"""Numbers in words, as digits: so that one spelling of a number is the other, and two numbers are two.

English words and Chinese or Japanese numerals. What is no well-formed number stays as it stands:

    two hundred and forty   240        三百二十   320        三亿二千万   320000000
    twenty, one             stays      two three  stays
"""

import re

_SMALL_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS_WORDS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SMALL = {word: value for value, word in enumerate(_SMALL_WORDS)}
_TENS = {word: 10 * value for value, word in enumerate(_TENS_WORDS, start=2)}
_SCALES = {"thousand": 1_000, "million": 1_000_000, "billion": 1_000_000_000}
_WORD = "|".join((*_SMALL, *_TENS, *_SCALES, "hundred"))
_RUN = re.compile(rf"(?<![\w-])(?:{_WORD})(?:(?:\s+and\s+|[^\S\n]+|-)(?:{_WORD}))*(?![\w'’-])", re.IGNORECASE)

_DIGITS = {"〇": 0, "零": 0, "一": 1, "二": 2, "两": 2, "兩": 2, "三": 3, "四": 4, "五": 5, "六": 6, "七": 7, "八": 8,
           "九": 9}  # fmt: skip
_UNITS = {"十": 10, "百": 100, "千": 1000}
_MYRIADS = {"万": 10_000, "萬": 10_000, "亿": 100_000_000, "億": 100_000_000}
CJK_NUMERALS = "".join((*_DIGITS, *_UNITS, *_MYRIADS))
"""Characters of Chinese and Japanese numerals."""


def digits_for_words(text: str) -> str:
    """``text`` with every English number in words as digits; a lone "one" is too often no number and stays."""
    return _RUN.sub(_as_digits, text)


def parse_cjk_number(numeral: str) -> str:
    """Digits of a Chinese or Japanese numeral: ``三百二十`` is ``320``, ``二〇二五`` is ``2025``."""
    if all(char in _DIGITS for char in numeral):
        return "".join(str(_DIGITS[char]) for char in numeral)
    total, myriads, section, digit = 0, 0, 0, 0
    for char in numeral:
        if char in _DIGITS:
            digit = _DIGITS[char]
        elif char in _UNITS:
            section += (digit or 1) * _UNITS[char]
            digit = 0
        elif _MYRIADS[char] == 10_000:
            myriads = (myriads + section + digit or 1) * 10_000
            section, digit = 0, 0
        else:
            total = (total + myriads + section + digit or 1) * 100_000_000
            myriads, section, digit = 0, 0, 0
    return str(total + myriads + section + digit)


def _as_digits(match: re.Match[str]) -> str:
    words = re.split(r"[\s-]+", match.group().casefold())
    if words == ["one"]:
        return match.group()
    value = _parse(words)
    return match.group() if value is None else str(value)


def _parse(words: list[str]) -> int | None:
    """The value of a number in words; ``None`` where the words are no number or several."""
    total, current, scale = 0, 0, 1_000_000_000_000
    previous = ""
    for word in words:
        if word == "and":
            if previous != "hundred" and previous not in _SCALES:
                return None
        elif word in _SMALL:
            value = _SMALL[word]
            if previous in _SMALL or (current % 100 and value > 9) or (value == 0 and len(words) > 1):
                return None
            current += value
        elif word in _TENS:
            if current % 100:
                return None
            current += _TENS[word]
        elif word == "hundred":
            if not 0 < current < 10:
                return None
            current *= 100
        else:
            if not 0 < current < 1000 or _SCALES[word] >= scale:
                return None
            scale = _SCALES[word]
            total += current * scale
            current = 0
        previous = word
    return None if previous == "and" else total + current
