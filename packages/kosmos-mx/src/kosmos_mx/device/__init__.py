"""Device functions on MXFP8 tiles; they never import torch."""
