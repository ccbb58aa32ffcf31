"""Small models with random weights, one per architecture, built from configs: nothing is downloaded.

The weights are large enough that attention is far from uniform, and the logits of order 1, so that absolute tolerances
mean something. The same name gives the same weights in every precision and under every attention implementation.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections import defaultdict
from dataclasses import dataclass

import pytest
import torch
from browser import browser, open_page  # noqa: F401  (fixtures of the tests that open pages of the book)
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from geomlib.attention import Block, observe
from geomlib.attention import _joined as whole

LAYERS = 3
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 8
WINDOW = 5
LENGTH = 19  # of the texts: longer than any window
VOCABULARY = 67


@dataclass(frozen=True)
class Architecture:
    """One random-weight model and what is known about it without asking the library.

    Attributes:
        model_type: as transformers names it.
        settings: of the config.
        projection: the output projection's name, with the layer's index in place of {}.
        kv_heads: number of KV heads that reach the attention call.
        windows: sliding window of each layer, None where it sees everything.
        sdpa: False where transformers itself has only `eager` for it.
    """

    model_type: str
    settings: dict
    projection: str = "model.layers.{}.self_attn.o_proj"
    kv_heads: int = KV_HEADS
    windows: tuple[int | None, ...] = (None,) * LAYERS
    sdpa: bool = True


_GROUPED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA = _GROUPED | {"head_dim": 12}  # head_dim x heads is not the hidden size
_PLAIN = {k: v for k, v in _GROUPED.items() if k != "num_key_value_heads"}
_GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_FALCON = {k: v for k, v in _PLAIN.items() if k != "intermediate_size"}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

ARCHITECTURES = {
    "llama": Architecture("llama", _GROUPED),
    "mistral": Architecture("mistral", _GROUPED | {"sliding_window": WINDOW}, windows=(WINDOW,) * 3),
    "gemma": Architecture("gemma", _GEMMA | {"num_key_value_heads": 1}, kv_heads=1),
    "gemma2": Architecture(
        "gemma2",
        _GEMMA | {"sliding_window": WINDOW, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 2.0,
                  "final_logit_softcapping": 6.0},
        windows=(WINDOW, None, WINDOW),
        sdpa=False,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        _GEMMA | {"sliding_window": WINDOW, "query_pre_attn_scalar": 5, "layer_types": _ALTERNATING},
        windows=(WINDOW, None, WINDOW),
    ),
    "gemma3_multimodal": Architecture(
        "gemma3",
        {
            "text_config": _GEMMA | {"sliding_window": WINDOW, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 5,
                                     "model_type": "gemma3_text"},
            "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 28,
                              "num_attention_heads": 2, "patch_size": 14, "model_type": "siglip_vision_model"},
            "image_token_id": VOCABULARY - 1, "boi_token_id": VOCABULARY - 2, "eoi_token_id": VOCABULARY - 3,
            "mm_tokens_per_image": 4,
        },
        projection="model.language_model.layers.{}.self_attn.o_proj",
        windows=(WINDOW, None, WINDOW),
    ),
    "gemma4": Architecture(  # the last layer reads the values of an earlier one
        "gemma4_text",
        _GEMMA | {"sliding_window": WINDOW, "layer_types": [*_ALTERNATING, "full_attention"], "num_hidden_layers": 4,
                  "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCABULARY,
                  "global_head_dim": 16},
        windows=(WINDOW, None, WINDOW, None),
    ),
    "qwen2": Architecture(
        "qwen2",
        _GROUPED | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        windows=(None, WINDOW, WINDOW),
    ),
    "qwen3": Architecture("qwen3", _GROUPED | {"head_dim": HEAD_DIM}),
    "gpt2": Architecture("gpt2", _GPT2, "transformer.h.{}.attn.c_proj", HEADS),
    "gpt2_inverse_layer": Architecture(
        "gpt2", _GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "transformer.h.{}.attn.c_proj", HEADS
    ),
    "gpt2_upcast": Architecture(
        "gpt2",
        _GPT2 | {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True},
        "transformer.h.{}.attn.c_proj",
        HEADS,
    ),
    "gpt_neox": Architecture("gpt_neox", _PLAIN, "gpt_neox.layers.{}.attention.dense", HEADS),
    "opt": Architecture(
        "opt",
        {k: v for k, v in _PLAIN.items() if k != "intermediate_size"} | {"ffn_dim": 48, "word_embed_proj_dim": 32},
        "model.decoder.layers.{}.self_attn.out_proj",
        HEADS,
    ),
    "phi": Architecture("phi", _GROUPED, "model.layers.{}.self_attn.dense"),
    "phi3": Architecture("phi3", _GROUPED | {"sliding_window": WINDOW}, windows=(WINDOW,) * 3),
    "olmo2": Architecture("olmo2", _GROUPED),
    "falcon": Architecture("falcon", _FALCON, "transformer.h.{}.self_attention.dense", 1),
    "falcon_alibi": Architecture(
        "falcon",
        _FALCON | {"alibi": True, "multi_query": False, "parallel_attn": False},
        "transformer.h.{}.self_attention.dense",
        HEADS,
    ),
    "falcon_new": Architecture(
        "falcon",
        _FALCON | {"new_decoder_architecture": True, "num_kv_heads": KV_HEADS},
        "transformer.h.{}.self_attention.dense",
    ),
    "starcoder2": Architecture("starcoder2", _GROUPED | {"sliding_window": WINDOW}, windows=(WINDOW,) * 3),
    "gpt_oss": Architecture(
        "gpt_oss",
        _GROUPED | {"head_dim": HEAD_DIM, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
        windows=(WINDOW, None, WINDOW),
        sdpa=False,
    ),
    "gptj": Architecture("gptj", _GPT2 | {"rotary_dim": 4}, "transformer.h.{}.attn.out_proj", HEADS),
}  # fmt: skip


@torch.no_grad()
def randomize(model: PreTrainedModel, gain: float = 1.2) -> PreTrainedModel:
    """Weights of unit gain times `gain`, biases and norms that are not trivial; the same numbers in every precision."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if name.endswith("sinks"):
            parameter.copy_(noise)
        elif parameter.dim() > 1:
            inputs = parameter.shape[0] if "c_attn" in name else parameter.shape[-1]  # GPT-2's Conv1D is transposed
            parameter.copy_(noise * (gain / inputs**0.5))
        elif name.endswith("q_norm.weight") and model.config.model_type == "gemma4_text":
            parameter.copy_(0.5 + 0.1 * noise)  # this one does not scale its scores down
        else:
            parameter.copy_(0.2 * noise + (1.0 if float(parameter.float().mean()) > 0.5 else 0.0))
    return model


