"""A small model hub on the loopback, and processes that use it: what `transformers` and `datasets` really ask for.

Faults are switched on by the tests: a dropped connection, a truncated or changed file, 429, 500. As on the real hub, large
files are redirected to another origin, which gets no token, and their ETag is the SHA-256 of their content.
"""

import hashlib
import io
import json
import os
import re
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ACCEPTED, REFUSED = "hf_accepted", "hf_refused"  # tokens, by what the gated model's owner decided; any other is unknown
LARGE = (".safetensors", ".parquet")
OLD, NEW = "01d" + "0" * 37, "beef" + "0" * 36  # the two commits of org/tiny


@dataclass
class Repository:
    """Its commits, oldest first, and what else names one."""

    commits: dict[str, dict[str, bytes]]
    names: dict[str, str] = field(default_factory=dict)
    gated: bool = False

    def commit(self, revision: str) -> str | None:
        if revision in self.commits:
            return revision
        return list(self.commits)[-1] if revision == "main" else self.names.get(revision)


@dataclass
class Request:
    """What was asked for, and what the answer was."""

    method: str
    path: str
    token: str | None
    bytes: str | None
    status: int = 0


@dataclass
class Fault:
    """What goes wrong with requests whose path holds `part`, and how often.

    Kinds: "half" closes the connection within the body, "reset" breaks it there, "close" before any answer; "short" serves the
    first half as if it were all, "flip" changes one bit; a number is a status.
    """

    part: str
    kind: str | int
    times: float = float("inf")
    headers: dict[str, str] = field(default_factory=dict)


class Hub:
    """The hub: `repositories` by "org/name" or "datasets/org/name", `faults`, and the `requests` so far."""

    def __init__(self, repositories: dict[str, Repository]):
        self.repositories = repositories
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.lock = threading.Lock()
        self.ports = [0, 0]  # the hub's and the store's, the same ones again after a stop
        self.start()
        self.endpoint, self.store = (f"http://127.0.0.1:{port}" for port in self.ports)

    def start(self) -> None:
        self.servers = [
            ThreadingHTTPServer(("127.0.0.1", port), _handler(self, store))
            for port, store in zip(self.ports, (False, True), strict=True)
        ]
        self.ports = [s.server_port for s in self.servers]
        for server in self.servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def fault(self, part: str, kind: str | int, times: float = float("inf"), **headers: str) -> None:
        self.faults.append(Fault(part, kind, times, {k.replace("_", "-"): v for k, v in headers.items()}))

    def take_fault(self, path: str, head: bool) -> Fault | None:
        """The fault of this request, counted; what breaks a body leaves HEAD alone."""
        with self.lock:
            for fault in self.faults:
                if fault.part in path and fault.times > 0 and not (head and fault.kind in ("half", "reset", "close")):
                    fault.times -= not head or isinstance(fault.kind, int)
                    return fault
        return None

    def fetched(self, part: str) -> list[Request]:
        """The requests so far that got the content of a file."""
        return [r for r in self.requests if r.method == "GET" and part in r.path and r.status in (200, 206)]


