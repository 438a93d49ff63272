"""Masks of speculative decoding: a tree of draft tokens behind a common prefix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flexdecode.masks.arguments import checked_device, id_tensor, int_list, per_batch
from flexdecode.mods import MaskMod, mask_mod

__all__ = ["create_ancestors", "create_parents", "tree"]


def tree(ancestors: Tensor, prefix: int | Tensor) -> MaskMod:
    """True for the whole prefix, and within the tree for a token's ancestors and itself [1]_.

    ``kv_idx < prefix[b]``, or ``ancestors[q_idx - prefix[b], kv_idx - prefix[b]]`` inside the tree.

    Parameters
    ----------
    ancestors : Tensor, [T, T] or [B, T, T], bool
        True at ``[i, j]`` where draft token ``j`` is ``i`` itself or one of its ancestors; see
        `create_ancestors`. May change in place from step to step.
    prefix : int, or Tensor [] or [B], integer, tokens
        Position of the first draft token: the tree is the queries ``prefix[b] + [0, T)`` and the
        keys of the same positions. Keys past the tree are not seen.

    Returns
    -------
    MaskMod

    Raises
    ------
    TypeError
        `ancestors` is not a bool tensor, or `prefix` not an integer.
    ValueError
        `ancestors` is not square, is empty, or has another number of dimensions.

    References
    ----------
    .. [1] X. Miao et al., "SpecInfer: Accelerating Large Language Model Serving with Tree-based
       Speculative Inference and Verification", arXiv:2305.09781, 2023.

    Examples
    --------
    Two drafts, 1 and 2, for what follows token 0, after a prefix of two tokens:

    >>> import torch
    >>> mask = tree(create_ancestors([-1, 0, 0]), prefix=2)
    >>> mask(0, 0, torch.arange(2, 5)[:, None], torch.arange(5)).int()
    tensor([[1, 1, 1, 0, 0],
            [1, 1, 1, 1, 0],
            [1, 1, 1, 0, 1]], dtype=torch.int32)
    """
    if not isinstance(ancestors, Tensor) or ancestors.dtype != torch.bool:
        got = ancestors.dtype if isinstance(ancestors, Tensor) else type(ancestors).__name__
        raise TypeError(f"ancestors: expected a bool tensor, got {got}")
    if ancestors.ndim not in (2, 3) or ancestors.shape[-1] != ancestors.shape[-2]:
        raise ValueError(
            f"ancestors: expected shape [T, T] or [B, T, T], got {list(ancestors.shape)}"
        )
    size = ancestors.shape[-1]
    if size == 0:
        raise ValueError("ancestors: expected at least one draft token, got none")
    last = size - 1
    start = per_batch("prefix", prefix)

    if ancestors.ndim == 2:

        @mask_mod
        def tree(b, h, q_idx, kv_idx):
            # Rows and columns are clamped, since prefix keys ask outside the matrix.
            row = torch.clamp(q_idx - start(b), 0, last)
            column = torch.clamp(kv_idx - start(b), 0, last)
            inside = kv_idx < start(b) + size
            return (kv_idx < start(b)) | (inside & ancestors[row, column])

        return tree

    @mask_mod
    def tree_per_batch(b, h, q_idx, kv_idx):
        row = torch.clamp(q_idx - start(b), 0, last)
        column = torch.clamp(kv_idx - start(b), 0, last)
        inside = kv_idx < start(b) + size
        return (kv_idx < start(b)) | (inside & ancestors[b, row, column])

    return tree_per_batch


def create_ancestors(
    parents: Sequence[int] | Tensor, device: torch.device | str | None = None
) -> Tensor:
    """Turn trees given by parents into the matrix that `tree` takes.

    Parameters
    ----------
    parents : sequence of int, length T, or Tensor [T] or [B, T], integer
        Parent of each draft token, which comes before it; -1 for a child of the prefix. A tensor is
        data: it is neither checked nor waited for, so that a tree can change at every step.
    device : torch.device or str, optional
        Where the matrix goes. Default: the tensor's own, else torch's current default device.

    Returns
    -------
    Tensor, [T, T] or [B, T, T], bool
        True at ``[i, j]`` where ``j`` is ``i`` or one of its ancestors.

    Raises
    ------
    ValueError
        A parent in a sequence does not come before its child, or a tensor has other dimensions.
    TypeError
        A tensor is not of integers.

    Examples
    --------
    >>> create_ancestors([-1, 0, 0, 1]).int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 0, 1, 0],
            [1, 1, 0, 1]], dtype=torch.int32)
    """
    if isinstance(parents, Tensor):
        id_tensor("parents", parents, "[T] or [B, T]")
    else:
        device = checked_device(device)
        for token, parent in enumerate(int_list("parents", parents)):
            if not -1 <= parent < token:
                raise ValueError(
                    f"parents: expected the parent of token {token} in [-1, {token}), got {parent}"
                )
        parents = torch.tensor(parents, dtype=torch.int64, device=device)
    size = parents.shape[-1]
    tokens = torch.arange(size, device=parents.device)
    reach = (parents[..., None] == tokens) | (tokens[:, None] == tokens)
    for _ in range(max(size - 1, 0).bit_length()):
        steps = reach.float()
        reach = steps @ steps > 0  # each product doubles the number of steps up
    return reach if device is None else reach.to(checked_device(device))


def create_parents(paths: Sequence[Sequence[int]]) -> list[int]:
    """Turn a tree given by paths, as Medusa [1]_ and EAGLE [2]_ do, into parents.

    Parameters
    ----------
    paths : sequence of sequences of int
        The draft tokens but the root: ``(i, j)`` is the ``j``-th guess for what follows the
        ``i``-th guess for what follows the root. Every path but its last step is a path too.

    Returns
    -------
    list of int, length ``len(paths) + 1``
        For `create_ancestors`. Token 0 is the root, the last accepted token; the others follow
        sorted by depth, then by path.

    Raises
    ------
    ValueError
        A path is empty, twice there, or its parent is missing.

    References
    ----------
    .. [1] T. Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple
       Decoding Heads", arXiv:2401.10774, 2024.
    .. [2] Y. Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty",
       arXiv:2401.15077, 2024.

    Examples
    --------
    Two guesses for the next token, and one for what follows the better of them:

    >>> create_parents([(0,), (1,), (0, 0)])
    [-1, 0, 0, 1]
    """
    places: dict[tuple[int, ...], int] = {(): 0}
    parents = [-1]
    if isinstance(paths, (str, bytes, Tensor)) or not isinstance(paths, Iterable):
        raise TypeError(f"paths: expected a sequence of paths, got {type(paths).__name__}")
    found = [tuple(int_list("paths", path)) for path in paths]
    for path in sorted(found, key=lambda path: (len(path), path)):
        if path in places:
            raise ValueError(f"paths: expected every path once and none empty, got {path} again")
        if path[:-1] not in places:
            raise ValueError(f"paths: expected {path[:-1]}, the parent of {path}, got none")
        parents.append(places[path[:-1]])
        places[path] = len(places)
    return parents
