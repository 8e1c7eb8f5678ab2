"""A report as data (headings, texts, tables, figures) and its two forms: one HTML file, one Markdown file.

Both hold everything they show; nothing is loaded from anywhere.
"""

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass, field

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
html { color: #222; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .7rem; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.scroll { overflow-x: auto; } figure { margin: 1rem 0; } svg { max-width: 100%; height: auto; }
.warning { color: #9a4a00; } .note { color: #555; }
.fail { color: #b00020; font-weight: 600; } .pass { color: #1b6e2c; }
"""


@dataclass(frozen=True, slots=True)
class Heading:
    """Title of a section."""

    text: str


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A text; ``kind`` is ``plain``, ``note``, ``warning``, ``pass`` or ``fail``."""

    text: str
    kind: str = "plain"


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of texts."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Plot:
    """An SVG with its caption."""

    title: str
    svg: str


Block = Heading | Paragraph | Grid | Plot


@dataclass(slots=True)
class Page:
    """A report."""

    title: str
    blocks: list[Block] = field(default_factory=list)

    def html(self) -> str:
        """One file that needs no other."""
        body = "\n".join(_html(block) for block in self.blocks)
        title = html.escape(self.title)
        return (
            f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
            f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n{body}\n</body>\n</html>\n"
        )

    def markdown(self) -> str:
        """The same as Markdown; plots are embedded images."""
        return "\n\n".join([f"# {self.title}", *(_markdown(block) for block in self.blocks)]) + "\n"


def _html(block: Block) -> str:
    match block:
        case Heading(text):
            return f"<h2>{html.escape(text)}</h2>"
        case Paragraph(text, kind):
            return f'<p class="{html.escape(kind)}">{html.escape(text)}</p>'
        case Grid(columns, rows):
            head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
            body = "\n".join(
                "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
            )
            return (
                f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'
            )
        case Plot(title, svg):
            return f"<figure>\n{svg}\n<figcaption>{html.escape(title)}</figcaption>\n</figure>"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text):
            return f"## {text}"
        case Paragraph(text, kind):
            return f"**{text}**" if kind in ("warning", "fail") else text
        case Grid(columns, rows):
            lines = [_row(columns), _row(["---"] * len(columns)), *(_row(row) for row in rows)]
            return "\n".join(lines)
        case Plot(title, svg):
            packed = base64.b64encode(svg.encode()).decode()
            return f"![{title}](data:image/svg+xml;base64,{packed})"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
