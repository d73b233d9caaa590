"""Benchmarks of the MoE layers."""
