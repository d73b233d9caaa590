"""Command line of the TP+SP operations; `python -m kosmos_tpsp` lists the commands."""
