"""Sphinx configuration; ``make docs`` builds with warnings as errors."""

project = "flexdecode"
author = "flexdecode contributors"
copyright = "2026, flexdecode contributors"

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
html_theme = "furo"
myst_heading_anchors = 3
