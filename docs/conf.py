"""Sphinx: Markdown pages by MyST, looks by Furo."""

from embedlayer import __version__

project = "embedlayer"
author = "the embedlayer authors"
copyright = "the embedlayer authors"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath"]
html_theme = "furo"
html_title = "embedlayer"
suppress_warnings = ["config.cache"]
