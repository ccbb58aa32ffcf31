"""The command as a user runs it: a process of its own, judged by its exit code and its two outputs."""

import json
import os
import pty
import re
import select
import subprocess
import termios
import time
from pathlib import Path

import pandas as pd
import pytest
from test_models import save
from test_study import GEOMLIB, LAYERS, _poison, command, files, leftovers, record, save_model, save_texts, words

from geomlib.models import EMBEDDED
from geomlib.study import Study, load_table

SMALL = {"windows": 2, "length": 24, "sizes": (1, 2, 4), "bins": 3, "random_rankings": 2}


def run(*arguments, **env) -> subprocess.CompletedProcess:
    """The command without a terminal and without the caller's hub settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    return subprocess.run(
        [GEOMLIB, *map(str, arguments)], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        env=kept | {k: str(v) for k, v in env.items()}, timeout=300,
    )  # fmt: skip


def measure(out: Path, env: dict | None = None, **fields) -> subprocess.CompletedProcess:
    return run(*command(SMALL | fields, out)[1:], **(env or {}))


def refused(done: subprocess.CompletedProcess, sentence: str) -> None:
    """Exit code 2, one sentence in one line, nothing else."""
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("geomlib: ") and lines[0].endswith("."), done.stderr
    assert re.search(sentence, lines[0]), lines[0]
    assert done.stdout == ""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("cli")
    save_model(place / "model")
    save_texts(place / "texts.jsonl", 30)
    return place


@pytest.fixture
def given(place) -> dict:
    return {"model": place / "model", "text": place / "texts.jsonl"}


# --- what works -------------------------------------------------------------------------------------------------------


def test_measuring_quietly(given, tmp_path):
    """Not on a terminal: nothing on stderr; tables and study.json as the library writes them; a second time, too."""
    done = measure(tmp_path / "out", **given, rankings=("attention", "contribution"), distances=("cosine",), seed=3)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(files(tmp_path / "out")) == 2 and not leftovers(tmp_path / "out")
    assert record(tmp_path / "out")["study"] | {"model": ""} == {
        "model": "", "revision": None, "corpus": None, "text": "texts.jsonl", "detokenise": False, "windows": 2,
        "skip": 0, "length": 24, "seed": 3, "dtype": None, "queries": "all", "sizes": [1, 2, 4],
        "rankings": ["attention", "contribution"], "distances": ["cosine"], "controls": ["random", "magnitude"],
        "random_rankings": 2, "bins": 3,
    }  # fmt: skip
    fields = SMALL | {k: str(v) for k, v in given.items()}
    study = Study(**fields, rankings=("attention", "contribution"), distances=("cosine",), seed=3)
    table = study.run(tmp_path / "library")
    assert record(tmp_path / "out")["key"] == record(tmp_path / "library")["key"]
    pd.testing.assert_frame_equal(load_table(tmp_path / "out"), table)

    lines = done.stdout.splitlines()
    assert lines[0] == "Mean F_N over heads, layers and 2 documents, with 95 % intervals:"
    assert lines[-1] == f"Tables and study.json are in {tmp_path / 'out'}."
    assert len(lines) == 2 + 1 + 5 * 2  # five kinds of sets, N = 2 and 4: N = 1 says nothing
    (shown,) = [line.split() for line in lines if line.split()[:4] == ["cosine", "contribution", "none", "4"]]
    rows = table.query("ranking == 'contribution' and control == 'none' and size == 4")
    heads = rows.groupby(["document", "layer", "head"]).apply(
        lambda r: (r["f"] * r["queries"]).sum() / r["queries"].sum()
    )
    assert float(shown[4]) == pytest.approx(heads.mean(), abs=6e-4)  # every layer has as many heads here


def on_a_terminal(*arguments) -> tuple[int, str]:
    """Exit code and everything that appears on a terminal of 100 columns."""
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (30, 100))
    with subprocess.Popen(
        list(map(str, arguments)), stdin=follower, stdout=follower, stderr=follower, close_fds=True,
        env=os.environ | {"TERM": "xterm"},
    ) as running:  # fmt: skip
        os.close(follower)
        shown = b""
        while True:
            ready, _, _ = select.select([leader], [], [], 300)
            try:
                chunk = os.read(leader, 65536) if ready else b""
            except OSError:  # the other end is closed
                chunk = b""
            if not chunk:
                break
            shown += chunk
    os.close(leader)
    return running.returncode, shown.decode()


def test_a_bar_with_the_time_left_on_a_terminal(given, tmp_path):
    code, shown = on_a_terminal(*command(SMALL | given | {"windows": 20, "length": 100}, tmp_path))
    assert code == 0, shown
    total = 20 * LAYERS
    assert f"{total}/{total}" in shown and "100%" in shown
    left = re.findall(r"(\d+)/40 \[\d\d:\d\d<(\d\d:\d\d)", shown)
    assert any(0 < int(n) < total for n, _ in left), shown  # on the way, not at the end alone
    assert "Mean F_N" in shown


def test_help_of_every_command():
    for arguments in (
        [],
        ["measure"],
        ["fetch"],
        ["run"],
        ["estimate"],
        ["scorecard"],
        ["compare"],
        ["notebooks"],
        ["measure", "separability"],
    ):
        done = run(*arguments, "--help", COLUMNS="200", TERM="dumb")
        assert done.returncode == 0 and "Usage" in done.stdout, done.stderr
        assert done.stderr == ""
    for flag in ("--model", "--corpus", "--text", "--windows", "--length", "--queries", "--out"):
        assert flag in done.stdout


def test_help_is_fast_and_imports_no_torch():
    times = []
    for _ in range(5):  # the best of five: a busy machine slows some runs, never speeds one up
        start = time.perf_counter()
        done = run("--help", PYTHONPROFILEIMPORTTIME="1")
        times.append(time.perf_counter() - start)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "geomlib" in imported
    assert not {"torch", "transformers", "numpy", "pandas", "numba"} & imported
    assert min(times) < 1


# --- bad input --------------------------------------------------------------------------------------------------------


def test_an_unknown_model_lists_the_embedded_ones(given, tmp_path):
    done = measure(tmp_path / "out", **given | {"model": "smollm3"})
    refused(done, f"There is no model 'smollm3': .*{', '.join(EMBEDDED)}")
    assert not (tmp_path / "out").exists()


def test_no_network(given, tmp_path):
    start = time.monotonic()
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": tmp_path / "hf"}
    done = measure(tmp_path / "out", env, **given | {"model": "org/model"})
    refused(done, "The model hub cannot be reached for org/model: .*or use an embedded model")
    assert time.monotonic() - start < 60


def test_an_encoder_model(given, tmp_path):
    done = measure(tmp_path / "out", **given | {"model": save(tmp_path / "bert", "BertForMaskedLM")})
    refused(done, "is a BertForMaskedLM, not a causal language model")


def test_nan_in_the_model(given, tmp_path):
    folder = save_model(tmp_path / "model", _poison("model.layers.1.self_attn.q_proj.weight"))
    refused(measure(tmp_path / "out", **given | {"model": folder}), "layer 1 gives NaN")


def test_a_text_shorter_than_the_window(given, tmp_path):
    (tmp_path / "short.txt").write_text(words(22))
    done = measure(tmp_path / "out", **given | {"text": tmp_path / "short.txt"})
    refused(done, r"short\.txt has 22 tokens, too few for a window of 24: .*at most 23")


def test_a_text_that_is_one_window(given, tmp_path):
    (tmp_path / "exact.txt").write_text(words(23))
    done = measure(tmp_path / "out", **given | {"text": tmp_path / "exact.txt", "windows": 8})
    assert (done.returncode, done.stderr) == (0, "")
    assert len(files(tmp_path / "out")) == 1
    assert done.stdout.startswith("The text holds 1 of up to 8 windows.\nMean F_N over heads, layers and 1 passage:\n")
    assert "low" not in done.stdout and "NaN" not in done.stdout  # one document says nothing about the next


def test_n_as_large_as_the_window(given, tmp_path):
    done = measure(tmp_path / "out", **given | {"sizes": (24, 48)})
    refused(done, r"every N of sizes \(24, 48\) is at least the window's 24 sources")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty: give a file with text"),
        (b"words and \0 nul", "is a binary file"),
    ],
    ids=["empty", "binary"],
)
def test_text_files_that_are_none(given, tmp_path, content, sentence):
    (tmp_path / "mine.txt").write_bytes(content)
    refused(measure(tmp_path / "out", **given | {"text": tmp_path / "mine.txt"}), sentence)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("sizes", ["2,many", "", "1.5", "2;4"])
def test_sizes_that_are_none(given, tmp_path, sizes):
    done = run("measure", "separability", "--out", tmp_path, "--sizes", sizes)
    refused(done, re.escape(f"--sizes {sizes!r} is not usable: give whole numbers with commas"))


def test_a_folder_that_holds_another_study(given, tmp_path):
    (tmp_path / "study.json").write_text(json.dumps({"key": "0", "study": {"length": 99}}))
    refused(measure(tmp_path, **given), "holds another study")


def test_an_unknown_name_to_fetch():
    refused(run("fetch", "llama"), "llama is not embedded: fetch one of smollm2-135m")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["colour=blue"], "has a parameter colour: known are"),
        (["colour"], "--set colour is not usable: give name=value"),
        (["windows=many"], "windows = 'many' does not fit .*: give a whole number such as"),
        (["model_name=x"], "model_name is not for --set: give --model instead"),
    ],
)
def test_settings_that_no_notebook_has(settings, sentence, tmp_path):
    flags = [flag for setting in settings for flag in ("--set", setting)]
    refused(run("run", "--out", tmp_path / "out", *flags), sentence)
    assert not (tmp_path / "out").exists()


def test_an_unknown_chapter(tmp_path):
    refused(
        run("run", "--out", tmp_path / "out", "--chapter", "99_end"),
        "there is no notebook 99_end: give one of 00_quickstart",
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--device", "gpu"], "'gpu' is not a device: give cpu, cuda or cuda:1"),
        (["--device", "cuda:99"], "There is no GPU for cuda:99 here: give device='cpu'"),
        (["--dtype", "half-ish"], "'half-ish' is not a dtype"),
        (["--device", "cpu", "--device-map", "auto"], "device and device_map exclude each other"),
    ],
)
@pytest.mark.parametrize("command", [["run"], ["measure", "separability"]])
def test_where_a_model_cannot_go_is_said_at_once(command, options, says, tmp_path):
    if command != ["run"] and "--dtype" in options:
        return
    refused(run(*command, "--out", tmp_path / "out", *options), says)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [["--queries", "some"], ["--windows", "few"], ["--colour", "1"], []])
def test_what_typer_refuses_has_exit_code_2_and_no_traceback(arguments, tmp_path):
    out = ["--out", tmp_path / "out"] if arguments else []  # without --out, that is what is missing
    done = run("measure", "separability", *out, *arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and (arguments or ["--out"])[0] in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["measure", "separability"], "Missing option '--out'"),
        (["measure", "separability", "--out", "x", "--queries", "first"], "'first' is not one of 'all', 'last'"),
        (["measure", "separability", "--out", "x", "--windows", "2.5"], "'--windows': Input should be a valid integer"),
        (["measure", "sepa"], "No such command 'sepa'"),
        (["measure", "separability", "--out", "x", "--text", "a.txt", "--corpus", "b"], "give one of them"),
    ],
)
def test_options_that_do_not_exist_or_fit(arguments, says):
    refused(run(*arguments), re.escape(says))
