"""Build hook: pins the sibling packages to the one version of the repository.

It runs in the repository only: an sdist carries the finished list in its PKG-INFO. Why the pin has
a local label: docs/decisions/0001-distribution-names.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class SiblingPins(MetadataHookInterface):
    """Joins the hook's `third-party` and `siblings` into `dependencies`, and pins its `extras`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `metadata["dependencies"]`."""
        version = (Path(self.root).parents[1] / "VERSION").read_text(encoding="utf-8").strip()

        def pinned(siblings: list[str]) -> list[str]:
            return [f"{sibling}=={version}" for sibling in siblings]

        metadata["dependencies"] = self.config["third-party"] + pinned(self.config["siblings"])
        if "extras" in self.config:
            metadata["optional-dependencies"] = {
                extra: pinned(names) for extra, names in self.config["extras"].items()
            }
