"""Powers of two and the pieces of head dims. Nothing here imports Triton."""

MIN_TILE = 16  # the smallest side of a matrix instruction
MIN_REST = 32  # a second piece of 16 columns costs more registers than it saves memory


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def split_dim(dim: int) -> tuple[int, int]:
    """Cover a head dim with one or two power-of-two pieces, wasting little.

    Returns
    -------
    pieces : (int, int)
        The second is 0 when one piece is as good.

    Examples
    --------
    >>> [split_dim(dim) for dim in (4, 80, 96, 120, 128, 576)]
    [(16, 0), (64, 32), (64, 32), (128, 0), (128, 0), (512, 64)]
    """
    whole = next_power_of_2(max(dim, MIN_TILE))
    half = whole // 2
    rest = next_power_of_2(max(dim - half, MIN_REST))
    return (half, rest) if half + rest < whole else (whole, 0)


def has_padded_piece(dim: int) -> bool:
    """Whether a head dim has a second piece that it does not fill, read under a mask."""
    first, second = split_dim(dim)
    return second > 0 and first + second > dim
