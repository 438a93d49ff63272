"""Merges and cascades on a GPU: graphs that replay, compiled graphs, large addresses."""

import pytest
import torch

from flexdecode import (
    AuxRequest,
    SharedPrefix,
    attention,
    cascade_attention,
    create_block_mask,
    merge_attentions,
    merge_attentions_,
)
from flexdecode.masks import causal, sliding_window

pytestmark = pytest.mark.gpu


def draw(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize("ruled", [False, True])
def test_a_graph_replays_a_cascade_with_new_lengths(ruled):
    """Lengths of a tree's nodes and of the own keys are data."""
    B, node = 12, [0, 1, 1, 2, 0, 1, 2, 2, 2, 2, 0, 1]
    q, own = draw(B, 8, 1, 64), draw(2, B, 2, 700, 64)
    root, nodes = draw(2, 1, 2, 900, 64), draw(2, 3, 2, 500, 64)
    node_len = torch.tensor([500, 70, 0], device="cuda")
    kv_len = torch.arange(1, B + 1, device="cuda") * 7
    sinks = draw(8, dtype=torch.float32)
    mask = create_block_mask(causal & sliding_window(1000)) if ruled else None
    out = torch.full_like(q, float("nan"))
    prefixes = [SharedPrefix(*root), SharedPrefix(*nodes, node, node_len)]

    def decode():
        out.copy_(
            cascade_attention(
                q, *own, prefixes=prefixes, kv_len=kv_len, sinks=sinks, block_mask=mask
            )
        )

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        decode()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    for _ in range(4):
        kv_len += 37
        node_len += torch.tensor([-90, 60, 20], device="cuda")
        graph.replay()
        for b in range(B):
            n = node[b]
            pieces = [
                (root[:, 0], 900),
                (nodes[:, n], int(node_len[n])),
                (own[:, b], int(kv_len[b])),
            ]
            whole = torch.cat([x[:, :, :length] for x, length in pieces], 2)
            exact = attention(
                q[b : b + 1],
                whole[:1],
                whole[1:],
                sinks=sinks,
                block_mask=mask,
                backend="reference",
            )
            torch.testing.assert_close(out[b : b + 1], exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("parts", [2, 3, 8, 16, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sizes_and_dtypes(parts, dtype):
    """Lists and stacks of all tile sizes, forward and backward, beside torch in float64."""
    for shape in ((16, 32, 1, 128), (3, 5, 700, 80), (1, 1, 1, 512)):
        outs = draw(parts, *shape, dtype=dtype).requires_grad_()
        lses = (draw(parts, *shape[:3], dtype=torch.float32) * 3).detach()
        lses[0, 0, 0] = -torch.inf
        lses.requires_grad_()
        sinks = draw(shape[1], dtype=torch.float32).requires_grad_()
        grads = draw(*shape, dtype=dtype), draw(*shape[:3], dtype=torch.float32)
        wide = [x.detach().double().requires_grad_() for x in (outs, lses, sinks)]
        right = merge_attentions(*wide, backend="torch")
        right += torch.autograd.grad(right, wide, [g.double() for g in grads])
        for form in (list, lambda x: x):
            found = merge_attentions(form(outs), form(lses), sinks)
            found += torch.autograd.grad(found, (outs, lses, sinks), grads)
            for x, exact in zip(found, right, strict=True):
                low = x.dtype == torch.bfloat16
                close = {"rtol": 1e-2, "atol": 1e-2} if low else {"rtol": 1e-4, "atol": 1e-4}
                torch.testing.assert_close(x.double(), exact, **close)


def test_more_than_two_to_the_31_elements():
    rows = 9_000_000
    outs = torch.zeros(2, rows, 128, dtype=torch.bfloat16, device="cuda")
    lses = torch.zeros(2, rows, device="cuda")
    outs[1, -1] = 2.0
    lses[0, 0] = -torch.inf
    outs[0, 0], outs[1, 0] = float("nan"), 3.0
    out, lse = merge_attentions(outs, lses)
    assert (out[0] == 3).all() and lse[0] == 0
    assert (out[-1] == 1).all()
    assert (out[1:-1] == 0).all()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of what inductor imports
def test_compiled_code_holds_both_merges():
    """Inductor keeps the operators, in place and not, and finds the gradients."""
    outs, lses = draw(2, 4, 8, 1, 64, dtype=torch.float32), draw(2, 4, 8, 1, dtype=torch.float32)
    outs.requires_grad_()

    def step(outs, lses):
        out, lse = merge_attentions([outs[0] * 2, outs[1]], [lses[0], lses[1]])
        return out.sin(), lse

    def stream(state, total, out, lse):
        merge_attentions_(state, total, out, lse)
        return state + 1

    expected = step(outs, lses)
    found = torch.compile(step, fullgraph=True)(outs, lses)
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected[0].sum(), outs)
    torch.testing.assert_close(torch.autograd.grad(found[0].sum(), outs), wanted)
    state, total = torch.zeros_like(outs[0]), torch.full_like(lses[0], -torch.inf)
    part = outs[0].detach(), lses[0]
    with torch.no_grad():
        more = torch.compile(stream, fullgraph=True)(state, total, *part)
    assert torch.equal(state, part[0]) and torch.equal(total, part[1])
    assert torch.equal(more, part[0] + 1)


def test_a_long_prefix_of_many_sequences():
    """Taller than a tile, in 16 bits, beside the plain call over copies."""
    q, own, common = draw(64, 32, 1, 128), draw(2, 64, 8, 200, 128), draw(2, 1, 8, 5000, 128)
    prefixes = [SharedPrefix(*common)]
    aux = AuxRequest(lse=True, max_scores=True)
    out, found = cascade_attention(q, *own, prefixes=prefixes, return_aux=aux)
    whole = torch.cat([common.expand(-1, 64, -1, -1, -1), own], 3)
    exact, right = attention(q, *whole, return_aux=aux)
    torch.testing.assert_close(out, exact, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(found.lse, right.lse, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found.max_scores, right.max_scores, rtol=1e-4, atol=1e-3)
