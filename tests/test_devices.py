"""Models in pieces, in few bits, in half precision, and of families that nobody has met: the same numbers, or a sentence.

No GPU is needed: `two_devices` pretends two, and refuses what real ones refuse.
"""

import importlib.util
import json
import string
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from accelerate import dispatch_model
from conftest import small_model
from test_study import make_tokenizer, save_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from two_devices import FIRST, SECOND, operations, two_devices

from geomlib import attention, pruning, sparsify, theory
from geomlib import models as M
from geomlib.attention import final_rows, intervene, observe, self_check
from geomlib.corpora import Window
from geomlib.errors import GeomlibError
from geomlib.models import LOAD, Model, load_model
from geomlib.resume import head_columns
from geomlib.study import ANALYSES, Study
from geomlib.theory import BoundsTable

LENGTH = 14
# No token comes twice: equal values would tie, and rounding would decide.
IDS = 3 + torch.randperm(50, generator=torch.Generator().manual_seed(0))[None, :LENGTH]
WINDOW = Window("document", 0, IDS[0].tolist(), False)


@pytest.fixture(autouse=True)
def no_defaults(monkeypatch):
    monkeypatch.delenv(LOAD, raising=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with model/ and text.txt, in which no word comes twice."""
    folder = tmp_path_factory.mktemp("devices")
    save_model(folder / "model", num_hidden_layers=3)
    (folder / "text.txt").write_text(" ".join(f"w{i}" for i in range(LENGTH)))
    return folder


def study(folder, **fields) -> Study:
    fields = {"windows": 1, "length": LENGTH, "sizes": (1, 3), "bins": 2, "random_rankings": 1} | fields
    return Study(model=str(folder / "model"), text=str(folder / "text.txt"), **fields)


def tables(folder, out, model: Model, **fields) -> dict[str, pd.DataFrame]:
    """Every analysis that there is."""
    every = pd.DataFrame([(layer, head) for layer in range(3) for head in range(4)], columns=["layer", "head"])
    asked = {"orders": [sparsify.random_order(every, 0)], "retentions": (0.5,)}
    return study(folder, **fields).run(out, model, analyses=list(ANALYSES), **asked)


def furthest(ours: pd.DataFrame, theirs: pd.DataFrame) -> float:
    """The largest difference of two tables' numbers, if they have the same rows."""
    numbers = ours.select_dtypes("float64").columns
    names = [c for c in ours if c not in numbers]
    assert list(ours) == list(theirs) and len(ours)
    pd.testing.assert_frame_equal(ours[names], theirs[names])
    return float((ours[numbers] - theirs[numbers]).abs().max(axis=None))


# --- several devices --------------------------------------------------------------------------------------------------


def split(hf, first: int = 1):
    """Layers below `first` and the embeddings on one device, all the rest on the other, with accelerate's own hooks."""
    places, output = {}, hf.get_output_embeddings()
    tied = output.weight is hf.get_input_embeddings().weight
    for name, module in hf.named_modules():
        parts = name.split(".")
        layer = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if layer is not None:  # whole layers, as accelerate splits: a residual stays with its layer
            places[".".join(parts[: layer + 1])] = FIRST if int(parts[layer]) < first else SECOND
        elif any(module.named_parameters(recurse=False)) or any(module.named_buffers(recurse=False)):
            early = any(x in name for x in ("embed", "wte", "wpe", "rotary", "per_layer")) or (
                tied and module is output
            )
            places[name] = FIRST if early else SECOND
    return dispatch_model(hf, places, main_device=FIRST)


def test_the_pretended_devices_refuse_what_real_ones_refuse():
    with two_devices():
        a, b, c = torch.ones(2, 2, device=FIRST), torch.ones(2, 2).to(SECOND), torch.ones(2, 2)
        for x, y in ((a, b), (b, a), (a, c), (c, b)):
            with pytest.raises(RuntimeError, match="same device"):
                x @ y
            with pytest.raises(RuntimeError, match="same device"):
                x.add_(y)
            with pytest.raises(RuntimeError, match="same device"):
                torch.where(x > 0, x, y)
        with pytest.raises(RuntimeError):
            a.numpy()
        with pytest.raises(RuntimeError, match="same device"):
            c[torch.zeros(2, dtype=torch.int64, device=FIRST)]
        x = a.clone().requires_grad_()
        (x.to(SECOND) @ b).sum().backward()
        assert x.grad.device == torch.device(FIRST) and x.grad.tolist() == [[2, 2], [2, 2]]
        a[0][1] = 5  # a view is a view
        assert a.cpu().tolist() == [[1, 5], [1, 1]] and a.cpu().device.type == "cpu"
        assert torch.tensor([1, 2], device=SECOND).device == torch.device(SECOND)


@pytest.mark.parametrize(
    "fields",
    [{"queries": "all"}, {"queries": "last", "distances": ("euclidean", "cosine"), "rankings": ("contribution",)}],
    ids=["all", "last"],
)
def test_every_analysis_of_a_model_on_two_devices(folder, tmp_path, fields):
    model = load_model(str(folder / "model"), device="cpu")
    expected = tables(folder, tmp_path / "whole", model, **fields)
    model = load_model(str(folder / "model"), device="cpu", check=False)  # anew: nothing is known of it
    with two_devices():
        model.hf = split(model.hf)
        assert model.device == torch.device(FIRST)
        found = tables(folder, tmp_path / "split", model, **fields)
    assert min(operations[FIRST], operations[SECOND]) > 1000
    for name in ANALYSES:
        assert furthest(found[name], expected[name]) <= 1e-5, name


@pytest.mark.parametrize("name", ["gpt2", "falcon_alibi", "gpt_oss", "gemma4"])
def test_architectures_on_two_devices(name):
    """Masks per layer, biases, learned sinks, tied embeddings, and values of another layer on another device."""
    model = small_model(name).requires_grad_(False)
    config = model.config.get_text_config()
    config._experts_implementation = "eager"  # the grouped products ask what kind of device it is
    mask = torch.ones(config.num_hidden_layers, config.num_attention_heads)
    mask[0, 1] = mask[-1, 2] = 0

    def measured():
        table = BoundsTable(LENGTH, "last", (1, 2), 1, "key")
        with torch.no_grad(), observe(model, table):
            model(IDS.to(attention.input_device(model)))
        heads = [(0, 0), (config.num_hidden_layers - 1, 3)]
        return [
            table.table(), sparsify.importance(model, [WINDOW]),
            sparsify.head_scan(model, [WINDOW], heads), sparsify.nll(model, [WINDOW], head_mask=mask),
        ]  # fmt: skip

    expected = measured()
    model = small_model(name).requires_grad_(False)  # anew: nothing is known of it
    model.config.get_text_config()._experts_implementation = "eager"
    with two_devices():
        model = split(model)
        found = measured()
        rows = final_rows(model, WINDOW.input_ids)
    assert {str(b.weights.device) for b in rows.values()} == {FIRST, SECOND}
    for ours, theirs in zip(found, expected, strict=True):
        assert furthest(ours, theirs) <= 2e-5


@torch.no_grad()
def test_pruning_on_two_devices(folder):
    model = load_model(str(folder / "model"), device="cpu")
    heads = [(0, 0), (0, 1), (1, 2), (2, 2), (2, 3)]
    expected = pruning.prune(model, heads).hf(IDS).logits
    model = load_model(str(folder / "model"), device="cpu", check=False)
    with two_devices():
        model.hf = split(model.hf)
        small = pruning.prune(model, heads)
        assert small.hf.config.geomlib_pruned["cut"] == {"0": [2, 3], "2": [0, 1]}
        found = small.hf(IDS).logits
        assert {str(p.device) for p in small.hf.parameters()} == {FIRST, SECOND}
        profile = theory.mean_profile(model, IDS)
    assert float((found.cpu() - expected).abs().max()) <= 1e-5
    assert profile.device.type == "cpu"


OFFLOADED = {
    "model.embed_tokens": "disk", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk",
    "model.norm": "disk", "model.rotary_emb": "cpu", "lm_head": "disk",
}  # fmt: skip


def test_every_analysis_of_an_offloaded_model(folder, tmp_path):
    whole, model = (load_model(str(folder / "model"), device_map=m) for m in ("cpu", OFFLOADED))
    assert model.hf.lm_head.weight.device.type == model.hf.model.embed_tokens.weight.device.type == "meta"
    assert model.device.type == "cpu"
    expected, found = (tables(folder, tmp_path / n, m) for n, m in (("whole", whole), ("offloaded", model)))
    for name in ANALYSES:
        assert furthest(found[name], expected[name]) <= 1e-6, name
    with pytest.raises(GeomlibError, match="offloaded by the device_map: load the model whole"):
        pruning.prune(model, [(0, 0)])
    assert len(final_rows(model, WINDOW.input_ids)) == 3


def test_offloaded_to_memory_and_computed_on_another_device(folder):
    """What device_map="auto" makes of a model that is larger than the GPUs."""
    model = load_model(str(folder / "model"), device="cpu").hf
    expected = [sparsify.importance(model, [WINDOW]), sparsify.head_scan(model, [WINDOW], [(0, 0), (2, 3)])]
    model = load_model(str(folder / "model"), device="cpu", check=False).hf
    places = OFFLOADED | {"model.layers.0": FIRST, "model.layers.2": SECOND, "model.rotary_emb": FIRST}
    places = {k: "cpu" if v == "disk" else v for k, v in places.items()}
    with two_devices():
        model = dispatch_model(model, places, main_device=FIRST)
        assert model.lm_head.weight.device.type == "meta"
        found = [sparsify.importance(model, [WINDOW]), sparsify.head_scan(model, [WINDOW], [(0, 0), (2, 3)])]
    for ours, theirs in zip(found, expected, strict=True):
        assert furthest(ours, theirs) <= 1e-5


# --- half precision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_analysis_in_half_precision(folder, tmp_path, dtype):
    found, expected = (
        tables(folder, tmp_path / d, load_model(str(folder / "model"), device="cpu", dtype=d))
        for d in (dtype, "float32")
    )
    record = json.loads((tmp_path / dtype / "study.json").read_text())
    assert (record["model"]["dtype"], record["model"]["note"]) == (dtype, f"in {dtype}")
    noise = {"bfloat16": 0.1, "float16": 0.02}[dtype]
    for name in ANALYSES:
        assert np.isfinite(found[name].select_dtypes("float64")).all(axis=None)
    # Near ties fall differently query by query; means over heads do not move much.
    for name, column in (("taxonomy", "entropy"), ("taxonomy", "sink_mass"), ("separability", "f"), ("coherence", "mu_sd"),
                         ("importance", "contribution"), ("importance", "gradient"), ("scan", "nll")):  # fmt: skip
        ours, theirs = found[name][column].mean(), expected[name][column].mean()
        assert ours == pytest.approx(theirs, rel=noise, abs=noise / 10), (name, column)
        assert ours != theirs


@pytest.mark.slow
def test_the_default_model_in_bfloat16(tmp_path):
    fields = {"windows": 1, "length": 48, "queries": "last", "random_rankings": 1}
    names = ["separability", "bounds", "sinks", "taxonomy", "importance"]
    found, expected = (
        Study(**fields, dtype=d).run(tmp_path / d, load_model("smollm2-135m", device="cpu", dtype=d), analyses=names)
        for d in ("bfloat16", "float32")
    )
    note = json.loads((tmp_path / "bfloat16" / "study.json").read_text())["model"]["note"]
    assert note == "4-bit weights (Q4_1), dequantised; in bfloat16"
    for name, column in (("separability", "f"), ("taxonomy", "vote_sink"), ("importance", "contribution")):
        ours, theirs = found[name][column].mean(), expected[name][column].mean()
        assert ours == pytest.approx(theirs, rel=0.05), column


# --- few bits ---------------------------------------------------------------------------------------------------------

packed_weights = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


def test_few_bits_without_bitsandbytes(folder, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(M.importlib.util, "find_spec", lambda n, *a: None if n == "bitsandbytes" else real(n, *a))
    with pytest.raises(GeomlibError, match="in 8 bits needs bitsandbytes: pip install bitsandbytes"):
        load_model(str(folder / "model"), bits=8)
    with pytest.raises(GeomlibError, match="bits = 3 is not usable: give 8 or 4"):
        load_model(str(folder / "model"), bits=3)


def test_a_packed_folder_without_bitsandbytes(folder, monkeypatch, tmp_path):
    config = json.loads((folder / "model" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    real = importlib.util.find_spec
    monkeypatch.setattr(M.importlib.util, "find_spec", lambda n, *a: None if n == "bitsandbytes" else real(n, *a))
    with pytest.raises(GeomlibError, match="in 4 bits needs bitsandbytes"):
        load_model(str(tmp_path))
    with pytest.raises(GeomlibError, match="packed already: leave bits out"):
        load_model(str(tmp_path), bits=8)


@packed_weights
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("bits", "noise"), [(8, 0.02), (4, 0.2)])
def test_every_analysis_in_few_bits(folder, tmp_path, capfd, bits, noise, dtype):
    full = load_model(str(folder / "model"), device="cpu")
    model = load_model(str(folder / "model"), device="cpu", bits=bits, dtype=dtype)
    packed = model.hf.model.layers[1].self_attn.o_proj
    assert packed.weight.element_size() == 1 and model.hf.lm_head.weight.dtype == model.dtype
    assert model.note == f"{bits}-bit weights" + ("; in bfloat16" if dtype == "bfloat16" else "")
    assert "equals the model's own" in model.checked
    columns = [head_columns(m.hf.model.layers[1].self_attn.o_proj, 4) for m in (model, full)]
    assert float((columns[0] - columns[1]).norm() / columns[1].norm()) <= noise
    found, expected = (tables(folder, tmp_path / n, m) for n, m in (("packed", model), ("full", full)))
    assert json.loads((tmp_path / "packed" / "study.json").read_text())["model"]["note"] == model.note
    for name in ("importance", "scan", "retention"):
        assert np.isfinite(found[name].select_dtypes("float64")).all(axis=None)
    assert found["importance"]["magnitude"].mean() == pytest.approx(
        expected["importance"]["magnitude"].mean(), rel=0.02
    )
    assert found["scan"]["full_nll"].mean() == pytest.approx(expected["scan"]["full_nll"].mean(), rel=noise)
    one = pd.DataFrame({"layer": [1], "head": [2]})
    mask = torch.ones(3, 4)
    mask[1, 2] = 0
    window = study(folder).take(model)
    scanned = found["scan"].merge(one)["nll"].iloc[0]
    assert scanned == pytest.approx(
        sparsify.nll(model, window, mask)["nll"].iloc[0], rel=1e-3 if dtype == "float32" else 2e-2
    )
    with pytest.raises(GeomlibError, match="quantised weights cannot be pruned"):
        pruning.prune(model, [(0, 0)])
    model.hf.save_pretrained(tmp_path / "saved")
    model.tokenizer.save_pretrained(tmp_path / "saved")
    again = load_model(str(tmp_path / "saved"), device="cpu", dtype=dtype)
    assert again.note == model.note and again.hf.model.layers[1].self_attn.o_proj.weight.element_size() == 1
    with torch.no_grad():
        assert torch.equal(again.hf(IDS).logits, model.hf(IDS).logits)
    assert capfd.readouterr().err.count("quantization") == 0  # bitsandbytes would say at each product that it rounds


@packed_weights
def test_export_of_few_bits_is_refused_before_anything_is_measured(folder, tmp_path, monkeypatch):
    monkeypatch.setenv(LOAD, '{"bits": 8, "device": "cpu"}')
    with pytest.raises(GeomlibError, match="quantised weights cannot be pruned"):
        list(pruning.export(study(folder), study(folder), "random", 0.5, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_scaled_weights_are_not_taken_for_plain_ones():
    """Eight-bit floating-point weights mean nothing without their scales."""
    linear = torch.nn.Linear(8, 8, bias=False).requires_grad_(False)
    plain = head_columns(linear, 2)

    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return x @ (self.weight.float() * 3).T

    scaled = Scaled(8, 8, bias=False).requires_grad_(False)
    scaled.weight.data = (linear.weight / 3).to(torch.float8_e4m3fn)
    found = head_columns(scaled, 2)
    assert float((found - plain).norm() / plain.norm()) <= 0.1


# --- what is loaded by default ----------------------------------------------------------------------------------------


def test_defaults_from_the_environment(folder, monkeypatch):
    name = str(folder / "model")
    monkeypatch.setenv(LOAD, '{"dtype": "bfloat16", "device_map": {"": "cpu"}, "bits": null}')
    real, given = AutoModelForCausalLM.from_pretrained, []
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: given.append(k) or real(*a, **k))
    assert load_model(name).dtype == torch.bfloat16
    assert load_model(name, dtype="float32").dtype == torch.float32
    load_model(name, device="cpu")  # excludes the device_map of the environment
    assert [k.get("device_map") for k in given] == [{"": "cpu"}, {"": "cpu"}, None]
    monkeypatch.setenv(LOAD, '{"device": "cuda:99"}')
    with pytest.raises(GeomlibError, match="no GPU for cuda:99"):
        load_model(name)
    assert load_model(name, device_map="cpu").device.type == "cpu"
    monkeypatch.setenv(LOAD, '{"bits": 3}')
    with pytest.raises(GeomlibError, match="bits = 3"):
        load_model(name)
    for empty in ("", "{}"):
        monkeypatch.setenv(LOAD, empty)
        assert load_model(name).dtype == torch.float32


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("{", "is no JSON object: give dtype, device, device_map, bits as in"),
        ('["cpu"]', "is no JSON object"),
        ('{"devices": "cpu"}', "has the key 'devices': give dtype, device, device_map, bits"),
        ('{"device": "cpu", "device_map": "auto"}', "exclude each other"),
        ('{"dtype": "float31"}', "not a dtype"),
    ],
)
def test_bad_defaults(folder, monkeypatch, value, sentence):
    monkeypatch.setenv(LOAD, value)
    with pytest.raises(GeomlibError, match=sentence) as error:
        load_model(str(folder / "model"))
    assert "\n" not in str(error.value)


def test_a_name_with_its_revision(folder, monkeypatch):
    commit, asked = "c0ffee" + "0" * 34, []
    path = str(folder / "model")
    monkeypatch.setattr(M, "_hub_commit", lambda *a: asked.append(a) or (commit, path))
    model = load_model("org/name@v1", check=False)
    assert (model.name, model.revision, model.fingerprint) == ("org/name@v1", commit, f"org/name@{commit[:12]}")
    assert load_model("org/name@v1", revision="v1", check=False).fingerprint == model.fingerprint
    assert load_model("org/name", revision="v1", check=False).fingerprint == model.fingerprint
    assert asked == [("org/name", "v1")] * 3
    with pytest.raises(GeomlibError, match="org/name@v1 and revision v2 name two revisions"):
        load_model("org/name@v1", revision="v2")
    for local in ("smollm2-135m", path):
        with pytest.raises(GeomlibError, match="has no revisions"):
            load_model(f"{local}@main")


# --- families that nobody has met -------------------------------------------------------------------------------------

FAMILY = string.Template('''
import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class Config(PreTrainedConfig):
    model_type = "$family"

    def __init__(self, vocab_size=63, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, **kwargs):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        super().__init__(**kwargs)


def by_hand(module, q, k, v, mask, scaling):
    scores = q @ k.transpose(2, 3) * scaling
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2), None


class OurAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.mix = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.gate = nn.Linear(config.hidden_size, config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x, mask):
        heads = self.config.num_attention_heads
        q, k, v = (p.unflatten(-1, (heads, -1)).transpose(1, 2) for p in self.mix(x).chunk(3, -1))
        g = torch.sigmoid(self.gate(x))
        $attention
        z = z.flatten(2)
        $before
        y = self.out(z)
        $after
        return y


class Block(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.look = OurAttention(config, layer_idx)
        self.norm = nn.LayerNorm(config.hidden_size)

    def forward(self, x, mask):
        return x + self.look(self.norm(x), mask)


class Base(PreTrainedModel):
    config_class = Config
    base_model_prefix = "core"
    _supports_sdpa = $sdpa
    _supports_attention_backend = True

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.post_init()

    def get_input_embeddings(self):
        return self.words

    def forward(self, input_ids=None, attention_mask=None, use_cache=None, **kwargs):
        x = self.words(input_ids)
        mask = create_causal_mask(config=self.config, inputs_embeds=x, attention_mask=attention_mask, cache=None)
        for block in self.blocks:
            x = block(x, mask)
        return BaseModelOutputWithPast(last_hidden_state=x)


class ForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = Config
    base_model_prefix = "core"
    _supports_sdpa = $sdpa
    _supports_attention_backend = True

    def __init__(self, config):
        super().__init__(config)
        self.core = Base(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids=None, use_cache=None, **kwargs):
        return CausalLMOutputWithPast(logits=self.head(self.core(input_ids, **kwargs)[0]))
''')  # fmt: skip
INTERFACE = (
    "z, _ = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, by_hand)"
    "(self, q, k, v, mask, scaling=q.shape[-1] ** -0.5)"
)
HAND = "z, _ = by_hand(self, q, k, v, mask, q.shape[-1] ** -0.5)"
TORCH = "z = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)"


@pytest.fixture
def family(tmp_path, monkeypatch):
    """Saves a model of a new family, from a module of the user's own, and gives its folder."""
    made = []

    def make(attention=INTERFACE, before="", after="", sdpa=True):
        name = f"family_{len(made)}_{tmp_path.name}".lower().replace("-", "_")
        file = tmp_path / f"{name}.py"
        file.write_text(FAMILY.substitute(family=name, attention=attention, before=before, after=after, sdpa=sdpa))
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        AutoConfig.register(name, module.Config)
        AutoModelForCausalLM.register(module.Config, module.ForCausalLM)
        made.append((name, module.Config))
        torch.manual_seed(0)
        model = module.ForCausalLM(module.Config(initializer_range=0.3))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(tmp_path / name)
        make_tokenizer().save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    yield make
    for name, config in made:
        CONFIG_MAPPING._extra_content.pop(name, None)
        AutoModelForCausalLM._model_mapping._extra_content.pop(config, None)


@pytest.mark.parametrize("attention", [INTERFACE, TORCH])
def test_a_new_family_is_measured(family, attention):
    model = load_model(family(attention), device="cpu")
    assert "ForCausalLM: geomlib's attention equals the model's own (logits differ by at most" in model.checked
    assert model.checked.endswith("on 12 tokens).")
    reference = []
    for layer in range(2):  # from the definitions, on what enters the layer
        block = model.hf.core.blocks[layer]
        block.register_forward_hook(lambda module, args, output: reference.append((module, args[0])))
    blocks = {}
    with torch.no_grad(), observe(model, lambda b: blocks.__setitem__(b.layer, b)):
        model.hf(IDS)
    with torch.no_grad():
        for layer, (block, x) in enumerate(reference):
            q, k, v = block.look.mix(block.norm(x[0])).double().view(LENGTH, 3, 3, 8).permute(1, 2, 0, 3)
            for h in range(3):
                for t in range(LENGTH):
                    alpha = ((k[h, : t + 1] @ q[h, t]) / 8**0.5).softmax(-1)
                    assert float((blocks[layer].weights[h, t, : t + 1] - alpha).abs().max()) <= 1e-5
            assert float((blocks[layer].values - v).abs().max()) <= 1e-5
    scan = sparsify.head_scan(model, [WINDOW], [(0, 2), (1, 0)])
    for row in scan.itertuples():
        mask = torch.ones(2, 3)
        mask[row.layer, row.head] = 0
        assert row.nll == pytest.approx(sparsify.nll(model, [WINDOW], mask)["nll"].iloc[0], rel=1e-5)


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ({"attention": HAND}, "only 0 of its 2 layers compute attention through the interface"),
        ({"attention": f"{INTERFACE} if self.layer_idx else ({HAND[7:]})"}, "only 1 of its 2 layers"),
        ({"before": "z = z * g"}, "what enters the output projection of layer 0 (a gate or a norm may stand between)"),
        ({"before": "z = F.layer_norm(z, z.shape[-1:])"}, "a gate or a norm may stand between"),
        ({"before": "z = z.flip(-1)"}, "what enters the output projection of layer 0"),
        ({"attention": f"{INTERFACE}\n        z = (z + v.transpose(1, 2)) / 2"}, "what enters the output projection"),
    ],
    ids=["hand", "one layer by hand", "gate", "norm", "other order of heads", "values added"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_new_family_that_would_be_measured_wrong_is_refused_in_words(family, code, sentence, dtype):
    with pytest.raises(GeomlibError, match="nothing was measured") as error:
        load_model(family(**code), device="cpu", dtype=dtype)
    text = str(error.value)
    assert text.startswith("ForCausalLM cannot be ") and sentence in text and "\n" not in text


def test_attention_by_hand_without_the_interface_in_its_source(family, monkeypatch):
    path = family(HAND, sdpa=False)
    model = load_model(path, device="cpu", check=False)
    monkeypatch.setattr(type(model.hf), "_can_set_attn_implementation_cached_value", False, raising=False)
    with pytest.raises(GeomlibError, match="computes its attention by hand; nothing was measured"):
        self_check(model.hf)


def test_a_gate_after_the_output_projection_is_no_hindrance(family):
    """Weights and values are the model's; a resumed pass would not be, which is noticed, and whole passes are made."""
    model = load_model(family(after="y = y * g"), device="cpu")
    scan = sparsify.head_scan(model, [WINDOW])
    for row in scan.itertuples():
        mask = torch.ones(2, 3)
        mask[row.layer, row.head] = 0
        with torch.no_grad(), intervene(model, head_mask=mask):
            logits = model.hf(IDS).logits[0, :-1].double()
        nll = torch.nn.functional.cross_entropy(logits, torch.tensor(WINDOW.input_ids[1:]))
        assert row.nll == pytest.approx(float(nll), rel=1e-6)


def test_the_self_check_says_what_it_decided():
    for name in ("llama", "gemma3_multimodal", "falcon_new"):
        model = small_model(name)
        assert self_check(model).startswith(f"{type(model).__name__}: geomlib's attention equals the model's own")
