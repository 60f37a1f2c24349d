"""Pieces of a page: tables and figures of speech, as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

__all__ = ["as_table", "code", "in_brackets", "milliseconds", "more", "number", "percent", "small_range", "table_row"]

Report = Mapping[str, Any]
Row = Mapping[str, Any]


def as_table(head: Sequence[str], rows: Sequence[str], caption: str = "") -> str:
    """Return a table of rows that are written out already, as `table_row` does it; with no head it has none."""
    title = f'<p class="soft">{caption}</p>' if caption else ""
    names = "".join(f'<th scope="col">{name}</th>' for name in head)
    top = f"<thead><tr>{names}</tr></thead>" if head else ""
    return f'{title}<div class="scroll"><table>{top}<tbody>{"".join(rows)}</tbody></table></div>'


def table_row(cells: Iterable[object], *, chosen: bool = False) -> str:
    """Return a row of cells that are written out already."""
    kind = ' class="chosen"' if chosen else ""
    return f"<tr{kind}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def code(text: str) -> str:
    """Return a name as it is, in the type of code."""
    return f"<code>{escape(text)}</code>"


def number(value: float | None, form: str) -> str:
    """Return a figure as text, a dash if there is none; per cent signs stand apart."""
    return "-" if value is None else form.format(value).replace("%", "&#8239;%")


def milliseconds(seconds: float | None) -> str:
    """Return milliseconds to three figures or a tenth, whichever is finer."""
    if seconds is None:
        return "-"
    value = 1e3 * seconds
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def small_range(bounds: Sequence[float] | None, scale: float, digits: int) -> str:
    """Return bounds as small print; nothing if there are none."""
    if bounds is None:
        return ""
    low, high = (f"{scale * bound:.{digits}f}" for bound in bounds)
    return f"<small>{low} to {high}</small>"


def in_brackets(bounds: Sequence[float] | None, form: str, confidence: float) -> str:
    """Return an interval in brackets, to follow a figure; nothing if there is none."""
    if bounds is None:
        return ""
    return f" ({percent(100 * confidence)} interval {form.format(bounds[0])} to {form.format(bounds[1])})"


def percent(value: float) -> str:
    """Return a whole number of per cent."""
    return f"{value:.0f}&#8239;%"


def more(share: float) -> str:
    """Return a relative difference of times in words."""
    return f"{100 * abs(share):.1f}&#8239;% {'more' if share >= 0 else 'less'}"
