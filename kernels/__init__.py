"""Triton kernels. Import as ``flexdecode.kernels``."""

if __name__ != "flexdecode.kernels":
    raise ImportError("this folder is the package flexdecode.kernels: import it by that name")
