"""Timing on one machine: two clocks, the number of threads, comparisons, and what a measured gain says."""
