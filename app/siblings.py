"""The processes of one gateway ask each other for what each has in memory: metrics, and receipts of the last moments.

Each listens on a Unix socket in a folder that only their user may enter. Whoever is scraped asks the others and shows
every series with the label ``process``, so that a counter that begins anew after a restart is seen as such:

    firsttoken_prompt_tokens_total{process="0",model_name="default"} 1200
    firsttoken_prompt_tokens_total{process="1",model_name="default"} 1180
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from app.auth import Principal

PLACE_VARIABLE = "FIRSTTOKEN_PROCESS"
"""``index:count:folder``, set by the supervisor for the processes that it starts."""
ANSWER_TIMEOUT_S = 2.0
MAX_QUESTION_BYTES = 1024 * 1024
LABEL = b"process"

FindReceipt = Callable[[str, str, frozenset[str]], bytes | None]
"""Id, tenant and groups of the caller; the record, if this process has it in memory."""


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Which of the processes this one is."""

    index: int
    count: int
    folder: Path

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> "ProcessPlace | None":
        """What the supervisor says; ``None`` in a process that stands alone."""
        if not (text := environ.get(PLACE_VARIABLE)):
            return None
        index, count, folder = text.split(":", 2)
        return cls(int(index), int(count), Path(folder))

    def variable(self) -> str:
        """What ``from_environ`` reads."""
        return f"{self.index}:{self.count}:{self.folder}"

    def socket_of(self, index: int) -> Path:
        """Where a process listens."""
        return self.folder / f"{index}.sock"


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One line of JSON; the answer is all that comes until the connection closes, nothing where there is none."""

    receipt_id: str | None = None
    """``None`` asks for the metrics."""
    tenant_id: str = ""
    groups: tuple[str, ...] = ()


class Siblings:
    """Asks the other processes, and answers them."""

    def __init__(self, place: ProcessPlace, render_metrics: Callable[[], bytes], find_receipt: FindReceipt) -> None:
        self._place = place
        self._render_metrics = render_metrics
        self._find_receipt = find_receipt
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listens."""
        path = self._place.socket_of(self._place.index)
        path.unlink(missing_ok=True)  # of a process that died
        self._server = await asyncio.start_unix_server(self._answer, path, limit=MAX_QUESTION_BYTES)

    async def close(self) -> None:
        """Listens no more."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def metrics(self) -> bytes:
        """The metrics of all processes that answer in time."""
        others = await self._ask_all(Question())
        return with_process_label({self._place.index: self._render_metrics(), **others})

    async def find_receipt(self, receipt_id: str, principal: Principal) -> bytes | None:
        """A record that another process has in memory and the caller may read."""
        question = Question(
            receipt_id=receipt_id, tenant_id=principal.tenant_id, groups=tuple(sorted(principal.groups))
        )
        return next(iter((await self._ask_all(question)).values()), None)

    async def _ask_all(self, question: Question) -> dict[int, bytes]:
        others = [index for index in range(self._place.count) if index != self._place.index]
        answers = await asyncio.gather(*(self._ask(index, question) for index in others))
        return {index: answer for index, answer in zip(others, answers, strict=True) if answer}

    async def _ask(self, index: int, question: Question) -> bytes:
        """What a process answers; nothing where it is just being started again."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(self._place.socket_of(index))
                try:
                    writer.write(msgspec.json.encode(question) + b"\n")
                    return await reader.read()
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return b""

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            question = msgspec.json.decode(await reader.readline(), type=Question)
            if question.receipt_id is None:
                writer.write(self._render_metrics())
            else:
                groups = frozenset(question.groups)
                writer.write(self._find_receipt(question.receipt_id, question.tenant_id, groups) or b"")
            await writer.drain()
        except (OSError, ValueError, msgspec.MsgspecError):
            pass  # whoever asked is gone
        finally:
            writer.close()


def with_process_label(texts: Mapping[int, bytes]) -> bytes:
    """Metrics of several processes in Prometheus' text format as one text: families together, processes by label."""
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for index, text in sorted(texts.items()):
        label = b'%b="%d"' % (LABEL, index)
        family = b""
        for line in text.splitlines():
            if line.startswith(b"#"):
                family = line.split(b" ", 3)[2]
                head = heads.setdefault(family, [])
                if line not in head:
                    head.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, label))
    lines = [line for family, head in heads.items() for line in (*head, *samples.get(family, ()))]
    return b"\n".join(lines) + b"\n"


def _labelled(sample: bytes, label: bytes) -> bytes:
    name, brace, rest = sample.partition(b"{")
    if brace and b" " not in name:
        return b"%b{%b,%b" % (name, label, rest) if not rest.startswith(b"}") else b"%b{%b%b" % (name, label, rest)
    name, _, value = sample.partition(b" ")
    return b"%b{%b} %b" % (name, label, value)
