"""Entry kernels, one file a direction; nothing here imports torch."""
