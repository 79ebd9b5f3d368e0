"""Settings of Sphinx: `make docs` builds the pages with warnings as errors."""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

import attnlab

sys.path.append(str(Path(__file__).parent / "_ext"))

project = "attnlab"
author = copyright = "the attnlab authors"
version = release = attnlab.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "reference",
]
default_role = "literal"  # `name` in a docstring
html_theme = "furo"
html_title = f"attnlab {version}"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 3

nb_execution_mode = "cache"
nb_execution_raise_on_error = True
suppress_warnings = ["misc.highlighting_failure"]  # `!command \\` of a notebook is not Python
nb_execution_timeout = 60  # seconds for a cell

autodoc_typehints = "description"
napoleon_google_docstring = True


def link_files(app: Sphinx, name: str, source: list[str]) -> None:
    """Turn a link to a Markdown file outside docs/ into a download, which Sphinx would look for among its pages."""
    source[0] = re.sub(r"\]\((?=\.\./\.\./[^)]*\.md\b)", "](path:", source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", link_files)
