"""The performance page: committed result files as tables and plots."""

from tilewright.bench.report.page import report

__all__ = ["report"]
