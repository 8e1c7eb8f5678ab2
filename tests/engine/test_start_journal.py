"""The journal of begun requests: what was noted can be read, however the writer ended."""

import os
from pathlib import Path

from engine.start_journal import StartJournal, read_started


def test_noted_requests_are_read_though_nobody_closed_the_journal(tmp_path: Path) -> None:
    journal = StartJournal(tmp_path / "started")
    journal.note(["a", "b"])
    journal.note(["line\nbreak", "ünï"])
    assert read_started(tmp_path / "started") == {"a", "b", "line\nbreak", "ünï"}
    journal.close()


def test_cleared_journal_is_empty_and_goes_on(tmp_path: Path) -> None:
    journal = StartJournal(tmp_path / "started")
    journal.note(["a"])
    journal.clear()
    journal.note(["b"])
    assert read_started(tmp_path / "started") == {"b"}
    journal.close()


def test_line_that_was_cut_off_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "started").write_bytes(b'"a"\n"b')
    assert read_started(tmp_path / "started") == {"a"}


def test_process_that_noted_nothing_has_begun_nothing(tmp_path: Path) -> None:
    assert read_started(tmp_path / "nowhere") == set()


def test_only_the_user_may_read_it(tmp_path: Path) -> None:
    journal = StartJournal(tmp_path / "started")
    assert os.stat(tmp_path / "started").st_mode & 0o777 == 0o600
    journal.close()
