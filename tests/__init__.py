"""Tests of tilewright.  What several of them need is in `tests/harness`."""
