"""Device functions of the MoE kernels; nothing here imports torch."""
