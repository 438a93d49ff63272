"""`attention` within ``torch.compile`` and ``torch.export``: one operator, no graph breaks."""

import functools
import io

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from flexdecode import (
    AuxRequest,
    BlockMask,
    append_kv,
    attention,
    compile_count,
    compiled,
    create_block_mask,
    quantize,
)
from flexdecode.graph_text import graph_from_text, graph_to_text
from flexdecode.masks import causal, sliding_window
from flexdecode.trace import trace
from tests import mod_cases
from tests.helpers import assert_matches, random_inputs

B, HQ, HKV, LKV, D = 2, 4, 2, 64, 16
Q, K, V = random_inputs(B, HQ, HKV, 1, LKV, D)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


class Compiled:
    """A function compiled without graph breaks, and how often that happened."""

    def __init__(self, function, backend="eager"):
        self.counter = CompileCounterWithBackend(backend)
        self.function = function
        self.compiled = torch.compile(function, fullgraph=True, backend=self.counter)

    def check(self, *args):
        """Run and compare with the same function, not compiled."""
        found = self.compiled(*args)
        torch.testing.assert_close(found, self.function(*args), atol=1e-6, rtol=0)
        return found

    @property
    def count(self):
        return self.counter.frame_count


def window_of(size, ids):
    def inside(q_idx, kv_idx):
        return q_idx - kv_idx < size

    return lambda b, h, q_idx, kv_idx: inside(q_idx, kv_idx) & (ids[kv_idx] < 9)


def decayed(rate, slopes, cap=20.0):
    return lambda score, b, h, q_idx, kv_idx: (
        cap * torch.tanh(score / cap) - slopes[h] * (q_idx - kv_idx) * rate
    )


def ids_of(step):
    return torch.full((LKV + step,), step)


LENGTHS = torch.tensor([20, 33])
# What the i-th call passes to attention. All calls of a case share one graph, or two at most.
CASES = {
    "no mask": lambda i: {"kv_len": LENGTHS + i},
    "length int": lambda i: {"kv_len": 40 + i, "q_offset": 41 + i},
    "lazy": lambda i: {
        "block_mask": create_block_mask(window_of(9 + i, ids_of(i)), BLOCK_SIZE=16),
        "kv_len": LENGTHS + i,
    },
    "sized": lambda i: {
        "block_mask": create_block_mask(causal & sliding_window(9), None, None, 1, LKV),
    },
    "fixed": lambda i: {
        "block_mask": create_block_mask(
            sliding_window(9), B, HQ, 1, LKV, BLOCK_SIZE=16, q_offset=torch.tensor([30 + i, 20])
        ),
    },
    "blocks": lambda i: {
        "block_mask": BlockMask.from_kv_blocks(
            torch.tensor([[[1]]]), torch.tensor([[[[i]]]]), BLOCK_SIZE=16
        ),
    },
    "bound": lambda i: {
        "block_mask": create_block_mask(window_of(9 + i, ids_of(i)), BLOCK_SIZE=16).bind(
            batch=B, heads=HQ, q_len=1, kv_len=LENGTHS + i, kv_capacity=LKV
        ),
    },
    "pages": lambda i: {
        "block_mask": create_block_mask(causal & sliding_window(9), BLOCK_SIZE=16),
        "kv_len": LENGTHS + i,
        "page_table": torch.tensor([[0], [1]], dtype=torch.int32),
    },
    "starts": lambda i: {
        "kv_len": LENGTHS,
        "kv_start": torch.tensor([i, 3]),
    },
    "score": lambda i: {
        "score_mod": decayed(1 + i, torch.rand(HQ)),
        "kv_len": LENGTHS,
        "bias": torch.rand(1, HQ, 1, LKV),
        "sinks": torch.rand(HQ),
    },
}


PAIRS = [(name, "eager") for name in CASES]
PAIRS += [(name, "aot_eager") for name in ("fixed", "bound", "score")]


