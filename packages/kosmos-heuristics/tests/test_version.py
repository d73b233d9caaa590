"""The version is that of the installed distribution."""

from importlib.metadata import PackageNotFoundError, version

import kosmos_heuristics


def test_version_is_the_distributions_or_says_that_there_is_none():
    try:
        wanted = version("kosmos-heuristics")
    except PackageNotFoundError:
        wanted = "0+source"
    assert kosmos_heuristics.__version__ == wanted
    assert "__version__" in kosmos_heuristics.__all__
