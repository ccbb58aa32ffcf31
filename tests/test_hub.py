"""Models and data sets of the hub from end to end, and what the user is told when the hub or the network fails.

Everything is asked of a small hub on the loopback, by processes whose cache starts empty. `time.sleep` is recorded instead of
slept where the hub's client waits, so that the tests know how long a user would wait.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from hub import ACCEPTED, NEW, OLD, REFUSED, Users, serve, the_repositories

WITHOUT_WAITING = "import time\nwaited = []\ntime.sleep = waited.append\n"
PRELUDE = f"""
{WITHOUT_WAITING}
from itertools import islice
from geomlib import load_corpus, load_model
from geomlib.errors import GeomlibError

def attempt(call, *args, **kwargs):
    try:
        print(call(*args, **kwargs))
    except GeomlibError as e:
        print(e)
    print(sum(waited))
    waited.clear()

def model(*args, **kwargs):
    m = load_model(*args, device="cpu", **kwargs)
    weights = sum(p.double().abs().sum() for p in m.hf.parameters())
    return f"{{m.fingerprint}} {{m.revision}} {{weights:.6f}} {{m.tokenizer.bos_token_id}} {{len(m.tokenizer)}}"

def corpus(name, count=300, **kwargs):
    c = load_corpus(name, **kwargs)
    found = list(islice(c.documents(), count))
    return f"{{len(found)}} {{c.source['revision']}} {{found[0].text[:40]!r}}"
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    with serve(the_repositories(folder / "made")) as hub:
        users = Users(hub.endpoint, folder)
        yield hub, users
        users.close()


@pytest.fixture
def hub(world):
    hub, users = world
    hub.faults.clear()
    hub.requests.clear()
    shutil.rmtree(users.home, ignore_errors=True)
    return hub


@pytest.fixture
def users(world):
    return world[1]


@pytest.fixture
def attempt(hub, users):
    """One attempt in a process of its own: what it prints, and how long it would have waited."""

    def attempt(call: str, **environ: str) -> tuple[str, float]:
        done = users.run(f"{PRELUDE}\nattempt({call})", **environ)
        assert done.code == 0, done.err
        assert "Traceback" not in done.err
        said, waited = done.out.splitlines()
        return said, float(waited)

    return attempt


@pytest.fixture(scope="module")
def sound(world):
    """What loading org/tiny prints when nothing is wrong."""
    hub, users = world
    hub.faults.clear()
    shutil.rmtree(users.home, ignore_errors=True)
    said = users.run(f"{PRELUDE}\nattempt(model, 'org/tiny')").out.splitlines()[0]
    assert said.startswith(f"org/tiny@{NEW[:12]} {NEW}")
    assert said.endswith(" 0 500")  # BOS and the size of the vocabulary
    return said


# --- revisions, tokens, caches ----------------------------------------------------------------------------------------


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub, users, sound):
    code = "".join(f"\nattempt(model, 'org/tiny', {r!r})" for r in (None, "v1", "some/branch", "refs/pr/1", OLD, NEW))
    lines = users.run(f"{PRELUDE}{code}\nattempt(model, 'org/tiny@v1')").out.splitlines()[::2]
    assert lines[0] == lines[5] == sound
    assert len(set(lines[1:5])) == 1
    assert lines[6] == lines[1]
    assert lines[1].split()[:2] == [f"org/tiny@{OLD[:12]}", OLD]
    assert lines[1].split()[2] != sound.split()[2]  # other weights
    assert len(hub.fetched("model.safetensors")) == 2  # each of them once
    assert len(hub.fetched("config.json")) == len({r.path for r in hub.fetched("config.json")})


