"""Studies: what is refused, what is recorded, and that nothing short of a changed study changes a table.

Everything runs on a folder with a small random-weight model and on a JSONL file of random words, as a user's own would.
"""

import ast
import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from conftest import HEADS, LENGTH, randomize, small_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import geomlib
from geomlib import study as S
from geomlib.attention import observe
from geomlib.corpora import take_windows, text_corpus
from geomlib.errors import GeomlibError
from geomlib.fetch import file_sha256
from geomlib.models import Model, load_model
from geomlib.separability import METRICS, SCHEMA, SeparabilityTable
from geomlib.study import ANALYSES, Study, check_table, load_table

GEOMLIB = Path(sys.executable).with_name("geomlib")
WORDS = 60
LAYERS = 2


def make_tokenizer(bos: str | None = "<s>") -> PreTrainedTokenizerFast:
    """One token a word."""
    words = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(WORDS))])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, unk_token="<unk>")


def save_model(folder: Path, damage=None, bos: str | None = "<s>", **settings) -> Path:
    config = LlamaConfig(
        **{"vocab_size": WORDS + 3, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
           "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128} | settings
    )  # fmt: skip
    hf = randomize(LlamaForCausalLM(config))
    if damage:
        damage(hf)
    hf.save_pretrained(folder)
    make_tokenizer(bos).save_pretrained(folder)
    return folder


def words(count: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(WORDS)}" for _ in range(count))


def save_texts(path: Path, count: int, length: int = 150) -> Path:
    path.write_text("".join(json.dumps({"text": words(length, seed)}) + "\n" for seed in range(count)))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with model/ and texts.jsonl."""
    place = tmp_path_factory.mktemp("study")
    save_model(place / "model")
    save_texts(place / "texts.jsonl", 70)
    return place


@pytest.fixture(scope="module")
def model(place) -> Model:
    return load_model(str(place / "model"), device="cpu")


@pytest.fixture
def fields(place) -> dict:
    """Of a study that takes a blink: three windows."""
    return {
        "model": str(place / "model"), "text": str(place / "texts.jsonl"), "windows": 3, "length": 24,
        "sizes": (1, 2, 4, 8), "bins": 3, "random_rankings": 2, "distances": ("euclidean", "cosine"),
    }  # fmt: skip


def files(out: Path) -> list[Path]:
    return sorted((out / "separability").glob("*.parquet"))


def leftovers(out: Path) -> list[Path]:
    known = ("study.json", ".lock")
    return [p for p in out.rglob("*") if p.is_file() and p.suffix != ".parquet" and p.name not in known]


# --- the record -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"colour": 1}, r"colour = 1 is not usable: .*; known are model, revision, corpus, text"),
        ({"windows": 0}, "windows = 0 is not usable"),
        ({"windows": 2.5}, r"windows = 2\.5 is not usable"),
        ({"length": 2}, "length = 2 is not usable"),
        ({"queries": "some"}, "queries = 'some' is not usable"),
        ({"sizes": ()}, r"sizes = \(\) is not usable: give different whole numbers N of 1 or more"),
        ({"sizes": (0, 2)}, "give different whole numbers N of 1 or more"),
        ({"sizes": (2, 4, 2)}, "give different whole numbers N of 1 or more"),
        ({"sizes": ("many",)}, "sizes.0 = 'many' is not usable"),
        ({"rankings": ("magic",)}, "rankings.0 = 'magic' is not usable"),
        ({"rankings": ()}, r"rankings = \(\) is not usable: give one or more"),
        ({"rankings": ("attention", "attention")}, "give each once"),
        ({"distances": ()}, "give one or more"),
        ({"distances": ("cosine", "cosine")}, "give each once"),
        ({"controls": ("random", "random")}, "give each once"),
        ({"dtype": "int8"}, "dtype = 'int8' is not usable"),
        ({"random_rankings": 0}, "random_rankings = 0 is not usable"),
        ({"bins": 0}, "bins = 0 is not usable"),
        ({"bins": 9, "length": 8, "sizes": (2,)}, "9 bins do not fit 8 queries"),
        ({"sizes": (8, 16), "length": 8}, r"every N of sizes \(8, 16\) is at least the window's 8 sources"),
    ],
)
def test_wrong_fields_are_refused(wrong, sentence):
    with pytest.raises(GeomlibError, match=sentence) as caught:
        Study(**wrong)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    assert "Value error" not in str(caught.value)


def test_a_study_is_a_frozen_value():
    study = Study(sizes=(8, 2, 4), windows=2)
    assert study.sizes == (2, 4, 8)
    assert study == Study(sizes=[2, 4, 8], windows=2) and hash(study) == hash(Study(sizes=(2, 4, 8), windows=2))
    assert study != Study(sizes=(2, 4, 8), windows=3)
    with pytest.raises(ValueError, match="frozen"):
        study.windows = 3
    assert Study(sizes=(7, 8), length=8, bins=1).sizes == (7, 8)  # 7 of 8 leaves one unselected
    assert Study(controls=()).controls == ()


def test_one_window_too_long_for_the_model_is_refused(fields, model, tmp_path):
    assert len(Study(**fields | {"length": 128, "windows": 1}).run(tmp_path / "a", model))
    with pytest.raises(GeomlibError, match="has 128 positions: give a length of at most that"):
        Study(**fields | {"length": 129}).run(tmp_path / "b", model)
    assert not (tmp_path / "b").exists()


def test_windows_of_the_model_that_are_too_short_for_every_n(fields, tmp_path):
    """N >= T throughout, though the text is long enough: every layer sees five sources."""
    sliding = Model("sliding", small_model("mistral"), make_tokenizer())
    with pytest.raises(GeomlibError, match=r"sees more than N of sizes \(5, 8\) sources, so nothing is unselected"):
        Study(**fields | {"model": "sliding", "sizes": (5, 8)}).run(tmp_path, sliding)
    assert not files(tmp_path)


def test_another_model_than_the_studys_is_refused(fields, model, tmp_path):
    with pytest.raises(GeomlibError, match="the study is of smollm2-135m and the given model is"):
        Study(**fields | {"model": "smollm2-135m"}).run(tmp_path, model)
    with pytest.raises(GeomlibError, match="the study is in float64 and the given model in torch.float32"):
        Study(**fields | {"dtype": "float64"}).run(tmp_path, model)


# --- the tables -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", ["all", "last"])
def test_the_table_is_that_of_its_windows(fields, model, tmp_path, queries):
    study = Study(**fields | {"queries": queries, "rankings": ("contribution", "attention"), "seed": 5})
    table = study.run(tmp_path, model)
    windows, _ = take_windows(text_corpus(fields["text"]), model.tokenizer, 3, 24, seed=5)
    assert list(dict.fromkeys(table["document"])) == [w.document for w in windows]
    for window in windows:
        recorder = SeparabilityTable(
            24, queries, study.sizes, study.rankings, study.distances, random_rankings=2, bins=3,
            key=f"5 {window.document} {window.start}",
        )  # fmt: skip
        with observe(model, recorder):
            model.hf(torch.tensor([window.input_ids]))
        rows = table[table["document"] == window.document].drop(columns="document").reset_index(drop=True)
        pd.testing.assert_frame_equal(rows, recorder.table(), check_dtype=False)


def test_half_precision_is_recorded_and_measured(fields, tmp_path):
    """What a user without a GPU may ask for all the same: the geometry is in float32 whatever the model runs in."""
    table = Study(**fields | {"dtype": "bfloat16", "queries": "last"}).run(tmp_path)
    assert record(tmp_path)["model"]["dtype"] == "bfloat16"
    assert table["f"].between(0, 1).all()


def test_every_architecture_goes_through_a_study(architecture, fields, tmp_path):
    """Through the body of the model, without its logits: all layers and heads are there."""
    hf = small_model(architecture)
    study = Study(**fields | {"model": architecture, "windows": 1, "length": LENGTH, "sizes": (2,), "controls": ()})
    table = study.run(tmp_path, Model(architecture, hf, make_tokenizer()))
    assert set(table["layer"]) == set(range(hf.config.get_text_config().num_hidden_layers))
    assert set(table["head"]) == set(range(HEADS))


def test_the_file_has_the_documented_schema(fields, model, tmp_path):
    table = Study(**fields).run(tmp_path, model)
    assert list(table.columns) == list(SCHEMA)
    assert all(text for _, text in SCHEMA.values())
    schema = pq.read_schema(files(tmp_path)[0])
    stored = {
        n: str(t).replace("large_", "").replace("double", "float64")
        for n, t in zip(schema.names, schema.types, strict=True)
    }
    assert stored == {name: kind for name, (kind, _) in SCHEMA.items()}
    assert set(table["control"]) == {"none", "random", "magnitude"}
    assert not leftovers(tmp_path)
    pd.testing.assert_frame_equal(load_table(tmp_path), table)


TAMPERING = {
    "type": lambda t: t.astype({"layer": "int64"}),
    "missing": lambda t: t.drop(columns="margin"),
    "extra": lambda t: t.assign(note="x"),
    "NaN": lambda t: t.assign(f=t["f"].where(t.index != 3)),
    "infinite": lambda t: t.assign(margin=t["margin"].where(t.index != 3, float("inf"))),
    "range": lambda t: t.assign(precision=t["precision"].where(t.index != 3, 1.5)),
    "negative": lambda t: t.assign(recall=t["recall"].where(t.index != 3, -0.1)),
    "twice": lambda t: pd.concat([t, t.iloc[[7]]], ignore_index=True),
}


@pytest.mark.parametrize("tamper", TAMPERING.values(), ids=TAMPERING)
def test_a_tampered_table_is_never_written(fields, model, tmp_path, tamper, monkeypatch):
    measure = Study._measure
    check_table(Study(**fields).run(tmp_path / "good", model))
    monkeypatch.setattr(Study, "_measure", lambda *a: ((j, n, tamper(t)) for j, n, t in measure(*a)))
    with pytest.raises(GeomlibError, match="the table (does not fit the schema|holds)"):
        Study(**fields).run(tmp_path / "bad", model)
    assert not files(tmp_path / "bad") and not leftovers(tmp_path / "bad")


def test_two_documents_of_one_text_have_their_own_random_sets(fields, model, tmp_path):
    (tmp_path / "twins.jsonl").write_text(2 * (json.dumps({"text": words(23)}) + "\n"))
    table = Study(**fields | {"text": str(tmp_path / "twins.jsonl"), "windows": 2}).run(tmp_path / "out", model)
    assert table["document"].nunique() == 2
    first, second = (t.drop(columns="document").reset_index(drop=True) for _, t in table.groupby("document"))
    same = first["control"] == "none"
    pd.testing.assert_frame_equal(first[same], second[same])
    for control in ("random", "magnitude"):
        rows = (first["control"] == control) & (first["size"] == 4)
        assert (first.loc[rows, "f"] != second.loc[rows, "f"]).any()


# --- study.json and the key -------------------------------------------------------------------------------------------


def record(out: Path) -> dict:
    return json.loads((out / "study.json").read_text())


def test_study_json_names_every_version_and_hash(fields, model, tmp_path, place):
    Study(**fields).run(tmp_path, model)
    found = record(tmp_path)
    assert found["study"] == fields | {
        "text": "texts.jsonl", "corpus": None, "revision": None, "detokenise": False, "seed": 0, "dtype": None,
        "skip": 0, "queries": "all", "rankings": ["attention"], "controls": ["random", "magnitude"],
        "sizes": [1, 2, 4, 8], "distances": ["euclidean", "cosine"],
    }  # fmt: skip
    weights = found["model"]["sha256"]["model.safetensors"]
    assert weights == file_sha256(place / "model" / "model.safetensors")
    assert found["model"]["fingerprint"] == model.fingerprint and found["model"]["dtype"] == "float32"
    shape = [found["model"][k] for k in ("layers", "query_heads", "kv_heads", "head_dim")]
    assert shape == [LAYERS, 4, 2, 8]
    assert found["corpus"]["sha256"] == file_sha256(place / "texts.jsonl")
    windows, skipped = take_windows(text_corpus(fields["text"]), model.tokenizer, 3, 24)
    assert [(w["document"], w["start"], w["bos"]) for w in found["windows"]] == [
        (w.document, w.start, True) for w in windows
    ]
    assert len({w["sha256"] for w in found["windows"]}) == 3
    assert found["skipped_documents"] == skipped == 0
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["geomlib"] == geomlib.__version__
    assert {"python", "format", "code", "transformers", "tokenizers", "numpy", "numba"} <= set(found["versions"])
    assert len(found["key"]) == 16


def key_of(out: Path, loaded: Model | None, fields: dict) -> str:
    out /= f"k{len(list(out.iterdir()))}"
    Study(**fields).run(out, loaded)
    return record(out)["key"]


def test_whatever_decides_a_number_changes_the_key(fields, model, tmp_path, place, monkeypatch):
    def key(loaded=model, **changed):
        return key_of(tmp_path, loaded, fields | changed)

    save_texts(place / "other.jsonl", 71)
    other = save_model(place / "other", intermediate_size=64)
    keys = [
        key(), key(seed=1), key(length=23), key(windows=2), key(queries="last"), key(sizes=(2, 4)),
        key(rankings=("contribution",)), key(distances=("cosine",)), key(controls=("random",)), key(random_rankings=3),
        key(bins=2), key(skip=1), key(text=str(place / "other.jsonl")),
        key(load_model(str(other), device="cpu"), model=str(other)),
        key(load_model(str(place / "model"), device="cpu", dtype="float64"), dtype="float64"),
    ]  # fmt: skip
    monkeypatch.setattr(S, "version", lambda package: "0")
    keys.append(key())
    monkeypatch.setattr(S, "FORMAT", S.FORMAT + 1)
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_the_same_study_has_the_same_key(fields, model, tmp_path, place):
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.copy(place / "texts.jsonl", tmp_path / "elsewhere")  # what a text says counts, not where it lies
    keys = {
        key_of(tmp_path, model, fields),
        key_of(tmp_path, load_model(fields["model"], device="cpu"), fields),
        key_of(tmp_path, model, fields | {"sizes": (8, 4, 2, 1)}),
        key_of(tmp_path, model, fields | {"text": str(moved)}),
        key_of(tmp_path, None, fields),
    }
    assert len(keys) == 1


def test_results_of_other_code_are_another_study():
    """Every module of geomlib that a Study's numbers pass through is in the hash."""
    package, seen, todo = Path(S.__file__).parent, set(), ["study"]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for node in ast.walk(ast.parse((package / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "geomlib":
                todo += [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("geomlib."):
                todo.append(node.module.split(".")[1])
    assert not any(set(a.code) & set(S._CODE) for a in ANALYSES.values())
    named = set(S._CODE).union(*(a.code for a in ANALYSES.values()))
    # Files that are fetched, and pruned models, are known by the hashes of their files; a worker does what is done here;
    # and what counts as source does not change what is measured.
    assert named == seen - {"errors", "fetch", "pruning", "cluster", "hub", "progress", "source"}


def test_results_go_to_the_folder_of_the_key(fields, model, tmp_path, monkeypatch):
    monkeypatch.setenv("GEOMLIB_RESULTS", str(tmp_path / "results"))
    table = Study(**fields).run(model=model)
    (out,) = (tmp_path / "results").iterdir()
    assert out.name == record(out)["key"]
    pd.testing.assert_frame_equal(load_table(out), table)
    monkeypatch.delenv("GEOMLIB_RESULTS")
    monkeypatch.chdir(tmp_path)
    Study(**fields).run(model=model)
    assert (tmp_path / "runs" / "studies" / out.name / "study.json").is_file()


# --- resuming ---------------------------------------------------------------------------------------------------------


def test_what_is_there_is_not_measured_again(fields, model, tmp_path, monkeypatch):
    table = Study(**fields).run(tmp_path, model)
    measured = []
    measure = Study._measure
    monkeypatch.setattr(Study, "_measure", lambda *a: measured.extend(j.window.document for j in a[2]) or measure(*a))
    pd.testing.assert_frame_equal(Study(**fields).run(tmp_path, model), table)
    assert measured == []
    files(tmp_path)[1].unlink()
    pd.testing.assert_frame_equal(Study(**fields).run(tmp_path, model), table)
    assert measured == [table["document"].unique()[1]]


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0x55
    path.write_bytes(content)


DAMAGE = {
    "empty": lambda p: p.write_bytes(b""),
    "cut in half": lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]),
    "without its end": lambda p: p.write_bytes(p.read_bytes()[:-1]),
    "one bit": _flip,
    "no Parquet": lambda p: p.write_text("a table"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_done_again(fields, model, tmp_path, damage):
    table = Study(**fields).run(tmp_path, model)
    damage(files(tmp_path)[1])
    with pytest.raises(GeomlibError, match="is damaged, or of another study or version"):
        load_table(tmp_path)
    pd.testing.assert_frame_equal(Study(**fields).run(tmp_path, model), table)


def test_the_file_of_another_study_is_not_taken(fields, model, tmp_path):
    table = Study(**fields).run(tmp_path / "a", model)
    Study(**fields | {"random_rankings": 3}).run(tmp_path / "b", model)
    assert [p.name for p in files(tmp_path / "a")] == [p.name for p in files(tmp_path / "b")]
    shutil.copy(files(tmp_path / "b")[0], files(tmp_path / "a")[0])
    pd.testing.assert_frame_equal(Study(**fields).run(tmp_path / "a", model), table)
    shutil.copy(files(tmp_path / "b")[0], tmp_path / "a" / "separability" / "99999-stray.parquet")
    with pytest.raises(GeomlibError, match=r"99999-stray\.parquet is damaged, or of another study or version"):
        Study(**fields).run(tmp_path / "a", model)


def test_a_folder_of_another_study_is_refused(fields, model, tmp_path):
    table = Study(**fields).run(tmp_path, model)
    with pytest.raises(GeomlibError, match=r"holds another study \(it differs in length, bins\)"):
        Study(**fields | {"length": 16, "bins": 2}).run(tmp_path, model)
    pd.testing.assert_frame_equal(load_table(tmp_path), table)


def test_a_folder_of_the_same_fields_on_another_text_is_refused(fields, model, tmp_path):
    text = save_texts(tmp_path / "mine.jsonl", 5)
    Study(**fields | {"text": str(text)}).run(tmp_path / "out", model)
    save_texts(text, 6)
    with pytest.raises(GeomlibError, match=r"holds another study \(it differs in corpus"):
        Study(**fields | {"text": str(text)}).run(tmp_path / "out", model)


@pytest.mark.parametrize("content", ["", "{", "[]", "7", '"text"', "\0\xff"])
def test_a_damaged_study_json_is_refused(fields, model, tmp_path, content):
    (tmp_path / "study.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(GeomlibError, match=r"study\.json cannot be read|holds another study"):
        Study(**fields).run(tmp_path, model)
    assert (tmp_path / "study.json").read_bytes() == content.encode("latin-1")  # never overwritten


def test_a_folder_without_a_study(fields, model, tmp_path):
    with pytest.raises(GeomlibError, match="holds no study"):
        load_table(tmp_path)
    Study(**fields).run(tmp_path, model)
    for path in files(tmp_path):
        path.unlink()
    with pytest.raises(GeomlibError, match="holds no finished window of separability yet"):
        load_table(tmp_path)


def test_a_file_in_the_way(fields, model, tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(GeomlibError, match=r"cannot write to .*out"):
        Study(**fields).run(tmp_path / "out", model)
    assert (tmp_path / "out").read_text() == "mine"


# --- killed -----------------------------------------------------------------------------------------------------------

# One process per moment of death, forked from one that has imported everything and computed nothing.
_DYING = """
    import os, signal, sys
    import pyarrow.parquet as pq
    from geomlib import study as S

    fields, out = eval(sys.argv[1]), sys.argv[2]

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def at(call, real, instead):
        calls = [0]
        def counted(*args, **kwargs):
            calls[0] += 1
            return instead(*args, **kwargs) if calls[0] == call else real(*args, **kwargs)
        return counted

    def half(table, path, **kwargs):
        write(table, path, **kwargs)
        os.truncate(path, os.path.getsize(path) // 2)
        die()

    def arrange(moment):
        if moment == "claiming":
            os.replace = at(1, os.replace, die)
        if moment == "measuring":  # the second layer of the second window
            table = S.separability.SeparabilityTable
            table.__call__ = at(4, table.__call__, die)
        if moment == "writing":
            pq.write_table = at(2, write, half)
        if moment == "renaming":  # study.json and the first window went well
            os.replace = at(3, os.replace, die)

    write = pq.write_table
    for moment in sys.argv[3:]:
        child = os.fork()
        if not child:
            arrange(moment)
            S.Study(**fields).run(os.path.join(out, moment))
            os._exit(0)
        print(moment, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_killed_at_the_worst_moments(fields, model, tmp_path):
    whole = Study(**fields).run(tmp_path / "whole", model)
    moments = {"claiming": 0, "measuring": 1, "writing": 1, "renaming": 1}  # and the windows that are finished by then
    command = [sys.executable, "-c", textwrap.dedent(_DYING), repr(fields), tmp_path, *moments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[:-1] == [f"{m} {-signal.SIGKILL}" for m in moments], done.stderr
    for moment, finished in moments.items():
        out = tmp_path / moment
        assert len(files(out)) == finished
        assert len(leftovers(out)) == (moment != "measuring")  # the file that was being written
        if finished:
            assert load_table(out)["document"].nunique() == finished
        pd.testing.assert_frame_equal(Study(**fields).run(out, model), whole)
        assert (out / "study.json").read_bytes() == (tmp_path / "whole" / "study.json").read_bytes()


def command(fields: dict, out: Path) -> list[str]:
    """The command line of a study."""
    flags = [GEOMLIB, "measure", "separability", "--out", out]
    for name, value in fields.items():
        flag = "--" + {"rankings": "ranking", "distances": "distance", "controls": "control"}.get(name, name)
        if name == "sizes":
            flags += [flag, ",".join(map(str, value))]
        else:
            for each in value if isinstance(value, tuple) else (value,):
                flags += [flag.replace("_", "-"), str(each)]
    return list(map(str, flags))


def interrupt(fields: dict, out: Path, with_signal: int, after: int = 2) -> subprocess.CompletedProcess:
    """Starts a study and sends the signal as soon as `after` windows are finished."""
    with subprocess.Popen(command(fields, out), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        while running.poll() is None and len(files(out)) < after:
            time.sleep(0.002)
        running.send_signal(with_signal)
        stdout, stderr = running.communicate()
    return subprocess.CompletedProcess(running.args, running.returncode, stdout, stderr)


LONG = {"windows": 60, "length": 100}


def test_killed_from_outside(fields, model, tmp_path):
    """The command line, SIGKILL in the middle of a study, then the same again: the tables of an uninterrupted run."""
    fields |= LONG
    whole = Study(**fields).run(tmp_path / "whole", model)
    done = interrupt(fields, tmp_path / "killed", signal.SIGKILL)
    assert done.returncode == -signal.SIGKILL, done.stderr
    finished = {p: p.stat().st_mtime_ns for p in files(tmp_path / "killed")}
    assert 2 <= len(finished) < LONG["windows"]
    pd.testing.assert_frame_equal(Study(**fields).run(tmp_path / "killed", model), whole)
    assert {p: p.stat().st_mtime_ns for p in finished} == finished  # kept, not measured again


def test_interrupted_by_hand(fields, model, tmp_path):
    fields |= LONG
    done = interrupt(fields, tmp_path, signal.SIGINT)
    assert done.returncode == 130
    assert done.stderr == "geomlib: stopped; what is finished is kept, run the same again to continue.\n"
    assert done.stdout == ""
    finished = len(files(tmp_path))
    assert 2 <= finished < LONG["windows"] and not leftovers(tmp_path)
    assert Study(**fields).run(tmp_path, model)["document"].nunique() == LONG["windows"]


# --- another version, another process ---------------------------------------------------------------------------------


def test_a_folder_of_another_version_is_explained_and_left(fields, model, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        ours = S.versions()
        patch.setattr(S, "versions", lambda: ours | {"geomlib": "0.0.1", "torch": "2.0.0"})
        patch.setattr(S, "_code", lambda modules: "0123456789abcdef")
        table = Study(**fields).run(tmp_path, model)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(GeomlibError) as caught:
        Study(**fields).run(tmp_path, model)
    versions = S.versions()
    assert str(caught.value) == (
        f"{tmp_path} holds this study measured by another version (geomlib 0.0.1, torch 2.0.0; here geomlib "
        f"{versions['geomlib']}, torch {versions['torch']}) and is left as it is: read it with load_table(folder, "
        "any_code=True), give another folder, or remove this one."
    )
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    pd.testing.assert_frame_equal(load_table(tmp_path, any_code=True), table)
    with pytest.raises(GeomlibError, match=r"holds another study \(it differs in seed\)"):
        Study(**fields | {"seed": 1}).run(tmp_path, model)


def test_a_folder_of_a_version_that_knew_fewer_fields(fields, model, tmp_path):
    Study(**fields).run(tmp_path, model)
    found = record(tmp_path)
    del found["study"]["skip"]
    (tmp_path / "study.json").write_text(json.dumps(found | {"key": "0"}))
    with pytest.raises(GeomlibError, match="measured by another version .* and is left as it is"):
        Study(**fields).run(tmp_path, model)


# Two processes, forked from one that has imported everything and computed nothing. Each table that is written makes a line
# in the log; the second process starts when the first has written two.
_TWO = """
    import os, signal, sys, time
    from geomlib import store, study as S

    fields, first, second, out, kill = eval(sys.argv[1])
    log = out + ".log"
    keep = store.Tables.keep

    def logged(self, table, analysis, file):
        keep(self, table, analysis, file)
        with open(log, "a") as f:
            f.write(f"{analysis}/{file}\\n")

    def start(analyses):
        child = os.fork()
        if not child:
            S.Study(**fields).run(out, analyses=analyses)
            os._exit(0)
        return child

    store.Tables.keep = logged
    one = start(first)
    while not os.path.exists(log) or len(open(log).readlines()) < 2:
        time.sleep(0.002)
    store.print = lambda text, file: (open(log + ".waits", "w").close(), print(text, file=file))
    two = start(second)
    if kill:
        while not os.path.exists(log + ".waits"):
            time.sleep(0.002)
        os.kill(one, signal.SIGKILL)
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in (one, two)])
"""


@pytest.mark.parametrize(
    ("first", "second", "kill"),
    [
        (["separability"], ["separability"], False),
        (["separability", "sinks"], ["taxonomy", "sinks"], False),
        (["separability", "taxonomy"], ["taxonomy", "separability"], True),
    ],
    ids=["the same", "others", "killed"],
)
def test_two_processes_on_one_study(fields, model, tmp_path, first, second, kill):
    fields |= LONG
    names = sorted({*first, *second})
    whole = Study(**fields).run(tmp_path / "whole", model, analyses=names)
    out = tmp_path / "out"
    command = [sys.executable, "-c", textwrap.dedent(_TWO), repr((fields, first, second, str(out), kill))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == f"{[-signal.SIGKILL if kill else 0, 0]}\n", done.stderr
    waited = [line for line in done.stderr.splitlines() if line.startswith("geomlib:")]
    assert waited == [f"geomlib: another process measures this study in {out}: waiting for it"]
    written = (tmp_path / "out.log").read_text().splitlines()
    wanted = [str(p.relative_to(tmp_path / "whole")) for p in (tmp_path / "whole").rglob("*.parquet")]
    # A process that dies between a table and its line in the log leaves the table: nothing is ever written twice.
    assert len(set(written)) == len(written) and set(wanted) >= set(written) and len(wanted) - len(written) <= kill
    for name, table in whole.items():
        pd.testing.assert_frame_equal(load_table(out, name), table)


def test_a_study_that_is_whole_needs_no_lock(fields, model, tmp_path, monkeypatch):
    """So that it can be read where nothing can be written, and while another process holds the lock."""
    table = Study(**fields).run(tmp_path, model)
    monkeypatch.setattr(S.store, "locked", None)
    pd.testing.assert_frame_equal(Study(**fields).run(tmp_path, model), table)


def test_the_lock_is_free_after_an_error_and_twice_in_one_process(fields, model, tmp_path, capfd):
    with S.store.locked(tmp_path), S.store.locked(tmp_path):
        assert len(Study(**fields).run(tmp_path, model))
    with pytest.raises(KeyboardInterrupt), S.store.locked(tmp_path):
        raise KeyboardInterrupt
    done = subprocess.run(
        [sys.executable, "-c", f"from filelock import FileLock\nFileLock({str(tmp_path / '.lock')!r}).acquire(timeout=0)"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert capfd.readouterr().err == ""


def test_a_file_system_without_locks(fields, model, tmp_path, monkeypatch, capfd):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", unsupported)
    assert len(Study(**fields).run(tmp_path, model))
    assert capfd.readouterr().err.splitlines() == [
        f"geomlib: the file system of {tmp_path} has no locks: let one process at a time measure this study"
    ]


# --- batches ----------------------------------------------------------------------------------------------------------

SEVERAL = ["separability", "coherence", "taxonomy", "sinks"]


@pytest.mark.parametrize("queries", ["all", "last"])
def test_batches_change_nothing_but_rounding(fields, place, tmp_path, queries, monkeypatch):
    """In float64, so that rounding flips no near tie."""
    model = load_model(str(place / "model"), device="cpu", dtype="float64")
    study = Study(**fields | {"windows": 6, "queries": queries})
    alone = study.run(tmp_path / "alone", model, analyses=SEVERAL)
    sizes = []
    measure = Study._measure
    monkeypatch.setattr(Study, "_measure", lambda *a: sizes.append(len(a[2])) or measure(*a))
    together = study.run(tmp_path / "together", model, analyses=SEVERAL, batch=4)
    assert sizes == [4, 2]
    for name in SEVERAL:
        pd.testing.assert_frame_equal(together[name], alone[name], rtol=1e-9, atol=1e-12)
    written = [sorted(str(p.relative_to(out)) for p in out.rglob("*.parquet")) for out in tmp_path.iterdir()]
    assert written[0] == written[1]
    assert (tmp_path / "alone" / "study.json").read_bytes() == (tmp_path / "together" / "study.json").read_bytes()


def test_every_architecture_in_batches(architecture, fields, tmp_path):
    model = Model(architecture, small_model(architecture, torch.float64), make_tokenizer())
    study = Study(**fields | {"model": architecture, "length": LENGTH, "sizes": (2,), "controls": ()})
    tables = [study.run(tmp_path / str(batch), model, batch=batch) for batch in (1, 3)]
    pd.testing.assert_frame_equal(*tables, rtol=1e-6, atol=1e-9)


def test_only_windows_that_lack_the_same_share_a_pass(fields, model, tmp_path, monkeypatch):
    study = Study(**fields | {"windows": 5})
    whole = study.run(tmp_path / "whole", model, analyses=["separability", "sinks"])
    study.run(tmp_path / "out", model)
    files(tmp_path / "out")[2].unlink()
    sizes = []
    measure = Study._measure
    monkeypatch.setattr(Study, "_measure", lambda *a: sizes.append([j.names for j in a[2]]) or measure(*a))
    tables = study.run(tmp_path / "out", model, analyses=["separability", "sinks"], batch=8)
    assert sizes == [[["sinks"]] * 2, [["separability", "sinks"]], [["sinks"]] * 2]
    for name, table in tables.items():
        pd.testing.assert_frame_equal(table, whole[name], rtol=1e-4)


@pytest.mark.parametrize("batch", [0, -1])
def test_no_batch(fields, model, tmp_path, batch):
    with pytest.raises(GeomlibError, match=rf"batch = {batch} is not usable: give a whole number of windows"):
        Study(**fields).run(tmp_path, model, batch=batch)


# --- progress ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("progress", [False, True])
def test_progress_goes_to_the_file_that_the_environment_names(fields, model, tmp_path, monkeypatch, capfd, progress):
    line = tmp_path / "line"
    monkeypatch.setenv("GEOMLIB_PROGRESS", str(line))
    seen = []
    measure = Study._measure
    monkeypatch.setattr(Study, "_measure", lambda *a: seen.append(line.read_bytes().decode()) or measure(*a))
    Study(**fields).run(tmp_path / "out", model, progress=progress)
    assert len(seen) == 3 and all(re.fullmatch(r"\r\S+model: +\d+%\|.*\| \d/6 \[.*\] *", s) for s in seen), seen
    assert line.read_text() == "" and capfd.readouterr().err == ""


def test_a_progress_file_that_cannot_be_written_stops_nothing(fields, model, tmp_path, monkeypatch):
    monkeypatch.setenv("GEOMLIB_PROGRESS", str(tmp_path / "absent" / "line"))
    assert len(Study(**fields).run(tmp_path / "out", model))


# --- WikiText's spaces in a text of one's own -------------------------------------------------------------------------


def test_a_text_of_ones_own_is_detokenised_if_asked(fields, model, tmp_path):
    text = tmp_path / "wiki.txt"
    text.write_text(" ".join(f"w1 ( w{i % 9} ) . w2" for i in range(60)))
    study = Study(**fields | {"text": str(text), "windows": 1, "detokenise": True})
    (window,) = study.take(model)
    assert window.input_ids != Study(**fields | {"text": str(text), "windows": 1}).take(model)[0].input_ids
    study.run(tmp_path / "out", model)
    assert record(tmp_path / "out")["corpus"]["detokenised"] is True
    text.write_text(" ".join(f"w1 (w{i % 9}). w2" for i in range(60)))
    assert Study(**fields | {"text": str(text), "windows": 1}).take(model)[0].input_ids == window.input_ids


# --- a full disk ------------------------------------------------------------------------------------------------------

FULL = "geomlib: cannot write to {}: the disk is full; the windows written before are kept, free some space and run the same again.\n"


def test_no_room_for_a_window(fields, model, tmp_path):
    """A limit on the size of files stands in for the disk's end: study.json fits, a table does not."""
    whole = Study(**fields).run(tmp_path / "whole", model)
    out = tmp_path / "out"
    shutil.copytree(tmp_path / "whole", out)
    for path in files(out)[1:]:
        path.unlink()
    limit = min(p.stat().st_size for p in files(tmp_path / "whole")) // 2
    done = subprocess.run(
        command(fields, out), capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, FULL.format(out))
    assert files(out)[0].read_bytes() == files(tmp_path / "whole")[0].read_bytes()
    assert len(files(out)) == 1 and not leftovers(out)
    pd.testing.assert_frame_equal(Study(**fields).run(out, model), whole)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 64 KiB, and a function that makes it larger."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    try:
        yield disk, lambda: subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_disk_that_fills_up(fields, model, tmp_path, small_disk):
    disk, enlarge = small_disk
    fields["windows"] = 12
    whole = Study(**fields).run(tmp_path / "whole", model)
    assert sum(p.stat().st_size for p in files(tmp_path / "whole")) > 2 * 64 * 1024
    with pytest.raises(GeomlibError) as caught:
        Study(**fields).run(disk / "out", model)
    assert f"geomlib: {caught.value}\n" == FULL.format(disk / "out")
    finished = files(disk / "out")
    assert 1 <= len(finished) < 12 and not leftovers(disk / "out")
    for path in finished:
        assert path.read_bytes() == (tmp_path / "whole" / "separability" / path.name).read_bytes()
    enlarge()
    pd.testing.assert_frame_equal(Study(**fields).run(disk / "out", model), whole)


def test_a_disk_that_is_full_from_the_start(fields, model, tmp_path, small_disk):
    disk, enlarge = small_disk
    (disk / "filler").write_bytes(b"x" * os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize)
    with pytest.raises(GeomlibError, match="the disk is full"):
        Study(**fields).run(disk / "out", model)
    assert not files(disk / "out") and not leftovers(disk / "out") and not (disk / "out" / "study.json").exists()
    enlarge()
    assert len(Study(**fields).run(disk / "out", model))


# --- NaN --------------------------------------------------------------------------------------------------------------


def _poison(name):
    def damage(hf):
        with torch.no_grad():
            hf.get_parameter(name).view(-1)[3] = float("nan")

    return damage


@pytest.mark.parametrize("weight", ["q_proj", "v_proj"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_nan_names_the_layer(fields, tmp_path, weight, layer):
    folder = save_model(tmp_path / "model", _poison(f"model.layers.{layer}.self_attn.{weight}.weight"))
    with pytest.raises(GeomlibError, match=f"layer {layer} gives NaN"):
        Study(**fields | {"model": str(folder)}).run(tmp_path / "out")
    assert not files(tmp_path / "out")


@pytest.mark.parametrize("batch", [1, 3])
def test_nan_that_only_some_windows_meet(fields, place, tmp_path, batch):
    """The embedding of one word is NaN: the windows without it are measured and kept."""
    word = 3
    folder = save_model(tmp_path / "model", lambda hf: hf.model.embed_tokens.weight.data[3 + word].fill_(float("nan")))
    clean = " ".join(w for w in words(200).split() if w != f"w{word}")
    texts = [clean, clean[:-1], f"w{word} {words(22)}"]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    model = load_model(str(folder), device="cpu", check=False)
    fields |= {"model": str(folder), "text": str(tmp_path / "t.jsonl")}
    windows, _ = take_windows(text_corpus(fields["text"]), model.tokenizer, 3, 24)
    poisoned = [3 + word in w.input_ids for w in windows]
    assert sum(poisoned) == 1
    with pytest.raises(GeomlibError, match="layer 0 gives NaN"):
        Study(**fields).run(tmp_path / "out", model, batch=batch)
    assert len(files(tmp_path / "out")) == poisoned.index(True)


def test_nan_after_the_last_attention_names_the_last_layer(fields, tmp_path):
    model = load_model(fields["model"], device="cpu")
    _poison(f"model.layers.{LAYERS - 1}.mlp.down_proj.weight")(model.hf)  # once it has passed the check at load
    with pytest.raises(GeomlibError, match=rf"NaN or infinite numbers after its last layer \({LAYERS - 1}\)"):
        Study(**fields).run(tmp_path / "out", model)
    assert not files(tmp_path / "out")


# --- one's own text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bos", ["<s>", None])
def test_a_text_that_is_one_window(fields, tmp_path, bos):
    folder = save_model(tmp_path / "model", bos=bos)
    need = 24 - (bos is not None)
    (tmp_path / "exact.txt").write_text(words(need))
    (tmp_path / "short.txt").write_text(words(need - 1))
    model = load_model(str(folder), device="cpu")
    fields |= {"model": str(folder), "windows": 1}
    table = Study(**fields | {"text": str(tmp_path / "exact.txt")}).run(tmp_path / "out", model)
    assert set(table["document"]) == {"exact.txt#0"}
    assert record(tmp_path / "out")["windows"][0] | {"sha256": ""} == {
        "document": "exact.txt#0", "start": 0, "bos": bos is not None, "sha256": "",
    }  # fmt: skip
    assert table.query("control == 'none' and size == 1 and layer == 0 and head == 0 and distance == 'cosine'")[
        "queries"
    ].tolist() == [7, 8, 8]  # the first of 24 queries sees itself alone
    with pytest.raises(GeomlibError, match=f"short.txt has {need - 1} tokens, too few for a window of 24.*at most 23"):
        Study(**fields | {"text": str(tmp_path / "short.txt")}).run(tmp_path / "out2", model)
    assert not (tmp_path / "out2").exists()


def test_what_is_wrong_with_the_text_shows_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(S, "load_model", None)
    with pytest.raises(GeomlibError, match="There is no file"):
        Study(text=str(tmp_path / "absent.txt")).run(tmp_path)


def test_metrics_are_the_schemas():
    assert [c for c, (kind, _) in SCHEMA.items() if kind == "float64"] == list(METRICS)
