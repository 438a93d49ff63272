"""Tracing: one graph for mods that are alike, live values, guards, errors with the user's line."""

import enum
import functools
import gc
import math
import statistics
import sys
import time
import types
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flexdecode.evaluate import evaluate
from flexdecode.mods import and_masks, mask_mod
from flexdecode.trace import trace

sys.path.insert(0, str(Path(__file__).parent))
import mod_cases

module_window = 5
module_table = torch.arange(10)
NEST = {"window": 3}
SPARSE = torch.eye(12).to_sparse()


def _is_tensor(x):
    return isinstance(x, torch.Tensor)


def window(size):
    return lambda b, h, q_idx, kv_idx: q_idx - kv_idx < size


def dense(mod, kind="mask", q_len=12, kv_len=12, **kwargs):
    """Values of `mod` at b = 0, h = 0."""
    q_idx, kv_idx = torch.arange(q_len)[:, None], torch.arange(kv_len)[None, :]
    result = evaluate(trace(mod, kind), 0, 0, q_idx, kv_idx, **kwargs)
    return result.expand(q_len, kv_len)


# -- meaning -----------------------------------------------------------------------------------


def eager(mod, *inputs):
    """`mod` called on plain tensors with clamped positions, as a check of tracing itself."""
    return torch.as_tensor(mod(*inputs))


SAFE_EAGERLY = [
    name
    for name in mod_cases.masks()
    if name
    not in {"out_of_range_reads_zero", "logic", "cast_wraps", "length_one", "int_power", "strided"}
]


@pytest.mark.parametrize("name", SAFE_EAGERLY)
def test_traced_masks_mean_what_torch_means(name):
    mod = mod_cases.masks()[name]
    q_idx, kv_idx = torch.arange(40)[:, None], torch.arange(40)[None, :]
    for b in (0, 1):
        for h in range(3):
            got = evaluate(trace(mod, "mask"), b, h, q_idx, kv_idx).expand(40, 40)
            want = eager(mod, torch.tensor(b), torch.tensor(h), q_idx, kv_idx).expand(40, 40)
            assert got.dtype == torch.bool
            assert torch.equal(got, want)


@pytest.mark.parametrize("name", mod_cases.scores())
def test_traced_scores_mean_what_torch_means(name):
    mod = mod_cases.scores()[name]
    score = torch.randn(40, 40)
    q_idx, kv_idx = torch.arange(40)[:, None], torch.arange(40)[None, :]
    got = evaluate(trace(mod, "score"), 1, 2, q_idx, kv_idx, score).expand(40, 40)
    want = eager(mod, score, torch.tensor(1), torch.tensor(2), q_idx, kv_idx).expand(40, 40)
    # bfloat16 captures are widened before they meet an integer, where torch rounds the product.
    tolerance = 3e-2 if name == "alibi_table" else 2e-6
    torch.testing.assert_close(got, want.float(), rtol=tolerance, atol=tolerance)


def test_out_of_range_reads_are_zero_and_negative_ones_wrap():
    table = torch.tensor([5, 6, 7])
    got = dense(lambda s, b, h, q, k: table[k - 3] * 1.0, "score", 1, 8)
    assert got.tolist() == [[5, 6, 7, 5, 6, 7, 0, 0]]


def test_empty_table_reads_zero():
    table = torch.zeros(0)
    assert dense(lambda s, b, h, q, k: table[k] + 1, "score", 1, 3).tolist() == [[1, 1, 1]]


def test_float64_is_used_throughout_on_request():
    third = 1 / 3
    got = dense(
        lambda s, b, h, q, k: s * third,
        "score",
        1,
        1,
        score=torch.ones(1, 1, dtype=torch.float64),
        float_dtype=torch.float64,
    )
    assert got.item() == 1 / 3


# -- one graph for many mods -------------------------------------------------------------------


def test_fresh_closures_share_a_graph_and_keep_their_numbers():
    first, second = trace(window(3), "mask"), trace(window(7), "mask")
    assert first.graph is second.graph
    assert (first.params, second.params) == ((3,), (7,))


