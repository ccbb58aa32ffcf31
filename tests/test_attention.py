"""The attention seam: what is observed is what the model computes, and nothing is left behind.

The references are the models' own runs: logits, `eager`'s attentions, and what enters the output projection, captured by
hooks of this file. Masks are rebuilt here from each architecture's windows. Tolerances are absolute.
"""

import contextlib
import math

import pytest
import torch
import transformers
from conftest import (
    ARCHITECTURES,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    LENGTH,
    VOCABULARY,
    WINDOW,
    small_model,
    text,
)
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache

from geomlib import attention
from geomlib.attention import intervene, observe, self_check
from geomlib.errors import GeomlibError

transformers.logging.set_verbosity_error()


class Record:
    """An observer that keeps every block, to put the layers together again."""

    def __init__(self):
        self.blocks = []

    def __call__(self, block):
        self.blocks.append(block)

    def layer(self, layer, batch=0):
        """All rows of one layer as one block."""
        blocks = [b for b in self.blocks if b.layer == layer and b.batch == batch]
        sink = blocks[0].learned_sink_mass
        return attention.Block(
            layer,
            torch.cat([b.queries for b in blocks]),
            torch.cat([b.weights for b in blocks], dim=1),
            blocks[0].values,
            torch.cat([b.visible for b in blocks]),
            None if sink is None else torch.cat([b.learned_sink_mass for b in blocks], dim=1),
            batch,
        )

    def heads(self, layer, batch=0):
        """sum alpha v of every head, side by side, (query, query head x dim)."""
        block = self.layer(layer, batch)
        return (block.weights @ block.values).transpose(0, 1).flatten(1)


@torch.no_grad()
def run(model, ids, **kwargs):
    """The model's own run: its output, and the input of each layer's output projection, (batch, query, heads x dim)."""
    projected, hooks = {}, []
    template = ARCHITECTURES[architecture_of(model)].projection
    for layer in range(layers_of(model)):
        module = model.get_submodule(template.format(layer))
        hooks.append(
            module.register_forward_pre_hook(lambda m, args, layer=layer: projected.__setitem__(layer, args[0].clone()))
        )
    try:
        return model(input_ids=ids, **kwargs), projected
    finally:
        for hook in hooks:
            hook.remove()


def architecture_of(model):
    return next(k for k, a in ARCHITECTURES.items() if a.model_type == model.config.model_type)


def layers_of(model):
    return model.config.get_text_config().num_hidden_layers


@torch.no_grad()
def watch(model, ids, **kwargs):
    """An observed run: output and record."""
    record = Record()
    with observe(model, record):
        output = model(input_ids=ids, **kwargs)
    return output, record


def difference(a, b):
    assert a.shape == b.shape
    return float((a - b).abs().max())


def mask_of(window, length=LENGTH):
    """Causal, and at most `window` tokens back, the query included."""
    rows = torch.arange(length)[:, None]
    columns = torch.arange(length)[None]
    visible = columns <= rows
    return visible if window is None else visible & (rows - columns < window)


def switches(model):
    """Everything that a context may touch, to compare before and after."""
    configs = [model.config, model.config.get_text_config()]
    configs += [getattr(model.config, name) for name in model.config.sub_configs]
    return (
        [c._attn_implementation for c in configs],
        [c._attn_implementation_internal for c in configs],
        [m.training for m in model.modules()],
        [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._forward_hooks_always_called))
            for m in model.modules()
        ],
        torch.overrides._len_torch_function_stack(),
        dict(attention._states),
        dict(attention._modules),
    )


def eager(name, dtype, monkeypatch):
    """The same model under transformers' `eager`, with two faults of `eager` itself put right."""
    settings = {}
    if name == "falcon_alibi":  # eager adds the biases twice, once in the mask
        module = transformers.models.falcon.modeling_falcon
        once = module.build_alibi_tensor
        monkeypatch.setattr(module, "build_alibi_tensor", lambda *a, **k: once(*a, **k) / 2)
    if name == "gpt2_upcast" and dtype == torch.float64:  # eager refuses to run it in float64
        settings = {"reorder_and_upcast_attn": False}
    return small_model(name, dtype, "eager", **settings)


# --- every architecture -----------------------------------------------------------------------------------------------


def test_the_models_are_worth_measuring(architecture):
    """Far from uniform, logits of order 1, heads and layers that differ: else the tests below could not fail."""
    model = small_model(architecture)
    output, record = watch(model, text())
    assert 1 < float(output.logits.abs().max()) < 10
    for layer in range(layers_of(model)):
        weights = record.layer(layer).weights
        uniform = record.layer(layer).visible / record.layer(layer).visible.sum(-1, keepdim=True)
        assert float((weights - uniform)[:, LENGTH // 2 :].abs().max()) > 0.05  # uniform is 0.05 to 0.2
        assert difference(weights[0], weights[1]) > 0.05
    assert difference(record.layer(0).weights, record.layer(1).weights) > 0.1


def test_float32_equals_the_models_own(architecture, monkeypatch):
    model = small_model(architecture)
    own, projected = run(model, text())
    output, record = watch(model, text())
    assert difference(output.logits, own.logits) <= 1e-5
    reference = eager(architecture, torch.float32, monkeypatch)
    attentions = run(reference, text(), output_attentions=True)[0].attentions
    for layer in range(layers_of(model)):
        assert record.layer(layer).weights.dtype == record.layer(layer).values.dtype == torch.float32
        assert difference(record.layer(layer).weights, attentions[layer][0]) <= 1e-5
        assert difference(record.heads(layer), projected[layer][0]) <= 1e-5


def test_float64_equals_the_models_own(architecture, monkeypatch):
    model = small_model(architecture, torch.float64)
    if not ARCHITECTURES[architecture].sdpa:  # eager's softmax is float32 even there: made float64 for the logits
        softmax = torch.nn.functional.softmax
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim=dim))
            own, projected = run(model, text())
    else:
        assert model.config.get_text_config()._attn_implementation == "sdpa"
        own, projected = run(model, text())
    output, record = watch(model, text())
    assert output.logits.dtype == torch.float64
    assert difference(output.logits, own.logits) <= 1e-10
    reference = eager(architecture, torch.float64, monkeypatch)
    attentions = run(reference, text(), output_attentions=True)[0].attentions
    for layer in range(layers_of(model)):
        block = record.layer(layer)
        assert block.weights.dtype == block.values.dtype == torch.float64
        total = block.weights.sum(-1) + (0 if block.learned_sink_mass is None else block.learned_sink_mass)
        assert difference(total, torch.ones_like(total)) <= 1e-12
        assert difference(block.weights, attentions[layer][0]) <= 1e-6
        assert difference(record.heads(layer), projected[layer][0]) <= 1e-10


