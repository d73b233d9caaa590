"""Kernels of kosmos-core itself: they measure a machine. Nothing in this folder imports torch."""
