"""Command line of the MoE layers; `python -m kosmos_moe` lists the commands."""
