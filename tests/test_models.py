"""Loading: embedded models, local folders and the hub; what is refused, and in which words."""

import json
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from geomlib import models as M
from geomlib.errors import GeomlibError
from geomlib.fetch import Source, file_sha256
from geomlib.models import EMBEDDED, Embedded, Model, load_model

WORDS = ["<unk>", "<s>", "</s>", "the", "capital", "of", "Italy", "is", "Rome"]
LLAMA = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def tokenizer():
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def save(folder: Path, model_class: str = "LlamaForCausalLM", with_tokenizer: bool = True, **settings) -> Path:
    cls = getattr(transformers, model_class)
    torch.manual_seed(0)
    cls(cls.config_class(**(LLAMA | settings))).save_pretrained(folder)
    if with_tokenizer:
        tokenizer().save_pretrained(folder)
    return folder


# --- local folders ----------------------------------------------------------------------------------------------------


def test_a_local_folder(tmp_path):
    model = load_model(str(save(tmp_path / "m")), device="cpu", check=False)
    assert (model.layers, model.query_heads, model.kv_heads, model.head_dim, model.max_length) == (2, 4, 2, 4, 32)
    assert model.dtype == torch.float32
    assert model.device == torch.device("cpu")
    assert not model.hf.training
    assert not any(p.requires_grad for p in model.hf.parameters())
    assert model.tokenizer("the capital").input_ids == [3, 4]
    assert model.revision is None
    assert model.sha256["model.safetensors"] == file_sha256(tmp_path / "m" / "model.safetensors")


def test_the_fingerprint_follows_the_weights_and_not_the_path(tmp_path):
    first = load_model(save(tmp_path / "a"), check=False).fingerprint
    assert first.startswith("sha256:")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert load_model(tmp_path / "b", check=False).fingerprint == first
    assert load_model(save(tmp_path / "c", intermediate_size=32), check=False).fingerprint != first


@pytest.mark.parametrize("dtype", ["bfloat16", "bf16", torch.bfloat16])
def test_dtype_is_respected(tmp_path, dtype):
    assert load_model(save(tmp_path / "m"), dtype=dtype, device="cpu", check=False).dtype == torch.bfloat16


def test_device_map_is_handed_on(tmp_path, monkeypatch):
    real, given = AutoModelForCausalLM.from_pretrained, {}
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: given.update(k) or real(*a, **k))
    model = load_model(save(tmp_path / "m"), device_map={"": "cpu"}, check=False)
    assert given["device_map"] == {"": "cpu"}
    assert model.device == torch.device("cpu")
    with pytest.raises(GeomlibError, match="exclude each other"):
        load_model(tmp_path / "m", device_map="auto", device="cpu", check=False)


def test_attention_is_sdpa_unless_asked_otherwise(tmp_path):
    assert load_model(save(tmp_path / "m"), check=False).hf.config._attn_implementation == "sdpa"
    eager = load_model(tmp_path / "m", attn_implementation="eager", check=False)
    assert eager.hf.config._attn_implementation == "eager"


def test_loading_is_silent_and_restores_the_settings_of_transformers(tmp_path, capfd):
    before = transformers.utils.logging.get_verbosity(), transformers.utils.logging.is_progress_bar_enabled()
    load_model(save(tmp_path / "m"), check=False)
    capfd.readouterr()
    load_model(tmp_path / "m", check=False)
    assert capfd.readouterr() == ("", "")
    after = transformers.utils.logging.get_verbosity(), transformers.utils.logging.is_progress_bar_enabled()
    assert before == after


def test_the_check_at_load_runs(tmp_path, monkeypatch):
    checked = []
    monkeypatch.setattr("geomlib.attention.self_check", checked.append)
    model = load_model(save(tmp_path / "m"))
    assert checked == [model.hf]


@pytest.mark.parametrize(
    ("model_class", "settings"),
    [
        ("BertForMaskedLM", {}),
        ("BertLMHeadModel", {}),  # without is_decoder: sees both sides
        ("RobertaForMaskedLM", {}),
        ("T5ForConditionalGeneration", {"d_model": 16, "d_ff": 24, "d_kv": 4, "num_layers": 1, "num_heads": 2}),
        ("LlamaForSequenceClassification", {}),  # its language model head would be random
        ("LlamaModel", {}),
    ],
)
def test_what_is_not_a_causal_language_model_is_refused(tmp_path, model_class, settings):
    with pytest.raises(GeomlibError, match=f"is a {model_class}, not a causal language model"):
        load_model(save(tmp_path / "m", model_class, **settings), check=False)


