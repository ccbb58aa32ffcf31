"""Corpora and windows: the same tokens everywhere, exactly as many as asked for, BOS once."""

import hashlib
import json
import tarfile
from io import BytesIO
from itertools import pairwise

import pandas as pd
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from geomlib import corpora as C
from geomlib.corpora import Corpus, Document, detokenise_wikitext, load_corpus, take_windows, text_corpus
from geomlib.errors import GeomlibError

BOS = 1


def make_tokenizer(bos: str | None = "<s>", adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """One token a word, w0 is 3, w1 is 4...; `adds_bos` puts BOS in front by itself, as LLaMA's and Gemma's do."""
    words = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(2000))])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", 2)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, unk_token="<unk>")


def text(count: int, first: int = 0) -> str:
    return " ".join(f"w{i}" for i in range(first, first + count))


def corpus(*lengths: int, name: str = "c", **kwargs) -> Corpus:
    documents = [Document(f"d{i}", text(n)) for i, n in enumerate(lengths)]
    return Corpus(name, lambda: iter(documents), {}, **kwargs)


# --- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bos", "adds_bos"), [("<s>", True), ("<s>", False), (None, False)])
def test_windows_have_the_exact_length_and_bos_once(bos, adds_bos):
    windows, skipped = take_windows(corpus(*[50] * 8, 5), make_tokenizer(bos, adds_bos), count=8, length=16)
    assert len(windows) == 8
    assert skipped <= 1
    for w in windows:
        assert len(w.input_ids) == 16
        assert w.bos == (bos is not None)
        assert w.input_ids.count(BOS) == w.bos
        assert (w.input_ids[0] == BOS) == w.bos
        content = w.input_ids[1:] if w.bos else w.input_ids
        assert content == list(range(3 + w.start, 3 + w.start + len(content)))  # where `start` says it is


def test_windows_are_the_same_on_every_machine():
    # Pinned: a change of the draw would change every published number.
    windows, _ = take_windows(corpus(*[100] * 6), make_tokenizer(), count=3, length=10, seed=7)
    order = sorted(range(6), key=lambda i: hashlib.sha256(f'[7, "c", "d{i}"]'.encode()).digest())
    assert [w.document for w in windows] == [f"d{i}" for i in order[:3]]
    draws = [int.from_bytes(hashlib.sha256(f'[7, "c", "{w.document}"]'.encode()).digest(), "big") for w in windows]
    assert [w.start for w in windows] == [d % 92 for d in draws]


def test_fewer_windows_are_the_first_of_more():
    all_six, _ = take_windows(corpus(*[100] * 6), make_tokenizer(), count=6, length=10)
    three, _ = take_windows(corpus(*[100] * 6), make_tokenizer(), count=3, length=10)
    assert three == all_six[:3]


def test_seed_and_corpus_change_the_draw():
    drawn = {
        tuple(
            (w.document, w.start) for w in take_windows(corpus(*[500] * 9, name=name), make_tokenizer(), 9, 8, seed)[0]
        )
        for name, seed in (("c", 0), ("c", 1), ("other", 0))
    }
    assert len(drawn) == 3


def test_short_documents_are_skipped_and_counted():
    windows, skipped = take_windows(corpus(9, 3, 9, 8), make_tokenizer(), count=2, length=10)
    assert {w.document for w in windows} == {"d0", "d2"}
    assert all(w.start == 0 for w in windows)  # 9 tokens and BOS fit exactly
    assert 0 <= skipped <= 2
    with pytest.raises(GeomlibError, match=r"c has 2 documents of 10 tokens or more where 3 windows are asked for"):
        take_windows(corpus(9, 3, 9, 8), make_tokenizer(), count=3, length=10)


def test_of_a_streamed_corpus_only_the_first_documents_are_read():
    read = 0

    def endless():
        nonlocal read
        while True:
            read += 1
            yield Document(str(read), text(20))

    streamed = Corpus("s", endless, {}, streamed=True)
    assert len(take_windows(streamed, make_tokenizer(), count=2, length=10)[0]) == 2
    assert read == 200
    read = 0
    take_windows(streamed, make_tokenizer(), count=5, length=10)
    assert read == 250