def small_model(
    name: str, dtype: torch.dtype = torch.float32, implementation: str | None = None, **settings
) -> PreTrainedModel:
    """A fresh model of ARCHITECTURES in eval mode; `implementation` None is transformers' own choice."""
    architecture = ARCHITECTURES[name]
    config = CONFIG_MAPPING[architecture.model_type](**(architecture.settings | settings))
    if dtype == torch.float64 and architecture.model_type == "gpt_oss":
        config._experts_implementation = "eager"  # the grouped products have no float64
    auto = AutoModelForImageTextToText if architecture.model_type == "gemma3" else AutoModelForCausalLM
    return randomize(auto.from_config(config, dtype=dtype, attn_implementation=implementation).eval())


def text(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random token ids, none of them special; one row of LENGTH tokens unless told."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY - 3, shape or (1, LENGTH), generator=generator)


def collected(model, ids: torch.Tensor) -> list[Block]:
    """Each layer's attention as one block of all its rows, whatever blocks it came in."""
    parts = defaultdict(list)
    with torch.no_grad(), observe(model, lambda block: parts[block.layer].append(block)):
        model(ids)
    return [whole(blocks) for _, blocks in sorted(parts.items())]


REAL_LENGTH = 96


@pytest.fixture(scope="session")
def real():
    """smollm2-135m in float64 (so that F has no near ties) on one window: the model and the token ids."""
    from geomlib import load_corpus, load_model, take_windows

    model = load_model("smollm2-135m", device="cpu", dtype="float64")
    (window,), _ = take_windows(load_corpus("vital-articles"), model.tokenizer, 1, REAL_LENGTH)
    return model, torch.tensor([window.input_ids])


@pytest.fixture(params=list(ARCHITECTURES))
def architecture(request) -> str:
    """The name of each architecture in turn."""
    return request.param


@pytest.fixture(scope="session")
def measured(tmp_path_factory):
    """A run's folder with what the chapters measure on a small model (`made.Measured`): to be read, not changed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from made import measure

    found = measure(tmp_path_factory.mktemp("measured"))
    plt.close("all")
    return found
