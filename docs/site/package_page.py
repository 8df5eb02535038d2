"""The README as a package index shows it, where links and pictures need whole addresses.

The build reads this file as a hook (``pyproject.toml``), so that the repository's address stands in
``pyproject.toml`` alone.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


def whole(readme: str, repository: str) -> str:
    """The text with relative links as addresses in the repository, pictures as files of it."""

    def address(found: re.Match[str]) -> str:
        mark, words, place = found.groups()
        return f"{mark}[{words}]({repository}/{'raw' if mark else 'blob'}/main/{place})"

    return _LINK.sub(address, readme)


class PackagePage(MetadataHookInterface):
    """Sets the field ``readme``."""

    def update(self, metadata: dict[str, Any]) -> None:
        readme = Path(self.root, "README.md").read_text("utf-8")
        text = whole(readme, metadata["urls"]["Repository"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
