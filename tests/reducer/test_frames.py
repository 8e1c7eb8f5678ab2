"""Which lines around a text belong to the place it was copied from."""

import time

import pytest

from reducer.frames import body_span

BODY = "The optic nerve carries signals from the retina to the brain."
CODE = "def clear():\n    print('')\n"
APACHE = (
    "# -*- coding: utf-8 -*-\n# Copyright 2019 The Authors. All rights reserved.\n#\n"
    '# Licensed under the Apache License, Version 2.0 (the "License");\n\n'
)


def body(text: str, title: str | None = None, asked: frozenset[str] = frozenset()) -> str:
    span = body_span(text, title, asked)
    return text[span.start : span.end]


@pytest.mark.parametrize(
    ("head", "foot"),
    [
        ("Optic nerve\n", ""),
        (
            "Optic nerve - Free Encyclopedia\nFrom the open encyclopedia\n\n",
            "\nCategories: Optic nerve | All stub pages",
        ),
        ("[Document: Optic nerve] [Section 2 of 7]\n", "\n-- end of section --"),
        ("Home > Optic nerve\nShare this page | Print | Email\n\n", "\n\nRelated articles | Most read | Contact us"),
        ("Seite 3 von 9\n", "\nEnde des Abschnitts"),
        ("Página 3 de 9\n", "\nfin de la sección"),
        ("Страница 3 из 9\n", "\nконец раздела"),
        ("【文档 第2节，共7节】\n", "\n—— 本节完 ——"),
        ("", "\nThis page is provided for information only and does not constitute advice."),
    ],
)
def test_frames_are_left_out(head: str, foot: str) -> None:
    assert body(head + BODY + foot, "Optic nerve") == BODY


@pytest.mark.parametrize(
    "line",
    [
        "Plan of 2025",
        "Section 12",
        "Last updated: 12 March 2024",
        "Optic nerve, right eye only",
        "Optic nerve (2nd edition) - Wiki 3",
        "Categories: 1990 births | Living people",
        "Source: Reuters, Anna Weber",
        "Free",
        "Home > Optic nerve > Draft of 2021",
        "Part 2",
        "Not approved",
        "Optic nerve: not available online",
        "Optic nerve - discontinued news",
        "Optic nerve - Reuters",
        "From Leeds",
        "Categories: Articles | Cancelled projects",
        "Retrieved from archive after deletion",
    ],
)
def test_lines_that_state_something_are_part_of_the_body(line: str) -> None:
    text = f"{line}\n{BODY}"
    assert body(text, "Optic nerve") == text


def test_licence_above_code_is_left_out_unless_it_is_asked_for() -> None:
    assert body(APACHE + CODE) == CODE
    assert body(APACHE + CODE, asked=frozenset({"apache"})).startswith("# Licensed under the Apache")
    assert body("# clears the screen\n" + CODE) == "# clears the screen\n" + CODE


def test_frames_alone_leave_one_line() -> None:
    assert body("Optic nerve\n-- end of section --", "Optic nerve")
    assert body("", None) == ""


@pytest.mark.parametrize("text", [" " * 1_000_000 + "\nx", "\n" * 1_000_000, "# \n" * 300_000, "x\n" * 500_000])
def test_a_million_characters_are_read_in_linear_time(text: str) -> None:
    started = time.process_time()
    body(text, "Optic nerve")
    # Linear takes a second; quadratic would take minutes.
    assert time.process_time() - started < 30