def test_only_visible_sources_have_weight(architecture):
    model = small_model(architecture)
    _, record = watch(model, text())
    for layer, window in enumerate(ARCHITECTURES[architecture].windows):
        block = record.layer(layer)
        expected = mask_of(window)
        assert torch.equal(block.visible, expected)
        assert (block.weights[:, ~expected] == 0).all()
        assert (block.weights[:, expected] > 0).all()
    assert {b.layer for b in record.blocks} == set(range(layers_of(model)))


def test_blocks_cover_each_query_once(architecture, monkeypatch):
    model = small_model(architecture)
    with torch.no_grad():
        own = model(text()).logits
    whole = watch(model, text())[1]
    monkeypatch.setattr(attention, "MAX_ROWS", 4)
    output, record = watch(model, text())
    assert difference(output.logits, own) <= 1e-5
    for layer in range(layers_of(model)):
        blocks = [b for b in record.blocks if b.layer == layer]
        assert [len(b.queries) for b in blocks] == [4, 4, 4, 4, 3]
        assert torch.cat([b.queries for b in blocks]).tolist() == list(range(LENGTH))
        for block in blocks:
            n = len(block.queries)
            assert block.batch == 0
            assert block.weights.shape == (HEADS, n, LENGTH)
            assert block.values.shape[:2] == (HEADS, LENGTH) and block.values.dim() == 3
            assert block.visible.shape == (n, LENGTH) and block.visible.dtype == torch.bool
            if architecture == "gpt_oss":
                assert block.learned_sink_mass.shape == (HEADS, n)
            else:
                assert block.learned_sink_mass is None
        assert difference(record.layer(layer).weights, whole.layer(layer).weights) <= 1e-6
        assert difference(record.layer(layer).values, whole.layer(layer).values) <= 1e-5


def test_grouped_values_are_repeated_not_tiled(architecture):
    model = small_model(architecture)
    values = watch(model, text())[1].layer(1).values
    kv_heads = ARCHITECTURES[architecture].kv_heads
    for head in range(HEADS):
        for other in range(head):
            same_group = head // (HEADS // kv_heads) == other // (HEADS // kv_heads)
            assert torch.equal(values[head], values[other]) == same_group


def test_restores_everything(architecture):
    model = small_model(architecture)
    model.train()
    next(iter(model.modules())).training = False  # flags that are not all alike
    list(model.modules())[5].training = False
    before = switches(model)
    with observe(model, Record()):
        with intervene(model, top_n=2), observe(model, Record()):
            assert not any(m.training for m in model.modules())
            assert switches(model)[:2] != before[:2] or architecture.startswith("falcon")
            model(text())
        model(text())
    assert switches(model) == before


def test_gradients_are_the_models_own(architecture):
    model = small_model(architecture, torch.float64)
    ids = text()
    model(ids, use_cache=False).logits.sum().backward()
    own = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    ones = torch.ones(layers_of(model), HEADS)
    with observe(model, Record()), intervene(model, head_mask=ones, top_n=LENGTH):
        model(ids, use_cache=False).logits.sum().backward()
    assert own and {n for n, p in model.named_parameters() if p.grad is not None} == set(own)
    scale = max(float(g.abs().max()) for g in own.values())
    for name, parameter in model.named_parameters():
        if name in own:
            # eager's softmax, forward and backward, is float32 even in float64
            tolerance = 1e-10 if ARCHITECTURES[architecture].sdpa else 1e-5
            assert difference(parameter.grad, own[name]) <= tolerance * max(1.0, scale), name


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_the_text_alone(architecture, side):
    model = small_model(architecture)
    texts = [text(1, LENGTH), text(1, LENGTH - 6, seed=1)]
    batch = torch.zeros(2, LENGTH, dtype=torch.int64)
    mask = torch.zeros(2, LENGTH, dtype=torch.int64)
    places = []
    for row, ids in enumerate(texts):
        n = ids.shape[1]
        place = slice(LENGTH - n, LENGTH) if side == "left" else slice(0, n)
        batch[row, place], mask[row, place] = ids[0], 1
        places.append(place)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    extra = {} if architecture == "opt" or architecture == "falcon_alibi" else {"position_ids": positions}
    output, record = watch(model, batch, attention_mask=mask, **extra)
    assert torch.isfinite(output.logits).all()
    for row, ids in enumerate(texts):
        alone, single = watch(model, ids)
        assert difference(output.logits[row, places[row]], alone.logits[0]) <= 1e-5
        for layer in range(layers_of(model)):
            ours, expected = record.layer(layer, row), single.layer(layer)
            assert torch.equal(ours.queries, expected.queries)
            assert torch.equal(ours.visible, expected.visible)
            assert difference(ours.weights, expected.weights) <= 1e-5
            assert difference(ours.values, expected.values) <= 1e-5


