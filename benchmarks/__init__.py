"""Benchmarks: one table of cases, timed for this library and for its peers."""
