"""What figures are drawn from, and the numbers that each keeps, which become its CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from matplotlib.axes import Axes

from hsdopt.errors import InvalidArgumentError

__all__ = ["Report", "Row", "baselines", "fields", "keep", "kept", "required"]

Report = Mapping[str, Any]
Row = Mapping[str, Any]
T = TypeVar("T")

_TABLE = "hsdopt_table"
"""The attribute of an Axes under which a figure keeps the data that it shows."""


def baselines(report: Report) -> Sequence[Row]:
    """Return the rows of the baselines; reports of older versions have none."""
    rows: Sequence[Row] = report.get("baselines", ())
    return rows


def required(rows: Sequence[T], what: str) -> Sequence[T]:
    """Return `rows`, of which there has to be one.

    Raises
    ------
    InvalidArgumentError
        If there are none.
    """
    if not rows:
        raise InvalidArgumentError(f"expected at least one {what}; got none")
    return rows


def keep(axes: Axes, table: Sequence[Row]) -> None:
    """Keep the data that a figure shows with its axes, one mapping per row of the CSV."""
    setattr(axes, _TABLE, table)


def kept(axes: Axes) -> Sequence[Row] | None:
    """Return the data that was kept with `axes`, or None."""
    table: Sequence[Row] | None = getattr(axes, _TABLE, None)
    return table


def fields(row: Row, *names: str) -> dict[str, Any]:
    """Return these fields of a row, intervals as two columns."""
    flat: dict[str, Any] = {}
    for name in names:
        if name.endswith("interval"):
            flat[f"{name}_low"], flat[f"{name}_high"] = row[name] or ("", "")
        else:
            flat[name] = row[name]
    return flat