@pytest.mark.parametrize(("name", "backend"), PAIRS)
def test_equals_eager_and_compiles_twice_at_most(name, backend):
    def region(q, k, v, arguments):
        aux = AuxRequest(lse=True, max_scores=True)
        return attention(q * 1.5, k, v, return_aux=aux, scale=0.3, **arguments)

    region = Compiled(region, backend)
    for i in range(4):
        region.check(Q, K, V, CASES[name](i))
    assert region.count <= 2


def test_a_mask_of_torch():
    from torch.nn.attention.flex_attention import create_block_mask as torchs

    mask = torchs(lambda b, h, q, kv: (q >= kv) | (kv < 30), None, None, 1, LKV, device="cpu")
    Compiled(lambda mask: attention(Q, K, V, block_mask=mask)).check(mask)


def test_300_tokens_of_a_bound_mask_compile_once():
    """Lengths move in place; the tables are rewritten within the region."""
    lengths = torch.tensor([1, 20])
    k, v = random_inputs(B, HQ, HKV, 1, 330, D)[1:]
    mask = create_block_mask(causal & sliding_window(50), BLOCK_SIZE=32)
    step = mask.bind(batch=B, heads=HQ, q_len=1, kv_len=lengths, kv_capacity=330)

    def region(q):
        step.update()
        return attention(q, k, v, block_mask=step)

    region = Compiled(region)
    for _ in range(300):
        lengths += 1
        out = region.compiled(Q)
    assert region.count == 1
    wanted = {"mask": causal & sliding_window(50), "kv_len": lengths}
    assert_matches(out, Q, k, v, **wanted)


def test_300_tokens_of_a_growing_cache_compile_twice():
    """Lengths are dynamic integers, and every token makes a new rule."""
    region = Compiled(lambda q, k, v, mask: attention(q, k, v, block_mask=mask))
    k, v = random_inputs(B, HQ, HKV, 1, 310, D)[1:]
    for length in range(10, 310):
        rule = window_of(length - 5, torch.zeros(length, dtype=torch.int64))
        mask = create_block_mask(rule, BLOCK_SIZE=32)
        out = region.compiled(Q, k[:, :, :length], v[:, :, :length], mask)
    assert region.count <= 2
    assert_matches(out, Q, k[:, :, :length], v[:, :, :length], mask=rule)


def test_length_as_dynamic_integer_compiles_twice():
    region = Compiled(lambda q, kv_len: attention(q, K, V, kv_len=kv_len))
    for kv_len in range(2, LKV):
        region.check(Q, kv_len)
    assert region.count <= 2


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_update_within_the_region_reaches_every_buffer(backend, device):
    """Lists by head are united for key heads: what was united before is rewritten too."""
    where = device if backend == "triton" else "cpu"
    q, k, v = (x.to(where) for x in (Q, K, V))
    lengths = torch.tensor([20, 30], device=where)
    mask = create_block_mask(lambda b, h, q, kv: q - kv < 10 + 5 * h, BLOCK_SIZE=16)
    step = mask.bind(batch=B, heads=HQ, q_len=1, kv_len=lengths, kv_capacity=LKV)
    attention(q, k, v, block_mask=step, backend=backend)

    def region(q):
        step.update()
        return attention(q, k, v, block_mask=step, backend=backend)

    region = Compiled(region, "aot_eager")
    for _ in range(2 if backend == "cpu" else 1):  # kernels are interpreted
        lengths += 9
        for table in step.tables.tensors:
            table.zero_()
        out = region.compiled(q)
        wanted = attention(Q, K, V, block_mask=mask, kv_len=lengths.cpu(), backend="cpu")
        torch.testing.assert_close(out.cpu(), wanted, atol=1e-5, rtol=0)
        again = attention(q, k, v, block_mask=step, backend=backend if q.is_cuda else "cpu")
        torch.testing.assert_close(again.cpu(), wanted, atol=1e-5, rtol=0)
    assert region.count == 1


