"""Models of transformers give the same through flexdecode as through their own eager attention."""

import copy
from dataclasses import dataclass

import pytest
import torch

from flexdecode import compile_count
from flexdecode.integrations.transformers import (
    attention_forward,
    create_mask,
    forward,
    mask_creation,
    register,
    restrict,
)

transformers = pytest.importorskip("transformers", minversion="5")

PROMPT = 13  # tokens of the longest prompt; every window below is shorter
NEW = 8
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
GEMMA = {"sliding_window": 8, "head_dim": 8, "query_pre_attn_scalar": 3}  # an odd scale
BOTH_KINDS = ["sliding_attention", "full_attention"]
CONFIGS = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "mistral_full": ("MistralConfig", {"sliding_window": None, "num_key_value_heads": 1}),
    "phi3": ("Phi3Config", {"sliding_window": 8, "num_key_value_heads": 3}),
    "qwen2": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 8, "num_key_value_heads": 6}),
    "gemma2": (
        "Gemma2Config",
        {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": None},
    ),
    "gemma3": ("Gemma3TextConfig", {**GEMMA, "layer_types": BOTH_KINDS}),
    "gpt_oss": (
        "GptOssConfig",
        {"sliding_window": 8, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "cohere2": ("Cohere2Config", {"sliding_window": 8, "layer_types": BOTH_KINDS}),
    "deepseek_v3": (  # keys of 16, values of 12
        "DeepseekV3Config",
        {
            "num_key_value_heads": 6,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
    "gemma4": (  # the last two layers compute the last token of a prompt alone
        "Gemma4TextConfig",
        {
            "sliding_window": 8,
            "head_dim": 8,
            "global_head_dim": 8,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": 2 * BOTH_KINDS,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 97,
        },
    ),
}


@pytest.fixture(autouse=True)
def registered():
    register(block_size=4)


@pytest.fixture(scope="module")
def build():
    """Build tiny models by name, with weights large enough that attention matters."""
    models = {}

    def build(name, implementation="eager"):
        if name not in models:
            kind, options = CONFIGS[name]
            if not hasattr(transformers, kind):
                pytest.skip(f"no {kind} in transformers {transformers.__version__}")
            config = getattr(transformers, kind)(**{**SIZES, **options})
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config).eval()
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
                parameter.requires_grad_(False)
            for module in model.modules():
                if hasattr(module, "sinks"):
                    torch.nn.init.normal_(module.sinks)
            models[name] = model
        models[name].set_attn_implementation(implementation)
        return models[name]

    return build


@dataclass
class Batch:
    input_ids: torch.Tensor
    attention_mask: torch.Tensor


@pytest.fixture
def batch():
    """Three prompts of different length, padded on the left."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(2, SIZES["vocab_size"], (3, PROMPT), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    for row, padding in enumerate((0, 5, 2)):
        input_ids[row, :padding] = 0
        attention_mask[row, :padding] = 0
    return Batch(input_ids, attention_mask)


def generate(model, batch, **options):
    with torch.no_grad():
        result = model.generate(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **{"max_new_tokens": NEW, "min_new_tokens": NEW, **options},
        )
    return result.sequences, torch.stack(result.logits)


def assert_same(got, wanted):
    assert torch.equal(got[0], wanted[0])
    torch.testing.assert_close(got[1], wanted[1], atol=2e-5, rtol=0)


STATIC = {"cache_implementation": "static", "disable_compile": True}
RUNS = {  # whether the prompts are padded on the left, how eager runs, and how we do
    "padded": (True, {}, {}),
    "dynamic": (False, {}, {}),
    "static": (False, {}, STATIC),
    "no cache": (False, {}, {"use_cache": False}),
    "beams": (True, {"num_beams": 2}, {"num_beams": 2}),
    "padded static": (True, {}, STATIC),
}


@pytest.fixture(scope="module")
def eager(build):
    """What a model generates through its own attention."""
    found = {}

    def run(name, batch, padded, options):
        key = (name, padded, *options.items())
        if key not in found:
            found[key] = generate(build(name), batch, **options)
        return found[key]

    return run


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", CONFIGS)
def test_generate_equals_eager(build, eager, batch, name, run):
    padded, options, ours = RUNS[run]
    if not padded:
        batch = Batch(batch.input_ids[:1], batch.attention_mask[:1])
    wanted = eager(name, batch, padded, options)
    assert_same(generate(build(name, "flexdecode"), batch, **ours), wanted)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_triton_backend_equals_eager(build, batch, name, device):
    """Interpreted where there is no GPU; one prompt and two steps."""
    pytest.importorskip("triton")

    def logits(model):
        model = model.to(device)
        ids, mask = batch.input_ids.to(device), batch.attention_mask.to(device)
        with torch.no_grad():
            result = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=3,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        model.to("cpu")
        return torch.stack(result.logits)

    wanted = logits(build(name))
    register(backend="triton", block_size=16)
    torch.testing.assert_close(logits(build(name, "flexdecode")), wanted, atol=2e-5, rtol=0)


def test_assisted_generation_equals_eager(build, batch, monkeypatch):
    """Several draft tokens are verified at once, and wrong ones are cut off the cache."""
    alone = Batch(batch.input_ids[:1], batch.attention_mask[:1])
    wanted = generate(build("qwen2"), alone)
    rows = []
    original = forward.attention
    monkeypatch.setattr(
        forward, "attention", lambda q, *a, **k: rows.append(q.shape[2]) or original(q, *a, **k)
    )
    assistant = build("llama", "flexdecode")
    got = generate(build("qwen2", "flexdecode"), alone, assistant_model=assistant)
    assert_same(got, wanted)
    assert {1, PROMPT} < set(rows)


def test_chunked_attention_equals_eager(batch):
    config = transformers.Llama4TextConfig(
        **SIZES,
        head_dim=8,
        attention_chunk_size=8,
        no_rope_layers=[1, 0],
        num_local_experts=2,
        intermediate_size_mlp=64,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    wanted = generate(model, batch)
    model.set_attn_implementation("flexdecode")
    assert_same(generate(model, batch), wanted)


def test_padding_rows_are_finite(build, batch):
    """Rows of padding may attend to nothing at all: zeros, never NaN."""
    with torch.no_grad():
        logits = build("gpt_oss", "flexdecode")(
            batch.input_ids, attention_mask=batch.attention_mask
        ).logits
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_bfloat16_is_as_exact_as_eager(build, batch, name):
    """Teacher-forced errors against float32: what rounds in between is kept in float32."""

    def logits(model):
        with torch.no_grad():
            out = model(batch.input_ids, attention_mask=batch.attention_mask).logits.float()
        return out[batch.attention_mask.bool()]

    exact = logits(build(name))
    rounded = copy.deepcopy(build(name)).to(torch.bfloat16)
    eager_error = (logits(rounded) - exact).square().mean().sqrt()
    rounded.set_attn_implementation("flexdecode")
    assert (logits(rounded) - exact).square().mean().sqrt() <= 1.2 * eager_error


# The name until transformers 5.40; its successor is unknown to the first releases of 5.
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_chunks_on_a_static_cache_equal_eager(build, batch, name, padded):
    """Several tokens at once on a part-filled cache, whose counter moves within the forward."""

    def run(model, cache):
        logits, seen = [], 0
        for chunk in (6, 4, 3):
            mask = batch.attention_mask[:, : seen + chunk] if padded else None
            ids = batch.input_ids[:, seen : seen + chunk]
            with torch.no_grad():
                logits.append(model(ids, attention_mask=mask, past_key_values=cache).logits)
            seen += chunk
        logits = torch.cat(logits, 1)
        return logits[batch.attention_mask.bool()] if padded else logits

    model = build(name)
    wanted = run(model, transformers.DynamicCache(config=model.config))
    model = build(name, "flexdecode")
    got = run(model, transformers.StaticCache(config=model.config, max_cache_len=20))
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=0)


@pytest.fixture
def graphs():
    """Count what torch.compile does."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


def generate_compiled(model, batch, **options):
    compile_config = transformers.CompileConfig(backend="eager", mode=None, fullgraph=True)
    compile_config._compile_all_devices = True  # generate() compiles on a GPU only
    return generate(
        model, batch, cache_implementation="static", compile_config=compile_config, **options
    )


def test_compiled_generate_equals_eager(build, eager, batch, graphs):
    """No graph breaks; a second graph for caches that slide, whose counters are numbers."""
    got = generate_compiled(build("gemma2", "flexdecode"), batch)
    assert_same(got, eager("gemma2", batch, True, {}))
    assert graphs["stats"]["unique_graphs"] <= 2
    assert not graphs["graph_break"]


def test_300_tokens_of_generate_compile_once(build, batch, graphs):
    length = {"max_new_tokens": 300, "min_new_tokens": 300}
    sequences, logits = generate_compiled(build("llama", "flexdecode"), batch, **length)
    assert graphs["stats"]["unique_graphs"] == 1
    mask = torch.nn.functional.pad(batch.attention_mask, (0, 300), value=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():  # all tokens at once, which gives the same
        wanted = build("llama")(sequences, attention_mask=mask, position_ids=positions).logits
    wanted = wanted[:, PROMPT - 1 : -1].transpose(0, 1)
    torch.testing.assert_close(logits, wanted, atol=2e-5, rtol=0)
    assert torch.equal(sequences[:, PROMPT:], wanted.argmax(-1).t())


# The name until transformers 5.40; its successor is unknown to the first releases of 5.
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_a_compiled_model_makes_its_masks_in_the_graph(build, batch, graphs):
    """A prompt in chunks, then single tokens: no graph breaks, two graphs of each."""
    model = build("llama", "flexdecode")
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
    caches = [transformers.StaticCache(config=model.config, max_cache_len=40) for _ in range(2)]
    ids = torch.cat([batch.input_ids, torch.randint(2, SIZES["vocab_size"], (3, 20))], 1)
    mask = torch.nn.functional.pad(batch.attention_mask, (0, 20), value=1)
    counts, seen = [], 0
    with torch.no_grad():
        for chunk in [4] * 3 + [1] * 8:
            rows = slice(seen, seen + chunk)
            seen += chunk
            inputs = {"input_ids": ids[:, rows], "attention_mask": mask[:, :seen]}
            got = compiled(**inputs, past_key_values=caches[0]).logits
            counts.append(graphs["stats"]["unique_graphs"])
            wanted = model(**inputs, past_key_values=caches[1]).logits
            torch.testing.assert_close(got, wanted, atol=2e-5, rtol=0)
    assert not graphs["graph_break"]
    assert counts[1] == counts[2] == 2
    assert counts[-1] == counts[4] <= 4


def test_a_compiled_model_under_restrict(build, batch, graphs):
    """The rule is out of the graph's reach: the mask is made outside, and only that."""
    model = build("llama", "flexdecode")
    compiled = torch.compile(model.forward, backend="eager")
    with torch.no_grad(), restrict(lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 4):
        got = compiled(batch.input_ids, use_cache=False).logits
        wanted = model(batch.input_ids, use_cache=False).logits
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=0)
    assert all("is made outside of the graph" in reason for reason in graphs["graph_break"])
    assert graphs["graph_break"]


@pytest.mark.parametrize(("name", "kinds"), [("llama", 1), ("mistral", 1), ("qwen2", 2)])
def test_tables_are_built_once_per_kind_and_forward(build, batch, name, kinds, monkeypatch):
    calls = []
    create = mask_creation.create_block_mask
    monkeypatch.setattr(
        mask_creation, "create_block_mask", lambda *a, **k: calls.append(a) or create(*a, **k)
    )
    generate(build(name, "flexdecode"), batch)
    assert len(calls) == kinds * NEW


def test_every_token_has_the_same_trace(build, batch, monkeypatch):
    """What would be compiled depends on neither the token nor the padding's length."""
    from flexdecode.trace import trace

    keys = []
    create = mask_creation.create_block_mask

    def record(rule, *args, **kwargs):
        keys.append(trace(rule, "mask").graph.key)
        return create(rule, *args, **kwargs)

    monkeypatch.setattr(mask_creation, "create_block_mask", record)
    generate(build("mistral", "flexdecode"), batch)
    # A sliding cache starts to shift its keys at most once.
    assert len(set(keys)) <= 2


def check_own_matrix(build, batch, mask, bias):
    """A user's matrix gives the logits that eager attention gives with the same as a bias."""
    with torch.no_grad():
        wanted = build("llama")(batch.input_ids, attention_mask=bias).logits
        got = build("llama", "flexdecode")(batch.input_ids, attention_mask=mask).logits
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("heads", [1, 6])
@pytest.mark.parametrize("rows", [1, 3])
def test_own_matrix_equals_eager(build, batch, kind, heads, rows):
    generator = torch.Generator().manual_seed(2)
    allowed = torch.rand(rows, heads, PROMPT, PROMPT, generator=generator) < 0.6
    allowed |= torch.eye(PROMPT, dtype=torch.bool)
    bias = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    bias = bias + torch.where(allowed, torch.randn(allowed.shape, generator=generator), 0)
    if kind == "bool":
        bias = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    mask = allowed if kind == "bool" else bias
    check_own_matrix(build, batch, mask, bias)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_one_row_of_an_own_matrix_is_for_all_queries(build, batch, kind):
    allowed = batch.attention_mask.bool()[:, None, None]
    bias = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    mask = allowed if kind == "bool" else bias
    check_own_matrix(build, batch, mask, bias)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(
    "shape",
    [(2, 1, 13, 13), (3, 2, 13, 13), (3, 1, 12, 13), (3, 1, 14, 13), (3, 1, 13, 12)],
    ids=["batch", "key heads", "too few rows", "too many rows", "too few columns"],
)
def test_own_matrix_of_another_size_is_refused(build, batch, kind, shape):
    """Eager attention cannot broadcast them either."""
    mask = torch.ones(shape, dtype=torch.bool) if kind == "bool" else torch.zeros(shape)
    model = build("llama", "flexdecode")
    with torch.no_grad(), pytest.raises(ValueError, match=r"attention_mask: expected shape \[3 or"):
        model(batch.input_ids, attention_mask=mask)


def test_own_float_matrix_is_added_after_the_softcap(build, batch):
    bias = (
        torch.randn(1, 1, PROMPT, PROMPT)
        .tril()
        .masked_fill(torch.ones(PROMPT, PROMPT).triu(1).bool(), torch.finfo(torch.float32).min)
    )
    mask = {"full_attention": bias, "sliding_attention": bias}
    with torch.no_grad():
        wanted = build("gemma2")(batch.input_ids, attention_mask=mask).logits
        got = build("gemma2", "flexdecode")(batch.input_ids, attention_mask=mask).logits
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=0)


def test_restrict_counts_from_the_first_token(build, batch):
    """A row of a left-padded batch sees what it would see alone."""

    def sinks_and_window(b, h, q_idx, kv_idx):
        return (kv_idx < 2) | (q_idx - kv_idx < 4)

    model = build("llama", "flexdecode")
    free = generate(model, batch)
    with restrict(sinks_and_window):
        together = generate(model, batch)
        for row in range(3):
            real = batch.attention_mask[row].bool()
            alone = Batch(batch.input_ids[row, real][None], batch.attention_mask[row, real][None])
            tokens, logits = generate(model, alone)
            assert torch.equal(tokens[0, -NEW:], together[0][row, -NEW:])
            torch.testing.assert_close(logits[:, 0], together[1][:, row], atol=2e-5, rtol=0)
    assert (free[1] - together[1]).abs().max() > 0.1
    assert_same(generate(model, batch), free)


def test_restrict_equals_eager_with_the_same_matrix(build, batch):
    def rule(b, h, q_idx, kv_idx):
        return (kv_idx % 3 == h % 3) | (q_idx == kv_idx)

    h, q, kv = torch.meshgrid(
        torch.arange(6), torch.arange(PROMPT), torch.arange(PROMPT), indexing="ij"
    )
    allowed = (rule(0, h, q, kv) & (q >= kv) & (q - kv < 7))[None]
    bias = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    with torch.no_grad():
        wanted = build("llama")(batch.input_ids, attention_mask=bias).logits
        model = build("llama", "flexdecode")
        with restrict(rule), restrict(lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 7):
            got = model(batch.input_ids).logits
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=0)


def test_restrict_and_an_own_matrix(build, batch):
    """Its rows have no positions: a rule that went unheard would be worse than an error."""
    causal = torch.ones(1, 1, PROMPT, PROMPT, dtype=torch.bool).tril()
    model = build("llama", "flexdecode")
    with torch.no_grad(), restrict(lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 4):
        with pytest.raises(ValueError, match="expected the model's own mask under restrict"):
            model(batch.input_ids, attention_mask=causal)


def test_restrict_where_layers_differ_in_heads(batch):
    config = transformers.BartConfig(
        d_model=48,
        vocab_size=97,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=6,
        decoder_attention_heads=4,
        max_position_embeddings=64,
    )
    model = transformers.AutoModelForSeq2SeqLM.from_config(
        config, attn_implementation="flexdecode"
    ).eval()
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    with torch.no_grad():
        wanted = model(**inputs, decoder_input_ids=batch.input_ids).logits
        with restrict(lambda b, h, q_idx, kv_idx: kv_idx < 90):
            got = model(**inputs, decoder_input_ids=batch.input_ids).logits
    assert torch.equal(got, wanted)


def test_settings_reach_attention(build, batch, monkeypatch):
    register("flexdecode", backend="reference", kernel_options={"num_splits": 1})
    seen = []
    original = forward.attention
    monkeypatch.setattr(forward, "attention", lambda *a, **k: seen.append(k) or original(*a, **k))
    with torch.no_grad():
        build("llama", "flexdecode")(batch.input_ids)
    assert {k["backend"] for k in seen} == {"reference"}
    assert all(k["kernel_options"] == {"num_splits": 1} for k in seen)


def test_position_bias_is_added():
    module = torch.nn.Module()
    q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    bias = torch.randn(1, 2, 3, 5)
    out, weights = attention_forward(module, q, k, v, None, position_bias=bias)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(out, wanted.transpose(1, 2), atol=1e-5, rtol=0)
    assert weights is None


@pytest.mark.parametrize("rows", [1, 3])
def test_sinks_of_each_query(rows):
    """Inkling 2 computes one logit for each query and head."""
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    sinks = torch.randn(2, 4, rows, 1)
    out, _ = attention_forward(torch.nn.Module(), q, k, v, None, sinks=sinks)
    scores = q @ k.repeat_interleave(2, 1).mT * 8**-0.5
    weights = torch.cat([scores, sinks.expand(2, 4, 3, 1)], -1).softmax(-1)[..., :-1]
    wanted = weights @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, wanted.transpose(1, 2), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["indices", "block_indices"])