def test_the_second_time_is_served_from_the_cache(hub, attempt, users, sound):
    first = attempt("model, 'org/tiny'")[0]
    assert first == sound
    hub.requests.clear()
    assert attempt("model, 'org/tiny'")[0] == sound
    assert [r.path for r in hub.requests] == ["/api/models/org/tiny/revision/main"]
    # What is asked when nobody answers: once, and what is there serves. The same when the hub is busy or forbids asking.
    for trouble in ("close", 429, 500):
        hub.faults.clear()
        hub.fault("/", trouble)
        assert attempt("model, 'org/tiny'") == (sound, 0)
    assert attempt("model, 'org/tiny'", HF_HUB_OFFLINE="1") == (sound, 0)
    said, waited = attempt("model, 'org/tiny', 'v1'", HF_HUB_OFFLINE="1")
    assert "cannot be reached for org/tiny" in said
    assert waited == 0


def test_the_cache_serves_when_the_hub_is_gone(hub, attempt, sound):
    assert attempt("model, 'org/tiny'")[0] == sound
    hub.stop()
    try:
        assert attempt("model, 'org/tiny'") == (sound, 0)
        assert "cannot be reached for org/gated" in attempt("model, 'org/gated'")[0]
        assert "cannot be reached for Skylion007/openwebtext" in attempt("corpus, 'openwebtext'")[0]
    finally:
        hub.start()


def test_a_token_is_sent_to_the_hub_and_nowhere_else(hub, attempt, sound):
    said = attempt("model, 'org/gated'")[0]
    assert said == (
        "org/gated is gated: accept its terms on its model page, then set HF_TOKEN to a token of that account."
    )
    said = attempt("model, 'org/gated'", HF_TOKEN=REFUSED)[0]
    assert said == (
        "org/gated is gated and the account of your token has no access: accept its terms on its model page, and wait where "
        "its owner has to agree."
    )
    hub.requests.clear()
    assert attempt("model, 'org/gated'", HF_TOKEN=ACCEPTED)[0] == sound.replace("org/tiny", "org/gated")
    stored = [r for r in hub.requests if r.path.endswith(".safetensors") and r.method == "GET"]
    assert [r.token for r in stored] == [None]
    assert {r.token for r in hub.requests if r not in stored} == {ACCEPTED}
    said = attempt("model, 'org/tiny', 'v1'", HF_TOKEN="hf_unknown")[0]
    assert said.startswith("The hub does not know your token, asked for org/tiny: set HF_TOKEN")

    assert attempt("corpus, 'org/gated'")[0].startswith("org/gated is gated: accept its terms on its dataset page")
    assert "the account of your token has no access" in attempt("corpus, 'org/gated'", HF_TOKEN=REFUSED)[0]
    assert attempt("corpus, 'org/gated'", HF_TOKEN=ACCEPTED)[0].startswith(f"300 {NEW}")
    assert "does not know your token" in attempt("corpus, 'openwebtext'", HF_TOKEN="hf_unknown")[0]


def test_what_is_not_there_is_one_sentence(hub, users):
    calls = {
        "model, 'org/absent'": "The hub has no public model org/absent: check the id, or set HF_TOKEN",
        "model, 'org/absent', 'v1'": "The hub has no public model org/absent",
        "model, 'org/tiny', 'absent'": "org/tiny has no such revision",
        "model, 'org/tiny@absent'": "has no such revision",
        "model, 'org/empty'": "org/empty has no file that transformers can load",
        "model, 'org/encoder'": "org/encoder is a BertForMaskedLM, not a causal language model",
        "model, 'absent'": "There is no model 'absent': give an embedded one",
        "corpus, 'org/columns'": "org/columns has no text column (it has content)",
        "corpus, 'org/absent'": "The hub has no public dataset org/absent",
        "corpus, 'openwebtext', revision='absent'": "Skylion007/openwebtext has no revision absent",
        "corpus, 'openwebtext@absent'": "Skylion007/openwebtext has no revision absent",
        "corpus, 'openwebtext@v1', revision='main'": "openwebtext@v1 and revision main name two revisions",
        "corpus, 'vital-articles@v1'": "vital-articles is not a hub dataset and has no revisions",
        "corpus, 'wikitext'": "There is no corpus 'wikitext': give one of vital-articles",
    }
    done = users.run(PRELUDE + "".join(f"\nattempt({c})" for c in calls))
    for line, sentence in zip(done.out.splitlines()[::2], calls.values(), strict=True):
        assert sentence in line
        assert "\n" not in line
    assert not hub.fetched("wikitext")
    assert not hub.fetched("model.safetensors")  # what is refused is not fetched first