def test_equal_structure_from_different_code_has_equal_keys():
    def one(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    def other(batch, head, row, column):
        return row >= column

    assert trace(one, "mask").graph.key == trace(other, "mask").graph.key


def test_int_and_float_numbers_are_told_apart():
    scaled = lambda factor: lambda s, b, h, q, k: s * factor  # noqa: E731
    assert trace(scaled(2), "score").graph.params == ("int",)
    assert trace(scaled(2.0), "score").graph.params == ("float",)


def test_captures_are_live_and_rebound():
    def documents(ids):
        return lambda b, h, q, k: ids[q] == ids[k]

    ids = torch.tensor([0, 0, 1])
    mod = documents(ids)
    before = dense(mod, q_len=3, kv_len=3)
    ids[2] = 0
    assert not before.all() and dense(mod, q_len=3, kv_len=3).all()
    longer = trace(documents(torch.arange(50)), "mask")
    assert longer.graph is trace(mod, "mask").graph
    assert longer.captures[0].shape == (50,)


def test_globals_are_seen_and_live(monkeypatch):
    mod = lambda b, h, q, k: (q - k < module_window) & (module_table[k] < 9)  # noqa: E731
    assert trace(mod, "mask").params == (5,)
    monkeypatch.setattr(sys.modules[__name__], "module_window", 2)
    assert trace(mod, "mask").params == (2,)


def test_defaults_partials_and_numpy_numbers():
    def rule(b, h, q, k, size=4, *, shift=1):
        return q - k < size + shift

    assert trace(rule, "mask").params == (4, 1)
    assert dense(functools.partial(rule, shift=0)).sum() < dense(rule).sum()
    assert trace(window(np.int64(6)), "mask").params == (6,)


def test_objects_and_containers_are_retraced_without_new_structure():
    class Rule:
        def __init__(self, size, ids):
            self.size, self.ids = size, ids

        def __call__(self, b, h, q, k):
            return (q - k < self.size) & (self.ids[q] == self.ids[k])

    first, second = (trace(Rule(n, torch.arange(n)), "mask") for n in (5, 9))
    assert first.graph.key == second.graph.key
    assert (first.params, second.params) == ((5,), (9,))
    held = lambda b, h, q, k: q - k < NEST["window"]  # noqa: E731
    assert dense(held)[5].sum() == 12 - 3
    NEST["window"] = 4
    assert dense(held)[5].sum() == 12 - 2
    NEST["window"] = 3


def test_recursive_and_nested_functions():
    def power(x, n):
        return x if n == 1 else x * power(x, n - 1)

    got = dense(lambda s, b, h, q, k: power(s, 3), "score", 1, 1, score=torch.full((1, 1), 2.0))
    assert got.item() == 8


# -- numbers in control flow -------------------------------------------------------------------


def test_numbers_in_control_flow_are_guarded():
    def ladder(steps):
        def mod(b, h, q, k):
            result = q < 0
            for step in range(steps):
                result = result | (k == q - step)
            return result if steps > 1 else k == q

        return mod

    for steps in (1, 2, 5, 2):
        expected = sum(12 - step for step in range(steps))
        assert dense(ladder(steps)).sum() == expected


def test_math_min_and_isinstance_on_numbers():
    def mod(size, cap):
        def rule(s, b, h, q, k):
            assert isinstance(size, int) and isinstance(cap, float)
            return s * math.sqrt(cap) + min(size, 4) + (q // size)

        return rule

    one = torch.ones(1, 1)
    assert dense(mod(3, 4.0), "score", 1, 1, score=one).item() == 5
    assert dense(mod(8, 9.0), "score", 1, 1, score=one).item() == 7


def test_isinstance_tells_tensors_from_numbers():
    def mod(size, table):
        def rule(s, b, h, q, k):
            for each in (s, q, q - k, table, table[k]):
                assert isinstance(each, torch.Tensor) and isinstance(each, (int, Tensor))
            assert not isinstance(size, torch.Tensor) and issubclass(torch.nn.Parameter, Tensor)
            assert isinstance(torch.Tensor([1.0]), torch.Tensor)
            return Tensor.abs(s) + size

        return rule

    one = torch.ones(1, 1)
    assert dense(mod(3, torch.arange(9)), "score", 1, 1, score=-one).item() == 4


def test_stand_ins_are_no_tensors_to_torch_itself():
    """C++ reads the memory of what isinstance calls a tensor, where it looks for a number too."""
    seen = []

    class Rule:
        """Its parts cannot be walked, so that the functions which it calls are torch's own."""

        table = torch.arange(12)

        def __call__(self, s, b, h, q, k):
            seen.extend(map(_is_tensor, (s, q, self.table[k], self.table[:3])))
            seen.append(_is_tensor(self.table))
            s = torch.where(q >= k, s, 0.5)
            s = torch.where(q - k < 9, 0.25, s)
            late = torch.add(k, 1, alpha=2) > torch.add(0, 7, alpha=k // k.clamp(min=1))
            return torch.where(late, torch.clamp(s, 0.1, 9), self.table[k])

    got = dense(Rule(), "score", score=torch.full((12, 12), 3.0))
    assert seen == [False] * 3 + [True] * 2
    q, k = torch.arange(12)[:, None], torch.arange(12)[None, :]
    wanted = torch.where(q - k < 9, 0.25, torch.where(q >= k, 3.0, 0.5))
    torch.testing.assert_close(got, torch.where(k + 2 > 7 * (k > 0), wanted, k.float()))


def test_shapes_of_captures_are_run_time_numbers():
    def within(table):
        return lambda b, h, q, k: k < table.shape[0]

    assert (
        trace(within(torch.zeros(3)), "mask").graph is trace(within(torch.zeros(7)), "mask").graph
    )
    assert dense(within(torch.zeros(7)), q_len=1).sum() == 7


# -- forms that models use ---------------------------------------------------------------------


@pytest.mark.parametrize("length", [9, torch.tensor(9), torch.tensor([9]), torch.tensor([[9]])])
def test_fc02_lengths_of_any_form(length):
    mod = lambda b, h, q, k: k < length  # noqa: E731
    assert dense(mod, q_len=1).sum() == 9


def test_methods_that_transformers_masks_use():
    padding = torch.tensor([[False, True, True], [True, True, True]])

    def composed(b, h, q, k):
        result = q.new_ones((), dtype=torch.bool)
        result = result & (q >= k).to(result.device)
        return result & padding[b, k].to(torch.bool) & ((q - k).abs() < 5)

    assert dense(composed, q_len=3, kv_len=3).tolist() == [
        [False, False, False],
        [False, True, False],
        [False, True, True],
    ]


def test_functional_and_imported_functions():
    from torch import where

    mod = lambda s, b, h, q, k: where(q > k, F.silu(s), torch.special.expit(s))  # noqa: E731
    with pytest.raises(TypeError, match="expit"):
        trace(mod, "score")
    mod = lambda s, b, h, q, k: where(q > k, F.silu(s), torch.sigmoid(s))  # noqa: E731
    assert dense(mod, "score", 2, 2, score=torch.zeros(2, 2)).tolist() == [[0.5, 0.5], [0, 0.5]]


def test_fc55_captures_that_require_grad():
    slope = torch.nn.Parameter(torch.tensor(0.5))
    unused = torch.nn.Parameter(torch.tensor(0.5))
    mod = lambda s, b, h, q, k: s * slope if unused is not None else s  # noqa: E731
    assert not dense(mod, "score", 1, 1, score=torch.ones(1, 1)).requires_grad


# -- errors ------------------------------------------------------------------------------------


def branches(b, h, q_idx, kv_idx):
    if q_idx >= kv_idx:
        return True
    return False


BAD_MASKS = {
    "returned int64": lambda b, h, q, k: q - k,
    "returned NoneType": lambda b, h, q, k: None,
    r"tensor of shape \[10\]": lambda b, h, q, k: module_table,
    "use torch.where": branches,
    "torch.cumsum is not supported": lambda b, h, q, k: torch.cumsum(q, 0) > k,
    "Tensor.sum is not supported": lambda b, h, q, k: module_table.sum() > k,
    "item": lambda b, h, q, k: module_table[q].item() > 3,
    "Python number": lambda b, h, q, k: int(q) > 3,
    "score_mod": lambda s, b, h, q, k: s,
    r"expected mask_mod\(b, h, q_idx, kv_idx\)": lambda q, k: q >= k,
    "integer a dimension": lambda b, h, q, k: module_table[q > k] > 0,
    "Python number ": lambda b, h, q, k: k in range(q),
    "boolean condition": lambda b, h, q, k: torch.where(q, k, 3) > 0,
    "cannot iterate": lambda b, h, q, k: sum(module_table) > k,
}


@pytest.mark.parametrize("message", BAD_MASKS)
def test_fc56_bad_masks_are_explained(message):
    with pytest.raises(TypeError, match=message):
        trace(BAD_MASKS[message], "mask")


def test_errors_show_the_users_line():
    with pytest.raises(TypeError, match=r"test_trace.py:\d+: if q_idx >= kv_idx:"):
        trace(branches, "mask")


def test_fc56_score_mods_and_masks_are_not_mixed_up():
    with pytest.raises(TypeError, match="is a mask_mod"):
        trace(lambda b, h, q, k: q >= k, "score")
    with pytest.raises(TypeError, match="returned bool"):
        trace(lambda s, b, h, q, k: s > 0, "score")
    with pytest.raises(TypeError, match="expected a function"):
        trace(torch.ones(3), "mask")


def test_masks_have_no_truth_value():
    with pytest.raises(TypeError, match="&"):
        bool(mask_mod(lambda b, h, q, k: q >= k))
    with pytest.raises(IndexError, match="too many indices"):
        trace(lambda b, h, q, k: module_table[q, k] > 0, "mask")


# -- cost --------------------------------------------------------------------------------------


def test_tracing_is_cheap():
    """Reported, not asserted tightly: this machine is shared. Typically 0.3 ms and 6 µs."""
    mods = [eval(f"lambda b, h, q, k: (q >= k) & (q - k < {n}) | (k < 4)") for n in range(40)]
    times = []
    for mod in mods:
        start = time.perf_counter()
        trace(and_masks(mod, window(3)), "mask")
        times.append(time.perf_counter() - start)
    assert statistics.median(times) < 2e-3 * 10


def test_graphs_print_readably():
    text = str(trace(mod_cases.masks()["documents"], "mask"))
    assert "doc#0: int64, rank 1" in text
    assert "%" in text and "==" in text


def test_replaced_cells_and_tensors_are_seen_at_once():
    size, table = 3, torch.arange(12)

    def mod(b, h, q, k):
        return (q - k < size) & (table[k] < 5)

    assert trace(mod, "mask") is trace(mod, "mask")
    before = dense(mod)
    size = 2
    assert trace(mod, "mask").params == (2,)
    table = torch.zeros(12, dtype=torch.int64)
    assert dense(mod).sum() > before.sum()


def test_traces_do_not_keep_mods_alive():
    def make():
        table = torch.arange(12)
        return (lambda b, h, q, k: table[k] > q), weakref.ref(table)

    mod, table = make()
    trace(mod, "mask")
    del mod
    gc.collect()
    assert table() is None


# -- what a cached trace may take for granted ------------------------------------------------------


def test_two_tensors_after_one_in_both_places():
    def both(first, second):
        return lambda b, h, q_idx, kv_idx: first[q_idx] + second[kv_idx] > 0

    one, other = torch.randn(12), torch.randn(12)
    for first, second in ((one, one), (one, other), (other, one)):
        expected = first[:, None] + second > 0
        assert torch.equal(dense(both(first, second)), expected)


def test_attributes_of_classes_and_functions_are_live():
    class Config:
        window = 3

    def by_class(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < Config.window

    def by_function(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < by_function.window

    for size in (3, 7):
        Config.window = by_function.window = size
        expected = dense(window(size))
        assert torch.equal(dense(by_class), expected)
        assert torch.equal(dense(by_function), expected)


def test_numbers_imported_inside_a_mod_are_live(monkeypatch):
    settings = types.ModuleType("flexdecode_test_settings")
    monkeypatch.setitem(sys.modules, settings.__name__, settings)

    def mod(b, h, q_idx, kv_idx):
        from flexdecode_test_settings import size

        return q_idx - kv_idx < size

    for settings.size in (3, 7):
        assert torch.equal(dense(mod), dense(window(settings.size)))


def test_defaults_of_inner_functions_are_live():
    size = 3

    def near(distance):
        return distance < size

    def through_default(distance, rule=near):
        return rule(distance)

    def through_keyword(distance, *, size=3):
        return distance < size

    def first(b, h, q_idx, kv_idx):
        return through_default(q_idx - kv_idx)

    def second(b, h, q_idx, kv_idx):
        return through_keyword(q_idx - kv_idx)

    for size in (3, 7):
        through_keyword.__kwdefaults__["size"] = size
        assert torch.equal(dense(first), dense(window(size)))
        assert torch.equal(dense(second), dense(window(size)))


def test_replaced_code_is_seen():
    def mod(b, h, q_idx, kv_idx):
        return kv_idx < 3

    dense(mod)
    mod.__code__ = (lambda b, h, q_idx, kv_idx: kv_idx < 7).__code__
    assert dense(mod).sum() == 12 * 7


def test_data_of_another_dtype_put_into_a_parameter():
    weight = torch.nn.Parameter(torch.zeros(12))

    def mod(b, h, q_idx, kv_idx):
        return weight[kv_idx] > 0

    assert trace(mod, "mask").graph.captures[0].dtype == "float32"
    weight.data = torch.ones(12, dtype=torch.float16)
    assert trace(mod, "mask").graph.captures[0].dtype == "float16"


def test_tensors_of_length_one_broadcast_or_not_as_they_are_now():
    def mod(first, second):
        return lambda b, h, q_idx, kv_idx: (first + second)[kv_idx] > 0

    many, one = torch.randn(12), torch.randn(1)
    for first, second in ((many, many), (one, many), (many, one)):
        assert torch.equal(dense(mod(first, second)), (first + second > 0).expand(12, 12))
    # Rank 1 stays rank 1, whatever the batch.
    for lengths in (torch.tensor([5]), torch.tensor([5, 9])):
        mask = dense(lambda b, h, q_idx, kv_idx, lengths=lengths: kv_idx < (lengths - 1)[b])
        assert mask.sum() == 12 * 4


def test_signs_of_exponents_are_guarded():
    def mod(n):
        return lambda b, h, q_idx, kv_idx: 2**n * kv_idx < 4

    assert [int(dense(mod(n))[0].sum()) for n in (1, -1, 0)] == [2, 8, 4]


def test_members_of_number_enums_are_numbers():
    class Size(int, enum.Enum):
        SMALL = 4

    mask = trace(window(Size.SMALL), "mask")
    assert "Size" not in str(mask)
    assert torch.equal(dense(window(Size.SMALL)), dense(window(4)))


@pytest.mark.parametrize(
    ("mod", "message"),
    [
        (lambda b, h, q_idx, kv_idx: kv_idx < module_table.max(), "Tensor.max with 1 argument is"),
        (lambda b, h, q_idx, kv_idx: torch.where(kv_idx < q_idx), "torch.where with 1 argument is"),
        (lambda b, h, q_idx, kv_idx: kv_idx.type("torch.IntTensor") < 3, "takes a torch.dtype"),
        (lambda b, h, q_idx, kv_idx: kv_idx[0] < 3, "too many indices"),
        (lambda b, h, q_idx, kv_idx: SPARSE[q_idx, kv_idx] > 0, "torch.sparse_coo cannot be read"),
    ],
)
def test_arguments_that_are_not_taken_are_explained(mod, message):
    with pytest.raises((TypeError, IndexError), match=message):
        trace(mod, "mask")


def test_slices_fit_tensors_of_any_length_in_one_graph():
    def mod(table, size):
        return lambda b, h, q_idx, kv_idx: (
            (table[2:][kv_idx] > 0) ^ (table[:-2][kv_idx] > 0) ^ (table[-size:][-kv_idx] > 0)
        )

    keys = set()
    for length, size in ((5, 2), (9, 4), (3, 8)):
        table = torch.randn(length)
        last = table[-size:]
        at = torch.arange(min(length - 2, len(last)))
        expected = (table[2:][at] > 0) ^ (table[:-2][at] > 0) ^ (last[-at] > 0)
        traced = trace(mod(table, size), "mask")
        keys.add(traced.graph.key)
        assert torch.equal(evaluate(traced, 0, 0, 0, at), expected)
    assert len(keys) == 1


def test_functions_of_namespaces_that_are_dropped_are_freed():
    names = {"table": torch.arange(12), "offset": 1}
    exec("def mod(b, h, q_idx, kv_idx): return table[kv_idx] > offset", names)
    trace(names["mod"], "mask")
    alive = weakref.ref(names["mod"])
    del names
    gc.collect()
    assert alive() is None


def test_evaluation_under_another_default_device():
    table = torch.arange(12)

    def mod(b, h, q_idx, kv_idx):
        return kv_idx // 3 < table[kv_idx] % q_idx

    expected = dense(mod)
    q_idx, kv_idx = torch.arange(12)[:, None], torch.arange(12)[None, :]
    with torch.device("meta"):
        got = evaluate(trace(mod, "mask"), 0, 0, q_idx, kv_idx)
    assert torch.equal(got, expected)


def test_numbers_are_told_from_tensors_and_found_in_sets():
    def mod(n):
        def rule(b, h, q_idx, kv_idx):
            size = {2: 3}.get(n, 5)
            if hasattr(n, "shape") or hasattr(n, "item") or n in {4}:
                size = 7
            if type(n) is not int:
                size = 9
            return kv_idx < size

        return rule

    def sets_alone(n):
        return lambda b, h, q_idx, kv_idx: kv_idx < (7 if n in {4} else {2: 3}.get(n, 5))

    for n, expected in ((2, 3), (3, 5), (4, 7)):
        assert int(dense(mod(n))[0].sum()) == int(dense(sets_alone(n))[0].sum()) == expected