def test_keys_that_a_layer_selects_itself_are_refused(name):
    """DeepSeek V3.2 and MiniMax M3 put them into the mask for eager attention alone."""
    q = torch.zeros(1, 1, 1, 8)
    with pytest.raises(ValueError, match="got a selection of keys"):
        attention_forward(
            torch.nn.Module(), q, q, q, None, **{name: torch.zeros(1, 1, 1, dtype=torch.int64)}
        )


def test_keys_that_a_layer_adds_are_refused():
    """DeepSeek V4 attends to compressed keys behind those of the mask."""
    mask = create_mask(1, 3, 5)
    q, k = torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 7, 8)
    with pytest.raises(ValueError, match="expected 3 queries and 7 keys, got a mask of 3 and 5"):
        attention_forward(torch.nn.Module(), q, k, k, mask)


def test_a_model_that_leaves_out_block_masks_is_refused(batch):
    """Doge builds a matrix of its own, from the model's mask only if that is a matrix."""
    config = transformers.DogeConfig(**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="flexdecode")
    with torch.no_grad(), pytest.raises(TypeError, match="read their mask as a matrix"):
        model.eval()(batch.input_ids)


def test_dropout_is_refused():
    q = torch.zeros(1, 1, 1, 8)
    with pytest.raises(ValueError, match=r"dropout: expected 0, got 0\.1"):
        attention_forward(torch.nn.Module(), q, q, q, None, dropout=0.1)