@pytest.mark.parametrize(("count", "length"), [(1, 2), (0, 10)])
def test_senseless_sizes_are_refused(count, length):
    with pytest.raises(GeomlibError, match="needs a length of 3 or more"):
        take_windows(corpus(50), make_tokenizer(), count, length)


# --- the user's own files ---------------------------------------------------------------------------------------------


@pytest.fixture
def write(tmp_path):
    def write(content: str | bytes, name: str = "my.txt"):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path / name

    return write


@pytest.mark.parametrize(("bos", "tokens"), [("<s>", 9), (None, 10)])
def test_a_text_of_one_window_is_that_window(write, bos, tokens):
    windows, skipped = take_windows(text_corpus(write(text(tokens))), make_tokenizer(bos, False), count=60, length=10)
    (window,) = windows
    assert (window.document, window.start, skipped) == ("my.txt#0", 0, 0)
    assert window.input_ids == ([BOS] if bos else []) + list(range(3, 3 + tokens))


def test_a_text_one_token_shorter_is_refused_with_the_length_that_works(write):
    own = text_corpus(write(text(8)))
    with pytest.raises(GeomlibError, match=r"my\.txt has 8 tokens.*a length of at most 9"):
        take_windows(own, make_tokenizer(), count=1, length=10)
    assert take_windows(own, make_tokenizer(), count=1, length=9)[0][0].start == 0


def test_a_longer_text_is_cut_into_windows_that_do_not_overlap(write):
    own = text_corpus(write(text(100)))
    windows, _ = take_windows(own, make_tokenizer(), count=4, length=10)
    assert [w.start for w in windows] == [0, 30, 60, 91]
    assert [w.document for w in windows] == ["my.txt#0", "my.txt#1", "my.txt#2", "my.txt#3"]
    windows, _ = take_windows(own, make_tokenizer(), count=60, length=10)
    assert len(windows) == 11  # as many as it holds
    assert all(b.start - a.start >= 9 for a, b in pairwise(windows))
    assert [w.start for w in take_windows(own, make_tokenizer(), count=1, length=10)[0]] == [0]


def test_text_jsonl_and_parquet_give_the_same_documents(write, tmp_path):
    texts = ["one text", "another, with é and\nlines"]
    jsonl = text_corpus(write("\n".join(json.dumps({"text": t, "more": 1}) for t in texts) + "\n\n", "my.jsonl"))
    pd.DataFrame({"more": [1, 2], "text": texts}).to_parquet(tmp_path / "my.parquet")
    parquet = text_corpus(tmp_path / "my.parquet")
    plain = text_corpus(write("\ufeff" + texts[1].replace("\n", "\r\n")))
    assert list(jsonl.documents()) == [Document(f"my.jsonl:{i}", t) for i, t in enumerate(texts)]
    assert list(parquet.documents()) == [Document(f"my.parquet:{i}", t) for i, t in enumerate(texts)]
    assert list(plain.documents()) == [Document("my.txt", texts[1])]
    assert plain.plain_text
    assert not jsonl.plain_text
    assert parquet.source["sha256"] == hashlib.sha256((tmp_path / "my.parquet").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("my.txt", "", "is empty"),
        ("my.txt", " \n", "is empty"),
        ("my.txt", b"caf\xe9", r"is not UTF-8 text \(byte 3\)"),
        ("my.txt", b"\x00\x01\x02", "is a binary file"),
        ("my.jsonl", "", "is empty"),
        ("my.jsonl", '{"text": "a"}\n{"tex', "Line 2 of .* is not JSON"),
        ("my.jsonl", '{"content": "a"}', 'Line 1 of .* has no "text" string'),
        ("my.jsonl", '["text"]', 'Line 1 of .* has no "text" string'),
        ("my.parquet", b"PAR1 and more", "is not a Parquet file"),
    ],
)
def test_files_that_do_not_serve_are_refused(write, name, content, sentence):
    with pytest.raises(GeomlibError, match=sentence):
        text_corpus(write(content, name))