def test_a_step_of_packed_queries_in_one_graph():
    """Append, rewrite the tables and attend, with another share of the rows at every call."""
    k_cache, v_cache = random_inputs(1, HQ, HKV, 1, LKV, D, seed=3)[1:]
    k_cache, v_cache = (x.view(HKV, 4, 16, D).transpose(0, 1).clone() for x in (k_cache, v_cache))
    q, k_new, v_new = random_inputs(1, HQ, HKV, 5, 5, D, seed=4)
    pages = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    starts, seen = torch.tensor([0, 1, 5]), torch.tensor([11, 14])
    lengths = seen + starts.diff()
    step = create_block_mask(causal & sliding_window(12), BLOCK_SIZE=16).bind(
        batch=2,
        heads=HQ,
        q_len=5,
        kv_len=lengths,
        kv_capacity=32,
        page_table=pages,
        cu_seqlens_q=starts,
    )

    def region(q, k_cache, v_cache):
        append_kv(k_cache, v_cache, k_new, v_new, kv_len=seen, page_table=pages, cu_seqlens=starts)
        step.update()
        return attention(q, k_cache, v_cache, block_mask=step)

    compiled_region = Compiled(region, "aot_eager")
    for middle in (1, 3, 4):
        starts[1] = middle
        lengths.copy_(seen + starts.diff())
        plain = k_cache.clone(), v_cache.clone()
        found = compiled_region.compiled(q, k_cache, v_cache)
        torch.testing.assert_close(found, region(q, *plain))
        torch.testing.assert_close((k_cache, v_cache), plain)
    assert compiled_region.count == 1


def test_caches_within_one_allocation_break_a_graph_of_older_torch(monkeypatch):
    """inductor of torch 2.11 was seen to write such a cache elsewhere."""
    monkeypatch.setattr(compiled, "_LOSES_OFFSETS", True)

    def region(q, k, v, kv_len):
        append_kv(k, v, q[:, :HKV] * 3, q[:, HKV:], kv_len=kv_len)
        return attention(q, k, v, kv_len=kv_len + 1)

    kv_len = torch.tensor([10, 30])
    apart = Compiled(region, "aot_eager")
    apart.check(Q, K.clone(), V.clone(), kv_len)
    assert apart.count == 1
    both, again = torch.stack((K, V)), torch.stack((K, V))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="part of a larger allocation"):
        torch.compile(region, backend="eager", fullgraph=True)(Q, *both, kv_len)
    out = torch.compile(region, backend="eager")(Q, *both, kv_len)
    torch.testing.assert_close(out, region(Q, *again, kv_len))
    torch.testing.assert_close(both, again)


@pytest.mark.parametrize(("format", "groups"), [("int4", 2), ("fp8", 1)])
def test_quantised_caches(format, groups):
    region = Compiled(lambda q, k, v, n: attention(q, k, v, kv_len=n), "aot_eager")
    for length in (40, 50, 60):
        k, v = (quantize(x[:, :, :length], format, groups=groups) for x in (K, V))
        region.check(Q.bfloat16(), k, v, LENGTHS + length - 40)
    assert region.count <= 2


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_appending_to_quantised_caches(backend, device):
    where = device if backend == "triton" else "cpu"
    q, lengths = Q.bfloat16().to(where), LENGTHS.to(where)
    k, v = (quantize(x.to(where), "int8") for x in (K, V))
    again = [quantize(x.to(where), "int8") for x in (K, V)]

    def region(q, kv_len, k, v):
        append_kv(k, v, q[:, :HKV] * 3, q[:, HKV:], kv_len=kv_len, backend=backend)
        return attention(q, k, v, kv_len=kv_len + 1)

    region = Compiled(region, "aot_eager")
    for length in (10, 30):
        found = region.compiled(q, lengths + length, k, v)
        torch.testing.assert_close(found, region.function(q, lengths + length, *again))
    assert torch.equal(k.data, again[0].data) and torch.equal(k.scale, again[0].scale)
    assert region.count == 1


def test_code_that_a_rule_calls_is_guarded():
    def under(test):
        return lambda b, h, q_idx, kv_idx: test(kv_idx)

    region = Compiled(lambda mask: attention(Q, K, V, block_mask=mask))
    for test in (lambda kv: kv < 10, lambda kv: kv >= 10, lambda kv: kv % 3 == 0):
        region.check(create_block_mask(under(test)))
    assert region.count == 3