# --- data sets --------------------------------------------------------------------------------------------------------


def test_the_data_sets_of_the_paper_are_streamed(hub, users):
    code = """
        from geomlib import load_corpus, load_model, take_windows
        tokenizer = load_model("org/tiny", device="cpu").tokenizer
        for name in ("openwebtext", "openwebtext@v1", "wikitext-103"):
            corpus = load_corpus(name)
            windows, skipped = take_windows(corpus, tokenizer, 4, 64)
            print(corpus.name, corpus.source["revision"], [(w.document, w.start, len(w.input_ids)) for w in windows])
        texts = [d.text for d in load_corpus("wikitext-103").documents()]
        print(len(texts), all(t.startswith(" = ") and " = = History = = " in t for t in texts))
        print(next(load_corpus("wikitext-103", detokenise=True).documents()).text)
    """
    done = users.run(code)
    lines = done.out.splitlines()
    assert lines[0] == lines[1], done.err  # the revision decides the texts and not the draw
    assert lines[0].startswith(f"openwebtext {NEW}")
    assert lines[2].startswith(f"wikitext-103 {NEW}")
    assert lines[3] == "80 True"
    assert " @-@ " not in done.out
    assert {r.path[-22:] for r in hub.fetched("train-") if "plain_text" in r.path} == {
        "00000-of-00004.parquet",
        "00001-of-00004.parquet",  # 150 documents each, of which 200 take part
    }
    assert not hub.fetched("validation")
    assert all(f"/{NEW}/" in r.path for r in hub.requests if "/resolve/" in r.path and "/datasets/" in r.path)  # pinned


@pytest.mark.parametrize("fault", ["half", "reset", "close"])
def test_a_connection_lost_once_while_streaming_is_nothing_to_notice(hub, attempt, fault):
    hub.fault("train-00001", fault, times=1)
    said, waited = attempt("corpus, 'openwebtext'")
    assert said.startswith(f"300 {NEW}")
    assert waited <= 5
    assert hub.faults[0].times == 0


@pytest.mark.parametrize(
    ("part", "fault", "sentence"),
    [
        ("train-00001", "half", "breaks off at Skylion007/openwebtext"),
        ("train-00001", "close", "breaks off at Skylion007/openwebtext"),
        ("train-00001", 429, "limits requests, also for Skylion007/openwebtext: wait some minutes"),
        ("train-00001", 500, r"has a fault of its own \(status 500\) with Skylion007/openwebtext"),
        ("train-00001", 504, r"has a fault of its own \(status 504\) with Skylion007/openwebtext"),
        ("train-00001", "short", r"Skylion007/openwebtext cannot be read \(.*[Pp]arquet.*\): try again"),
        ("/tree/", "close", "breaks off at Skylion007/openwebtext"),
        ("/tree/", 429, "limits requests, also for Skylion007/openwebtext"),
        ("/api/", "close", "breaks off at Skylion007/openwebtext"),
        ("/api/", 429, "limits requests, also for Skylion007/openwebtext"),
        ("/api/", 503, r"has a fault of its own \(status 503\)"),
    ],
)
def test_a_lasting_fault_of_a_data_set_is_one_sentence_within_two_minutes(hub, attempt, part, fault, sentence):
    hub.fault(part, fault)
    said, waited = attempt("corpus, 'openwebtext'")
    assert pd.Series([said]).str.contains(sentence).all(), said
    assert waited <= 120
    hub.faults.clear()
    assert attempt("corpus, 'openwebtext'")[0].startswith(f"300 {NEW}")


