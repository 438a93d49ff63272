"""Masks and score rules ready to use. Import as ``flexdecode.masks``."""

if __name__ != "flexdecode.masks":
    raise ImportError("this folder is the package flexdecode.masks: import it by that name")