def test_numbers_that_shape_a_rule_are_guarded():
    def repeated(times, kind):
        def rule(score, b, h, q_idx, kv_idx):
            for _ in range(times):
                score = score * 0.5
            return score + 1 if kind == "more" else score

        return rule

    region = Compiled(lambda rule: attention(Q, K, V, score_mod=rule))
    for times, kind in ((1, "less"), (3, "less"), (3, "more"), (2, "more")):
        region.check(repeated(times, kind))


def test_captures_that_coincide_are_guarded():
    def both(first, second):
        return lambda score, b, h, q_idx, kv_idx: score + first[h] - second[h]

    one, other = torch.rand(HQ), torch.rand(HQ)
    region = Compiled(lambda rule: attention(Q, K, V, score_mod=rule))
    for first, second in ((one, one), (one, other), (other, one)):
        region.check(both(first, second))


def test_a_number_that_a_rule_is_given_later_is_seen():
    size = 5

    def rule(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < size

    mask = create_block_mask(rule)
    region = Compiled(lambda: attention(Q, K, V, block_mask=mask))
    for size in (5, 9, 30):  # noqa: B007  # the rule reads it
        assert_matches(region.check(), Q, K, V, mask=rule)


def test_masks_made_in_the_region():
    region = Compiled(lambda q: attention(q, K, V, block_mask=create_block_mask(causal)))
    region.check(Q)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_masks_with_sizes_made_in_the_region(backend):
    """Tables are built once, by an operator; the rule may be a partial of the region's tensors."""

    def region(q, k, v, first, wanted):
        ids = torch.arange(k.shape[2]) % 5
        mask = create_block_mask(
            functools.partial(in_ids, ids, wanted),
            B,
            None,
            q.shape[2],
            k.shape[2],
            "cpu",
            16,
            q_offset=first,
        )
        return attention(q, k, v, block_mask=mask) + attention(q * 2, k, v, block_mask=mask)

    region = Compiled(region, backend)
    for i in range(4):
        region.check(Q, K[:, :, : 40 + i], V[:, :, : 40 + i], torch.tensor([3, i]), 2 + i % 3)
    assert region.count <= 2


def test_sizes_of_a_rule_over_a_list_break_the_graph():
    limit = [30]

    def region(q):
        rule = lambda b, h, q_idx, kv_idx: kv_idx < limit[0]  # noqa: E731
        mask = create_block_mask(rule, None, None, 1, LKV, device="cpu")
        return attention(q * 2, K, V, block_mask=mask) + 1

    torch.testing.assert_close(torch.compile(region, backend="eager")(Q), region(Q))


def test_what_no_graph_holds_breaks_it_and_says_why():
    limit = [30]
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx < limit[0])

    def region(q):
        return attention(q * 2, K, V, block_mask=mask) + 1

    with pytest.raises(torch._dynamo.exc.Unsupported, match="closes over what a graph cannot hold"):
        torch.compile(region, backend="eager", fullgraph=True)(Q)
    torch.testing.assert_close(torch.compile(region, backend="eager")(Q), region(Q))


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 fails to look at such a rule, with an error"
)
def test_rules_over_tensors_of_the_region_break_it():
    def region(q):
        slopes = torch.arange(HQ) * q.sum()
        rule = lambda score, b, h, q_idx, kv_idx: score + slopes[h]  # noqa: E731
        return attention(q, K, V, score_mod=rule) + 1

    with pytest.raises(torch._dynamo.exc.Unsupported, match="tensors of the compiled region"):
        torch.compile(region, backend="eager", fullgraph=True)(Q)
    torch.testing.assert_close(torch.compile(region, backend="eager")(Q), region(Q))


def scaled_by(slopes, power, score, b, h, q_idx, kv_idx):
    return score * slopes[h] ** power


def in_ids(ids, wanted, b, h, q_idx, kv_idx):
    return ids[kv_idx] >= wanted


