"""The performance pages: committed result files as tables and plots, a page for each family of ops."""

from tilewright.bench.report.page import pages, report

__all__ = ["pages", "report"]