@pytest.mark.parametrize("part", ["train-00001", "/api/"])
def test_a_data_set_waits_as_long_as_the_hub_says(hub, attempt, part):
    hub.fault(part, 429, times=1, Retry_After="40")
    said, waited = attempt("corpus, 'openwebtext'")
    assert said.startswith(f"300 {NEW}")
    assert waited == 41


def test_a_damaged_card_does_not_stay_in_the_cache(hub, attempt):
    hub.fault("README.md", "short")
    assert "README.md of Salesforce/wikitext came damaged" in attempt("corpus, 'wikitext-103'")[0]
    hub.faults.clear()
    assert attempt("corpus, 'wikitext-103'")[0].startswith(f"80 {NEW}")


# --- models that do not arrive whole ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "fault"),
    [
        *(("model.safetensors", fault) for fault in ("half", "reset", "close", "short", "flip")),
        *(("tokenizer_config.json", fault) for fault in ("reset", "flip", 429)),
    ],
)
def test_a_fault_that_passes_is_nothing_to_notice(hub, attempt, sound, file, fault):
    hub.fault(file, fault, times=1, **({"Retry_After": "2"} if fault == 429 else {}))
    said, waited = attempt("model, 'org/tiny'")
    assert said == sound
    assert waited <= 3
    assert hub.faults[0].times == 0


@pytest.mark.parametrize(
    ("file", "fault", "sentence"),
    [
        ("model.safetensors", "close", "breaks off at org/tiny"),
        ("model.safetensors", "reset", "breaks off at org/tiny"),
        ("model.safetensors", "short", "model.safetensors of org/tiny came damaged three times and was not kept"),
        ("model.safetensors", "flip", "model.safetensors of org/tiny came damaged three times and was not kept"),
        ("model.safetensors", 429, "limits requests, also for org/tiny: wait some minutes"),
        ("model.safetensors", 500, "has a fault of its own (status 500) with org/tiny"),
        ("/config.json", "short", "config.json of org/tiny came damaged three times"),
        # `transformers` would go on with a tokenizer that has no BOS:
        ("tokenizer_config.json", 429, "limits requests, also for org/tiny"),
        ("tokenizer_config.json", 500, "has a fault of its own (status 500) with org/tiny"),
        ("tokenizer_config.json", "flip", "tokenizer_config.json of org/tiny came damaged three times"),
        ("tokenizer.json", "close", "breaks off at org/tiny"),
        ("/", 429, "limits requests, also for org/tiny"),
        ("/", 503, "has a fault of its own (status 503) with org/tiny"),
    ],
)
def test_a_lasting_fault_of_a_model_is_one_sentence_and_mended_with_the_hub(
    hub, attempt, users, sound, file, fault, sentence
):
    hub.fault(file, fault)
    said, waited = attempt("model, 'org/tiny'")
    assert sentence in said
    assert waited <= 60
    hub.faults.clear()
    assert attempt("model, 'org/tiny'")[0] == sound


def test_a_file_that_others_left_truncated_is_fetched_again(hub, attempt, users, sound):
    assert attempt("model, 'org/tiny'")[0] == sound
    for file in ("model.safetensors", "config.json"):
        (path,) = users.home.glob(f"hub/models--org--tiny/snapshots/*/{file}")
        path.write_bytes(path.read_bytes()[:100])
    said = attempt("model, 'org/tiny'", HF_HUB_OFFLINE="1")[0]
    assert "org/tiny cannot be loaded" in said  # nowhere to get them from
    assert attempt("model, 'org/tiny'")[0] == sound


def test_of_a_model_in_parts_what_has_arrived_is_kept(hub, attempt):
    hub.fault("model-00003-of", "close")
    assert "breaks off at org/sharded" in attempt("model, 'org/sharded'")[0]
    hub.fault("/", "close")
    assert "breaks off at org/sharded" in attempt("model, 'org/sharded'")[0]  # two of four parts
    hub.faults.clear()
    hub.requests.clear()
    assert attempt("model, 'org/sharded'")[0].startswith(f"org/sharded@{NEW[:12]}")
    assert sorted(r.path.split("/")[-1] for r in hub.fetched("model-")) == [
        "model-00003-of-00004.safetensors",
        "model-00004-of-00004.safetensors",
    ]