# --- how a model is run -----------------------------------------------------------------------------------------------


def test_a_row_of_nothing_but_padding_gives_no_blocks():
    model = small_model("llama")
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1] = 0
    output, record = watch(model, text(2, LENGTH), attention_mask=mask)
    assert torch.isfinite(output.logits).all()
    assert {b.batch for b in record.blocks} == {0}


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "falcon_alibi", "gemma3"])
def test_train_mode_is_switched_off_and_back(name):
    dropouts = {k: 0.5 for k in ("attention_dropout", "resid_pdrop", "attn_pdrop", "embd_pdrop", "dropout")}
    model = small_model(name, **dropouts)
    own = run(model, text())[0].logits
    model.train()
    model.get_submodule(ARCHITECTURES[name].projection.format(1)).training = False
    flags = [m.training for m in model.modules()]
    output, record = watch(model, text())
    assert [m.training for m in model.modules()] == flags and any(flags) and not all(flags)
    assert difference(output.logits, own) <= 1e-5
    for layer in range(LAYERS):
        total = record.layer(layer).weights.sum(-1)
        assert difference(total, torch.ones_like(total)) <= 1e-6


def test_offloaded_weights(tmp_path):
    from accelerate import cpu_offload, dispatch_model

    own = run(small_model("llama"), text())[0].logits
    expected = watch(small_model("llama"), text())[1]
    split = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk",
             "model.norm": "disk", "model.rotary_emb": "cpu", "lm_head": "disk"}  # fmt: skip
    models = {
        "split": dispatch_model(small_model("llama"), split, main_device="cpu", offload_dir=str(tmp_path)),
        "whole": cpu_offload(small_model("llama"), torch.device("cpu")),
    }
    for model in models.values():
        assert any(p.device.type == "meta" for p in model.parameters())
        output, record = watch(model, text())
        assert difference(output.logits, own) <= 1e-5
        for layer in range(LAYERS):
            assert difference(record.layer(layer).weights, expected.layer(layer).weights) <= 1e-6
            assert record.layer(layer).weights.device.type == "cpu"


def test_bfloat16_scores_are_float32(architecture):
    model = small_model(architecture, torch.bfloat16)
    output, record = watch(model, text())
    assert output.logits.dtype == torch.bfloat16
    for layer in range(layers_of(model)):
        block = record.layer(layer)
        assert block.weights.dtype == block.values.dtype == torch.float32
        total = block.weights.sum(-1) + (0 if block.learned_sink_mass is None else block.learned_sink_mass)
        assert difference(total, torch.ones_like(total)) <= 1e-6


def test_autocast_does_not_reach_the_scores():
    model = small_model("llama")
    scores = []

    def keep(module, query, key, value, *args, **kwargs):
        scores.append((query, key))
        return attention._attention_function(module, query, key, value, *args, **kwargs)

    record = Record()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), observe(model, record):
        AttentionInterface.register(attention.NAME, keep)
        model(text())
    query, key = (x[0].double() for x in scores[0])
    exact = query @ key.repeat_interleave(HEADS // KV_HEADS, 0).transpose(1, 2) * HEAD_DIM**-0.5
    exact = exact.masked_fill(~mask_of(None), -math.inf).softmax(-1)
    assert difference(record.layer(0).weights.double(), exact) <= 1e-6


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2", "falcon", "falcon_alibi", "gpt_oss", "gemma4"])
def test_decoding_from_a_cache_gives_the_rows_of_the_full_pass(name):
    model = small_model(name)
    _, full = watch(model, text())
    cache = DynamicCache(config=model.config)
    start = 0
    for stop in (7, 9, *range(10, LENGTH + 1)):  # a prefix, a chunk, then token by token
        output, record = watch(model, text()[:, start:stop], cache=cache)
        for layer in range(layers_of(model)):
            ours, expected = record.layer(layer), full.layer(layer)
            n = ours.weights.shape[-1]  # a window's cache keeps only the last tokens
            assert torch.equal(ours.queries, torch.arange(n - (stop - start), n))
            assert difference(ours.weights, expected.weights[:, start:stop, stop - n : stop]) <= 1e-5
            assert (expected.weights[:, start:stop, : stop - n] == 0).all()
            assert difference(ours.values, expected.values[:, stop - n : stop]) <= 1e-5
        start = stop
    assert difference(output.logits[0, -1], run(model, text())[0].logits[0, -1]) <= 1e-5
    kept = [LENGTH if window is None else WINDOW for window in ARCHITECTURES[name].windows]
    assert [record.layer(layer).weights.shape[-1] for layer in range(layers_of(model))] == kept


def test_a_static_cache_with_room_left():
    model = small_model("llama")
    _, full = watch(model, text())
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 8)
    for start, stop in ((0, 9), (9, 13), (13, 14)):
        _, record = watch(model, text()[:, start:stop], cache=cache)
        ours = record.layer(2)
        assert ours.queries.tolist() == list(range(start, stop))
        assert ours.weights.shape == (HEADS, stop - start, LENGTH + 8)
        assert difference(ours.weights[..., :LENGTH], full.layer(2).weights[:, start:stop]) <= 1e-5
        assert (ours.weights[..., LENGTH:] == 0).all()


