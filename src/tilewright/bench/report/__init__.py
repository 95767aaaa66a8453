"""The performance pages: committed result files as tables and plots, one page a family."""

from tilewright.bench.report.page import pages, report

__all__ = ["pages", "report"]
