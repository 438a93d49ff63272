"""What the choice of a configuration needs to know about a device. Nothing here imports Triton."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """What the choice needs to know about a device.

    Attributes
    ----------
    processors : int
        Streaming multiprocessors or compute units.
    shared_memory : int
        Bytes of shared memory that one program may use.
    pdl : bool
        Whether a kernel can be launched before the one that it depends on has ended.
    cuda : bool
        Whether kernels may hold CUDA instructions.
    fp8_rows : int
        Least rows of a tile whose matrix instructions take e4m3; 0 where none do. Smaller tiles
        would be converted to float16, so that decoding to bfloat16 is as fast and more precise.
    arch : str
        Whose measured choices it takes, see `flexdecode.choices.Key`; none where empty.
    columns : int
        Least columns of a matrix instruction. Fewer query rows than the 16 that it takes as rows
        are its columns where they are quantised: less of it is padding.
    """

    processors: int
    shared_memory: int
    pdl: bool = False
    cuda: bool = False
    fp8_rows: int = 0
    arch: str = ""
    columns: int = 8


# What the interpreter is given: small, so that tests cross tile borders.
INTERPRETED = Device(processors=8, shared_memory=1 << 30, arch="interpreter")
