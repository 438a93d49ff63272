"""Triton kernels. Import as ``flexdecode.kernels``.

Read `decode` first (the legend, the kernel), `attend` (its loop), `tiles`, `worklist`, `reduce`;
`pages` says where the keys of other caches are, `quantized` (with `codes`, `coefficients`,
`pieces`, `float8`) what is done with codes;
`tables` and `interval_tables` build block tables, `launch` turns a call into launches, `compiling`
compiles them side by side (`ahead`: even later ones), `triton_key` remembers Triton's hash;
`configs` chooses tiles, with `loops` (steps, warps, stages) and `splits`, from what `hardware` and
`sizes` say, and `layout` numbers programs, all without Triton; `merge` joins whole calls; `append`,
with `rotary` and `quantize_rows`, writes new keys.
"""

if __name__ != "flexdecode.kernels":
    # Not an error at once: with this repository on sys.path, transformers looks for Hugging Face's
    # package of this name, imports what it finds, and asks for its version.
    __path__ = []

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError("this folder is the package flexdecode.kernels: import it by that name")