def test_parquet_without_texts_is_refused(tmp_path):
    pd.DataFrame({"content": ["a"]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(GeomlibError, match=r'has no "text" column \(it has content\)'):
        text_corpus(tmp_path / "a.parquet")
    pd.DataFrame({"text": [1]}).to_parquet(tmp_path / "b.parquet")
    with pytest.raises(GeomlibError, match="does not hold strings"):
        text_corpus(tmp_path / "b.parquet")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(GeomlibError, match="There is no file"):
        text_corpus(tmp_path / "missing.txt")


# --- embedded corpora -------------------------------------------------------------------------------------------------


def test_a_document_is_consecutive_articles_of_one_topic(tmp_path):
    articles = {f"{t}{i}": {"topic": t, "extract": t * 9_000, "description": ""} for i in range(8) for t in "ab"}
    articles["alone"] = {"topic": "c", "extract": "short", "description": ""}
    (tmp_path / "a.json").write_text(json.dumps(articles))
    documents = list(C._vital_articles(tmp_path / "a.json"))
    # Three articles reach TOPIC_CHARS; the last two join the second document of their topic.
    assert [d.id for d in documents] == ["a/0", "a/1", "b/0", "b/1", "c/0"]
    assert documents[0].text == "\n\n".join(f"a{i}\n{'a' * 9_000}" for i in range(3))
    assert documents[1].text == "\n\n".join(f"a{i}\n{'a' * 9_000}" for i in range(3, 8))
    assert documents[4].text == "alone\nshort"


def test_the_documentation_is_read_from_the_archive(tmp_path):
    files = {"docs/b.txt": "b", "docs/a/c.txt": "é", "docs/_theme/x.txt": "", "tests/t.txt": "", "docs/conf.py": ""}
    with tarfile.open(tmp_path / "d.tar.gz", "w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(f"django-5.2.8/{name}")
            info.size = len(content.encode())
            tar.addfile(info, BytesIO(content.encode()))
    assert list(C._django_docs(tmp_path / "d.tar.gz")) == [Document("docs/a/c.txt", "é"), Document("docs/b.txt", "b")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [("vital-articles", 202), ("vital-articles-fr", 148), ("vital-articles-es", 109), ("django-docs", 639)],
)
def test_the_embedded_corpora(name, count):
    loaded = load_corpus(name)
    documents = list(loaded.documents())
    assert len(documents) == len({d.id for d in documents}) == count
    assert loaded.source["detokenised"] is False
    if name != "django-docs":
        assert min(len(d.text) for d in documents) >= C.TOPIC_CHARS - 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("wikitext",), "There is no corpus 'wikitext': give one of vital-articles.*wikitext-103"),
        (("vital-articles", "main"), "has no revisions"),
        (("wikitext-103",), "cannot be reached for Salesforce/wikitext.*vital-articles"),  # the tests run offline
    ],
)
def test_names_that_do_not_serve_are_refused(arguments, sentence):
    with pytest.raises(GeomlibError, match=sentence):
        load_corpus(*arguments)


# --- WikiText ---------------------------------------------------------------------------------------------------------


def test_articles_of_wikitext_begin_at_top_level_headings():
    lines = ["", " = One = \n", "", " A = b = c . \n", " = = Part = = \n", "", " text \n", "", " = Two = \n", " x \n"]
    documents = list(C._wikitext(iter(lines)))
    assert [d.id for d in documents] == ["0", "1"]
    assert documents[0].text == "".join(lines[:8])
    assert documents[1].text == " = Two = \n x \n"


@pytest.mark.parametrize(
    ("tokenised", "expected"),
    [
        ("a well @-@ known 1 @,@ 500 , and 2 @.@ 5 .", "a well-known 1,500, and 2.5."),
        ("it 's what they don 't say ; he ca n't", "it's what they don't say; he can't"),
        ('the " Big Game " ( 1999 ) : yes !', 'the "Big Game" (1999): yes!'),
        ("the players ' cup", "the players' cup"),
        ("cost $ 5 or 5 %", "cost $5 or 5%"),
        ("plain text stays", "plain text stays"),
    ],
)
def test_the_detokeniser(tokenised, expected):
    assert detokenise_wikitext(tokenised) == expected


def test_detokenising_is_done_on_request_and_recorded(monkeypatch, tmp_path):
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"T": {"topic": "t", "extract": "well @-@ known ."}}))
    monkeypatch.setattr(C, "fetch", lambda source: file)
    loaded = load_corpus("vital-articles", detokenise=True)
    assert [d.text for d in loaded.documents()] == ["T\nwell-known."]
    assert loaded.source["detokenised"] is True
    assert [d.text for d in load_corpus("vital-articles").documents()] == ["T\nwell @-@ known ."]
