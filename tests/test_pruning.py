"""Models without some of their heads: the same logits as with these heads zeroed, in memory and from a folder."""

import copy
import itertools
import json
import math
import os
import random
import resource
import shutil

import pandas as pd
import pytest
import torch
from conftest import ARCHITECTURES, HEADS, LAYERS, randomize, small_model, text
from test_study import make_tokenizer, save_model, save_texts
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from geomlib import pruning, sparsify
from geomlib.attention import intervene, observe, self_check
from geomlib.corpora import Window
from geomlib.errors import GeomlibError
from geomlib.models import Model, load_model
from geomlib.pruning import RECORD, parameters, prune, save
from geomlib.study import Study

EVERY = list(itertools.product(range(LAYERS), range(HEADS)))
WHOLE_LAYER = [(1, h) for h in range(HEADS)]
REMOVED = {
    "one head": [(1, 2)],
    "a head of each group": [(0, 0), (0, 3)],
    "a group": [(0, 2), (0, 3)],
    "a layer": WHOLE_LAYER,
    "a layer, a group and a head": [*WHOLE_LAYER, (0, 0), (0, 1), (2, 3)],
    "all but one": [h for h in EVERY if h != (2, 1)],
}
RAGGED = REMOVED["a layer, a group and a head"]
NEVER_CUT = {"phi3", "olmo2", "falcon", "falcon_alibi", "falcon_new", "gemma4"}
LONG = text(2, 40, seed=5)  # longer than what `prune` tries itself


def ablated(model, heads, ids=LONG) -> torch.Tensor:
    config = model.config.get_text_config()
    mask = torch.ones(config.num_hidden_layers, HEADS)
    for head in heads:
        mask[head] = 0
    with torch.no_grad(), intervene(model, head_mask=mask):
        return model(ids).logits


@torch.no_grad()
def logits(model, ids=LONG) -> torch.Tensor:
    return model(ids).logits


def sizes(model) -> dict:
    return {n: tuple(p.shape) for n, p in model.named_parameters()}


def same_weights(a, b) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(x, second[n]) for n, x in first.items())


def as_model(hf, name: str = "small") -> Model:
    return Model(name, hf, make_tokenizer())


def saved(hf, heads, folder, **settings) -> Model:
    """The pruned model that was written to the folder."""
    small = prune(as_model(hf), heads, **settings)
    save(small, folder, {})
    return small


def one_sentence(error) -> bool:
    return "\n" not in str(error.value) and str(error.value).endswith(".")


# --- in memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", REMOVED.values(), ids=REMOVED)
def test_logits_are_those_of_the_model_with_the_heads_zeroed(architecture, heads):
    model = small_model(architecture, torch.float64)
    before = copy.deepcopy(model.state_dict())
    shapes, config = sizes(model), model.config.to_dict()
    small = prune(model, heads)
    torch.testing.assert_close(logits(small), ablated(model, heads), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits(small), logits(model), atol=1e-3)
    assert sizes(model) == shapes and model.config.to_dict() == config
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())
    assert not {p.data_ptr() for p in small.parameters()} & {p.data_ptr() for p in model.parameters()}


@pytest.mark.parametrize("heads", REMOVED.values(), ids=REMOVED)
def test_whole_groups_make_the_model_smaller(architecture, heads):
    model = small_model(architecture)
    group = HEADS // ARCHITECTURES[architecture].kv_heads
    small = prune(model, heads)
    record = getattr(small.config, RECORD)
    assert record["removed"] == [list(h) for h in sorted(heads)]
    expected = {}
    for layer in range(LAYERS):
        gone = [h for la, h in heads if la == layer]
        groups = [range(g, g + group) for g in range(0, HEADS, group)]
        left = [h for g in groups if not set(g) <= set(gone) for h in g]
        if len(left) < HEADS and architecture not in NEVER_CUT:
            expected[str(layer)] = left or [0]
    assert record["cut"] == expected
    assert (parameters(small) < parameters(model)) == bool(expected)
    if not expected:
        assert sizes(small) == sizes(model)
    for layer in range(LAYERS):
        place = ARCHITECTURES[architecture].projection.format(layer)
        axis = 0 if isinstance(model.get_submodule(place), Conv1D) else 1
        entering = [m.get_submodule(place).weight.shape[axis] for m in (model, small)]
        assert entering[1] * HEADS == entering[0] * len(expected.get(str(layer), range(HEADS)))


