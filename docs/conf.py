"""Sphinx configuration; ``make docs`` builds with warnings as errors."""

import re

from sphinx.application import Sphinx

project = "flexdecode"
author = "flexdecode contributors"
copyright = "2026, flexdecode contributors"

extensions = ["myst_nb", "numpydoc", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
default_role = "py:obj"  # a name in single backticks, in docstrings

autodoc_member_order = "groupwise"
autodoc_typehints = "none"  # docstrings say more than annotations do: shapes, units
numpydoc_show_class_members = False  # autodoc lists them
numpydoc_xref_param_type = False

nb_execution_mode = "force"  # the pictures are of this very version
nb_execution_timeout = 180
nb_execution_raise_on_error = True

html_theme = "sphinx_book_theme"
html_title = "flexdecode"
html_static_path = ["_static"]
html_css_files = ["narrow.css"]
html_theme_options = {
    "navbar_persistent": [],  # the side bar has the search field already
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "pygments_light_style": "default",
    "pygments_dark_style": "github-dark",
}


def number_references(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Show references as written, [1], [2]: numpydoc's labels are unique, but say nothing."""
    for n, line in enumerate(lines):
        line = re.sub(r"^( *)\.\. \[R[0-9a-f]+-(\d+)\]", r"\1*  [\2]", line)
        lines[n] = re.sub(r"\[R[0-9a-f]+-(\d+)\]_", r"[\1]", line)


def setup(app: Sphinx) -> None:
    """Rewrite docstrings after numpydoc has read them."""
    app.connect("autodoc-process-docstring", number_references, priority=900)