def test_right_padding_beside_a_static_cache():
    model = small_model("llama")
    mask = torch.ones(1, 12, dtype=torch.int64)
    mask[:, 9:] = 0
    cache = StaticCache(config=model.config, max_cache_len=20)
    _, record = watch(model, text()[:, :12], attention_mask=mask, cache=cache)
    _, alone = watch(model, text()[:, :9])
    assert record.layer(0).queries.tolist() == list(range(9))
    assert difference(record.layer(2).weights[..., :9], alone.layer(2).weights) <= 1e-5


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "falcon"])
def test_generate(name):
    model = small_model(name)
    ids = text(1, 8)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    own = model.generate(ids, **options)
    record = Record()
    with observe(model, record):
        tokens = model.generate(ids, **options)
    assert torch.equal(tokens, own) and tokens.shape[1] == 16
    _, full = watch(model, tokens[:, :-1])
    for layer in range(LAYERS):
        rows = [row for b in record.blocks if b.layer == layer for row in b.weights.unbind(1)]
        assert len(rows) == 15
        for t, row in enumerate(rows):
            kept = min(row.shape[-1], t + 1)
            first = 0 if t < 8 else t + 1 - kept
            assert difference(row[:, :kept], full.layer(layer).weights[:, t, first : first + kept]) <= 1e-5


def test_packed_texts_do_not_see_each_other():
    model = small_model("llama")
    first, second = text(1, 8), text(1, 11, seed=1)
    positions = torch.cat([torch.arange(8), torch.arange(11)])[None]
    output, record = watch(model, torch.cat([first, second], 1), position_ids=positions, use_cache=False)
    for ids, place in ((first, slice(0, 8)), (second, slice(8, 19))):
        alone, single = watch(model, ids)
        assert difference(output.logits[0, place], alone.logits[0]) <= 1e-5
        for layer in range(LAYERS):
            ours = record.layer(layer)
            assert difference(ours.weights[:, place, place], single.layer(layer).weights) <= 1e-5
            assert float(ours.weights[:, place].sum()) == pytest.approx(HEADS * ids.shape[1], abs=1e-4)
    assert record.layer(0).queries.tolist() == list(range(19))


def test_hidden_states_may_be_asked_for():
    model = small_model("llama")
    own = run(model, text(), output_hidden_states=True)[0].hidden_states
    ours = watch(model, text(), output_hidden_states=True)[0].hidden_states
    assert len(ours) == LAYERS + 1
    assert all(difference(a, b) <= 1e-5 for a, b in zip(own, ours, strict=True))


def test_masks_made_by_hand():
    """Boolean or additive, 4-D: passed through by transformers, without geomlib's mask twin."""
    model = small_model("llama")
    visible = mask_of(6)[None, None]
    additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    for mask in (visible, additive, additive.masked_fill(~visible, -math.inf)):
        own = run(model, text(), attention_mask=mask)[0].logits
        output, record = watch(model, text(), attention_mask=mask)
        assert difference(output.logits, own) <= 1e-5
        assert torch.equal(record.layer(1).visible, visible[0, 0])


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda m: m[0].logical_or_(torch.eye(LENGTH, dtype=torch.bool).roll(1, 1)), "tokens after the query"),
        (lambda m: m[:, :, 4, 4].fill_(False), "hides tokens from themselves"),
        (lambda m: m[:, 1, 9, 3].fill_(False), "different tokens"),
    ],
)
def test_masks_that_cannot_be_measured_are_refused(spoil, sentence):
    model = small_model("llama")
    mask = mask_of(None).expand(1, HEADS, LENGTH, LENGTH).clone()
    spoil(mask)
    with pytest.raises(GeomlibError, match=sentence):
        watch(model, text(), attention_mask=mask)


# --- the architectures' own ways --------------------------------------------------------------------------------------


def by_hand(query, key, window, scale, cap=None):
    """(head, query, source) weights from one head's states each, in float64."""
    scores = query.double() @ key.double().transpose(1, 2) * scale
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    return scores.masked_fill(~mask_of(window), -math.inf).softmax(-1)


