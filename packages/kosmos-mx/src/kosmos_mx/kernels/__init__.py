"""Entry kernels of the MXFP8 operations."""