@pytest.mark.parametrize(
    ("name", "less"),
    [
        ("llama", 2 * 2 * 8 * 32 + 2 * 8 * 32),  # q and o of two heads, k and v of one, of dimension 8 in a width of 32
        ("gpt2", 2 * (4 * 8 * 32 + 3 * 8)),  # q, k, v and o of two heads, and three biases
        ("qwen2", 2 * 2 * 8 * 32 + 2 * 8 * 32 + 2 * 8 + 2 * 8),
    ],
)
def test_how_many_weights_a_group_has(name, less):
    model = small_model(name)
    assert parameters(model) - parameters(prune(model, REMOVED["a group"])) == less


def test_tied_weights_count_once():
    model = small_model("gemma")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert parameters(model) == sum(math.prod(s) for s in sizes(model).values())
    small = prune(model, RAGGED)
    assert small.lm_head.weight is small.model.embed_tokens.weight
    assert "lm_head.weight" not in sizes(small)


def test_zeroes_alone_keep_every_shape(architecture):
    model = small_model(architecture, torch.float64)
    small = prune(model, RAGGED, cut=False)
    assert sizes(small) == sizes(model) and getattr(small.config, RECORD)["cut"] == {}
    torch.testing.assert_close(logits(small), ablated(model, RAGGED), atol=1e-5, rtol=1e-5)


def test_random_sets_of_heads():
    rng = random.Random(0)
    for name in ("llama", "gpt2", "gpt_neox", "gpt_oss", "opt"):
        model = small_model(name, torch.float64)
        for _ in range(6):
            heads = rng.sample(EVERY, rng.randrange(1, 12))
            torch.testing.assert_close(logits(prune(model, heads)), ablated(model, heads), atol=1e-6, rtol=1e-6)


def test_all_heads_and_none():
    model = small_model("llama")
    torch.testing.assert_close(logits(prune(model, EVERY)), ablated(model, EVERY), atol=2e-5, rtol=1e-5)
    small = prune(model, [])
    assert torch.equal(logits(small), logits(model)) and getattr(small.config, RECORD) == {
        "removed": [],
        "cut": {},
        "projection": "o_proj",
    }


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize("heads", [RAGGED, REMOVED["all but one"]], ids=["ragged", "all but one"])
def test_a_cache_changes_nothing(architecture, heads):
    small = prune(small_model(architecture), heads)
    ids = LONG[:1, :23]
    with torch.no_grad():
        whole = small(ids).logits
        first = small(ids[:, :15], use_cache=True)
        steps, cache = [first.logits], first.past_key_values
        for t in range(15, 23):
            step = small(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
            steps, cache = [*steps, step.logits], step.past_key_values
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "gpt_neox", "gpt_oss", "phi3"])
def test_generation_with_a_cache_is_generation_without(name):
    small = prune(small_model(name), RAGGED)
    prompt = {"input_ids": LONG[:1, :9], "attention_mask": torch.ones(1, 9, dtype=torch.long)}
    found = [
        small.generate(**prompt, max_new_tokens=6, do_sample=False, use_cache=c, eos_token_id=None, pad_token_id=0)
        for c in (True, False)
    ]
    assert found[0].shape == (1, 15) and torch.equal(*found)


def test_half_precision():
    for name in ("llama", "gpt2"):
        model = small_model(name, torch.bfloat16)
        small = prune(model, RAGGED)
        assert small.dtype == torch.bfloat16 and parameters(small) < parameters(model)
        assert (logits(small) - ablated(model, RAGGED)).abs().max() < 0.2


def test_a_model_in_training_mode_is_cut_too():
    model = small_model("gpt2", attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3)
    expected = ablated(model, RAGGED)
    small = prune(model.train(), RAGGED)
    assert parameters(small) < parameters(model)
    torch.testing.assert_close(logits(small.eval()), expected, atol=2e-5, rtol=1e-5)


def test_a_geomlib_model_stays_one_and_says_so():
    model = as_model(small_model("llama"))
    model.note = "4-bit weights"
    small = prune(model, RAGGED)
    assert isinstance(small, Model) and small.tokenizer is model.tokenizer
    assert small.note == "4-bit weights; without 7 of 12 query heads"
    assert not getattr(model.hf.config, RECORD, None) and model.note == "4-bit weights"


def test_two_prunings_are_two_models():
    """Whatever tells models apart, the key of a study say, must tell these apart."""
    model = as_model(small_model("llama"))
    first, second = prune(model, [(0, 0)]), prune(model, [(0, 1)])
    assert not torch.equal(logits(first.hf), logits(second.hf))
    assert first.fingerprint != second.fingerprint