# --- the command line -------------------------------------------------------------------------------------------------

MEASURE = ("measure", "separability", "--windows", "2", "--length", "64", "--sizes", "2,8", "--random-rankings", "1")


def test_the_command_line_measures_a_model_and_texts_of_the_hub(hub, users, tmp_path):
    arguments = (*MEASURE, "--model", "org/gated", "--revision", NEW, "--corpus", f"wikitext-103@{NEW}")
    out = tmp_path / "out"
    done = users.command(*arguments, "--out", str(out))
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert done.err.startswith("geomlib: org/gated is gated: accept its terms")
    assert not out.exists()

    # As a user starts it, in a process that has nothing imported yet.
    real = subprocess.run(
        [Path(sys.executable).with_name("geomlib"), *arguments, "--out", str(out)],
        env=users.environ | {"HF_TOKEN": ACCEPTED}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert real.returncode == 0, real.stderr
    record = json.loads((out / "study.json").read_text())
    assert (record["model"]["revision"], record["corpus"]["revision"]) == (NEW, NEW)
    assert record["corpus"]["repository"] == "Salesforce/wikitext"
    assert record["study"]["corpus"] == f"wikitext-103@{NEW}"
    assert all(w["bos"] for w in record["windows"])
    tables = sorted((out / "separability").glob("*.parquet"))
    assert len(tables) == 2


def test_what_was_measured_stays_when_the_hub_fails(hub, users, tmp_path):
    out = tmp_path / "out"
    arguments = (*MEASURE, "--model", "org/tiny", "--corpus", "openwebtext", "--out", str(out))
    assert users.command(*arguments).code == 0
    first, second = sorted((out / "separability").glob("*.parquet"))
    whole, kept = pd.read_parquet(second), first.read_bytes()
    second.unlink()  # as if stopped between the two windows
    for part, fault, sentence in (("train-00001", "half", "breaks off"), ("/", 429, "limits requests")):
        hub.faults.clear()
        hub.fault(part, fault)
        done = users.command(*arguments, before=WITHOUT_WAITING)
        assert done.code == 2
        assert "Traceback" not in done.err
        assert sentence in done.err.splitlines()[-1]
        assert first.read_bytes() == kept
    hub.faults.clear()
    assert users.command(*arguments).code == 0
    pd.testing.assert_frame_equal(pd.read_parquet(second), whole)


def test_a_run_by_the_papers_profile_takes_model_and_texts_from_the_hub(hub, users, tmp_path):
    """The whole way of the command: the revision becomes a commit, the kernel asks the same hub, both data sets are streamed."""
    out = tmp_path / "run"
    small = [f"--set={x}" for x in ("length=40", "windows=2", "final_windows=2", "random_rankings=1")]
    arguments = [
        "--model",
        "org/tiny",
        "--revision",
        OLD,
        "--profile",
        "paper",
        "--chapters",
        "02",
        *small,
        "--out",
        str(out),
    ]
    real = subprocess.run(
        [Path(sys.executable).with_name("geomlib"), "run", *arguments], cwd=Path(__file__).parent.parent,
        env=users.environ, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert real.returncode == 0, real.stderr
    asked = json.loads((out / "run.json").read_text())["asked"]
    assert (asked["model"], asked["profile"]) == (f"org/tiny@{OLD}", "paper")
    records = [json.loads(p.read_text()) for p in out.glob("tables/*/study.json")]
    assert {r["model"]["revision"] for r in records} == {OLD}
    texts = {(r["corpus"]["repository"], r["study"]["queries"]) for r in records}
    assert texts == {(name, q) for name in ("Salesforce/wikitext", "Skylion007/openwebtext") for q in ("all", "last")}
    card = json.loads((out / "scorecard.json").read_text())
    assert {r["corpus"] for r in card["rows"] if r["claim"] == "C1"} == {"wikitext-103", "openwebtext"}
