"""The Hugging Face hub: what it says of a model or data set, its files whole and checked, its faults as sentences."""

import hashlib
from pathlib import Path
from urllib.parse import quote

from geomlib.errors import GeomlibError
from geomlib.fetch import file_sha256


def hub_info(kind: str, name: str, revision: str | None, patient: bool = True) -> dict:
    """What the hub says of a "model" or "dataset": "sha", the commit of `revision`, and "siblings", its files.

    Asked once, because the hub's client would retry for minutes without a network; if `patient`, up to five times more as
    long as the hub answers that it is busy.
    """
    from huggingface_hub import constants, utils

    url = f"{constants.ENDPOINT}/api/{kind}s/{name}/revision/{quote(revision or 'main', safe='')}?blobs=true"
    answer = utils.http_backoff(
        "GET", url, headers=utils.build_hf_headers(), timeout=5, max_retries=5 if patient else 0, retry_on_exceptions=()
    )
    utils.hf_raise_for_status(answer)
    try:
        return answer.json()
    except ValueError as e:  # a page to log in to a network, with status 200
        raise ConnectionError("something else than the hub answers") from e


def hub_file(kind: str, name: str, files: dict[str, dict], file: str, revision: str | None) -> Path:
    """The path of a file in the hub's cache, fetched first if it is not there, compared with what the hub lists as `files`.

    A connection that breaks and a file that comes damaged are tried three times; a damaged one never stays in the cache.
    """
    import huggingface_hub as hub

    for attempt in range(3):
        there = hub.try_to_load_from_cache(name, file, revision=revision, repo_type=kind)
        try:
            path = Path(hub.hf_hub_download(name, file, revision=revision, repo_type=kind))
        except Exception as e:
            if attempt < 2 and type(e).__name__ == "ReadError":  # the one that the hub's client itself does not retry
                continue
            raise
        if _is_listed(path, files.get(file, {}), new=not isinstance(there, str)):
            return path
        path.resolve().unlink()  # the content, which the name in the snapshot links to
        path.unlink(missing_ok=True)
    raise GeomlibError(
        f"{file} of {name} came damaged three times and was not kept: try again later, or through another network."
    )


def _is_listed(path: Path, listed: dict, new: bool) -> bool:
    """Whether a file is what the hub lists: its size, and its hash if it is new."""
    size, lfs, oid = (listed.get(k) for k in ("size", "lfs", "blobId"))
    if size is not None and path.stat().st_size != size:
        return False
    if lfs:
        return not new or file_sha256(path) == lfs["sha256"]
    return not oid or hashlib.sha1(b"blob %d\0" % size + path.read_bytes()).hexdigest() == oid  # as git names it


def hub_sentence(e: Exception, name: str, kind: str, instead: str) -> str | None:
    """What to do about a "model" or "dataset" that the hub refuses or does not deliver; None if it is not the hub's doing."""
    from huggingface_hub import errors as hub
    from huggingface_hub import get_token

    answers = [x.response for x in chain(e) if getattr(x, "response", None) is not None]
    status = answers[0].status_code if answers else None
    if is_a(e, hub.GatedRepoError) and get_token():
        return (
            f"{name} is gated and the account of your token has no access: accept its terms on its {kind} page, and wait where "
            "its owner has to agree."
        )
    if is_a(e, hub.GatedRepoError):
        return f"{name} is gated: accept its terms on its {kind} page, then set HF_TOKEN to a token of that account."
    if status == 401 and "Invalid credentials" in (answers[0].headers.get("X-Error-Message") or ""):
        return f"The hub does not know your token, asked for {name}: set HF_TOKEN to a valid one, or log out with hf auth logout."
    if is_a(e, hub.RepositoryNotFoundError) or status == 401:
        return f"The hub has no public {kind} {name}: check the id, or set HF_TOKEN if it is private."
    if is_a(e, hub.RevisionNotFoundError):
        return f"{name} has no such revision: check it on the {kind} page."
    if status == 429:
        return f"The hub limits requests, also for {name}: wait some minutes and run it again, or set HF_TOKEN for a higher limit."
    if status and status >= 500:
        return f"The hub has a fault of its own (status {status}) with {name}: try again later, or {instead}."
    # httpx's errors by their names, whichever of its successors the hub's client is built on.
    kinds = {k.__name__ for x in chain(e) for k in type(x).__mro__}
    if kinds & {"ReadError", "RemoteProtocolError"}:
        return f"The connection to the hub breaks off at {name}: run it again, or {instead}."
    if kinds & {"ConnectionError", "LocalEntryNotFoundError", "TransportError", "TimeoutException"}:
        return f"The model hub cannot be reached for {name}: connect to the network, or {instead}."
    return None


def chain(e: BaseException) -> list[BaseException]:
    """An exception and what it came from."""
    chain = [e]
    while chain[-1].__cause__ or chain[-1].__context__:
        chain.append(chain[-1].__cause__ or chain[-1].__context__)
    return chain


def is_a(e: Exception, *types) -> bool:
    return any(isinstance(x, types) for x in chain(e))


def first_line(e: Exception) -> str:
    return str(e).strip().split("\n")[0].rstrip(".: ")[:200] or type(e).__name__
