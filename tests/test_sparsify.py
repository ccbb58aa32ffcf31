"""Scores, orders and the cost of removal: slow loops over the models' own logits, and planted tables with known answers."""

import copy
import itertools
import json
import math
import random
import statistics
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ARCHITECTURES, HEADS, KV_HEADS, LAYERS, LENGTH, VOCABULARY, randomize, small_model, text
from test_study import save_model, save_texts
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from geomlib import claims, resume, sparsify, stats, taxonomy
from geomlib import nll as likelihood
from geomlib import study as S
from geomlib.attention import intervene
from geomlib.corpora import Window
from geomlib.errors import GeomlibError
from geomlib.models import load_model
from geomlib.resume import head_columns
from geomlib.sparsify import (
    IMPORTANCE_SCHEMA,
    RETENTION_SCHEMA,
    RETENTIONS,
    SCAN_SCHEMA,
    Order,
    all_orders,
    best,
    by_score,
    damages,
    grouped,
    guarded,
    head_scan,
    importance,
    layers_of,
    nll,
    random_order,
    recomputed,
    retention_curve,
)
from geomlib.study import Study, load_table

EVERY = list(itertools.product(range(LAYERS), range(HEADS)))


def window(seed: int = 0, length: int = LENGTH) -> Window:
    return Window(f"document {seed}", 0, text(1, length, seed=seed)[0].tolist(), False)


WINDOWS = [window(0), window(1)]


def heads_of(model) -> list[tuple[int, int]]:
    config = model.config.get_text_config()
    return list(itertools.product(range(config.num_hidden_layers), range(config.num_attention_heads)))


def without(model, *heads) -> torch.Tensor:
    mask = torch.ones(model.config.get_text_config().num_hidden_layers, HEADS)
    for head in heads:
        mask[head] = 0
    return mask


def projection(name: str, model, layer: int) -> torch.nn.Module:
    return model.get_submodule(ARCHITECTURES[name].projection.format(layer))


@torch.no_grad()
def zeroed(name: str, model, *heads):
    """A copy whose output projections ignore these heads."""
    model = copy.deepcopy(model)
    for layer, head in heads:
        weight = projection(name, model, layer).weight
        if not isinstance(projection(name, model, layer), Conv1D):
            weight = weight.T
        dim = weight.shape[0] // HEADS
        for i in range(head * dim, (head + 1) * dim):
            weight[i] = 0
    return model


@torch.no_grad()
def slow_nll(model, ids: list[int]) -> float:
    logits = model(torch.tensor([ids])).logits[0].double()
    losses = [
        math.log(sum(math.exp(x) for x in row)) - row[i] for row, i in zip(logits.tolist(), ids[1:], strict=False)
    ]
    return statistics.fmean(losses)


def other_model(model_type: str, **settings):
    config = CONFIG_MAPPING[model_type](**ARCHITECTURES["llama"].settings, **settings)
    return randomize(AutoModelForCausalLM.from_config(config).eval())