def test_a_causal_layer_without_mask_is_refused():
    q = torch.zeros(1, 1, 1, 8)
    with pytest.raises(ValueError, match="attention_mask: expected a mask in a causal layer"):
        attention_forward(torch.nn.Module(), q, q, q, None, is_causal=True)


@pytest.mark.parametrize("name", ["my_flash", "eager", "a/b"])
def test_names_of_other_back_ends_are_refused(name):
    with pytest.raises(ValueError, match="name: expected a name of its own"):
        register(name)


def test_restrict_refuses_what_is_no_function():
    with pytest.raises(TypeError, match="expected functions"), restrict(3):
        pass


def test_model_mask_looks_like_four_dimensions():
    mask = create_mask(2, 3, 7, 4, mask_function=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    assert mask.shape == (2, 1, 3, 7)
    assert create_mask(2, 3, 7, attention_mask=mask) is mask


@pytest.mark.parametrize(
    "read",
    [
        lambda mask: torch.zeros(3, 7) + mask,
        lambda mask: mask[:, 0],
        lambda mask: mask[..., :5],
        lambda mask: mask[:, :, 0],
        lambda mask: mask.to(torch.bool),
    ],
)
def test_layers_that_read_a_matrix_are_told(read):
    mask = create_mask(2, 3, 7, 4)
    with pytest.raises(
        TypeError, match=r"read their mask as a matrix.*another attn_implementation"
    ):
        read(mask)
    with pytest.raises(
        AttributeError, match=r"no attribute 'dtype': .* read their mask as a matrix"
    ):
        _ = mask.dtype


@pytest.mark.parametrize("rows", [slice(-1, None), slice(2, 7), slice(None), slice(3, 3)])
@pytest.mark.parametrize("tensor", [False, True])
def test_rows_of_a_model_mask(rows, tensor):
    real = torch.tensor([[False] * 3 + [True] * 14, [True] * 17])
    offset = torch.tensor(5) if tensor else 5
    mask = create_mask(
        2,
        9,
        14,
        offset,
        3,
        lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 4),
        real,
        block_size=4,
    )
    q, k = torch.randn(2, 2, 9, 8), torch.randn(2, 1, 14, 8)
    module = torch.nn.Module()
    wanted, _ = attention_forward(module, q, k, k, mask)
    part = mask[:, :, rows, :]
    assert part.shape == (2, 1, len(range(9)[rows]), 14)
    got, _ = attention_forward(module, q[:, :, rows], k, k, part)
    torch.testing.assert_close(got, wanted[:, rows], atol=1e-6, rtol=0)
    torch.testing.assert_close(mask[:, :, rows].block_mask.to_dense(), part.block_mask.to_dense())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_generate_on_a_gpu_replays_graphs(build, eager, batch, graphs, name):
    """generate() compiles a static cache's model by itself, with CUDA graphs."""
    wanted = eager(name, batch, True, {})
    model = build(name, "flexdecode").to("cuda")
    there = Batch(batch.input_ids.cuda(), batch.attention_mask.cuda())
    for _ in range(2):
        before = compile_count()
        sequences, logits = generate(model, there, cache_implementation="static")
        torch.testing.assert_close(logits.cpu(), wanted[1], atol=1e-3, rtol=0)
        assert torch.equal(sequences.cpu(), wanted[0])
    model.to("cpu")
    assert compile_count() == before
    assert graphs["inductor"]["cudagraph_skips"] == 0
