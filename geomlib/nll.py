"""Negative log likelihood of texts, without keeping the logits of all tokens; perplexity is its exponential."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from weakref import WeakKeyDictionary

import pandas as pd
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from geomlib.attention import _hf, input_device, intervene, readable, short_input, weights_of
from geomlib.errors import GeomlibError

_CHUNK = 2048  # of the vocabulary: logits of this many tokens at once stay in the processor's cache
# What two ways of computing the same may differ by, of the numbers' own size.
NOISE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def nll(model, windows: Sequence, head_mask: torch.Tensor | None = None) -> pd.DataFrame:
    """Mean NLL of each window's targets: every token but the first (BOS where there is one) once, given all before it.

    Args:
        windows: of one length, as `corpora.take_windows` gives them.
        head_mask: as `intervene` takes it, (layer, query head).

    Returns:
        Columns document, nll (nats), targets. Perplexity of all of them: exp of the mean NLL weighted by targets.
    """
    hf = _hf(model)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if head_mask is not None:
            stack.enter_context(intervene(model, head_mask=head_mask))
        rows = [(w.document, mean(score(hf, input_ids(hf, w))), len(w.input_ids) - 1) for w in windows]
    return pd.DataFrame(rows, columns=["document", "nll", "targets"])


def input_ids(hf, window) -> torch.Tensor:
    return torch.tensor([window.input_ids], device=input_device(hf))


def mean(scores: torch.Tensor) -> float:
    value = float(scores.double().mean())
    if not math.isfinite(value):
        raise GeomlibError("the model gives NaN or infinite numbers: load it in float32 or check its weights.")
    return value


@contextmanager
def evaluating(hf) -> Iterator[None]:
    """Eval mode inside, as it was afterwards."""
    training = [module for module in hf.modules() if module.training]
    hf.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


_plain: WeakKeyDictionary = WeakKeyDictionary()  # model -> whether `_vocabulary_nll` gives what its own logits give


def score(hf, ids: torch.Tensor) -> torch.Tensor:
    """NLL of each target, (window, target), without ever keeping the logits of all tokens where the model allows it."""
    with evaluating(hf):
        if hf not in _plain:
            short = short_input(hf)
            with torch.no_grad():
                own, noise = _own_nll(hf, short), NOISE[hf.dtype]
                _plain[hf] = readable(hf.get_output_embeddings()) and torch.allclose(
                    _vocabulary_nll(hf, short).to(own.device), own, atol=noise, rtol=noise
                )
        return _vocabulary_nll(hf, ids) if _plain[hf] else _own_nll(hf, ids)


def _own_nll(hf, ids):
    logits = hf(input_ids=ids, use_cache=False).logits[:, :-1]
    rows = [F.cross_entropy(x if x.dtype == torch.float64 else x.float(), t, reduction="none")
            for x, t in zip(logits, ids[:, 1:].to(logits.device), strict=True)]  # fmt: skip
    return torch.stack(rows)


def _vocabulary_nll(hf, ids):
    """From the last hidden states, a piece of the vocabulary at a time; final soft-capping is applied where the config has it."""
    hidden = hf.base_model(input_ids=ids, use_cache=False)[0][:, :-1]
    weight, bias = weights_of(hf.get_output_embeddings())
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    hidden, targets = hidden.to(weight.device), ids[:, 1:].to(weight.device)
    cap = getattr(hf.config.get_text_config(), "final_logit_softcapping", None)

    def logits(rows, weight, bias):
        x = F.linear(rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        return x if cap is None else torch.tanh(x / cap) * cap

    def piece(rows, start):
        part = slice(start, start + _CHUNK)
        return logits(rows, weight[part], None if bias is None else bias[part]).logsumexp(-1)

    def reduced(rows, start):  # where gradients are wanted, the pieces are computed again on the way back
        return checkpoint(piece, rows, start, use_reentrant=False) if torch.is_grad_enabled() else piece(rows, start)

    total = torch.stack([reduced(hidden, s) for s in range(0, len(weight), _CHUNK)]).logsumexp(0)
    own = torch.linalg.vecdot(hidden.to(dtype), weight[targets].to(dtype))
    own = own if bias is None else own + bias[targets].to(dtype)
    return total - (own if cap is None else torch.tanh(own / cap) * cap)