def test_gemma2_scale_and_cap():
    model = small_model("gemma2")
    states = {}

    def keep(module, query, key, value, *args, **kwargs):
        states[module.layer_idx] = query[0], key[0].repeat_interleave(HEADS // KV_HEADS, 0)
        return attention._attention_function(module, query, key, value, *args, **kwargs)

    record = Record()
    with torch.no_grad(), observe(model, record):
        AttentionInterface.register(attention.NAME, keep)
        model(text())
    for layer, window in enumerate(ARCHITECTURES["gemma2"].windows):
        ours = record.layer(layer).weights.double()
        assert difference(ours, by_hand(*states[layer], window, 5**-0.5, cap=2.0)) <= 1e-6
        assert difference(ours, by_hand(*states[layer], window, 5**-0.5)) > 0.05  # the cap matters
        assert difference(ours, by_hand(*states[layer], window, 12**-0.5, cap=2.0)) > 0.05  # so does the scale


def test_gpt2_scales_by_the_inverse_layer():
    plain, scaled = (watch(small_model(n), text())[1] for n in ("gpt2", "gpt2_inverse_layer"))
    assert difference(plain.layer(0).weights, scaled.layer(0).weights) == 0
    assert difference(plain.layer(1).weights, scaled.layer(1).weights) > 0.05


def test_gpt_neox_values_come_from_the_fused_projection_head_by_head():
    model = small_model("gpt_neox")
    fused = []
    hook = model.gpt_neox.layers[1].attention.query_key_value.register_forward_hook(lambda m, a, out: fused.append(out))
    values = watch(model, text())[1].layer(1).values
    hook.remove()
    expected = fused[-1][0].view(LENGTH, HEADS, 3, HEAD_DIM)[:, :, 2].transpose(0, 1)
    assert difference(values, expected) == 0


def test_gemma4_shared_values_are_those_of_the_earlier_layer():
    record = watch(small_model("gemma4"), text())[1]
    assert difference(record.layer(2).values, record.layer(0).values) == 0  # sliding reads sliding
    assert difference(record.layer(3).values, record.layer(1).values) == 0  # full reads full
    assert difference(record.layer(2).weights, record.layer(0).weights) > 0.05


def test_gpt_oss_learned_sink_takes_its_share():
    model = small_model("gpt_oss")
    record = watch(model, text())[1]
    mass = record.layer(0).learned_sink_mass
    assert 0 < float(mass.min()) and 0.1 < float(mass.mean()) and float(mass.max()) < 1
    with torch.no_grad():
        model.model.layers[0].self_attn.sinks[1] = 1000.0  # head 1 gives everything to its sink
    block = watch(model, text())[1].layer(0)
    assert (block.weights[1] == 0).all() and (block.learned_sink_mass[1] == 1).all()
    with torch.no_grad(), intervene(model, top_n=2, renormalize=True):
        assert torch.isfinite(model(text()).logits).all()


# --- what is refused --------------------------------------------------------------------------------------------------

_SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_REFUSED = {
    "BertModel": lambda: transformers.BertModel(transformers.BertConfig(**_SMALL, intermediate_size=48)),
    "BertSelfAttention": lambda: transformers.BertLMHeadModel(transformers.BertConfig(**_SMALL, intermediate_size=48)),
    "BertForMaskedLM": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**_SMALL, intermediate_size=48)),
    "LlamaModel": lambda: small_model("llama").model,
    "MambaForCausalLM": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4)
    ),
    "BloomForCausalLM": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
    ),
    "MptForCausalLM": lambda: transformers.MptForCausalLM(
        transformers.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=VOCABULARY)
    ),
    "GPTNeoForCausalLM": lambda: transformers.GPTNeoForCausalLM(
        transformers.GPTNeoConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
        )
    ),
    "T5ForConditionalGeneration": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    ),
    "ViTModel": lambda: transformers.ViTModel(
        transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, image_size=28, patch_size=14)
    ),
    "Linear": lambda: torch.nn.Linear(2, 2),
    "str": lambda: "gpt2",
}


def assert_one_sentence(error):
    message = str(error.value)
    assert message.endswith(".") and "\n" not in message and ". " not in message, message


@pytest.mark.parametrize("name", _REFUSED)
@pytest.mark.parametrize("context", ["observe", "intervene"])
def test_refused_by_name(name, context):
    model = _REFUSED[name]()
    before = switches(model) if isinstance(model, transformers.PreTrainedModel) else None
    opened = {"observe": lambda: observe(model, Record()), "intervene": lambda: intervene(model, torch.ones(2, 4))}
    with pytest.raises(GeomlibError, match=name) as error, opened[context]():
        pytest.fail("it was accepted")
    assert_one_sentence(error)
    assert before is None or switches(model) == before


def test_an_unknown_argument_is_refused():
    model = small_model("llama")
    with pytest.raises(GeomlibError, match="LlamaAttention passes position_bias") as error:
        watch(model, text(), position_bias=torch.zeros(1))
    assert_one_sentence(error)


def test_without_its_mask_twin_it_fails_and_sees_nothing():
    model = small_model("llama")
    record = Record()
    with observe(model, record):
        del AttentionMaskInterface._global_mapping[attention.NAME]
        with pytest.raises(GeomlibError, match="LlamaAttention.*mask twin") as error:
            model(text())
    assert_one_sentence(error)
    assert not record.blocks
    watch(model, text(), use_cache=False)  # and the next context has both again


def test_geomlibs_function_outside_a_context_is_refused():
    model = small_model("llama")
    watch(model, text())
    model.set_attn_implementation(attention.NAME)
    with pytest.raises(GeomlibError, match="LlamaAttention.*outside"):
        model(text())


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss", "falcon", "gemma3_multimodal"])
@pytest.mark.parametrize("asked_by", ["argument", "config", "base"])
def test_attentions_are_never_none(name, asked_by):
    model = small_model(name, implementation="eager")
    record = Record()
    model.config.output_attentions = asked_by == "config"
    with pytest.raises(GeomlibError, match="output_attentions") as error, observe(model, record):
        if asked_by == "base":
            model.base_model(text(), output_attentions=True)
        else:
            model(text(), output_attentions=True)
    assert_one_sentence(error)
    assert not record.blocks


def test_nan_names_the_layer():
    model = small_model("llama")
    watch(model, text())
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[3, 3] = math.nan
    with pytest.raises(GeomlibError, match="layer 1 ") as error:
        watch(model, text())
    assert "NaN" in str(error.value)
    fresh = small_model("llama")
    with torch.no_grad():
        fresh.model.layers[1].mlp.down_proj.weight[3, 3] = math.nan
    before = switches(fresh)
    with pytest.raises(GeomlibError, match="layer 2 "), observe(fresh):
        pass
    assert switches(fresh) == before