def test_partials_take_tensors_and_numbers_of_the_region():
    def region(q, power):
        slopes = torch.arange(HQ) + q[0, 0, 0, 0].abs()
        ids = torch.arange(LKV) % 7
        return attention(
            q,
            K,
            V,
            score_mod=functools.partial(scaled_by, slopes, power),
            block_mask=create_block_mask(functools.partial(in_ids, ids, power)),
        )

    region = Compiled(region)
    for power in (2, 3, 4, 5):
        region.check(Q, power)
    assert region.count <= 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # its own
def test_inductor():
    """The compiler's own wrapper around the operator; nothing of it needs a C++ compiler."""
    pytest.importorskip("triton")
    lengths = torch.tensor([20, 30])
    mask = create_block_mask(causal & sliding_window(9), BLOCK_SIZE=16)
    step = mask.bind(batch=B, heads=HQ, q_len=1, kv_len=lengths, kv_capacity=LKV)

    def region(q, k, v):
        step.update()
        out, aux = attention(q, k, v, block_mask=step, return_aux=AuxRequest(lse=True))
        return out, aux.lse

    region = Compiled(region, "inductor")
    for _ in range(2):
        lengths += 7
        region.check(Q, K, V)
    assert region.count == 1


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("slopes", torch.rand(HQ))
        self.rule = decayed(2, self.slopes)
        self.mask = create_block_mask(causal & sliding_window(30), BLOCK_SIZE=16)

    def forward(self, q, k, v, kv_len):
        return attention(q, k, v, block_mask=self.mask, score_mod=self.rule, kv_len=kv_len)


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_shapes_survives_a_file(strict):
    layer = Layer()
    dynamic = torch.export.Dim.DYNAMIC
    shapes = ({0: dynamic}, {0: dynamic, 2: dynamic}, {0: dynamic, 2: dynamic}, {0: dynamic})
    program = torch.export.export(layer, (Q, K, V, LENGTHS), dynamic_shapes=shapes, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    q, k, v = random_inputs(3, HQ, HKV, 1, 90, D, seed=1)
    kv_len = torch.tensor([90, 1, 40])
    torch.testing.assert_close(loaded(q, k, v, kv_len), layer(q, k, v, kv_len))


@pytest.mark.parametrize("name", ["bound", "score", "no mask"])
def test_operators_pass_torchs_own_checks(name):
    arguments = CASES[name](0)
    parts = compiled.Parts()
    call = parts.call({"return_aux": AuxRequest(lse=True), "backend": "auto", **arguments})
    torch.library.opcheck(
        torch.ops.flexdecode.attention.default,
        (Q, K, V, call, parts.tensors, parts.ints, parts.floats),
        test_utils=("test_schema", "test_faketensor"),
    )
    if name == "bound":
        parts = compiled.Parts(writes=True)
        call = parts.call(arguments)
        torch.library.opcheck(
            torch.ops.flexdecode.update.default,
            (parts.tables, call, parts.tensors, parts.ints, parts.floats),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_vmap_is_refused():
    with pytest.raises(NotImplementedError, match="attention: vmap is not supported; q, k and v"):
        torch.func.vmap(lambda q: attention(q, K, V))(torch.stack([Q, Q]))


def test_gradients_are_refused():
    q = Q.clone().requires_grad_()
    with torch.enable_grad():
        with pytest.raises(ValueError, match="q: expected a tensor that does not require grad"):
            torch.compile(lambda q: attention(q, K, V), backend="eager")(q)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="has no backward pass"):
            torch.compile(lambda q: attention(q, K, V), backend="eager", fullgraph=True)(q)
        with pytest.raises(ValueError, match="has no backward pass"):
            torch.func.grad(lambda q: attention(q, K, V).sum())(Q)


def test_captured_parameters_are_detached():
    sinks, slopes = (torch.nn.Parameter(torch.rand(HQ)) for _ in range(2))
    rule = decayed(1, slopes)

    def region(q):
        return attention(q, K, V, sinks=sinks, score_mod=rule)

    with torch.enable_grad():
        out = torch.compile(region, backend="aot_eager", fullgraph=True)(Q)
        assert not out.requires_grad
        torch.testing.assert_close(out, region(Q))


def test_wrong_shapes_keep_their_message():
    with pytest.raises(ValueError, match="k: expected head dim 16 to match q, got 5"):
        torch.compile(lambda q, k: attention(q, k, V), backend="aot_eager")(Q, K[..., :5])


RULES = [(name, rule, "mask") for name, rule in mod_cases.masks().items()]
RULES += [(name, rule, "score") for name, rule in mod_cases.scores().items()]


@pytest.mark.parametrize(("name", "rule", "kind"), RULES, ids=[name for name, *_ in RULES])
def test_a_graph_survives_its_text(name, rule, kind):
    graph = trace(rule, kind).graph
    again = graph_from_text(graph_to_text(graph))
    assert again.key == graph.key
    assert str(again) == str(graph)
    assert (again.name, again.where, again.uses) == (graph.name, graph.where, graph.uses)


class Decoder(torch.nn.Module):
    """One layer with a cache in buffers, which CUDA graphs may write in place."""

    def __init__(self, step, capacity):
        super().__init__()
        self.step = step
        k, v = (torch.randn(B, HKV, capacity, 64, device="cuda").bfloat16() for _ in range(2))
        self.register_buffer("k", k)
        self.register_buffer("v", v)
        self.register_buffer("project", torch.randn(64, 64, device="cuda", dtype=k.dtype) / 8)

    def forward(self, x):
        seen = self.step.kv_len - 1
        new = x[:, :HKV] @ self.project
        append_kv(self.k, self.v, new, new * 2, kv_len=seen)
        self.step.update()
        return attention(x @ self.project, self.k, self.v, block_mask=self.step) + x


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # one that torch opens a pool with
def test_reduce_overhead_replays_one_graph():
    """Appending, tables and attention within CUDA graphs that the compiler makes: 100 tokens."""
    capacity = 400
    lengths = torch.tensor([30, 200], device="cuda")
    mask = create_block_mask(causal & sliding_window(100))
    step = mask.bind(batch=B, heads=HQ, q_len=1, kv_len=lengths, kv_capacity=capacity)
    for table in (*step.tables.tensors, step.tables.states, lengths):
        torch._dynamo.mark_static_address(table)  # written, or read, where they are
    layer = Decoder(step, capacity)
    start = layer.k.clone(), layer.v.clone(), lengths.clone()
    xs = torch.randn(100, B, HQ, 1, 64, device="cuda", dtype=torch.bfloat16)

    def run(forward):
        for buffer, value in zip((layer.k, layer.v, lengths), start, strict=True):
            buffer.copy_(value)
        outs = []
        for x in xs:
            lengths.add_(1)
            outs.append(forward(x).clone())
        return torch.stack(outs)

    wanted = run(layer)
    counters = torch._dynamo.utils.counters
    counters.clear()
    before = compile_count()
    compiled_layer = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    # The projection may be rounded otherwise by the compiler's own matrix product.
    torch.testing.assert_close(run(compiled_layer), wanted, atol=3e-2, rtol=3e-2)
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert compile_count() - before <= 2
    assert not torch.equal(wanted[0], wanted[1])


@pytest.mark.gpu
def test_300_tokens_compile_few_kernels():
    """A growing cache of transformers' kind, new rules at every token, through inductor."""
    k, v = torch.randn(2, B, HKV, 310, 64, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(B, HQ, 1, 64, device="cuda", dtype=torch.bfloat16)
    region = Compiled(lambda q, k, v, m: attention(q, k, v, block_mask=m) * 2, "inductor")
    counts = []
    for length in range(10, 310):
        ids = torch.zeros(length, dtype=torch.int64, device="cuda")
        mask = create_block_mask(window_of(length - 5, ids))
        out = region.compiled(q, k[:, :, :length], v[:, :, :length], mask)
        counts.append(compile_count())
    assert region.count <= 2
    assert counts[-1] - counts[1] == 0, counts
    torch.testing.assert_close(
        out, 2 * attention(q, k[:, :, :length], v[:, :, :length], block_mask=mask)
    )
