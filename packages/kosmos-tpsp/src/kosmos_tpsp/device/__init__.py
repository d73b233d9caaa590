"""Device functions that several TP+SP kernels share; nothing here imports torch."""