def test_a_submodel_of_an_observed_model_is_refused():
    outer = small_model("gemma3_multimodal")
    inner = outer.model.language_model
    inner.can_generate = lambda: True
    with observe(outer), pytest.raises(GeomlibError, match="part of another"):
        attention._enter(inner)
    watch(outer, text())


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        ({"rows": 1.01}, "do not sum to 1"),
        ({"values": 1.1}, "output projection of layer"),
        ({"future": True}, "attends to later tokens"),
        ({"output": 1.1}, "logits change"),
        ({"skip": True}, "only 2 of its 3 layers"),
    ],
)
def test_the_self_check_sees(monkeypatch, spoil, sentence):
    """Each standing invariant, broken on purpose."""
    model = small_model("llama")
    block = attention.Block

    def spoiled(layer, queries, weights, values, *rest):
        weights = weights * spoil.get("rows", 1)
        if spoil.get("future"):
            weights = weights.roll(1, dims=-1)
        return block(layer, queries, weights, values * spoil.get("values", 1), *rest)

    attend = attention._attend

    def changed(*args):
        return attend(*args) * spoil.get("output", 1)

    monkeypatch.setattr(attention, "Block", spoiled)
    monkeypatch.setattr(attention, "_attend", changed)
    if spoil.get("skip"):
        layer = model.model.layers[1].self_attn
        layer.forward = lambda hidden_states, **kwargs: (layer.o_proj(hidden_states), None)
    with pytest.raises(GeomlibError, match=f"LlamaForCausalLM.*{sentence}"):
        self_check(model)


def test_the_self_check_runs_once(monkeypatch):
    calls = []
    check = attention.self_check
    monkeypatch.setattr(attention, "self_check", lambda model: (calls.append(model), check(model)))
    model = small_model("llama")
    for _ in range(2):
        watch(model, text())
        with intervene(model, top_n=3):
            pass
    assert len(calls) == 1


# --- contexts ---------------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


@pytest.mark.parametrize("name", ["llama", "gemma3_multimodal", "falcon"])
@pytest.mark.parametrize("where", ["observer", "forward", "body"])
def test_restores_after_an_exception(name, where):
    model = small_model(name).train()
    before = switches(model)
    hooks = contextlib.ExitStack()

    def observer(block):
        if where == "observer" and block.layer == 1:
            raise Stop

    with pytest.raises(Stop), hooks, observe(model), observe(model, observer), intervene(model, top_n=2):
        if where == "body":
            raise Stop
        if where == "forward":
            module = model.get_submodule(ARCHITECTURES[name].projection.format(1))
            hooks.callback(module.register_forward_pre_hook(raise_stop).remove)
        model(text())
    assert switches(model) == before
    watch(model.eval(), text())


def raise_stop(*args):
    raise Stop


def test_nested_observers_all_see_the_same():
    model = small_model("llama")
    outer, inner, twice = Record(), Record(), Record()
    with torch.no_grad(), observe(model, outer):
        with observe(model, inner, twice, twice):
            model(text())
        model(text())
    assert len(outer.blocks) == 2 * LAYERS and len(inner.blocks) == LAYERS and len(twice.blocks) == 2 * LAYERS
    assert difference(outer.layer(1).weights[:, :LENGTH], inner.layer(1).weights) == 0


@pytest.mark.parametrize(
    "names", [("llama", "gemma2"), ("falcon", "falcon_alibi"), ("falcon", "llama"), ("llama", "llama")]
)
def test_two_models_at_once(names):
    models = [small_model(n) for n in names]
    expected = [watch(m, text())[1] for m in models]
    before = [switches(m) for m in models]
    records = [Record(), Record()]
    with torch.no_grad(), observe(models[0], records[0]), observe(models[1], records[1]):
        for model in models:
            model(text())
    assert [switches(m) for m in models] == before
    for ours, alone in zip(records, expected, strict=True):
        assert len(ours.blocks) == LAYERS
        assert difference(ours.layer(2).weights, alone.layer(2).weights) == 0


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "falcon"])
def test_an_exception_caught_inside_leaves_the_context_working(name):
    """Falcon's route must close: an attention of the caller's own afterwards is none of geomlib's business."""
    model = small_model(name)
    own = model(text()).logits
    projection = model.get_submodule(ARCHITECTURES[name].projection.format(1))
    record = Record()
    with observe(model, record):
        hook = projection.register_forward_pre_hook(raise_stop)
        with pytest.raises(Stop):
            model(text())
        hook.remove()
        record.blocks.clear()
        q = torch.randn(1, 1, 3, 4)
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
        assert not record.blocks
        assert difference(model(text()).logits, own) <= 1e-5
    assert len(record.blocks) == LAYERS


@pytest.mark.parametrize("name", ["llama", "falcon"])
def test_other_models_may_run_meanwhile(name):
    observed, other = small_model("llama"), small_model(name)
    own = run(other, text())[0].logits
    record = Record()
    with torch.no_grad(), observe(observed, record):
        assert difference(other(text()).logits, own) == 0
    assert not record.blocks


# --- interventions ----------------------------------------------------------------------------------------------------


def with_scaled_heads(model, name, mask):
    """Logits when a hook of this test scales each head's slice of what enters the output projection."""
    hooks = []

    def scale(module, args, row):
        x = args[0]
        return ((x.unflatten(-1, (HEADS, -1)) * row[:, None].to(x)).flatten(-2),)

    for layer, row in enumerate(mask):
        module = model.get_submodule(ARCHITECTURES[name].projection.format(layer))
        hooks.append(module.register_forward_pre_hook(lambda m, a, row=row: scale(m, a, row)))
    try:
        return model(text()).logits
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def test_a_head_mask_scales_the_input_of_the_output_projection(architecture):
    model = small_model(architecture)
    own = model(text()).logits
    mask = torch.ones(layers_of(model), HEADS)
    mask[0, 1] = mask[2, 3] = 0
    mask[1] = torch.tensor([0.25, 1.5, -1.0, 0.0])
    expected = with_scaled_heads(model, architecture, mask)
    with intervene(model, head_mask=mask):
        ours = model(text()).logits
    assert difference(ours, expected) <= 1e-5
    assert difference(ours, own) > 0.1
    assert difference(model(text()).logits, own) == 0


