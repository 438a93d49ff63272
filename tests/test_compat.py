"""Code written for torch's FlexAttention gives torch's results after changing one import."""

import pytest
import torch
from torch.nn.attention import flex_attention as theirs

from flexdecode import compat as ours

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:return_lse is deprecated:FutureWarning"),
]


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def relative(score, b, h, q_idx, kv_idx):
    return score + 0.1 * (kv_idx - q_idx) * (h + 1)


def inputs(Hq=4, Hkv=4, Lq=150, Lkv=150):
    q = torch.randn(2, Hq, Lq, 32)
    k, v = torch.randn(2, 2, Hkv, Lkv, 32)
    return q, k, v


@pytest.mark.parametrize("Lq", [1, 40, 150])
@pytest.mark.parametrize("score_mod", [None, relative])
@pytest.mark.parametrize("masked", [False, True])
def test_flex_attention_equals_torch(Lq, score_mod, masked):
    q, k, v = inputs(Lq=Lq)
    masks = [None, None]
    if masked:
        masks = [
            m.create_block_mask(causal, None, None, Lq, 150, device="cpu") for m in (ours, theirs)
        ]
    got = ours.flex_attention(q, k, v, score_mod, masks[0], return_lse=True)
    want = theirs.flex_attention(q, k, v, score_mod, masks[1], return_lse=True)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        ours.flex_attention(q, k, v, score_mod, masks[1]), want[0], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("full", [False, True])
def test_masks_of_given_blocks_start_at_position_0(full):
    q, k, v = inputs(Lq=100)
    # All blocks that the rule needs: without compilation torch looks at the rule alone.
    counts = torch.tensor([[[1, 1 if full else 2]]], dtype=torch.int32)
    blocks = torch.tensor([[[[0, 1, 2], [1, 0, 2]]]], dtype=torch.int32)
    tables = [counts, blocks]
    if full:
        tables += [torch.tensor([[[0, 1]]]).int(), torch.tensor([[[[0, 1, 2]] * 2]]).int()]
    given = {"BLOCK_SIZE": (64, 64), "mask_mod": causal, "seq_lengths": (100, 150)}
    masks = [m.BlockMask.from_kv_blocks(*tables, **given) for m in (ours, theirs)]
    got = ours.flex_attention(q, k, v, relative, masks[0], return_lse=True)
    want = theirs.flex_attention(q, k, v, relative, masks[1], return_lse=True)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    both = ours.flex_attention(q, k, v, relative, masks[0] | ~masks[0])  # of the blocks
    every = ours.flex_attention(q, k, v, relative)
    torch.testing.assert_close(both, every, rtol=1e-4, atol=1e-5)


def test_grouped_heads_need_enable_gqa():
    q, k, v = inputs(Hq=6, Hkv=2)
    with pytest.raises(ValueError, match="enable_gqa"):
        ours.flex_attention(q, k, v)
    got = ours.flex_attention(q, k, v, relative, enable_gqa=True)
    want = theirs.flex_attention(q, k, v, relative, enable_gqa=True)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_aux_request_and_combinators():
    q, k, v = inputs()
    window = ours.and_masks(causal, lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 9)
    mask = ours.create_block_mask(ours.or_masks(window, ours.noop_mask), 2, 4, 150, 150, "cpu")
    out, aux = ours.flex_attention(
        q, k, v, block_mask=mask, return_aux=ours.AuxRequest(lse=True, max_scores=True)
    )
    want, lse = theirs.flex_attention(q, k, v, return_lse=True)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(aux.lse, lse, rtol=1e-4, atol=1e-5)
    assert aux.max_scores.shape == lse.shape
    with pytest.raises(ValueError, match="return_lse"):
        ours.flex_attention(q, k, v, return_lse=True, return_aux=ours.AuxRequest(lse=True))


def test_torch_kernel_hints_are_accepted_and_unknown_options_are_not():
    q, k, v = inputs(Lq=3)
    hinted = ours.flex_attention(q, k, v, kernel_options={"ROWS_GUARANTEED_SAFE": True})
    assert torch.equal(hinted, ours.flex_attention(q, k, v))
    with pytest.raises(ValueError, match="BLOCK_X"):
        ours.flex_attention(q, k, v, kernel_options={"BLOCK_X": 3})
