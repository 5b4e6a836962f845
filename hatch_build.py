"""Build hook: hatchling calls it for the long description and the URLs in the metadata of a distribution."""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

CODE = r"(?P<code>^```.*?^```$|`[^`]+`)"
COMMENT = r"(?P<comment><!--.*?-->\n?)"
LINK = r"(?P<image>!?)\[(?P<label>[^\]]*)\]\((?!\w+:)(?P<path>[^)\s]+)\)"  # a relative one
MARKDOWN = re.compile(f"{CODE}|{COMMENT}|{LINK}", re.DOTALL | re.MULTILINE)


def repository_url(value: str) -> str:
    """Return the address of a repository without a slash or `.git` at its end; raise `ValueError` for a bad one."""
    match = re.fullmatch(r"(https://[\w.-]+(?::\d+)?/[\w.~/-]*?[\w~-])(?:\.git)?/*", value, re.ASCII)
    if not match:
        raise ValueError(
            f"EMBEDLAYER_REPOSITORY is {value!r}, which is not the https URL of a repository. Set it to one, for "
            "example https://example.org/embedlayer, or unset it to build without URLs."
        )
    return match[1]


def long_description(readme: str, repository: str | None, tag: str) -> str:
    """Return the README without HTML comments and relative links; code stays as it is.

    With a repository, relative links and images become absolute, at the tag. Without one, images are left out and a
    link becomes its label, followed by the path where the label is not the path.
    """

    def replacement(match: re.Match[str]) -> str:
        image, label, path = match["image"], match["label"], match["path"]
        if not path:  # code or a comment
            return match["code"] or ""
        if repository:
            return f"{image}[{label}]({repository}/{'raw' if image else 'blob'}/{tag}/{path})"
        return "" if image else label if label == path else f"{label} ({path})"

    return MARKDOWN.sub(replacement, readme)


class DistributionMetadata(MetadataHookInterface):
    """Sets `readme` and `urls`; a wheel that is built from a source distribution has those of its PKG-INFO."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set both fields from README.md and, where it is set, the environment variable `EMBEDLAYER_REPOSITORY`."""
        metadata.setdefault("urls", {})
        if "readme" in metadata:  # hatchling has read PKG-INFO
            return
        value, tag = os.environ.get("EMBEDLAYER_REPOSITORY"), f"v{metadata['version']}"
        repository = repository_url(value) if value else None
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": long_description(readme, repository, tag),
        }
        if repository:
            metadata["urls"] = {
                "Homepage": repository,
                "Documentation": f"{repository}/blob/{tag}/docs/index.md",
                "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",  # the newest: also what came after this release
                "Issues": f"{repository}/issues",
            }