@torch.no_grad()
def test_head_masks_multiply_when_nested():
    model = small_model("llama")
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.rand(LAYERS, HEADS, generator=generator) for _ in range(2))
    with intervene(model, head_mask=first), intervene(model, head_mask=second):
        nested = model(text()).logits
    assert difference(nested, with_scaled_heads(model, "llama", first * second)) <= 1e-5
    with intervene(model, head_mask=first.tolist()):
        listed = model(text()).logits
    assert difference(listed, with_scaled_heads(model, "llama", first)) <= 1e-5


@pytest.mark.parametrize("shape", [(HEADS,), (LAYERS, KV_HEADS), (HEADS, LAYERS), (1, LAYERS, HEADS)])
def test_a_wrong_head_mask_is_refused(shape):
    model = small_model("llama")
    before = switches(model)
    with pytest.raises(GeomlibError, match="head_mask has shape") as error, intervene(model, torch.ones(shape)):
        pytest.fail("it was accepted")
    assert "(3, 4)" in str(error.value)
    assert switches(model) == before


@pytest.mark.parametrize("top_n", [0, -1, 1.5, True])
def test_a_wrong_top_n_is_refused(top_n):
    with pytest.raises(GeomlibError, match="top_n is"), intervene(small_model("llama"), top_n=top_n):
        pytest.fail("it was accepted")


def cut_by_hand(weights, visible, n, renormalize):
    """The obvious loop: keep the n largest visible weights of each row, ties to the lower index."""
    result = torch.zeros_like(weights)
    for h in range(weights.shape[0]):
        for t in range(weights.shape[1]):
            seen = visible[t].nonzero().flatten().tolist()
            kept = sorted(seen, key=lambda j: (-float(weights[h, t, j]), j))[:n]
            result[h, t, kept] = weights[h, t, kept]
            if renormalize:
                result[h, t] *= weights[h, t].sum() / result[h, t].sum()
    return result


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("top_n", [1, 3])
def test_top_n_cuts_every_row(architecture, top_n, renormalize):
    """Layer 0 has the same input with and without the cut; on a sliding window only visible sources count."""
    model = small_model(architecture)
    uncut = watch(model, text())[1].layer(0)
    expected = cut_by_hand(uncut.weights, uncut.visible, top_n, renormalize)
    record = Record()
    with torch.no_grad(), observe(model, record), intervene(model, top_n=top_n, renormalize=renormalize):
        model(text())
    ours = record.layer(0)
    assert difference(ours.weights, expected) <= 1e-6
    counts = (ours.weights > 0).sum(-1)
    assert torch.equal(counts, ours.visible.sum(-1).clamp(max=top_n).expand_as(counts))
    for layer in range(layers_of(model)):
        assert int((record.layer(layer).weights > 0).sum(-1).max()) == top_n
    if renormalize:
        assert difference(ours.weights.sum(-1), uncut.weights.sum(-1)) <= 1e-6
    if uncut.learned_sink_mass is not None:  # the sink keeps its share, the tokens never get it
        assert difference(ours.learned_sink_mass, uncut.learned_sink_mass) == 0
        assert float(ours.weights.sum(-1).max()) < 1


@torch.no_grad()
def test_the_cut_reaches_the_output(architecture):
    """The heads' outputs are those of the weights that observers see."""
    model = small_model(architecture)
    record = Record()
    with observe(model, record), intervene(model, top_n=2, renormalize=True):
        cut, projected = run(model, text())
    assert difference(cut.logits, model(text()).logits) > 0.1
    for layer in range(layers_of(model)):
        assert difference(record.heads(layer), projected[layer][0]) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("renormalize", [False, True])
def test_top_n_of_everything_changes_nothing(architecture, renormalize):
    model = small_model(architecture)
    own = model(text()).logits
    with intervene(model, top_n=LENGTH, renormalize=renormalize):
        assert difference(model(text()).logits, own) <= 1e-5
    if all(w == WINDOW for w in ARCHITECTURES[architecture].windows):
        with intervene(model, top_n=WINDOW, renormalize=renormalize):  # no window holds more
            assert difference(model(text()).logits, own) <= 1e-5


@torch.no_grad()
def test_ties_go_to_the_lower_index():
    model = small_model("gpt2")
    for block in model.transformer.h:  # queries are 0, so all scores of a row are equal
        block.attn.c_attn.weight[:, :32] = 0
        block.attn.c_attn.bias[:32] = 0
    record = Record()
    with observe(model, record), intervene(model, top_n=3):
        model(text())
    weights = record.layer(1).weights
    for t in range(LENGTH):
        assert weights[:, t].nonzero()[:, 1].unique().tolist() == list(range(min(t + 1, 3)))
    assert weights[0, -1, 0] == pytest.approx(1 / LENGTH)


def test_planted_ties():
    weights = torch.tensor([[[0.1, 0.3, 0.3, 0.0, 0.3], [0.2, 0.2, 0.2, 0.2, 0.2], [0.0, 1.0, 0.0, 0.0, 0.0]]])
    visible = torch.tensor([[True, True, True, False, True], [False, True, True, True, True], [True] * 5])
    kept = attention._cut(weights, visible, [attention._Intervention(None, 2, False)])
    assert torch.equal(kept[0], torch.tensor([[0, 0.3, 0.3, 0, 0], [0, 0.2, 0.2, 0, 0], [0, 1, 0, 0, 0]]))


