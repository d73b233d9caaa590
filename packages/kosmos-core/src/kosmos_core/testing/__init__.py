"""Tools that test kernels; import the submodule you need, this package imports none of them."""