def test_studies_of_two_prunings_are_not_mixed(tmp_path):
    save_model(tmp_path / "model")
    save_texts(tmp_path / "texts.jsonl", 4)
    model = load_model(str(tmp_path / "model"), device="cpu")
    study = Study(model=model.name, text=str(tmp_path / "texts.jsonl"), windows=2, length=24, sizes=(1, 2), bins=3)
    tables = []
    for i, heads in enumerate(([(0, 0)], [(0, 1)])):
        small = prune(model, heads)
        alone = study.run(tmp_path / f"out {i}", small, analyses="sinks")
        try:
            tables.append((study.run(tmp_path / "both", small, analyses="sinks"), alone))
        except GeomlibError as e:  # another study
            assert i == 1 and "another study" in str(e)
    for found, alone in tables:
        pd.testing.assert_frame_equal(found, alone)


@pytest.mark.parametrize("heads", [[(LAYERS, 0)], [(0, HEADS)], [(-1, 0)], [(0, -1)], [(0, 0), (7, 7)]])
def test_heads_that_are_not_the_models_are_refused(heads):
    with pytest.raises(GeomlibError, match=r"give \(layer, query head\) below \(3, 4\)") as error:
        prune(small_model("llama"), heads)
    assert one_sentence(error)


def test_quantised_weights_are_refused():
    for mark in ({"is_quantized": True}, {"config": {"quantization_config": {"bits": 4}}}):
        model = small_model("llama")
        for name, value in mark.items():
            if name == "config":
                model.config.quantization_config = value["quantization_config"]
            else:
                model.is_quantized = value
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(GeomlibError, match="quantised weights cannot be pruned") as error:
            prune(model, [(0, 0)])
        assert one_sentence(error)
        assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())


@pytest.mark.parametrize("heads", [RAGGED, [(1, 2)]], ids=["ragged", "zeroed"])
def test_a_pruned_model_is_not_pruned_again(heads, tmp_path):
    small = saved(small_model("llama"), heads, tmp_path / "m")
    for model in (small, small.hf, load_model(str(tmp_path / "m"), device="cpu")):
        with pytest.raises(GeomlibError, match="pruned already") as error:
            prune(model, [(0, 1)])
        assert one_sentence(error)


@pytest.mark.parametrize(
    "measure",
    [
        lambda m, w: sparsify.importance(m, w),
        lambda m, w: sparsify.head_scan(m, w),
        lambda m, w: sparsify.nll(m, w, torch.eye(LAYERS, HEADS)),
    ],
    ids=["importance", "scan", "mask"],
)
def test_heads_of_a_ragged_model_are_refused_not_mistaken(measure):
    """Its layers have different numbers of heads: nothing may take the rest of a layer for all of its heads."""
    small = prune(small_model("llama").requires_grad_(False), RAGGED)
    with pytest.raises(GeomlibError) as error:
        measure(small, [Window("d", 0, LONG[0].tolist(), False)])
    assert one_sentence(error)


# --- the folder -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [RAGGED, [(1, 2)], REMOVED["all but one"]], ids=["ragged", "zeroed", "all but one"])
def test_saved_and_loaded_it_is_the_same_to_the_bit(architecture, heads, tmp_path):
    small = saved(small_model(architecture), heads, tmp_path / "m")
    again = load_model(str(tmp_path / "m"), device="cpu")
    assert type(again.hf) is type(small.hf)
    assert same_weights(again.hf, small.hf)
    assert torch.equal(logits(again.hf), logits(small.hf))
    assert getattr(again.hf.config, RECORD) == getattr(small.hf.config, RECORD)
    assert not again.hf.training and not any(p.requires_grad for p in again.hf.parameters())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("mixtral", {"num_local_experts": 4}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}),
        ("granite", {"logits_scaling": 3.0}),
        ("smollm3", {}),
    ],
)
def test_names_of_weights_that_differ_on_disk(model_type, settings, tmp_path):
    config = CONFIG_MAPPING[model_type](**ARCHITECTURES["llama"].settings, **settings)
    model = randomize(AutoModelForCausalLM.from_config(config).eval())
    small = saved(model, RAGGED, tmp_path / "m")
    assert parameters(small.hf) < parameters(model)
    again = load_model(str(tmp_path / "m"), device="cpu")
    assert same_weights(again.hf, small.hf) and torch.equal(logits(again.hf), logits(small.hf))


def test_plain_transformers_load_what_was_only_zeroed(architecture, tmp_path):
    for i, heads in enumerate([[(1, 2)], RAGGED]):
        small = saved(small_model(architecture), heads, tmp_path / f"{i}", cut=False)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / f"{i}", dtype=torch.float32)
        assert same_weights(again, small.hf) and torch.equal(logits(again), logits(small.hf))