def state_of(model) -> dict:
    """What a measurement might leave behind."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_always_called")
    return {
        "hooks": [len(getattr(m, h)) for m in model.modules() for h in hooks],
        "forwards": [n for n, m in model.named_modules() if "forward" in m.__dict__],
        "training": [m.training for m in model.modules()],
        "grads": [n for n, p in model.named_parameters() if p.grad is not None],
        "wanted": [p.requires_grad for p in model.parameters()],
        "attention": model.config.get_text_config()._attn_implementation,
    }


def one_sentence(error) -> bool:
    return "\n" not in str(error.value) and str(error.value).endswith(".")


# --- negative log likelihood ------------------------------------------------------------------------------------------


def test_nll_is_the_mean_of_a_log_softmax_loop(architecture, monkeypatch):
    monkeypatch.setattr(likelihood, "_CHUNK", 10)  # of 67 words
    model = small_model(architecture)
    found = nll(model, WINDOWS)
    assert found["document"].tolist() == ["document 0", "document 1"]
    assert found["targets"].tolist() == [LENGTH - 1] * 2
    assert found["nll"].tolist() == pytest.approx([slow_nll(model, w.input_ids) for w in WINDOWS], abs=1e-5)


def test_final_soft_capping_counts():
    model = small_model("gemma2")
    capped = nll(model, WINDOWS)["nll"]
    model.config.final_logit_softcapping = None
    assert (nll(model, WINDOWS)["nll"] - capped).abs().min() > 1e-3


def test_a_model_that_knows_nothing_has_the_logarithm_of_its_vocabulary():
    model = small_model("llama")
    torch.nn.init.zeros_(model.lm_head.weight)
    found = nll(model, [window(0, 2), window(1, 9)])
    assert found["nll"].tolist() == pytest.approx([math.log(VOCABULARY)] * 2)
    assert found["targets"].tolist() == [1, 8]


def test_the_first_token_is_never_scored():
    """The prediction of token 3 is all that the model knows; a target counts once for each time it is there."""
    model = small_model("phi")
    torch.nn.init.zeros_(model.lm_head.weight)
    model.lm_head.bias.data.zero_()[3] = 5.0
    sure, unsure = (math.log(math.exp(5.0) + VOCABULARY - 1) - x for x in (5.0, 0.0))
    for ids, known in (([3, 4, 5, 6], 0), ([4, 4, 5, 3], 1), ([3, 3, 3, 6], 2)):
        expected = (known * sure + (3 - known) * unsure) / 3
        assert nll(model, [Window("d", 0, ids, False)])["nll"][0] == pytest.approx(expected, abs=1e-6)


def test_the_lean_path_never_makes_all_logits():
    model = small_model("gemma2")
    nll(model, WINDOWS)  # with its check
    model.lm_head.register_forward_hook(lambda *_: pytest.fail("logits were made"))
    nll(model, WINDOWS)
    importance(model.requires_grad_(False), WINDOWS[:1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_lean_path_and_the_own_one_agree(architecture, dtype, monkeypatch):
    monkeypatch.setattr(likelihood, "_CHUNK", 10)  # of 67 words
    model = small_model(architecture, dtype)
    lean = nll(model, WINDOWS)["nll"]
    assert likelihood._plain[model]
    monkeypatch.setitem(likelihood._plain, model, False)
    noise = {torch.float64: 1e-9, torch.bfloat16: 2e-2}[dtype]
    assert nll(model, WINDOWS)["nll"].tolist() == pytest.approx(lean.tolist(), abs=noise)


@pytest.mark.parametrize(
    ("model_type", "settings"), [("granite", {"logits_scaling": 3.0}), ("cohere", {"logit_scale": 0.3})]
)
def test_logits_that_are_scaled_on_the_way_are_the_models_own(model_type, settings):
    model = other_model(model_type, **settings)
    expected = [slow_nll(model, w.input_ids) for w in WINDOWS]
    assert nll(model, WINDOWS)["nll"].tolist() == pytest.approx(expected, abs=1e-5)
    head = [(1, 2)]
    (row,) = head_scan(model, WINDOWS[:1], head).itertuples()
    assert row.full_nll == pytest.approx(expected[0], abs=1e-5)
    with intervene(model, head_mask=without(model, *head)):
        assert row.nll == pytest.approx(slow_nll(model, WINDOWS[0].input_ids), abs=1e-5)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.v_proj.weight", "lm_head.weight"])
@pytest.mark.parametrize(
    "measure",
    [
        nll,
        lambda m, w: nll(m, w, torch.ones(LAYERS, HEADS)),
        importance,
        head_scan,
        lambda m, w: retention_curve(m, w, Order("o", tuple(EVERY)), [0.5]),
    ],
    ids=["nll", "masked nll", "importance", "head_scan", "retention_curve"],
)
def test_nan_is_one_sentence(name, measure):
    model = small_model("llama").requires_grad_(False)
    model.get_parameter(name).fill_(float("nan"))
    with pytest.raises(GeomlibError, match="NaN or infinite") as error:
        measure(model, WINDOWS[:1])
    assert one_sentence(error)


@pytest.mark.parametrize("measure", ["nll", "importance", "scan", "retention"])
def test_dropout_never_runs(measure):
    """A model in training mode is measured as in eval mode, and stays in training mode."""
    model = small_model("gpt2", attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3).requires_grad_(False)
    measures = {
        "nll": nll,
        "importance": importance,
        "scan": lambda m, w: head_scan(m, w, [(0, 1), (2, 3)]),
        "retention": lambda m, w: retention_curve(m, w, Order("o", tuple(EVERY)), [0.5]),
    }
    expected = measures[measure](model, WINDOWS[:1])
    fresh = small_model("gpt2", attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3).requires_grad_(False).train()
    pd.testing.assert_frame_equal(measures[measure](fresh, WINDOWS[:1]), expected, rtol=1e-4, atol=1e-5)
    assert fresh.training and fresh.transformer.drop.training


# --- what removing a head is ------------------------------------------------------------------------------------------


def test_a_mask_is_a_projection_with_zeroed_columns(architecture):
    model = small_model(architecture)
    rng = random.Random(0)
    for heads in ([(0, 0)], [(1, 3)], [(2, h) for h in range(HEADS)], rng.sample(heads_of(model), 5)):
        small = zeroed(architecture, model, *heads)
        with torch.no_grad(), intervene(model, head_mask=without(model, *heads)):
            torch.testing.assert_close(model(text()).logits, small(text()).logits, atol=1e-5, rtol=1e-5)
        expected = [slow_nll(small, w.input_ids) for w in WINDOWS]
        assert nll(model, WINDOWS, without(model, *heads))["nll"].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("group", range(KV_HEADS))
def test_head_h_uses_kv_head_h_over_group(group):
    """Without the values of a KV head, just the heads h with h // (H / K) equal to it add nothing."""
    model = small_model("llama")
    mute = copy.deepcopy(model)
    dim = mute.model.layers[1].self_attn.v_proj.weight.shape[0] // KV_HEADS
    mute.model.layers[1].self_attn.v_proj.weight.data[group * dim : (group + 1) * dim] = 0
    heads = [(1, h) for h in range(HEADS) if h // (HEADS // KV_HEADS) == group]
    assert nll(model, WINDOWS, without(model, *heads))["nll"].tolist() == pytest.approx(
        nll(mute, WINDOWS)["nll"], abs=1e-6
    )
    scan = head_scan(mute, WINDOWS[:1], [(1, h) for h in range(HEADS)])
    changed = (scan["nll"] - scan["full_nll"]).abs() > 1e-4
    assert changed.tolist() == [(1, h) not in heads for h in range(HEADS)]


def test_heads_summed_and_the_bias_once_are_the_attention_output(architecture):
    model = small_model(architecture)
    for layer in range(model.config.get_text_config().num_hidden_layers):
        module = projection(architecture, model, layer)
        attention = model.get_submodule(ARCHITECTURES[architecture].projection.format(layer).rpartition(".")[0])
        kept = {}
        hooks = [
            module.register_forward_pre_hook(lambda m, args, kept=kept: kept.update(z=args[0])),
            attention.register_forward_hook(lambda m, args, out, kept=kept: kept.update(out=out)),
        ]
        with torch.no_grad():
            model(text())
            columns = head_columns(module, HEADS)
        for hook in hooks:
            hook.remove()
        out = kept["out"][0] if isinstance(kept["out"], tuple) else kept["out"]
        dim = kept["z"].shape[-1] // HEADS
        assert columns.shape == (HEADS, dim, out.shape[-1])
        total = sum(kept["z"][..., h * dim : (h + 1) * dim] @ columns[h] for h in range(HEADS))
        total = total if module.bias is None else total + module.bias
        torch.testing.assert_close(total, out, atol=1e-5, rtol=1e-5)


def test_columns_of_packed_weights_are_what_the_projection_does():
    class Packed(torch.nn.Linear):
        def __init__(self, weight, bias):
            super().__init__(*weight.shape[::-1])
            self.weight = torch.nn.Parameter(weight, requires_grad=False)
            self.bias = torch.nn.Parameter(bias, requires_grad=False)

        def forward(self, x):
            return x @ (self.weight.float() * 0.25).T + self.bias

    weight = torch.randint(-8, 8, (6, HEADS * 2), dtype=torch.int8)
    columns = head_columns(Packed(weight, torch.randn(6)), HEADS)
    for h, i, o in itertools.product(range(HEADS), range(2), range(6)):
        assert columns[h, i, o] == pytest.approx(0.25 * int(weight[o, h * 2 + i]), abs=1e-5)


# --- importance -------------------------------------------------------------------------------------------------------


def slow_importance(name: str, model, ids: list[int]) -> dict:
    """(layer, head) -> magnitude, contribution, gradient, the last by a factor of one's own on each head of each query."""
    layers = model.config.get_text_config().num_hidden_layers
    factors, entered, hooks = {}, {}, []
    for layer in range(layers):
        factors[layer] = torch.ones(len(ids), HEADS, dtype=torch.float64, requires_grad=True)

        def scale(module, args, layer=layer):
            z = args[0]
            entered[layer] = z.detach()[0].unflatten(-1, (HEADS, -1))
            return (z * factors[layer].repeat_interleave(z.shape[-1] // HEADS, dim=-1).to(z), *args[1:])

        hooks.append(projection(name, model, layer).register_forward_pre_hook(scale))
    logits = model(torch.tensor([ids])).logits[0]
    loss = -sum(torch.log_softmax(logits[t - 1].double(), -1)[ids[t]] for t in range(1, len(ids)))
    slopes = torch.autograd.grad(loss, list(factors.values()))
    for hook in hooks:
        hook.remove()
    found = {}
    for layer, head in heads_of(model):
        module = projection(name, model, layer)
        weight = (module.weight.T if isinstance(module, Conv1D) else module.weight).detach()
        dim = weight.shape[1] // HEADS
        mine = weight[:, head * dim : (head + 1) * dim]
        sizes = [float((mine @ entered[layer][t, head]).norm()) for t in range(1, len(ids))]
        found[layer, head] = (
            math.sqrt(sum(x * x for x in mine.flatten().tolist())),
            statistics.fmean(sizes),
            statistics.fmean(abs(s) for s in slopes[layer][:, head].tolist()),
        )
    return found


def test_importance_is_that_of_slow_loops(architecture):
    model = small_model(architecture, torch.float64).requires_grad_(False)
    found = importance(model, WINDOWS)
    assert {c: str(t) for c, t in found.dtypes.items() if c != "document"} == {
        c: t for c, (t, _) in IMPORTANCE_SCHEMA.items() if c != "document"
    }
    assert len(found) == 2 * len(heads_of(model))
    assert found["gradient"].gt(0).all()
    for w in WINDOWS:
        expected = slow_importance(architecture, model, w.input_ids)
        for row in found[found["document"] == w.document].itertuples():
            values = (row.magnitude, row.contribution, row.gradient)
            assert values == pytest.approx(expected[row.layer, row.head], rel=1e-4), (row.layer, row.head)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_gradient_is_that_of_finite_differences(name):
    """Of one query at a time: heads of the queries before it do not change."""
    model = small_model(name, torch.float64).requires_grad_(False)
    ids, step, (layer, head) = WINDOWS[0].input_ids[:7], 1e-5, (1, 2)
    slopes = []
    for query in range(len(ids)):
        losses = []
        for factor in (1 + step, 1 - step):

            def scale(module, args, query=query, factor=factor):
                z = args[0].clone().unflatten(-1, (HEADS, -1))
                z[0, query, head] *= factor
                return (z.flatten(-2),)

            hook = projection(name, model, layer).register_forward_pre_hook(scale)
            losses.append(slow_nll(model, ids) * (len(ids) - 1))
            hook.remove()
        slopes.append((losses[0] - losses[1]) / (2 * step))
    found = importance(model, [Window("d", 0, ids, False)]).set_index(["layer", "head"])["gradient"]
    assert found[layer, head] == pytest.approx(statistics.fmean(map(abs, slopes)), rel=1e-4)


@pytest.mark.parametrize("wanted", [True, False])
def test_importance_leaves_the_model_as_it_was(wanted):
    model = small_model("llama").requires_grad_(wanted)
    before, logits = state_of(model), model(text()).logits
    importance(model, WINDOWS[:1])
    assert state_of(model) == before
    assert torch.equal(model(text()).logits, logits)


def test_importance_in_bfloat16_is_near_that_in_float32():
    exact, rough = (
        importance(small_model("llama", t).requires_grad_(False), WINDOWS) for t in (torch.float32, torch.bfloat16)
    )
    for column in ("magnitude", "contribution", "gradient"):
        assert rough[column].tolist() == pytest.approx(exact[column].tolist(), rel=0.3, abs=0.01)
        assert np.corrcoef(rough[column], exact[column])[0, 1] > 0.99


# --- the single-head scan ---------------------------------------------------------------------------------------------


def test_the_scan_is_the_nll_under_intervene_of_each_head(architecture):
    model = small_model(architecture)
    before = state_of(model)
    logits = model(text()).logits
    scan = head_scan(model, WINDOWS)
    assert resume.resumes(model) == (architecture != "gemma4")
    assert [(d, (la, h)) for d, la, h in zip(scan["document"], scan["layer"], scan["head"], strict=True)] == [
        (w.document, h) for w in WINDOWS for h in heads_of(model)
    ]
    assert {c: str(t) for c, t in scan.dtypes.items() if c != "document"} == {
        c: t for c, (t, _) in SCAN_SCHEMA.items() if c != "document"
    }
    full = nll(model, WINDOWS).set_index("document")["nll"]
    assert scan["full_nll"].tolist() == pytest.approx(full[scan["document"]].tolist(), abs=1e-6)
    assert scan["targets"].eq(LENGTH - 1).all()
    for head in heads_of(model):
        with intervene(model, head_mask=without(model, head)):
            expected = [slow_nll(model, w.input_ids) for w in WINDOWS]
        found = scan[(scan["layer"] == head[0]) & (scan["head"] == head[1])]["nll"].tolist()
        assert found == pytest.approx(expected, abs=1e-5), head
        assert abs(found[0] - full.iloc[0]) > 1e-5  # the head matters
    assert state_of(model) == before
    assert torch.equal(model(text()).logits, logits)


def test_a_scan_in_bfloat16_resumes_too():
    for name in ("llama", "gpt2", "gemma2"):
        model = small_model(name, torch.bfloat16)
        scan = head_scan(model, WINDOWS[:1])
        assert resume.resumes(model)
        expected = [nll(model, WINDOWS[:1], without(model, h))["nll"][0] for h in EVERY]
        assert scan["nll"].tolist() == pytest.approx(expected, abs=0.03)


def test_whole_passes_give_the_same_scan(monkeypatch):
    resumed, whole = small_model("gpt2"), small_model("gpt2")
    monkeypatch.setitem(resume._resumable, whole, False)
    pd.testing.assert_frame_equal(head_scan(resumed, WINDOWS), head_scan(whole, WINDOWS), atol=1e-5)


def test_a_layer_that_hands_something_on_the_side_is_not_resumed():
    model, side = small_model("llama"), []
    model.model.layers[1].mlp.register_forward_hook(lambda m, args, out: side.append(out))
    model.model.layers[2].mlp.register_forward_hook(lambda m, args, out: out + (side.pop() if side else 0))
    scan = head_scan(model, WINDOWS[:1])
    assert not resume.resumes(model)
    expected = [nll(model, WINDOWS[:1], without(model, h))["nll"][0] for h in EVERY]
    assert scan["nll"].tolist() == pytest.approx(expected, abs=1e-6)


def test_what_lies_before_the_layer_runs_once_a_window():
    model = small_model("llama")
    head_scan(model, WINDOWS[:1], [(0, 0)])
    calls = dict.fromkeys(range(LAYERS), 0)
    for layer in calls:
        model.model.layers[layer].mlp.register_forward_hook(
            lambda *_, layer=layer: calls.__setitem__(layer, calls[layer] + 1)
        )
    head_scan(model, WINDOWS[:1], [(1, h) for h in range(HEADS)])
    assert calls[1] - calls[0] == calls[2] - calls[0] == HEADS


def test_some_heads_of_a_scan():
    model = small_model("llama")
    part = head_scan(model, WINDOWS, np.array([[2, 1], [0, 3]]))
    assert part[["layer", "head"]].to_numpy().tolist() == [[0, 3], [2, 1]] * 2
    whole = head_scan(model, WINDOWS).merge(part[["document", "layer", "head"]])
    pd.testing.assert_frame_equal(whole, part)


@pytest.mark.parametrize("heads", [[(3, 0)], [(0, 4)], [(-1, 0)], [(0, -1)], [(0, 0), (9, 9)], []])
def test_heads_that_are_not_the_models_are_refused(heads):
    with pytest.raises(GeomlibError, match=r"12 query heads, from \(0, 0\) to \(2, 3\)") as error:
        head_scan(small_model("llama"), WINDOWS, heads)
    assert one_sentence(error)


class Stop(Exception):
    pass


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon", "gemma4"])
@pytest.mark.parametrize("when", [1, 4])
def test_the_model_is_whole_after_a_scan_that_broke_off(name, when):
    """At the end of a pass, with the layers before answered from the record."""
    model = small_model(name)
    logits, before = model(text()).logits, state_of(model)
    head_scan(model, WINDOWS[:1], [(0, 0)])
    passes = itertools.count()

    def stop(*_):
        if next(passes) == when:
            raise Stop

    hook = model.base_model.register_forward_hook(stop)
    with pytest.raises(Stop):
        head_scan(model, WINDOWS, [(2, 0), (2, 1), (2, 2)])
    hook.remove()
    assert state_of(model) == before
    assert torch.equal(model(text()).logits, logits)


def test_forwards_that_a_model_came_with_stay():
    model = small_model("llama")
    layer = model.model.layers[0]
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs)
    mine = layer.forward
    head_scan(model, WINDOWS[:1], [(1, 0)])
    assert layer.forward is mine


def test_progress_sums_to_one():
    model = small_model("llama").requires_grad_(False)
    for measure in (importance, head_scan, lambda m, w, progress: retention_curve(m, w, ORDER, progress=progress)):
        shares = []
        measure(model, WINDOWS, progress=shares.append)
        assert sum(shares) == pytest.approx(1)


def test_the_scan_of_a_real_model(real):
    model, ids = real
    heads = [(0, 8), (29, 2)]
    one = [Window("d", 0, ids[0].tolist(), True)]
    scan = head_scan(model, one, heads)
    assert resume.resumes(model.hf)
    with torch.no_grad():
        logits = torch.log_softmax(model.hf(ids).logits[0], -1)
        assert scan["full_nll"][0] == pytest.approx(-float(logits[:-1].gather(1, ids[0, 1:, None]).mean()), abs=1e-9)
        for i, head in enumerate(heads):
            mask = torch.ones(model.layers, model.query_heads)
            mask[head] = 0
            with intervene(model, head_mask=mask):
                logits = torch.log_softmax(model.hf(ids).logits[0], -1)
            assert scan["nll"][i] == pytest.approx(-float(logits[:-1].gather(1, ids[0, 1:, None]).mean()), abs=1e-7)


# --- damage of single heads -------------------------------------------------------------------------------------------


def scan_table(nlls: dict, full: dict, targets: dict) -> pd.DataFrame:
    """(layer, head) -> document -> NLL."""
    rows = [(d, *h, x, full[d], targets[d]) for h, each in nlls.items() for d, x in each.items()]
    table = pd.DataFrame(rows, columns=list(SCAN_SCHEMA))
    return table.astype({c: t for c, (t, _) in SCAN_SCHEMA.items() if t != "string"})


def test_damage_and_modified_z_score_by_hand():
    """Damages 0.1 to 0.5, and one of 3: median 0.35, absolute deviations 0.25, 0.15, 0.05, 0.05, 0.15, 2.65, MAD 0.15."""
    planted = [0.1, 0.2, 0.3, 0.4, 0.5, 3.0]
    scan = scan_table({(0, i): {"a": 2 * (1 + x)} for i, x in enumerate(planted)}, {"a": 2.0}, {"a": 7})
    found = damages(scan.sample(frac=1, random_state=0))
    assert list(found) == ["layer", "head", "damage", "z", "critical"]
    assert found["head"].tolist() == [5, 4, 3, 2, 1, 0]
    assert found["damage"].tolist() == pytest.approx(planted[::-1])
    expected = [0.6745 * x / 0.15 for x in (2.65, 0.15, 0.05, -0.05, -0.15, -0.25)]
    assert found["z"].tolist() == pytest.approx(expected)
    assert found["critical"].tolist() == [True] + [False] * 5


def test_an_outlier_begins_above_three_and_a_half():
    for z, critical in ((3.49, True), (3.47, False)):  # in units in which MAD is 1 the border is 3.5 / 0.6745 = 5.189
        off = {3.49: 5.2, 3.47: 5.18}[z]
        values = [-1, -1, -1, 0, 1, 1, off]
        scan = scan_table({(0, i): {"a": 10 + x} for i, x in enumerate(values)}, {"a": 10.0}, {"a": 5})
        assert damages(scan)["critical"].tolist() == [critical] + [False] * 6


def test_a_good_head_to_lose_is_never_critical():
    scan = scan_table({(0, i): {"a": 2 + x} for i, x in enumerate([-1.9, 0.01, 0.02, 0.03, 0.0])}, {"a": 2.0}, {"a": 5})
    assert not damages(scan)["critical"].any()


def test_a_spread_of_zero():
    scan = scan_table({(0, i): {"a": 2 + x} for i, x in enumerate([0, 0, 0, 0.5, -0.5])}, {"a": 2.0}, {"a": 5})
    found = damages(scan).set_index("head")
    assert found["z"].tolist() == [math.inf, 0, 0, 0, 0]
    assert found["critical"].to_dict() == {3: True, 0: False, 1: False, 2: False, 4: False}


def test_documents_weigh_by_their_targets():
    nlls = {(0, 0): {"a": 3.0, "b": 4.0}, (0, 1): {"a": 2.5, "b": 1.0}}
    found = damages(scan_table(nlls, {"a": 2.0, "b": 1.0}, {"a": 10, "b": 30})).set_index("head")["damage"]
    assert found[0] == pytest.approx((30 + 120) / (20 + 30) - 1)
    assert found[1] == pytest.approx((25 + 30) / (20 + 30) - 1)


# --- orders -----------------------------------------------------------------------------------------------------------

ORDER = Order("planted", tuple(random.Random(3).sample(EVERY, len(EVERY))), ("seen",))


def test_what_stays_is_the_ceiling_exactly():
    for count in range(1, 301):
        order = Order("o", tuple((0, h) for h in range(count)))
        for i in range(21):
            kept = math.ceil(Fraction(i, 20) * count)
            assert order.removed(i / 20) == order.heads[: count - kept], (count, i)
            assert order.removed(round(0.05 * i, 2)) == order.heads[: count - kept]


def test_whole_groups_go():
    for groups, group in itertools.product(range(1, 40), (2, 3, 9)):
        order = Order("o", tuple((0, h) for h in range(groups * group)), group=group)
        for i in range(21):
            kept = math.ceil(Fraction(i, 20) * groups)
            assert len(order.removed(i / 20)) == (groups - kept) * group


def test_at_each_retention_more_heads_go():
    order = Order("o", tuple((0, h) for h in random.Random(0).sample(range(40), 40)))
    for a, b in itertools.pairwise((1.0, *RETENTIONS, 0.0)):
        assert set(order.removed(a)) < set(order.removed(b))
    assert ORDER.removed(1) == () and set(ORDER.removed(0)) == set(EVERY)


def test_the_mask_is_zero_where_a_head_goes():
    for retention in (1.0, 0.9, 0.5, 0.1, 0.0):
        mask = ORDER.mask(retention)
        assert mask.shape == (LAYERS, HEADS)
        gone = ORDER.heads[: 12 - math.ceil(Fraction(str(retention)) * 12)]
        for head in EVERY:
            assert mask[head] == (0 if head in gone else 1)


@pytest.mark.parametrize("retention", [-0.1, 1.01, 90, float("nan"), float("inf")])
def test_a_retention_out_of_range_is_refused(retention):
    for call in (ORDER.removed, ORDER.mask):
        with pytest.raises(GeomlibError, match="give a share from 0 to 1") as error:
            call(retention)
        assert one_sentence(error)


def test_equal_scores_go_by_layer_and_head():
    scores = pd.DataFrame([(1, 0, 2.0), (0, 1, 2.0), (0, 0, 3.0), (1, 1, 1.0)], columns=["layer", "head", "x"])
    assert by_score("x", scores, "x").heads == ((1, 1), (0, 1), (1, 0), (0, 0))
    assert by_score("x", scores, "x", ascending=False).heads == ((0, 0), (0, 1), (1, 0), (1, 1))


def votes_table(seed: int = 0, documents=("a", "b")) -> pd.DataFrame:
    rng = random.Random(seed)
    rows = []
    for d, (layer, head) in itertools.product(documents, EVERY):
        for start, queries in ((0, 9), (10, 10)):
            counts = [rng.randrange(queries // 2), rng.randrange(queries // 2)]
            counts.append(queries - sum(counts))
            rng.shuffle(counts)
            values = dict.fromkeys(taxonomy.SIGNATURES, 0.0) | {"entropy": rng.random()}
            votes = dict(zip(taxonomy.VOTES, (c / queries for c in counts), strict=True))
            rows.append({"document": d, "layer": layer, "head": head, "query_from": start, "query_to": start + 10,
                         "queries": queries} | votes | values)  # fmt: skip
    return pd.DataFrame(rows)


def importance_table(seed: int = 0, documents=("a", "b")) -> pd.DataFrame:
    rng = random.Random(seed)
    rows = [(d, *h, rng.random(), rng.random(), rng.random()) for d in documents for h in EVERY]
    return pd.DataFrame(rows, columns=list(IMPORTANCE_SCHEMA))


VOTES, IMPORTANCE = votes_table(), importance_table()
PLANTED_SCAN = scan_table(
    {h: {"a": 2 + x, "b": 2 + x} for h, x in zip(EVERY, random.Random(9).sample(range(99), 12), strict=True)},
    {"a": 2.0, "b": 2.0}, {"a": 5, "b": 5},
)  # fmt: skip


def mean_of(table: pd.DataFrame, head: tuple[int, int], column: str, weights: str | None = None) -> float:
    rows = table[(table["layer"] == head[0]) & (table["head"] == head[1])]
    w = rows[weights] if weights else [1] * len(rows)
    return sum(x * k for x, k in zip(rows[column], w, strict=True)) / sum(w)


def regime_of(head: tuple[int, int]) -> str:
    current, sink, other = (round(mean_of(VOTES, head, v, "queries") * 38, 6) for v in taxonomy.VOTES)
    if other >= max(current, sink):
        return "reset"
    return "mixer" if sink >= current else "retriever"


def test_every_order_has_its_name_and_all_heads():
    orders = all_orders(VOTES, IMPORTANCE, PLANTED_SCAN)
    six = ["-".join(p) for p in itertools.permutations(["retriever", "mixer", "reset"])]
    assert sorted(sparsify.REGIME_ORDERS) == sorted(six)
    single = ["magnitude", "contribution", "gradient", "entropy", "entropy-reversed", "damage"]
    assert sorted(orders) == sorted([f"random {i}" for i in range(5)] + single + six)
    for name, order in orders.items():
        assert order.name == name and order.group == 1
        assert sorted(order.heads) == EVERY
        assert order.documents == (() if name.startswith("random") else ("a", "b"))
    assert set(orders) - set(all_orders(VOTES, IMPORTANCE, seeds=2)) == {"damage", "random 2", "random 3", "random 4"}


def test_single_metrics_remove_the_smallest_first():
    orders = all_orders(VOTES, IMPORTANCE, PLANTED_SCAN)
    for column in ("magnitude", "contribution", "gradient"):
        assert list(orders[column].heads) == sorted(EVERY, key=lambda h, c=column: mean_of(IMPORTANCE, h, c))
    assert list(orders["damage"].heads) == sorted(EVERY, key=lambda h: mean_of(PLANTED_SCAN, h, "nll"))


def test_entropy_removes_the_most_diffuse_first_and_reversed_the_most_focused():
    orders = all_orders(VOTES, IMPORTANCE)
    diffuse = sorted(EVERY, key=lambda h: -mean_of(VOTES, h, "entropy", "queries"))
    assert list(orders["entropy"].heads) == diffuse
    assert list(orders["entropy-reversed"].heads) == diffuse[::-1]


def test_regime_orders_go_regime_by_regime_and_inside_by_contribution():
    orders = all_orders(VOTES, IMPORTANCE)
    assert {regime_of(h) for h in EVERY} == {"retriever", "mixer", "reset"}
    for sequence in itertools.permutations(["retriever", "mixer", "reset"]):
        ranked = sorted(
            EVERY, key=lambda h, s=sequence: (s.index(regime_of(h)), mean_of(IMPORTANCE, h, "contribution"))
        )
        assert list(orders["-".join(sequence)].heads) == ranked


def test_random_orders_differ_and_are_seeded():
    first, again = (all_orders(VOTES, IMPORTANCE.sample(frac=1, random_state=i)) for i in range(2))
    names = [f"random {i}" for i in range(5)]
    assert len({first[n].heads for n in names}) == 5
    assert all(first[n].heads == again[n].heads for n in names)
    assert random_order(IMPORTANCE[IMPORTANCE["document"] == "a"], 3).heads == first["random 3"].heads


def test_guarded_heads_go_last():
    critical = [(2, 1), (0, 0), np.array([1, 3])]
    found = guarded(ORDER, critical)
    kept = {(2, 1), (0, 0), (1, 3)}
    assert list(found.heads) == [h for h in ORDER.heads if h not in kept] + [h for h in ORDER.heads if h in kept]
    assert found.name == "planted, guarded" and found.documents == ORDER.documents
    assert not kept & set(found.removed(0.25))
    with pytest.raises(GeomlibError, match="guard it before grouping"):
        guarded(grouped(ORDER, 2), critical)


def test_the_layers_of_an_order_stay_and_the_heads_are_random():
    found = [layers_of(ORDER, seed) for seed in range(4)]
    for order in found:
        assert [layer for layer, _ in order.heads] == [layer for layer, _ in ORDER.heads]
        assert sorted(order.heads) == EVERY and order.documents == ORDER.documents
    assert len({o.heads for o in found} | {ORDER.heads}) == 5 and len({o.name for o in found}) == 4
    assert layers_of(ORDER, 2) == found[2]
    with pytest.raises(GeomlibError, match="before grouping"):
        layers_of(grouped(ORDER, 2), 0)


@pytest.mark.parametrize("group", [1, 2, 4])
def test_groups_go_by_the_mean_place_of_their_heads(group):
    found = grouped(ORDER, group)
    units = [(layer, unit) for layer in range(LAYERS) for unit in range(HEADS // group)]
    members = {(la, u): [(la, h) for h in range(HEADS) if h // group == u] for la, u in units}
    place = {u: Fraction(sum(ORDER.heads.index(h) for h in members[u]), group) for u in units}
    assert list(found.heads) == [h for u in sorted(units, key=lambda u: (place[u], u)) for h in members[u]]
    assert (found.name, found.group, found.documents) == ("planted, KV groups", group, ("seen",))
    for retention in RETENTIONS:
        gone = set(found.removed(retention))
        assert all(gone.issuperset(m) or gone.isdisjoint(m) for m in members.values())


def test_groups_that_do_not_divide_the_heads_are_refused():
    with pytest.raises(GeomlibError, match="do not divide into groups of 3"):
        grouped(ORDER, 3)


# --- curves -----------------------------------------------------------------------------------------------------------


def test_a_curve_is_the_nll_under_its_masks(architecture):
    model = small_model(architecture)
    every = heads_of(model)
    order = Order("shuffled", tuple(random.Random(1).sample(every, len(every))))
    orders = [order, grouped(order, 2)]
    found = retention_curve(model, WINDOWS, orders, [0.5, 0.9, 0.1])
    assert {c: str(t) for c, t in found.dtypes.items() if c not in ("document", "order")} == {
        c: t for c, (t, _) in RETENTION_SCHEMA.items() if t != "string"
    }
    rows = set(zip(found["document"], found["order"], found["retention"], strict=True))
    assert rows == set(itertools.product(["document 0", "document 1"], [o.name for o in orders], [1.0, 0.9, 0.5, 0.1]))
    assert len(found) == len(rows)
    full = {w.document: slow_nll(model, w.input_ids) for w in WINDOWS}
    for row in found.itertuples():
        order = next(o for o in orders if o.name == row.order)
        units = len(every) // order.group
        heads = math.ceil(Fraction(str(row.retention)) * units) * order.group
        gone = order.heads[: len(every) - heads]
        (w,) = (w for w in WINDOWS if w.document == row.document)
        with intervene(model, head_mask=without(model, *gone)):
            expected = slow_nll(model, w.input_ids)
        assert row.nll == pytest.approx(expected, abs=1e-5)
        assert row.full_nll == pytest.approx(full[row.document], abs=1e-5)
        assert (row.heads, row.targets) == (heads, LENGTH - 1)
    whole = found[found["retention"] == 1]
    assert (whole["nll"] == whole["full_nll"]).all() and (whole["heads"] == len(every)).all()


def test_the_whole_model_is_in_every_curve_once():
    model = small_model("llama")
    for asked in ([], [1], [1.0, 0.5, 0.5]):
        found = retention_curve(model, WINDOWS[:1], ORDER, asked)
        assert found["retention"].tolist() == [1.0, 0.5][: 1 + (0.5 in asked)]


def test_an_order_is_not_judged_on_what_made_it():
    model = small_model("llama")
    order = Order("o", tuple(EVERY), ("document 1", "document 7"))
    with pytest.raises(GeomlibError, match="o was made from document 1") as error:
        retention_curve(model, WINDOWS, [ORDER, order])
    assert one_sentence(error)
    assert len(retention_curve(model, WINDOWS, order, [0.5], in_sample=True)) == 4
    assert len(retention_curve(model, WINDOWS[:1], order, [0.5])) == 2


@pytest.mark.parametrize(
    "heads",
    [EVERY[:-1], [*EVERY, (3, 0)], [*EVERY[:-1], (2, 4)], [*EVERY[:-1], (0, 0)], [*EVERY, (0, 0)]],
    ids=["one missing", "one more", "another", "one twice", "one twice and all"],
)
def test_an_order_of_other_heads_is_refused(heads):
    with pytest.raises(GeomlibError, match="not one of this model's 12 query heads"):
        retention_curve(small_model("llama"), WINDOWS, Order("o", tuple(heads)))


def test_orders_of_one_name_and_none_are_refused():
    for orders in ([ORDER, ORDER], []):
        with pytest.raises(GeomlibError, match="each under a name of its own"):
            retention_curve(small_model("llama"), WINDOWS, orders)


def test_a_retention_of_two_is_refused_by_the_curve():
    with pytest.raises(GeomlibError, match="give a share from 0 to 1"):
        retention_curve(small_model("llama"), WINDOWS, ORDER, [2])


def curves(plan: dict, full=(2.0, 3.0, 1.0, 4.0), targets=(10, 10, 10, 10)) -> pd.DataFrame:
    """order -> retention -> damage, one number or one a document; the whole model added."""
    rows = []
    for order, points in plan.items():
        for retention, damage in {1.0: 0.0, **points}.items():
            each = damage if isinstance(damage, list) else [damage] * len(full)
            for i, (x, f, t) in enumerate(zip(each, full, targets, strict=True)):
                rows.append((f"d{i}", order, retention, round(12 * retention), f * (1 + x), f, t))
    table = pd.DataFrame(rows, columns=list(RETENTION_SCHEMA))
    return table.astype({c: t for c, (t, _) in RETENTION_SCHEMA.items() if t != "string"})


def test_the_best_order_has_the_least_mean_damage_between_the_ends():
    table = curves(
        {"a": {0.9: 0.1, 0.5: 0.2, 0.2: 9.0}, "b": {0.9: 0.2, 0.5: 0.2, 0.2: 0.1}, "c": {0.9: 0, 0.5: 0, 0.2: 0}}
    )
    assert best(table, ["a", "b"], (0.5, 0.9)) == "a"
    assert best(table, ["a", "b"], (0.5, 1.0)) == "a"
    assert best(table, ["a", "b"], (0.1, 0.4)) == "b"
    assert best(table, ["a", "b"], (0.0, 1.0)) == "b"
    assert best(table, ["a", "b", "c"], (0.1, 0.4)) == "c"
    assert best(table, ["a", "b"], (0.6, 0.8)) == "b"  # nothing there: over all
    with pytest.raises(GeomlibError, match="none of the orders d, e: give some that were measured") as error:
        best(table, ["d", "e"], (0.1, 0.9))
    assert one_sentence(error)


def test_the_best_order_weighs_documents_by_their_targets():
    table = curves({"a": {0.5: [0.5, 0.0]}, "b": {0.5: [0.0, 0.4]}}, full=(2.0, 2.0), targets=(10, 90))
    assert stats.damage_curves(table).query("retention < 1")["damage"].tolist() == pytest.approx([0.05, 0.36])
    assert best(table, ["a", "b"], (0.5, 0.9)) == "a"
    assert best(table.assign(targets=10), ["a", "b"], (0.5, 0.9)) == "b"


@pytest.mark.parametrize("kind", ["scan", "retention"])
def test_rows_measured_once_more(kind):
    model = small_model("llama")
    orders = [ORDER, grouped(ORDER, 2)]
    table = head_scan(model, WINDOWS) if kind == "scan" else retention_curve(model, WINDOWS, orders)
    given = {} if kind == "scan" else {"orders": orders}
    found = recomputed(model, WINDOWS, table, 7, **given)
    assert len(found) == 7 and found.index.is_unique
    pd.testing.assert_frame_equal(found[list(table)], table.loc[found.index])
    assert found["difference"].abs().max() < 1e-6
    pd.testing.assert_frame_equal(recomputed(model, WINDOWS, table, 7, **given), found)
    assert list(recomputed(model, WINDOWS, table, 7, seed=1, **given).index) != list(found.index)
    wrong = recomputed(model, WINDOWS, table.assign(nll=table["nll"] + 0.5), 5, **given)
    assert wrong["difference"].tolist() == pytest.approx([-0.5] * 5, abs=1e-6)
    assert wrong["again"].tolist() == pytest.approx((wrong["nll"] - 0.5).tolist(), abs=1e-6)
    assert set(recomputed(model, WINDOWS[1:], table, 6, **given)["document"]) == {"document 1"}


# --- damage over documents --------------------------------------------------------------------------------------------


def test_damage_and_perplexity_of_a_planted_table():
    table = curves({"a": {0.5: [0.1, 0.2, 0.3, 0.4], 0.2: 0.7}}, targets=(10, 20, 30, 40))
    found = stats.damage_curves(table).set_index("retention")
    full, mine = 20 + 60 + 30 + 160, 20 * 1.1 + 60 * 1.2 + 30 * 1.3 + 160 * 1.4
    assert found.loc[0.5, "damage"] == pytest.approx(mine / full - 1)
    assert found.loc[0.5, "perplexity"] == pytest.approx(math.exp(mine / 100))
    assert found.loc[1.0, "perplexity"] == pytest.approx(math.exp(full / 100))
    assert found.loc[0.2, ["damage", "low", "high"]].tolist() == pytest.approx([0.7] * 3)
    assert found.loc[1.0, ["damage", "low", "high"]].tolist() == pytest.approx([0] * 3, abs=1e-12)
    assert found["heads"].to_dict() == {0.2: 2, 0.5: 6, 1.0: 12}
    assert found["documents"].eq(4).all()


def test_the_interval_of_two_documents_is_what_either_alone_gives():
    """Of both draws the same one: a chance of a quarter each."""
    found = stats.damage_curves(curves({"a": {0.5: [0.1, 0.4]}}, full=(2.0, 6.0), targets=(10, 5))).set_index(
        "retention"
    )
    assert found.loc[0.5, ["damage", "low", "high"]].tolist() == pytest.approx([14 / 50, 0.1, 0.4])


def test_one_document_has_no_interval():
    table = curves({"a": {0.5: [0.1]}, "b": {0.5: [0.3]}}, full=(2.0,), targets=(10,))
    assert stats.damage_curves(table)[["low", "high"]].isna().all(axis=None)
    (gap,) = stats.damage_difference(table, "b", "a").itertuples()
    assert gap.mean == pytest.approx(0.2) and math.isnan(gap.low) and math.isnan(gap.high)


def test_random_orders_count_as_their_mean():
    plan = {
        "random 0": 0.1,
        "random 1": 0.5,
        "random 2": 0.6,
        "layers of damage 0": 2.0,
        "layers of damage 11": 1.0,
        "damage": 9.0,
    }
    found = stats.damage_curves(curves({name: {0.5: x} for name, x in plan.items()})).query("retention < 1")
    assert dict(zip(found["order"], found["damage"], strict=True)) == pytest.approx(
        {"random": 0.4, "layers of damage": 1.5, "damage": 9.0}
    )


def test_a_constant_difference_has_an_interval_of_no_width():
    uneven = [0.1, 0.9, 0.4, 0.2]
    table = curves(
        {"a": {0.5: uneven}, "b": {0.5: [x + 0.25 for x in uneven]}, "random 0": {0.5: 0.0}, "random 1": {0.5: uneven}}
    )
    (gap,) = stats.damage_difference(table, "b", "a").itertuples()
    assert (gap.retention, gap.documents) == (0.5, 4)
    assert (gap.mean, gap.low, gap.high) == pytest.approx((0.25, 0.25, 0.25))
    apart = stats.damage_curves(table).query("order == 'a' and retention < 1").iloc[0]
    assert apart["high"] - apart["low"] > 0.1
    (gap,) = stats.damage_difference(table, "a", "random").itertuples()
    mean = sum(f * x / 2 for f, x in zip((2, 3, 1, 4), uneven, strict=True)) / 10
    assert gap.mean == pytest.approx(mean) and gap.low < mean < gap.high


def test_a_table_with_holes_is_refused():
    table = curves({"a": {0.5: 0.1}, "b": {0.5: 0.2}})
    hole = table[~((table["document"] == "d1") & (table["order"] == "a") & (table["retention"] == 0.5))]
    for measure in (stats.damage_curves, lambda t: stats.damage_difference(t, "a", "b")):
        with pytest.raises(GeomlibError, match="not every document has every order and retention"):
            measure(hole)
    with pytest.raises(GeomlibError, match="the curves have no order c: known are a, b"):
        stats.damage_difference(table, "a", "c")


def test_a_random_order_that_a_document_lacks_is_a_hole_too():
    table = curves({"random 0": {0.5: 0.1}, "random 1": {0.5: 0.5}})
    hole = table[~((table["document"] == "d1") & (table["order"] == "random 1"))]
    with pytest.raises(GeomlibError, match="not every document has every order and retention"):
        stats.damage_curves(hole)


# --- claims -----------------------------------------------------------------------------------------------------------

MODERATE, AGGRESSIVE = (0.9, 0.8, 0.7, 0.6, 0.5), (0.4, 0.3, 0.2, 0.1)
UNSURE = [0.5, -0.4, 0.1, -0.6]  # a mean below zero, an interval across it


def flat(damage, retentions=MODERATE) -> dict:
    return dict.fromkeys(retentions, damage)


@pytest.mark.parametrize(
    ("mine", "baselines", "verdict"),
    [
        (flat(0.1), {"random 0": flat(0.5), "magnitude": flat(0.2), "entropy": flat(0.3)}, "holds"),
        (flat(0.1), {"random 0": flat(0.5), "magnitude": flat(0.05), "entropy": flat(0.3)}, "holds in part"),
        (flat(0.1) | {0.7: 0.25}, {"random 0": flat(0.5), "magnitude": flat(0.2), "entropy": flat(0.3)}, "holds in part"),
        (flat(0.1) | {0.9: 0.6, 0.8: 0.6}, {"random 0": flat(0.5), "magnitude": flat(0.2), "entropy": flat(0.3)}, "holds in part"),
        (flat(0.1) | {0.9: 0.6, 0.8: 0.6, 0.5: 0.5}, {"random 0": flat(0.5), "magnitude": flat(1), "entropy": flat(1)},
         "does not hold"),
        (flat(UNSURE), {"random 0": flat(0.0), "magnitude": flat(1), "entropy": flat(1)}, "does not hold"),
        (flat(0.1) | {0.95: 9.0, 0.4: 9.0}, {"random 0": flat(0.5, (0.95, *MODERATE, 0.4)), "magnitude": flat(0.2, (0.95, *MODERATE, 0.4)),
                                 "entropy": flat(0.3, (0.95, *MODERATE, 0.4))}, "holds"),
    ],
    ids=["all", "not magnitude", "not everywhere", "most of random", "a part of random", "unsure", "other retentions"],
)  # fmt: skip
def test_c11(mine, baselines, verdict):
    found = claims.c11(
        curves({"mixer-reset-retriever": mine, **baselines}, full=(2.0, 2.0, 2.0, 2.0)), "mixer-reset-retriever"
    )
    assert (found.claim, found.verdict) == ("C11", verdict)
    assert found.measured and "95 %" in found.rule


def test_c11_takes_the_entropy_order_it_is_given():
    table = curves(
        {
            "o": flat(0.1),
            "random 0": flat(0.5),
            "magnitude": flat(0.2),
            "entropy": flat(0.3),
            "entropy-reversed": flat(0.0),
        }
    )
    assert claims.c11(table, "o").verdict == "holds"
    assert claims.c11(table, "o", "entropy-reversed").verdict == "holds in part"


def test_c11_at_half_of_the_retentions_is_not_enough():
    mine = {0.9: 0.1, 0.8: 0.1, 0.7: 0.6, 0.6: 0.6}
    others = {n: flat(0.5, tuple(mine)) for n in ("random 0", "magnitude", "entropy")}
    assert claims.c11(curves({"o": mine, **others}), "o").verdict == "does not hold"


METRICS = ("magnitude", "entropy", "entropy-reversed", "contribution", "gradient")


@pytest.mark.parametrize(
    ("mine", "one", "verdict"),
    [
        (flat(0.5, AGGRESSIVE), flat(0.2, AGGRESSIVE), "holds"),  # four are beaten and one is not
        (flat(0.5, AGGRESSIVE), flat(0.5, AGGRESSIVE), "holds"),
        (flat(0.5, AGGRESSIVE), flat(0.2, AGGRESSIVE) | {0.1: 0.9}, "holds in part"),
        (flat(0.5, AGGRESSIVE), flat(0.9, AGGRESSIVE), "does not hold"),
        (flat(UNSURE, AGGRESSIVE), flat(0.0, AGGRESSIVE), "holds"),
        (flat(0.5, AGGRESSIVE) | {0.5: 0.0}, flat(0.2, (0.5, *AGGRESSIVE)), "holds"),
    ],
)
def test_c12(mine, one, verdict):
    for name in METRICS[::2]:
        others = {m: flat(1.0, tuple(one)) for m in METRICS} | {name: one}
        found = claims.c12(curves({"o": mine, **others, "damage": flat(0.0, tuple(one))}, full=(2.0,) * 4), "o")
        assert (found.claim, found.verdict) == ("C12", verdict)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[t["document"] == "d0"],
        lambda t: t[t["retention"] == 1],
    ],
    ids=["one document", "the whole model alone"],
)
def test_c11_and_c12_are_not_testable(change):
    points = flat(0.1, MODERATE + AGGRESSIVE)
    table = change(curves({n: points for n in ("o", "random 0", *METRICS)}))
    for found in (claims.c11(table, "o"), claims.c12(table, "o")):
        assert found.verdict == "not testable here" and found.measured


def test_c11_and_c12_are_testable_on_their_own_retentions_only():
    names = ("o", "random 0", *METRICS)
    moderate, aggressive = (curves({n: flat(0.1, r) for n in names}) for r in (MODERATE, AGGRESSIVE))
    assert claims.c11(aggressive, "o").verdict == claims.c12(moderate, "o").verdict == "not testable here"
    assert claims.c11(moderate, "o").verdict == "does not hold"
    assert claims.c12(aggressive, "o").verdict == "holds"
    assert claims.c12(aggressive[~aggressive["order"].isin(METRICS)], "o").verdict == "not testable here"


def planted_scan(damage: dict, documents: int = 4) -> pd.DataFrame:
    """Of heads (0, 0) to (2, 9), 0.01 or a little more unless told; one number or one a document."""
    names = [f"d{i}" for i in range(documents)]
    nlls = {}
    for i, head in enumerate(itertools.product(range(3), range(10))):
        each = damage.get(head, 0.01 + 0.0001 * i)
        each = each if isinstance(each, list) else [each] * documents
        nlls[head] = {d: 2 * (1 + x) for d, x in zip(names, each, strict=True)}
    return scan_table(nlls, dict.fromkeys(names, 2.0), dict.fromkeys(names, 10))


REGIMES = pd.DataFrame(
    [(la, h, ("Retriever", "Mixer", "Reset")[la]) for la in range(3) for h in range(10)],
    columns=["layer", "head", "regime"],
)


ONE_REGIME = REGIMES.assign(regime="Reset")


@pytest.mark.parametrize(
    ("damage", "regimes", "verdict"),
    [
        ({(0, 3): 5.0}, ONE_REGIME, "holds"),  # one of 30 heads: its regime has about a thirtieth of its damage
        ({(0, 3): 5.0}, REGIMES, "holds in part"),  # one of ten heads: its regime has a little more than a tenth
        ({(0, 3): 5.0, (1, 1): 5.0}, REGIMES.replace("Reset", "Retriever"), "holds in part"),
        ({(0, 3): 0.5, (1, 1): 5.0}, ONE_REGIME, "holds in part"),
        ({(0, 3): 0.09}, ONE_REGIME, "holds in part"),
        ({(0, 3): [0.9, 0.9, 0.0, -0.2]}, ONE_REGIME, "holds in part"),
        ({}, REGIMES, "does not hold"),
        ({(0, 3): -5.0}, REGIMES, "does not hold"),
    ],
    ids=[
        "hidden",
        "not hidden",
        "one hidden of two",
        "the larger hides the smaller",
        "small",
        "unsure",
        "none",
        "better without",
    ],
)
def test_c13(damage, regimes, verdict):
    found = claims.c13(planted_scan(damage), regimes)
    assert (found.claim, found.verdict) == ("C13", verdict)


def test_c13_needs_two_documents():
    assert claims.c13(planted_scan({(0, 3): 5.0}, documents=1), REGIMES).verdict == "not testable here"


def test_c13_says_what_was_measured():
    found = claims.c13(planted_scan({(1, 4): 0.5, (2, 0): 0.08}), REGIMES)
    assert found.measured.startswith(
        "2 outliers of 30 heads; 1 break the model, 0 of them hidden; worst: layer 1, head 4 (Mixer)"
    )


def test_numbers_of_c11_c12_and_c13():
    """The gap at the lowest retention, to random and to the best single metric; the damage of the worst head."""
    mine = {0.9: 0.3, 0.5: [0.1, 0.2, 0.3, 0.4]}
    table = curves(
        {"o": mine} | {n: flat(0.5, (0.9, 0.5)) for n in ("random 0", "magnitude", "entropy")}, full=(2.0,) * 4
    )
    found = claims.c11(table, "o")
    assert found.quantity == "damage less that of random, 50% kept" and found.value == pytest.approx(-0.25)
    assert -0.4 < found.low < -0.25 < found.high < -0.1
    assert f"{found.value:+.2f} [{found.low:+.2f}, {found.high:+.2f}] at 50%" in found.measured
    others = {m: flat(1.0, AGGRESSIVE) for m in METRICS} | {"gradient": flat(0.2, AGGRESSIVE)}
    found = claims.c12(curves({"o": flat(0.5, AGGRESSIVE), **others}, full=(2.0,) * 4), "o")
    assert found.quantity == f"damage less that of gradient, {min(AGGRESSIVE):.0%} kept"
    assert (found.value, found.low, found.high) == pytest.approx((0.3, 0.3, 0.3))
    found = claims.c13(planted_scan({(1, 4): [0.4, 0.6, 0.5, 0.5]}), REGIMES)
    assert found.quantity == "damage of the worst head alone" and found.value == pytest.approx(0.5)
    assert 0.4 <= found.low < 0.5 < found.high <= 0.6
    none = [claims.c11(table[table["document"] == "d0"], "o"), claims.c13(planted_scan({}, documents=1), REGIMES)]
    assert all((v.value, v.low, v.high, v.quantity) == (None, None, None, "") for v in none)


def test_critical_heads_with_their_regimes():
    found = claims.critical(planted_scan({(1, 4): [0.4, 0.6, 0.5, 0.5]}), REGIMES)
    assert len(found) == 30 and found["critical"].tolist() == [True] + [False] * 29
    first = found.iloc[0]
    assert (first["layer"], first["head"], first["regime"]) == (1, 4, "Mixer")
    assert first["damage"] == pytest.approx(0.5)
    assert 0.4 <= first["low"] < 0.5 < first["high"] <= 0.6
    rest = sum(0.01 + 0.0001 * i for i in range(10, 20) if i != 14)
    assert first["regime_mean"] == pytest.approx((0.5 + rest) / 10)
    others = found.iloc[1:]
    assert (others["high"] - others["low"]).abs().max() < 1e-9


# --- studies ----------------------------------------------------------------------------------------------------------

STUDY_HEADS = [(la, h) for la in range(2) for h in range(4)]
MINE = [Order("mine", tuple(STUDY_HEADS)), Order("yours", tuple(STUDY_HEADS[::-1]))]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("sparsify")
    save_model(place / "model")
    save_texts(place / "texts.jsonl", 12)
    return place


@pytest.fixture(scope="module")
def loaded(place):
    return load_model(str(place / "model"), device="cpu")


@pytest.fixture
def fields(place) -> dict:
    return {"model": str(place / "model"), "text": str(place / "texts.jsonl"), "windows": 3, "length": 24,
            "sizes": (1, 2), "bins": 3}  # fmt: skip


@pytest.fixture
def measured(monkeypatch) -> list:
    """(analysis, document), as it is measured."""
    calls = []
    for name in ("importance", "head_scan", "retention_curve"):
        real = getattr(sparsify, name)
        monkeypatch.setattr(
            sparsify, name, lambda m, w, *a, n=name, r=real, **k: calls.append((n, w[0].document)) or r(m, w, *a, **k)
        )
    return calls


def test_a_study_gives_the_tables_of_its_windows(fields, loaded, tmp_path):
    study = Study(**fields)
    taken = study.take(loaded)
    assert len(taken) == 3
    tables = study.run(
        tmp_path, loaded, analyses=["importance", "scan", "retention", "taxonomy"], orders=MINE, retentions=[0.5]
    )
    expected = {
        "importance": importance(loaded, taken),
        "scan": head_scan(loaded, taken),
        "retention": retention_curve(loaded, taken, MINE, [0.5]),
    }
    for name, table in expected.items():
        pd.testing.assert_frame_equal(tables[name], table, check_dtype=False)
        pd.testing.assert_frame_equal(load_table(tmp_path, name), tables[name])
    orders = all_orders(tables["taxonomy"], tables["importance"], tables["scan"])
    assert all(sorted(o.heads) == STUDY_HEADS for o in orders.values())
    with pytest.raises(GeomlibError, match="was made from"):
        study.run(tmp_path, loaded, analyses="retention", orders=[orders["damage"]])
    later = Study(**fields | {"skip": 3})
    assert len(
        later.run(tmp_path / "later", loaded, analyses="retention", orders=list(orders.values()), retentions=[0.5])
    )


def test_skip_leaves_out_the_first_windows(fields, loaded):
    whole = Study(**fields | {"windows": 6}).take(loaded)
    assert Study(**fields).take(loaded) == whole[:3]
    assert Study(**fields | {"skip": 3}).take(loaded) == whole[3:]
    assert Study(**fields | {"skip": 1, "windows": 2}).take(loaded) == whole[1:3]
    assert len({w.document for w in whole}) == 6


def test_skip_is_part_of_the_study(fields, loaded, tmp_path):
    Study(**fields).run(tmp_path, loaded, analyses="importance")
    with pytest.raises(GeomlibError, match="it differs in skip"):
        Study(**fields | {"skip": 3}).run(tmp_path, loaded, analyses="importance")
    with pytest.raises(GeomlibError, match="skip = -1"):
        Study(**fields | {"skip": -1})


def test_a_text_that_skip_leaves_nothing_of(fields, loaded, tmp_path):
    (tmp_path / "short.txt").write_text("w1 " * 40)
    study = Study(**fields | {"text": str(tmp_path / "short.txt"), "skip": 4})
    with pytest.raises(GeomlibError, match=r"skip = 4 leaves none") as error:
        study.run(tmp_path / "out", loaded, analyses="scan")
    assert one_sentence(error)


def test_a_killed_scan_goes_on_where_it_was(fields, loaded, tmp_path, measured, monkeypatch):
    whole = Study(**fields).run(tmp_path / "whole", loaded, analyses="scan")
    documents = whole["document"].drop_duplicates().tolist()
    scan = sparsify.head_scan

    def die(model, windows, *args, **kwargs):
        if windows[0].document == documents[2]:
            raise KeyboardInterrupt
        return scan(model, windows, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sparsify, "head_scan", die)
        Study(**fields).run(tmp_path / "out", loaded, analyses="scan")
    assert len(list((tmp_path / "out" / "scan").glob("*.parquet"))) == 2
    measured.clear()
    pd.testing.assert_frame_equal(Study(**fields).run(tmp_path / "out", loaded, analyses="scan"), whole)
    assert measured == [("head_scan", documents[2])]


def test_importance_is_kept_when_the_scan_after_it_is_killed(fields, loaded, tmp_path, measured, monkeypatch):
    def die(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sparsify, "head_scan", die)
        Study(**fields).run(tmp_path, loaded, analyses=["importance", "scan"])
    measured.clear()
    Study(**fields).run(tmp_path, loaded, analyses=["importance", "scan"])
    assert [n for n, _ in measured].count("importance") == 2 and [n for n, _ in measured].count("head_scan") == 3


@pytest.mark.parametrize(
    ("orders", "retentions"),
    [
        (MINE[:1], [0.5]),
        ([Order("mine", tuple(STUDY_HEADS[::-1])), MINE[1]], [0.5]),
        (MINE, [0.5, 0.75]),
        ([Order("another", MINE[0].heads), MINE[1]], [0.5]),
    ],
    ids=["fewer", "other heads", "another retention", "another name"],
)
def test_other_curves_are_measured_anew(fields, loaded, tmp_path, measured, orders, retentions):
    first = Study(**fields).run(tmp_path, loaded, analyses="retention", orders=MINE, retentions=[0.5])
    measured.clear()
    again = Study(**fields).run(tmp_path, loaded, analyses="retention", orders=MINE, retentions=[0.5, 0.5])
    pd.testing.assert_frame_equal(again, first)
    assert measured == []
    found = Study(**fields).run(tmp_path, loaded, analyses="retention", orders=orders, retentions=retentions)
    assert len(measured) == 3
    taken = Study(**fields).take(loaded)
    pd.testing.assert_frame_equal(found, retention_curve(loaded, taken, orders, retentions), check_dtype=False)


def test_curves_of_two_sets_of_orders_in_one_folder_are_not_mixed(fields, loaded, tmp_path, measured):
    asked = [{"analyses": "retention", "orders": orders, "retentions": [0.5]} for orders in (MINE, MINE[:1])]
    tables = [Study(**fields).run(tmp_path, loaded, **a) for a in asked]
    assert [sorted(t["order"].unique()) for t in tables] == [["mine", "yours"], ["mine"]]
    with pytest.raises(GeomlibError) as error:
        load_table(tmp_path, "retention")
    assert one_sentence(error)
    measured.clear()
    for a, table in zip(asked, tables, strict=True):
        pd.testing.assert_frame_equal(Study(**fields).run(tmp_path, loaded, **a), table)
    assert measured == []


def test_killed_curves_go_on_where_they_were(fields, loaded, tmp_path, measured, monkeypatch):
    asked = {"analyses": "retention", "orders": MINE, "retentions": [0.5]}
    whole = Study(**fields).run(tmp_path / "whole", loaded, **asked)
    documents = whole["document"].drop_duplicates().tolist()
    curve = sparsify.retention_curve

    def die(model, windows, *args, **kwargs):
        if windows[0].document == documents[1]:
            raise KeyboardInterrupt
        return curve(model, windows, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sparsify, "retention_curve", die)
        Study(**fields).run(tmp_path / "out", loaded, **asked)
    measured.clear()
    pd.testing.assert_frame_equal(Study(**fields).run(tmp_path / "out", loaded, **asked), whole)
    assert measured == [("retention_curve", d) for d in documents[1:]]


@pytest.fixture
def published(fields, loaded, tmp_path, monkeypatch):
    """The folder book/studies/ours of the working directory, written by code of another version."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "book" / "studies" / "ours"
    with monkeypatch.context() as patch:
        patch.setattr(S, "_code", lambda modules: "0123456789abcdef")
        Study(**fields).run(out, loaded, analyses=["scan", "retention"], orders=MINE, retentions=[0.5])
    return out


def test_published_tables_are_taken(fields, loaded, tmp_path, published, measured):
    table = pd.concat(map(pd.read_parquet, sorted((published / "scan").glob("*"))), ignore_index=True)
    found = Study(**fields).run(tmp_path / "out", loaded, analyses="scan", published=True)
    pd.testing.assert_frame_equal(found, table)
    both = Study(**fields).run(
        tmp_path / "out", loaded, analyses=["scan", "retention"], orders=MINE, retentions=[0.5], published=True
    )
    pd.testing.assert_frame_equal(both["scan"], table)
    assert both["retention"]["order"].unique().tolist() == ["mine", "yours"]
    assert measured == [] and not (tmp_path / "out").exists()


@pytest.mark.parametrize("changed", [{"seed": 1}, {"skip": 1}, {"windows": 2}, {"length": 20}])
def test_published_tables_of_another_study_are_not_taken(fields, loaded, tmp_path, published, measured, changed):
    Study(**fields | changed).run(tmp_path / "out", loaded, analyses="scan", published=True)
    assert len(measured) == (fields | changed)["windows"]


def test_published_tables_are_not_taken_unasked(fields, loaded, tmp_path, published, measured):
    Study(**fields).run(tmp_path / "out", loaded, analyses="scan")
    assert len(measured) == 3


def test_published_curves_of_other_orders_are_not_taken(fields, loaded, tmp_path, published, measured):
    for i, (orders, retentions) in enumerate([(MINE[:1], [0.5]), (MINE, [0.75])]):
        asked = {"analyses": "retention", "orders": orders, "retentions": retentions, "published": True}
        Study(**fields).run(tmp_path / f"out {i}", loaded, **asked)
        assert len(measured) == 3 * (i + 1)


def test_published_tables_of_another_model_or_text_are_not_taken(fields, place, tmp_path, published, measured):
    save_model(tmp_path / "other", lambda hf: hf.lm_head.weight.data.mul_(1.01))
    other = load_model(str(tmp_path / "other"), device="cpu")
    other.name = fields["model"]
    Study(**fields).run(tmp_path / "out", other, analyses="scan", published=True)
    assert len(measured) == 3
    save_texts(tmp_path / "texts.jsonl", 11)
    fields["text"] = str(tmp_path / "texts.jsonl")
    Study(**fields).run(tmp_path / "out 2", load_model(fields["model"], device="cpu"), analyses="scan", published=True)
    assert len(measured) == 6


def test_published_tables_with_a_window_missing_are_not_taken(fields, loaded, tmp_path, published, measured):
    sorted((published / "scan").glob("*.parquet"))[1].unlink()
    Study(**fields).run(tmp_path / "out", loaded, analyses="scan", published=True)
    assert len(measured) == 3


def test_published_tables_whose_record_was_changed_are_not_taken(fields, loaded, tmp_path, published, measured):
    record = json.loads((published / "study.json").read_text())
    record["windows"][0]["sha256"] = "0" * 16
    (published / "study.json").write_text(json.dumps(record))
    Study(**fields).run(tmp_path / "out", loaded, analyses="scan", published=True)
    assert len(measured) == 3


def test_published_tables_come_into_the_folder_of_results(fields, loaded, tmp_path, published, measured, monkeypatch):
    """So that a run's folder is complete by itself; once, and only what was asked for."""
    monkeypatch.setenv("GEOMLIB_RESULTS", str(tmp_path / "tables"))
    record = json.loads((published / "study.json").read_text())
    found = Study(**fields).run(model=loaded, analyses="scan", published=True)
    (out,) = (tmp_path / "tables").iterdir()
    assert out.name == record["key"]
    assert (out / "study.json").read_bytes() == (published / "study.json").read_bytes()
    assert [p.name for p in out.iterdir() if p.is_dir()] == ["scan"]
    pd.testing.assert_frame_equal(load_table(out, "scan", any_code=True), found)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*.parquet")}
    asked = {"analyses": ["scan", "retention"], "orders": MINE, "retentions": [0.5], "published": True}
    Study(**fields).run(model=loaded, **asked)
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert len(list(out.glob("retention-*/*.parquet"))) == 3
    assert measured == []