def _handler(hub: Hub, store: bool) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def do_GET(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            path = unquote(self.path.partition("?")[0])
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            self.record = Request(self.command, path, token, self.headers.get("Range"))
            with hub.lock:
                hub.requests.append(self.record)
            self.fault = hub.take_fault(path, self.command == "HEAD")
            if self.fault and self.fault.kind == "close":
                self.close_connection = True
                return None
            if self.fault and isinstance(self.fault.kind, int):
                return self.answer(self.fault.kind, **self.fault.headers)
            if store:
                sha256 = path.split("/")[1]
                contents = (
                    c for r in hub.repositories.values() for files in r.commits.values() for c in files.values()
                )
                return self.content(next(c for c in contents if hashlib.sha256(c).hexdigest() == sha256))
            if token not in (None, ACCEPTED, REFUSED):
                return self.refuse(401, None, "Invalid credentials in Authorization header")
            return self.route(path.strip("/"), token, body)

        do_HEAD = do_POST = do_GET

        def route(self, path, token, body):
            api, path = path.startswith("api/"), path.removeprefix("api/").removeprefix("models/")
            parts = path.split("/")
            size = 3 if parts[0] == "datasets" else 2
            name, what, rest = "/".join(parts[:size]), "/".join(parts[size : size + 1]), parts[size + 1 :]
            repository = hub.repositories.get(name)
            if repository is None:
                return self.refuse(404 if token else 401, "RepoNotFound", "Repository not found")
            # A name of a branch can hold slashes, so the longest that is one counts.
            named = ((c, rest[i:]) for i in range(len(rest), 0, -1) if (c := repository.commit("/".join(rest[:i]))))
            commit, rest = (
                next(named, (None, rest)) if what not in ("", "auth-check") else (repository.commit("main"), [])
            )
            if commit is None:
                return self.refuse(404, "RevisionNotFound", "Invalid rev id")
            if repository.gated and not (api and what in ("", "revision")) and token != ACCEPTED:
                return self.refuse(403 if token else 401, "GatedRepo", f"Access to {name} is restricted")
            files, inside = repository.commits[commit], "/".join(rest)
            if api and what in ("", "revision"):
                siblings = [
                    {"rfilename": e["path"], "size": e["size"], "blobId": e["oid"]}
                    | ({"lfs": e["lfs"]} if "lfs" in e else {})
                    for e in _tree(files, "", True)
                    if e["type"] == "file"
                ]
                gated = "manual" if repository.gated else False
                return self.json(
                    {"id": name, "sha": commit, "siblings": siblings, "tags": [], "gated": gated, "private": False}
                )
            if api and what == "auth-check":
                return self.json({})
            if api and what == "tree":
                deep = "recursive=true" in self.path.lower()
                return self.json(list(_tree(files, inside, deep)))
            if api and what == "paths-info":
                asked = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
                entries = {e["path"]: e for e in _tree(files, "", True)}
                return self.json([entries[p] for p in asked if p in entries])
            headers = {"X-Repo-Commit": commit}
            if what != "resolve" or inside not in files:
                return self.refuse(404, "EntryNotFound", "Entry not found", **headers)
            content = files[inside]
            if inside.endswith(LARGE):
                sha256 = hashlib.sha256(content).hexdigest()
                short = self.fault and self.fault.kind == "short"
                headers |= {"X-Linked-ETag": f'"{sha256}"', "X-Linked-Size": str(len(content) // (2 if short else 1))}
                return self.answer(302, **headers, Location=f"{hub.store}/{sha256}/{inside}")
            return self.content(content, **headers, ETag=f'"{_git_sha1(content)}"')

        def content(self, content, **headers):
            if self.fault and self.fault.kind == "short":
                content = content[: len(content) // 2]
            if self.fault and self.fault.kind == "flip":
                content = content[:-1] + bytes([content[-1] ^ 1])
            if not self.record.bytes:
                return self.answer(200, content, **headers, **{"Accept-Ranges": "bytes"})
            first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", self.record.bytes).groups()
            end = min(int(last or len(content)), len(content) - 1)
            if int(first) > end:
                return self.answer(416, **headers, **{"Content-Range": f"bytes */{len(content)}"})
            part = {"Content-Range": f"bytes {first}-{end}/{len(content)}"}
            return self.answer(206, content[int(first) : end + 1], **headers, **part)

        def json(self, content):
            self.answer(200, json.dumps(content).encode(), **{"Content-Type": "application/json"})

        def refuse(self, status, code, message, **headers):
            headers |= {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
            self.answer(status, json.dumps({"error": message}).encode(), **headers)

        def answer(self, status, content=b"", **headers):
            self.record.status = status
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "HEAD":
                return
            if self.fault and self.fault.kind in ("half", "reset"):
                self.wfile.write(content[: len(content) // 2])
                self.close_connection = True
                if self.fault.kind == "reset":
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()
                return
            self.wfile.write(content)

    return Handler


def _git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _tree(files: dict[str, bytes], inside: str, deep: bool) -> Iterator[dict]:
    """Files and folders under a folder, as the hub lists them."""
    folders = set()
    for path, content in files.items():
        if inside and not path.startswith(f"{inside}/"):
            continue
        rest = path[len(inside) + 1 :] if inside else path
        parents = rest.split("/")[:-1]
        for i in range(1, len(parents) + 1 if deep else min(len(parents), 1) + 1):
            folders.add("/".join([inside, *parents[:i]] if inside else parents[:i]))
        if deep or not parents:
            entry = {"type": "file", "path": path, "size": len(content), "oid": _git_sha1(content)}
            if path.endswith(LARGE):
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": sha256, "sha256": sha256, "size": len(content), "pointerSize": 134}
            yield entry
    yield from ({"type": "directory", "path": f, "oid": "0" * 40, "size": 0} for f in sorted(folders))


@contextmanager
def serve(repositories: dict[str, Repository]) -> Iterator[Hub]:
    """A hub while the block runs."""
    hub = Hub(repositories)
    try:
        yield hub
    finally:
        hub.stop()


# --- what it serves ---------------------------------------------------------------------------------------------------


def articles() -> list[tuple[str, str]]:
    """Titles and texts of real articles."""
    from geomlib import load_corpus

    documents = load_corpus("vital-articles").documents()
    parts = (p.partition("\n") for d in documents for p in d.text.split("\n\n"))
    return [(title, text) for title, _, text in parts if len(text) > 600]


def tiny_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE like LLaMA 3's, learnt from the texts."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def tiny_llama(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int, **kwargs) -> dict[str, bytes]:
    """The files of a llama with random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder, **kwargs)
    tokenizer.save_pretrained(folder)
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def parquet(texts: list[str], rows: int) -> bytes:
    """One Parquet file of a text column, in row groups."""
    out = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), out, row_group_size=rows)
    return out.getvalue()


def wikitext_lines(title: str, text: str) -> list[str]:
    """An article line by line with WikiText's tokenised punctuation."""
    words = re.sub(r"(?<=\w)-(?=\w)", " @-@ ", re.sub(r"([,.;:()\"])", r" \1 ", text))
    sentences = [f" {' '.join(s.split())} . \n" for s in words.split(" . ") if s.strip()]
    half = len(sentences) // 2
    return ["", f" = {title} = \n", "", *sentences[:half], "", " = = History = = \n", "", *sentences[half:]]


def the_repositories(folder: Path) -> dict[str, Repository]:
    """org/tiny with two commits and other models, and the paper's two data sets and others, in real prose."""
    found = articles()
    tokenizer = tiny_tokenizer([text for _, text in found[:300]])
    wikitext = [line for title, text in found[:80] for line in wikitext_lines(title, text)]
    middle = len(wikitext) // 2
    config = "wikitext-103-raw-v1"
    card = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n"
    card += "".join(f"  - split: {s}\n    path: {config}/{s}-*\n" for s in ("test", "train", "validation")) + "---\n"
    wikitext_files = {
        "README.md": card.encode(),
        f"{config}/test-00000-of-00001.parquet": parquet(wikitext[:20], 1000),
        f"{config}/train-00000-of-00002.parquet": parquet(wikitext[:middle], 500),
        f"{config}/train-00001-of-00002.parquet": parquet(wikitext[middle:], 500),
        f"{config}/validation-00000-of-00001.parquet": parquet(wikitext[:20], 1000),
    }
    web = [text for _, text in found[80 : 80 + 600]]
    web_files = {f"plain_text/train-{i:05d}-of-00004.parquet": parquet(web[i::4], 100) for i in range(4)}
    new = tiny_llama(folder / "new", tokenizer, 1)
    encoder = b'{"model_type": "bert", "architectures": ["BertForMaskedLM"]}'
    other = io.BytesIO()
    pq.write_table(pa.table({"content": ["a"]}), other)
    return {
        "org/tiny": Repository(
            {OLD: tiny_llama(folder / "old", tokenizer, 0), NEW: new}, {"v1": OLD, "some/branch": OLD, "refs/pr/1": OLD}
        ),
        "org/gated": Repository({NEW: new}, gated=True),
        "org/sharded": Repository({NEW: tiny_llama(folder / "sharded", tokenizer, 2, max_shard_size="60KB")}),
        "org/empty": Repository({NEW: {"README.md": b"nothing yet"}}),
        "org/encoder": Repository({NEW: {"config.json": encoder, "model.safetensors": b"weights that nobody needs"}}),
        "datasets/Salesforce/wikitext": Repository({OLD: wikitext_files | {"README.md": b""}, NEW: wikitext_files}),
        "datasets/Skylion007/openwebtext": Repository({NEW: web_files}, {"v1": NEW}),
        "datasets/org/columns": Repository({NEW: {"data/train-00000-of-00001.parquet": other.getvalue()}}),
        "datasets/org/gated": Repository({NEW: web_files}, gated=True),
    }


# --- who uses it ------------------------------------------------------------------------------------------------------

_FORKING = """
import json, os, sys
import datasets, torch, transformers
from transformers.models.llama import modeling_llama
from huggingface_hub import constants
import geomlib.study
for line in sys.stdin:
    job = json.loads(line)
    pid = os.fork()
    if not pid:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.environ |= job["environ"]
        constants.HF_HUB_OFFLINE = "HF_HUB_OFFLINE" in job["environ"]  # read at import
        code = 1
        try:
            exec(job["code"], {"__name__": "__main__"})
            code = 0
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else int(e.code is not None)
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@dataclass
class Done:
    """How a process ended."""

    code: int
    out: str
    err: str


class Users:
    """Processes that see the hub, one for each piece of code, forked from one that has everything imported.

    The hub's client reads its environment at import, so nothing of this could happen in the tests' own process.
    """

    def __init__(self, endpoint: str, folder: Path):
        self.home, self.folder = folder / "home", folder
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | {
            "HF_ENDPOINT": endpoint, "HF_HOME": str(self.home), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "2",
            "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        self.first = subprocess.Popen(
            [sys.executable, "-c", _FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environ
        )

    def run(self, code: str, **environ: str) -> Done:
        """Runs code in a process of its own."""
        out, err = self.folder / "out", self.folder / "err"
        job = {"code": textwrap.dedent(code), "out": str(out), "err": str(err), "environ": environ}
        self.first.stdin.write(json.dumps(job) + "\n")
        self.first.stdin.flush()
        return Done(int(self.first.stdout.readline()), out.read_text(), err.read_text())

    def command(self, *arguments: str, before: str = "", **environ: str) -> Done:
        """Runs the command line in a process of its own."""
        return self.run(f"{textwrap.dedent(before)}\nfrom geomlib.cli import app\napp({list(arguments)!r})", **environ)

    def close(self) -> None:
        self.first.stdin.close()
        self.first.wait(10)
