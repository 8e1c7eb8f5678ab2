"""Reads result files back, with what lies beside them case by case or request by request."""

import gzip
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from eval.ablation import AblationReport
from eval.errors import DataError
from eval.load_records import LoadReport, RequestRecord
from eval.peers_records import PeersReport
from eval.records import CaseRecord, RecallReport

Report = RecallReport | LoadReport | AblationReport | PeersReport
_KINDS: dict[str, type[RecallReport] | type[LoadReport] | type[AblationReport] | type[PeersReport]] = {
    "recall": RecallReport,
    "load": LoadReport,
    "ablation": AblationReport,
    "peers": PeersReport,
}


@dataclass(frozen=True, slots=True)
class Result:
    """One result file."""

    name: str
    report: Report
    cases: list[CaseRecord] = field(default_factory=list)
    """Of a recall run."""
    requests: list[RequestRecord] = field(default_factory=list)
    """Of a load test."""


def read_result(path: Path) -> Result:
    """Reads a result of ``eval recall``, ``load`` or ``ablation``, or of the bench of peers.

    Raises DataError for another file. The records beside it may be missing; then the lists are empty.
    """
    try:
        whole: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        kind = whole.get("kind", "recall") if isinstance(whole, dict) else None
        expected = _KINDS.get(str(kind))
        if expected is None:
            raise DataError(f"{path}: kind {kind!r} is no result; known: {', '.join(_KINDS)}")
        report: Report = msgspec.convert(whole, expected)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise DataError(f"{path}: no result of an evaluation: {error}") from None
    if isinstance(report, RecallReport):
        return Result(path.name, report, cases=_lines(path, report.cases_file, CaseRecord))
    if isinstance(report, LoadReport):
        return Result(path.name, report, requests=_lines(path, report.requests_file, RequestRecord))
    return Result(path.name, report)


def _lines(path: Path, name: str | None, kind: Any) -> list[Any]:
    file = None if name is None else path.with_name(Path(name).name)
    if file is None or not file.is_file():
        return []
    decoder = msgspec.json.Decoder(kind)
    try:
        return [decoder.decode(line) for line in gzip.decompress(file.read_bytes()).splitlines() if line.strip()]
    except (OSError, EOFError, zlib.error, msgspec.MsgspecError) as error:
        raise DataError(f"{file}: {error}") from None