@torch.no_grad()
def test_cuts_apply_in_order():
    model = small_model("llama")
    uncut = watch(model, text())[1].layer(0)

    def nested(*cuts):
        record = Record()
        with contextlib.ExitStack() as stack:
            stack.enter_context(observe(model, record))
            for n, renormalize in cuts:
                stack.enter_context(intervene(model, top_n=n, renormalize=renormalize))
            model(text())
        return record.layer(0).weights

    def by_hand(*cuts):
        weights = uncut.weights
        for n, renormalize in cuts:
            weights = cut_by_hand(weights, uncut.visible, n, renormalize)
        return weights

    one, other = ((2, True), (4, False)), ((4, False), (2, True))
    assert difference(nested(*one), by_hand(*one)) <= 1e-6
    assert difference(nested(*other), by_hand(*other)) <= 1e-6
    assert difference(by_hand(*one), by_hand(*other)) > 0.01  # the order matters here


@torch.no_grad()
def test_observers_see_interventions_in_either_order():
    model = small_model("llama")
    mask = torch.full((LAYERS, HEADS), 0.5)
    inside, outside = Record(), Record()
    with observe(model, outside), intervene(model, mask, top_n=3):
        first = model(text()).logits
    with intervene(model, mask, top_n=3), observe(model, inside):
        second = model(text()).logits
    assert difference(first, second) == 0
    for layer in range(LAYERS):
        assert difference(inside.layer(layer).weights, outside.layer(layer).weights) == 0
    with observe(model, inside):
        model(text())
    assert model.config._attn_implementation != attention.NAME


@torch.no_grad()
def test_top_n_on_padded_batches():
    model = small_model("mistral")
    ids = text(1, LENGTH - 6)
    batch = torch.cat([torch.zeros(1, 6, dtype=torch.int64), ids], 1)
    mask = (torch.arange(LENGTH) >= 6)[None].long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with intervene(model, head_mask=torch.rand(LAYERS, HEADS), top_n=2, renormalize=True):
        alone = model(ids).logits
        padded = model(batch, attention_mask=mask, position_ids=positions).logits
    assert difference(padded[:, 6:], alone) <= 1e-5


def test_gradients_flow_through_head_masks_and_cuts():
    """d loss / d mask is what a first-order (Taylor) score needs: against central differences."""
    model = small_model("gpt_oss", torch.float64)
    mask = torch.ones(LAYERS, HEADS, dtype=torch.float64, requires_grad=True)

    def loss(factors):
        with intervene(model, head_mask=factors, top_n=3, renormalize=True), observe(model, Record()):
            return model(text()).logits.square().mean()

    loss(mask).backward()
    for place in ((0, 0), (1, 2), (2, 3)):
        step = torch.zeros(LAYERS, HEADS, dtype=torch.float64)
        step[place] = 1e-3
        with torch.no_grad():
            slope = (loss(mask + step) - loss(mask - step)) / 2e-3
        assert float(mask.grad[place]) == pytest.approx(float(slope), rel=1e-2, abs=1e-6)  # norms are float32 inside
        assert abs(float(slope)) > 1e-5


# --- a close look ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "falcon"])
@pytest.mark.parametrize("limit", [3, 256])
def test_final_rows_are_the_last_rows_of_each_layer(name, limit, monkeypatch):
    model, ids = small_model(name, torch.float64), text()
    whole: dict[int, list] = {}
    with torch.no_grad(), attention.observe(model, lambda b: whole.setdefault(b.layer, []).append(b)):
        model(ids)
    monkeypatch.setattr(attention, "MAX_ROWS", limit)  # rows of several blocks are joined
    for rows in (1, 5, LENGTH):
        found = attention.final_rows(model, ids[0].tolist(), rows)
        assert sorted(found) == sorted(whole)
        for layer, block in found.items():
            (expected,) = whole[layer]
            assert block.queries.tolist() == list(range(LENGTH - rows, LENGTH))
            torch.testing.assert_close(block.weights, expected.weights[:, -rows:])
            torch.testing.assert_close(block.values, expected.values)
            torch.testing.assert_close(block.outputs, block.weights @ block.values)
            assert torch.equal(block.visible, expected.visible[-rows:])
            if name == "gpt_oss":
                torch.testing.assert_close(block.learned_sink_mass, expected.learned_sink_mass[:, -rows:])
    for rows in (0, LENGTH + 1):
        with pytest.raises(GeomlibError, match=f"rows = {rows}"):
            attention.final_rows(model, ids[0], rows)


def test_outputs_of_a_block_are_those_before_a_head_mask():
    model, ids, blocks = small_model("llama", torch.float64), text(), []
    mask = torch.zeros(LAYERS, HEADS)
    with torch.no_grad(), attention.intervene(model, head_mask=mask), attention.observe(model, blocks.append):
        model(ids)
    for block in blocks:
        torch.testing.assert_close(block.outputs, block.weights @ block.values)
        assert block.outputs.abs().max() > 0.1


def test_observers_whose_work_others_take_come_first():
    order = []

    class Sharing:
        shares = True

        def __call__(self, block):
            order.append("shares")

    model = small_model("llama")
    with torch.no_grad(), attention.observe(model, lambda b: order.append("takes"), Sharing()):
        model(text())
    assert order == ["shares", "takes"] * LAYERS
