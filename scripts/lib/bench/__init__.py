"""Benchmarks: each measures beside a named peer in the same run, pairs alternated, and prints medians with their 95 % interval."""
