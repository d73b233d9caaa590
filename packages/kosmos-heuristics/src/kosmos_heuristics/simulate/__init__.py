"""A discrete-event simulator of the fused kernels: queues, roles and transfers, tile by tile."""