def test_plain_transformers_refuse_ragged_ones(architecture, tmp_path):
    if architecture in NEVER_CUT:
        pytest.skip("never cut")
    saved(small_model(architecture), RAGGED, tmp_path / "m")
    with pytest.raises((RuntimeError, ValueError)):
        AutoModelForCausalLM.from_pretrained(tmp_path / "m")


def test_tied_embeddings_are_tied_again(tmp_path):
    for tied in (True, False):
        model = small_model("llama", tie_word_embeddings=tied)
        small = saved(model, RAGGED, tmp_path / str(tied))
        again = load_model(str(tmp_path / str(tied)), device="cpu").hf
        assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
        assert parameters(again) == parameters(small.hf) and torch.equal(logits(again), logits(small.hf))


@pytest.mark.parametrize("heads", [RAGGED, [(1, 2)]], ids=["ragged", "zeroed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(heads, dtype, tmp_path):
    small = saved(small_model("llama", dtype), heads, tmp_path / "m")
    for asked in (dtype, "auto"):
        again = load_model(str(tmp_path / "m"), device="cpu", dtype=asked)
        assert again.dtype == dtype and same_weights(again.hf, small.hf)
        assert torch.equal(logits(again.hf), logits(small.hf))
    wide = load_model(str(tmp_path / "m"), device="cpu")
    assert wide.dtype == torch.float32
    assert all(torch.equal(x, small.hf.state_dict()[n].float()) for n, x in wide.hf.state_dict().items())


@pytest.mark.parametrize("heads", [RAGGED, [(1, 2)]], ids=["ragged", "zeroed"])
def test_settings_of_generation_are_kept(heads, tmp_path):
    model = small_model("llama")
    model.generation_config.repetition_penalty = 1.7
    model.generation_config.eos_token_id = [2, 5]
    saved(model, heads, tmp_path / "m")
    again = load_model(str(tmp_path / "m"), device="cpu").hf.generation_config
    assert (again.repetition_penalty, again.eos_token_id) == (1.7, [2, 5])


def test_many_files_of_weights(tmp_path):
    small = prune(as_model(small_model("llama")), RAGGED)
    write = small.hf.save_pretrained
    small.hf.save_pretrained = lambda folder, **k: write(folder, max_shard_size="20KB", **k)
    save(small, tmp_path / "m", {})
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2
    assert same_weights(load_model(str(tmp_path / "m"), device="cpu").hf, small.hf)


def test_what_was_loaded_is_observed_right(tmp_path):
    model = small_model("llama")
    saved(model, RAGGED, tmp_path / "m")
    again = load_model(str(tmp_path / "m"), device="cpu")
    self_check(again)
    heads = {}
    with torch.no_grad(), observe(again, lambda b: heads.setdefault(b.layer, b)):
        again.hf(LONG[:1])
    assert {layer: len(b.weights) for layer, b in heads.items()} == {0: 2, 1: 1, 2: 4}
    windows = [Window("d", 0, LONG[0].tolist(), False)]
    mask = torch.ones(LAYERS, HEADS)
    for head in RAGGED:
        mask[head] = 0
    assert sparsify.nll(again, windows)["nll"][0] == pytest.approx(
        sparsify.nll(model, windows, mask)["nll"][0], abs=1e-5
    )


def test_the_record_lies_beside_the_weights(tmp_path):
    small = prune(as_model(small_model("llama")), RAGGED)
    record = {"order": "planted", "retention": 0.5}
    assert save(small, tmp_path / "a" / "b", record) == tmp_path / "a" / "b"
    assert json.loads((tmp_path / "a" / "b" / f"{RECORD}.json").read_text()) == record
    config = json.loads((tmp_path / "a" / "b" / "config.json").read_text())[RECORD]
    assert config == {
        "removed": [list(h) for h in sorted(RAGGED)],
        "cut": {"0": [2, 3], "1": [0]},
        "projection": "o_proj",
    }


def test_nothing_is_overwritten(tmp_path):
    small = prune(as_model(small_model("llama")), RAGGED)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        with pytest.raises(GeomlibError, match="nothing is overwritten") as error:
            save(small, tmp_path / name, {})
        assert one_sentence(error)
    assert (tmp_path / "full" / "notes.txt").read_text() == (tmp_path / "file").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "full", "notes.txt"]
    (tmp_path / "empty").mkdir()
    save(small, tmp_path / "empty", {})
    assert same_weights(load_model(str(tmp_path / "empty"), device="cpu").hf, small.hf)


@pytest.mark.parametrize("moment", ["weights", "tokenizer", "renaming"])
def test_a_save_that_fails_leaves_nothing(moment, tmp_path, monkeypatch):
    small = prune(as_model(small_model("llama")), RAGGED)

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    target = {
        "weights": (small.hf, "save_pretrained"),
        "tokenizer": (small.tokenizer, "save_pretrained"),
        "renaming": (os, "replace"),
    }
    with monkeypatch.context() as patch, pytest.raises(GeomlibError, match="No space left on device") as error:
        patch.setattr(*target[moment], fail)
        save(small, tmp_path / "m", {})
    assert one_sentence(error)
    assert list(tmp_path.iterdir()) == []
    save(small, tmp_path / "m", {})


def test_a_save_without_room_for_the_weights_leaves_nothing(tmp_path):
    """A limit on the size of files stands in for the disk's end."""
    small = prune(as_model(small_model("llama")), RAGGED)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(GeomlibError, match="cannot write to") as error:
            save(small, tmp_path / "m", {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert one_sentence(error)
    assert list(tmp_path.iterdir()) == []


def _other_weights(folder, other):
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")


def _cut_short(folder, other):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _renamed(folder, other):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_projection.weight"] = weights.pop("model.layers.0.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _bad_record(folder, other):
    config = json.loads((folder / "config.json").read_text())
    config[RECORD]["cut"] = {"0": [0, 1, 2, 9]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "damage",
    [_other_weights, _cut_short, _renamed, _bad_record, lambda folder, _: (folder / "model.safetensors").unlink()],
    ids=["other weights", "cut short", "a weight missing", "another record", "no weights"],
)
def test_a_damaged_folder_is_one_sentence(damage, tmp_path):
    saved(small_model("llama"), RAGGED, tmp_path / "m")
    saved(small_model("llama"), REMOVED["all but one"], tmp_path / "other")
    damage(tmp_path / "m", tmp_path / "other")
    with pytest.raises(GeomlibError) as error:
        load_model(str(tmp_path / "m"), device="cpu")
    assert one_sentence(error)


def test_a_device_map_is_honoured(tmp_path):
    small = saved(small_model("llama"), RAGGED, tmp_path / "m")
    again = load_model(str(tmp_path / "m"), device_map="cpu", dtype="float32")
    assert torch.equal(logits(again.hf), logits(small.hf))


@pytest.mark.parametrize("unit", ["head", "group"])
def test_an_export_is_judged_on_other_documents(unit, tmp_path, monkeypatch):
    monkeypatch.setenv("GEOMLIB_RESULTS", str(tmp_path / "results"))
    save_model(tmp_path / "model")
    save_texts(tmp_path / "texts.jsonl", 8)
    fields = {"model": str(tmp_path / "model"), "text": str(tmp_path / "texts.jsonl"), "windows": 2, "length": 24,
              "sizes": (1, 2), "bins": 3}  # fmt: skip
    calibration, judged = Study(**fields), Study(**fields, skip=2)
    lines = list(pruning.export(calibration, judged, "contribution", 0.5, tmp_path / "out", unit))
    record = json.loads((tmp_path / "out" / f"{RECORD}.json").read_text())
    assert not set(record["calibration"]["documents"]) & set(record["judged"]["documents"])
    model, small = (load_model(str(tmp_path / n), device="cpu") for n in ("model", "out"))
    windows = judged.take(model)
    assert record["nll"]["before"] == pytest.approx(sparsify.nll(model, windows)["nll"].mean(), abs=1e-6)
    assert record["nll"]["after"] == pytest.approx(sparsify.nll(small, windows)["nll"].mean(), abs=1e-6)
    assert "4 of 8 query heads removed (order contribution" in lines[0]
    gone = [tuple(h) for h in getattr(small.hf.config, RECORD)["removed"]]
    assert len(gone) == 4 and same_weights(small.hf, prune(model, gone).hf)
    assert (parameters(small.hf) < parameters(model.hf)) or unit == "head"


def test_a_real_model(real):
    model, ids = real
    heads = [(3, 0), (3, 1), (3, 2), (10, 4), *((20, h) for h in range(9))]
    small = prune(model, heads)
    assert getattr(small.hf.config, RECORD)["cut"] == {"3": [3, 4, 5, 6, 7, 8], "20": [0]}
    mask = torch.ones(model.layers, model.query_heads)
    for head in heads:
        mask[head] = 0
    with torch.no_grad(), intervene(model, head_mask=mask):
        expected = model.hf(ids).logits
    torch.testing.assert_close(logits(small.hf, ids), expected, atol=1e-8, rtol=1e-8)
    assert small.hf.lm_head.weight is small.hf.model.embed_tokens.weight
