"""Reports: report.json and one self-contained page that says what to do, how sure that is, and why.

The page needs no network, no scripts and no other file. Everything that a user can name (plans, models,
paths) is escaped.
"""

from __future__ import annotations

from hsdopt.report.page import Written, html_page, write_report
from hsdopt.report.words import CAPTIONS

__all__ = ["CAPTIONS", "Written", "html_page", "write_report"]