def test_a_bert_that_says_it_is_a_decoder_is_accepted(tmp_path):
    save(tmp_path / "m", "BertLMHeadModel", is_decoder=True)
    assert load_model(tmp_path / "m", check=False).layers == 2


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(GeomlibError, match=r"has no config\.json"):
        load_model(tmp_path, check=False)


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(GeomlibError, match="tokenizer"):
        load_model(save(tmp_path / "m", with_tokenizer=False), check=False)


def test_a_folder_that_lacks_weights_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    file = save(tmp_path / "m") / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(GeomlibError, match=r"lacks 1 weights of LlamaForCausalLM \(such as model\.norm\.weight\)"):
        load_model(tmp_path / "m", check=False)


def test_a_model_with_code_of_its_own_is_refused(tmp_path):
    save(tmp_path / "m")
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    (tmp_path / "m" / "mine.py").write_text("raise SystemExit('code of the model was run')")
    with pytest.raises(GeomlibError, match="never runs"):
        load_model(tmp_path / "m", check=False)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"trust_remote_code": True}, "leave trust_remote_code out"),
        ({"device": "gpu"}, "is not a device"),
        ({"device": "cuda:99"}, "There is no GPU"),
        ({"dtype": "float31"}, "is not a dtype"),
        ({"revision": "main"}, "has no revisions"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, arguments, sentence):
    with pytest.raises(GeomlibError, match=sentence):
        load_model(save(tmp_path / "m"), check=False, **arguments)


@pytest.mark.parametrize("name", ["smollm", "./missing", "/missing/folder", "a/b/c", "", "two words"])
def test_an_unknown_name_lists_the_embedded_ones(name):
    with pytest.raises(GeomlibError, match="smollm2-135m, gemma3-270m"):
        load_model(name, check=False)


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "settings", "expected"),  # query heads, KV heads, head dim
    [
        ("gpt2", {"n_embd": 32, "n_head": 4}, (4, 4, 8)),
        ("falcon", {"hidden_size": 32, "num_attention_heads": 4, "multi_query": True}, (4, 1, 8)),
        ("falcon", {"hidden_size": 32, "num_attention_heads": 4, "multi_query": False}, (4, 4, 8)),
        (
            "falcon",
            {"hidden_size": 32, "num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True},
            (4, 2, 8),
        ),
        ("gpt_bigcode", {"n_embd": 32, "n_head": 4, "multi_query": True}, (4, 1, 8)),
        ("gpt_neox", {"hidden_size": 32, "num_attention_heads": 4}, (4, 4, 8)),
        ("qwen3", {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}, (4, 2, 24)),
        ("gemma3", {"text_config": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16}}, (4, 1, 16)),
    ],
)
def test_heads_are_read_from_every_kind_of_config(model_type, settings, expected):
    model = Model("m", SimpleNamespace(config=AutoConfig.for_model(model_type, **settings)), None)
    assert (model.query_heads, model.kv_heads, model.head_dim) == expected


# --- embedded models --------------------------------------------------------------------------------------------------


