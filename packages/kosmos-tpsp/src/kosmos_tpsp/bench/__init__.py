"""Benchmarks of the operations: what is measured, how it is checked, and how it is shown."""
