"""Entry kernels, one file an operation; nothing here imports torch."""