def write_gguf(path: Path) -> None:
    """A llama of one layer, with a byte-level tokenizer, as the embedded files have."""
    rng = np.random.default_rng(0)
    tokens = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    w = gguf.GGUFWriter(path, "llama")
    w.add_context_length(32)
    w.add_embedding_length(16)
    w.add_block_count(1)
    w.add_feed_forward_length(32)
    w.add_head_count(4)
    w.add_head_count_kv(2)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_dimension_count(4)
    w.add_vocab_size(len(tokens))
    w.add_tokenizer_model("gpt2")
    w.add_token_list(tokens)
    w.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    w.add_token_merges(["t h"])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    shapes = {"token_embd": (len(tokens), 16), "output_norm": (16,), "blk.0.attn_norm": (16,), "blk.0.ffn_norm": (16,)}
    shapes |= {
        "blk.0.attn_q": (16, 16),
        "blk.0.attn_k": (8, 16),
        "blk.0.attn_v": (8, 16),
        "blk.0.attn_output": (16, 16),
    }
    shapes |= {"blk.0.ffn_gate": (32, 16), "blk.0.ffn_up": (32, 16), "blk.0.ffn_down": (16, 32)}
    for name, shape in shapes.items():
        w.add_tensor(f"{name}.weight", rng.standard_normal(shape, dtype=np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """An embedded model named `tiny`, already fetched into an otherwise empty cache; gives its folder."""
    monkeypatch.setenv("GEOMLIB_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "cache" / "files" / "tiny.gguf"
    file.parent.mkdir(parents=True)
    write_gguf(file)
    source = Source("tiny.gguf", (), file_sha256(file), file.stat().st_size)
    monkeypatch.setitem(EMBEDDED, "tiny", Embedded(source, "no licence", "weights of noise"))
    return tmp_path / "cache" / "models" / "tiny"


def test_an_embedded_model_is_converted_once(tiny, monkeypatch, capfd):
    model = load_model("tiny", device="cpu", check=False)
    reader = gguf.GGUFReader(tiny.parent.parent / "files" / "tiny.gguf")
    embedding = next(t.data for t in reader.tensors if t.name == "token_embd.weight")
    assert torch.equal(model.hf.get_input_embeddings().weight, torch.tensor(embedding))
    assert model.sha256 == {"tiny.gguf": EMBEDDED["tiny"].source.sha256}
    assert model.note == "weights of noise"
    assert "quantization_config" not in json.loads((tiny / "config.json").read_text())
    assert (tiny / "NOTICE").read_text().startswith("no licence")
    assert model.tokenizer.bos_token_id == 1

    monkeypatch.setattr(M, "_convert", None)
    capfd.readouterr()
    again = load_model("tiny", device="cpu", check=False)
    assert capfd.readouterr() == ("", "")
    assert again.fingerprint == model.fingerprint
    assert all(torch.equal(p, q) for p, q in zip(again.hf.parameters(), model.hf.parameters(), strict=True))


def _flip(folder):
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        _flip,
        lambda folder: (folder / "model.safetensors").write_bytes(b""),
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text("{"),
        lambda folder: (folder / "manifest.json").write_text("[]"),
        lambda folder: (folder / "manifest.json").unlink(),
    ],
)
def test_a_damaged_conversion_is_repaired(tiny, damage):
    # Clones, since weights are mapped from the file that is damaged next.
    before = {k: v.clone() for k, v in load_model("tiny", device="cpu", check=False).hf.state_dict().items()}
    damage(tiny)
    with pytest.warns(UserWarning, match="damaged or out of date"):
        after = load_model("tiny", device="cpu", check=False).hf.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_a_killed_conversion_is_done_again(tiny):
    source = EMBEDDED["tiny"].source
    code = f"""
        import time
        from geomlib import models as M
        M.EMBEDDED["tiny"] = M.Embedded(M.Source("tiny.gguf", (), {source.sha256!r}, {source.size}), "", "")
        real = M._convert

        def convert(*arguments):
            real(*arguments)
            print("converted", flush=True)
            time.sleep(60)

        M._convert = convert
        M.embedded_folder("tiny")
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "converted\n"
        first.send_signal(signal.SIGKILL)
    assert not tiny.exists()
    assert load_model("tiny", check=False).layers == 1
    assert not any(p.is_dir() for p in (tiny.parent.parent / "tmp").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_the_capital_of_italy(name):
    model = load_model(name, device="cpu", check=False)
    text = "The capital of France is Paris. The capital of Spain is Madrid. The capital of Italy is"
    if name == "smollm2-135m":  # Gemma, a base model, goes on with "the" unless shown what is wanted
        text = "The capital of Italy is"
    ids = [model.tokenizer.bos_token_id, *model.tokenizer(text, add_special_tokens=False).input_ids]
    logits = model.hf(torch.tensor([ids])).logits[0, -1]
    assert model.tokenizer.decode([int(logits.argmax())]) == " Rome"
