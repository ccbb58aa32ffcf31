"""The one seam into attention: see the weights a model really uses, and change them.

`transformers` lets anyone register an attention function and its mask twin by name. geomlib registers one of each,
under one name, and switches a model to it for the length of a `with` block:

    with observe(model, observer):      # observer(block) is called once per block of query rows
        model(input_ids)
    with intervene(model, head_mask=mask, top_n=8):
        model(input_ids)

Nothing is kept: a block holds the rows of a few dozen queries, observers reduce it at once, and the weights of a
whole layer never exist. Falcon, which calls torch's `scaled_dot_product_attention` itself, is reached by intercepting
that call inside its attention modules; the same arithmetic serves both ways.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.pytorch_utils import Conv1D

from geomlib.errors import GeomlibError

NAME = "geomlib"
BLOCK_BYTES = 16 << 20  # of attention weights handed to observers at once: fast products, little memory
MAX_ROWS = 256

# Passed along by the models and irrelevant here: the mask twin has already applied them, or they do not touch attention.
_HARMLESS = {
    "sliding_window", "position_ids", "cache_position", "use_cache", "position_embeddings", "output_hidden_states",
}  # fmt: skip


@dataclass(frozen=True)
class Block:
    """Some query rows of one layer's attention, exactly as the model computes them.

    Attributes:
        layer: index of the layer.
        queries: positions of the rows, (query,): the place of each row's own token among the sources.
        weights: attention weights after scaling, soft-capping, masking and softmax (and after any `intervene`), in
            float32 or better, (query head, query, source). Invisible sources have weight exactly 0. A row sums to 1,
            less the learned sink's share.
        values: value states before the output projection, repeated from KV heads to query heads,
            (query head, source, dim), same dtype as `weights`.
        visible: True where the layer's mask lets the query see the source, (query, source).
        learned_sink_mass: weight taken by a learned sink (`s_aux`, as in gpt-oss), (query head, query); None without.
        batch: index in the batch. Padded queries and sources are left out, so that a padded row of a batch gives the
            same blocks as the text alone. Where a cache holds earlier tokens, the sources are those of the cache
            (a sliding window's cache forgets the oldest), and its padded ones stay, never visible.
        outputs: the heads' outputs z = sum_i alpha_i v_i before the output projection and before any head mask, (query head,
            query, dim), same dtype; where not given they are computed.
        shared: what observers of this block computed and others may use.
    """

    layer: int
    queries: torch.Tensor
    weights: torch.Tensor
    values: torch.Tensor
    visible: torch.Tensor
    learned_sink_mass: torch.Tensor | None
    batch: int = 0
    outputs: torch.Tensor = None
    shared: dict = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self):
        if self.outputs is None:
            object.__setattr__(self, "outputs", self.weights @ self.values)

    def only(self, rows: torch.Tensor) -> "Block":
        """The block with these of its rows, a boolean (query,)."""
        mass = self.learned_sink_mass
        return replace(
            self,
            queries=self.queries[rows],
            weights=self.weights[:, rows],
            visible=self.visible[rows],
            learned_sink_mass=None if mass is None else mass[:, rows],
            outputs=self.outputs[:, rows],
            shared={},
        )


Observer = Callable[[Block], None]


@dataclass
class _Intervention:
    head_mask: torch.Tensor | None
    top_n: int | None
    renormalize: bool


@dataclass
class _State:
    """What is active on one model."""

    hf: PreTrainedModel
    observers: list[Observer] = field(default_factory=list)
    interventions: list[_Intervention] = field(default_factory=list)
    layers_seen: set[int] = field(default_factory=set)
    restore: list[Callable[[], None]] = field(default_factory=list)
    depth: int = 0


_states: dict[int, _State] = {}  # id(hf model) -> state, only while a context is open
_modules: dict[int, _State] = {}  # id(module) -> state of its model
_checked: "weakref.WeakSet[PreTrainedModel]" = weakref.WeakSet()


# --- the attention function -------------------------------------------------------------------------------------------


def _attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,  # (batch, query head, query, dim)
    key: torch.Tensor,  # (batch, KV head, source, dim)
    value: torch.Tensor,  # (batch, KV head, source, dim)
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,  # applied to nothing: the seam enforces eval mode, and alpha is meant before dropout
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    state = _modules.get(id(module))
    who = type(module).__name__
    if state is None:
        raise GeomlibError(f"{who} was switched to geomlib's attention outside observe() or intervene(): use those.")
    unknown = sorted(k for k, v in kwargs.items() if k not in _HARMLESS and v is not None and v is not False)
    if unknown:
        raise GeomlibError(
            f"{who} passes {', '.join(unknown)} to its attention, which geomlib does not implement: it cannot be measured."
        )
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise GeomlibError(f"{who} is not causal: geomlib measures decoder language models only.")
    if attention_mask is None:
        raise GeomlibError(f"{who} reached geomlib's attention without its mask: the mask twin '{NAME}' is not in use.")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise GeomlibError(f"{who} does not say which layer it is (no layer_idx): it cannot be measured.")
    state.layers_seen.add(layer)
    with torch.autocast(query.device.type, enabled=False):  # it would compute the scores in half precision
        outputs = [
            _attend(state, layer, b, query[b], key[b], value[b], attention_mask[min(b, len(attention_mask) - 1)],
                    scaling, softcap, s_aux)
            for b in range(len(query))
        ]  # fmt: skip
    return torch.stack(outputs).to(query.dtype), None


def _attend(state, layer, batch, query, key, value, mask, scaling, softcap, s_aux) -> torch.Tensor:
    """One sequence through one layer, block by block. Returns head outputs (query, query head, dim)."""
    dtype = query.dtype if query.dtype == torch.float64 else torch.float32  # scores and softmax never in half precision
    heads, rows, dim = query.shape
    kv_heads, sources = key.shape[:2]
    mask, bias = mask[..., :sources], None
    if mask.dtype != torch.bool:  # additive, possibly per head (ALiBi); the most negative numbers mean invisible
        mask, bias = mask > torch.finfo(mask.dtype).min / 2, mask
    visible = mask[0]
    if len(mask) > 1 and (mask != visible).any():
        raise GeomlibError(f"layer {layer} lets its heads see different tokens: geomlib needs one mask for all heads.")

    # A causal query sees itself last, so its last visible source is its position; a query that cannot see itself is padding.
    last = sources - 1 - visible.flip(-1).to(torch.uint8).argmax(-1)
    positions = last.masked_fill(~visible.any(-1), -1)
    own = torch.arange(rows, device=positions.device)
    if rows != sources:  # a cache holds earlier tokens, and may have room for later ones
        own += (positions - own).max()
    if (positions > own).any():
        raise GeomlibError(f"layer {layer} sees tokens after the query: geomlib measures causal models only.")
    real = (positions == own) & (own >= 0)
    padded = not bool(real.all())
    if padded and not real.any():
        return torch.zeros(rows, heads, value.shape[-1], dtype=dtype, device=value.device)
    if padded:
        query, positions = query[:, real], positions[real]
        bias = bias[:, real] if bias is not None else None
        if rows == sources:  # drop padded sources too: the blocks are those of the text alone
            if visible[:, ~real].any():
                raise GeomlibError(f"layer {layer} hides tokens from themselves: they cannot be told from padding.")
            key, value, visible = key[:, real], value[:, real], visible[:, real]
            bias = bias[..., real] if bias is not None else None
            positions = torch.arange(len(positions), device=positions.device)
        visible = visible[real]
    sources = key.shape[1]

    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scaling = dim**-0.5 if scaling is None else scaling
    group = heads // kv_heads
    # head h reads KV head h // group
    values = value.detach().repeat_interleave(group, dim=0) if state.observers else None
    step = max(1, min(MAX_ROWS, BLOCK_BYTES // (4 * heads * sources)))
    outputs = []
    for start in range(0, len(positions), step):
        rows_seen = visible[start : start + step]
        columns = rows_seen.any(0).nonzero()
        low, high = int(columns[0]), int(columns[-1]) + 1  # nothing outside is visible to any row of the block
        q = query[:, start : start + step]
        n = q.shape[1]
        scores = (q * scaling).reshape(kv_heads, group * n, dim) @ key[:, low:high].transpose(1, 2)
        scores = scores.view(heads, n, high - low)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if bias is not None:
            scores = scores + bias[:, start : start + step, low:high].to(dtype)
        scores = scores.masked_fill(~rows_seen[:, low:high], float("-inf"))
        weights, sink_mass = _softmax(scores, s_aux)
        weights = _cut(weights, rows_seen[:, low:high], state.interventions)
        z = weights.reshape(kv_heads, group * n, high - low) @ value[:, low:high]
        z = z.view(heads, n, -1)
        if not torch.isfinite(z).all():
            raise GeomlibError(
                f"layer {layer} gives NaN or infinite attention outputs: load the model in float32 or check its weights."
            )
        if state.observers:
            full = weights.detach()
            if high - low < sources:
                full = full.new_zeros(heads, n, sources)
                full[..., low:high] = weights.detach()
            block = Block(layer, positions[start : start + step], full, values, rows_seen,
                          None if sink_mass is None else sink_mass.detach(), batch, z.detach())  # fmt: skip
            for observer in sorted(state.observers, key=lambda o: not getattr(o, "shares", False)):
                observer(block)  # those first whose work others take
        for intervention in state.interventions:
            if intervention.head_mask is not None:
                z = z * intervention.head_mask[layer].to(z)[:, None, None]
        outputs.append(z)
    z = torch.cat(outputs, dim=1).transpose(0, 1)
    return torch.zeros(rows, *z.shape[1:], dtype=dtype, device=z.device).index_put((real,), z) if padded else z


def _softmax(scores: torch.Tensor, s_aux: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Softmax over sources; a learned sink takes part in the normalisation and its share is returned apart."""
    if s_aux is None:
        return torch.softmax(scores, dim=-1), None
    sink = s_aux.to(scores).reshape(-1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)
    return weights[..., :-1], weights[..., -1]


def _cut(weights: torch.Tensor, visible: torch.Tensor, interventions: list[_Intervention]) -> torch.Tensor:
    """Keep the N largest weights of each row, ties to the lower index; renormalising keeps the row's own total, so
    that the share of a learned sink is never given to the tokens."""
    for intervention in interventions:
        n = intervention.top_n
        if n is None or n >= weights.shape[-1]:
            continue
        ranked = weights.masked_fill(~visible, -1.0)  # an invisible source is never one of the N
        threshold = ranked.topk(n, dim=-1).values[..., -1:]
        above, level = ranked > threshold, ranked == threshold
        kept = above | (level & (level.cumsum(-1) <= n - above.sum(-1, keepdim=True)))
        cut = weights * kept
        if intervention.renormalize:
            tiny = torch.finfo(cut.dtype).tiny  # a learned sink may have taken everything
            cut = cut * (weights.sum(-1, keepdim=True) / cut.sum(-1, keepdim=True).clamp_min(tiny))
        weights = cut
    return weights


def _mask_twin(*args, **kwargs) -> torch.Tensor:
    """The boolean mask that `sdpa` would use, never skipped: without it a custom function would see the future."""
    kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, **kwargs)


class _SdpaRoute(TorchFunctionMode):
    """Sends torch's scaled_dot_product_attention, called inside an attention module of `state`'s model, through geomlib."""

    def __init__(self, running: list[torch.nn.Module]):
        super().__init__()
        self.running = running

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or not self.running:
            return func(*args, **kwargs)
        return self._through(*args, **kwargs)

    def _through(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if attn_mask is None:
            rows, sources = query.shape[-2], key.shape[-2]
            attn_mask = torch.ones(1, 1, rows, sources, dtype=torch.bool, device=query.device)
            if is_causal:
                attn_mask = attn_mask.tril()  # torch aligns the triangle to the upper left
            elif rows > 1:
                raise GeomlibError(f"{type(self.running[-1]).__name__} is not causal: geomlib measures decoders only.")
        output, _ = _attention_function(self.running[-1], query, key, value, attn_mask, scaling=scale)
        return output.transpose(1, 2)


# --- switching a model to it ------------------------------------------------------------------------------------------


def _hf(model) -> PreTrainedModel:
    """transformers' own model object, from it or from a geomlib Model."""
    hf = getattr(model, "hf", model)
    if not isinstance(hf, PreTrainedModel):
        raise GeomlibError(f"{type(model).__name__} is not a transformers model: pass one, or load_model()'s result.")
    if hf.config.is_encoder_decoder:
        raise GeomlibError(f"{type(hf).__name__} is an encoder-decoder: geomlib measures decoder language models only.")
    if not hf.can_generate():
        raise GeomlibError(f"{type(hf).__name__} is not a causal language model: load one with AutoModelForCausalLM.")
    return hf


def _refuse_attentions(module: PreTrainedModel, args: tuple, kwargs: dict) -> None:
    """Forward pre-hook: asked for attentions, transformers would return None, and Falcon would go around geomlib."""
    asked = kwargs.get("output_attentions")
    if module.config.output_attentions if asked is None else asked:
        raise GeomlibError(
            f"{type(module).__name__} cannot return attentions (output_attentions=True) inside observe() or intervene(): "
            "the blocks given to an observer are its weights."
        )


def _enter(hf: PreTrainedModel) -> _State:
    state = _states.get(id(hf))
    if state is None:
        state = _State(hf)
        try:
            _switch(hf, state)
        except BaseException:
            _leave(hf, state)
            raise
        _states[id(hf)] = state
    state.depth += 1
    return state


def _switch(hf: PreTrainedModel, state: _State) -> None:
    by_interface = type(hf)._can_set_attn_implementation()
    if not by_interface and not hf._supports_sdpa:
        raise GeomlibError(
            f"{type(hf).__name__} cannot be observed: it computes its attention by hand; nothing was measured."
        )
    AttentionInterface.register(NAME, _attention_function)
    AttentionMaskInterface.register(NAME, _mask_twin)
    for module in hf.modules():
        if id(module) in _modules:
            raise GeomlibError("this model is part of another one that is being observed: use one of the two.")
        _modules[id(module)] = state
        state.restore.append(lambda m=module: _modules.pop(id(m), None))
        if module.training:
            module.training = False
            state.restore.append(lambda m=module: setattr(m, "training", True))
        if isinstance(module, PreTrainedModel):
            state.restore.append(module.register_forward_pre_hook(_refuse_attentions, with_kwargs=True).remove)
    for config in {id(c): c for c in (hf.config, hf.config.get_text_config())}.values():
        before = config._attn_implementation_internal
        # The internal field: the public setter also reaches vision towers, which are not ours to switch.
        config._attn_implementation_internal = NAME if by_interface else "sdpa"
        state.restore.append(lambda c=config, b=before: setattr(c, "_attn_implementation_internal", b))
    if not by_interface:
        running: list[torch.nn.Module] = []

        def started(module, args):
            running.append(module)

        def ended(module, args, output):
            running.pop()

        for module in hf.modules():
            if "Attention" in type(module).__name__ and hasattr(module, "layer_idx"):
                hooks = (
                    module.register_forward_pre_hook(started),
                    module.register_forward_hook(ended, always_call=True),
                )
                state.restore.extend(h.remove for h in hooks)
        route = _SdpaRoute(running)
        route.__enter__()
        state.restore.append(lambda: route.__exit__(None, None, None))


def _leave(hf: PreTrainedModel, state: _State) -> None:
    state.depth -= 1
    if state.depth <= 0:
        for undo in reversed(state.restore):
            undo()
        _states.pop(id(hf), None)


@contextmanager
def observe(model, *observers: Observer) -> Iterator[None]:
    """Call each observer with every `Block` of every forward pass inside the `with`.

    Args:
        model: a geomlib `Model` or transformers' own causal language model.
        observers: callables given one `Block` at a time, layer by layer, rows in order. They see the weights that the
            model uses, after any `intervene` that is open. Reduce or copy what you keep.

    The model is in eval mode inside and is restored on exit, its attention implementation and training flags too,
    also after an exception. Nests and stacks with itself and with `intervene`.

    Raises:
        GeomlibError: the model's attention cannot be observed; nothing is ever measured wrong instead.
    """
    hf = _hf(model)
    if hf not in _checked and id(hf) not in _states:
        self_check(hf)
    state = _enter(hf)
    state.observers.extend(observers)
    try:
        yield
    finally:
        for observer in reversed(observers):
            # by identity: an observer that compares equal to another must not take its place
            state.observers.pop(max(i for i, o in enumerate(state.observers) if o is observer))
        _leave(hf, state)


def refuse_ragged(hf: PreTrainedModel) -> None:
    """Refuse a model whose heads were cut out (`pruning.prune`) where heads are counted alike in every layer."""
    if (getattr(hf.config, "geomlib_pruned", None) or {}).get("cut"):
        raise GeomlibError("the model was pruned to layers of different shapes: take the model that it was made from.")


def final_rows(model, input_ids: Sequence[int] | torch.Tensor, rows: int = 1) -> dict[int, Block]:
    """The last query rows of every layer on one text, kept: for a close look at a few operations.

    Args:
        input_ids: token ids of the text, (token,).
        rows: how many queries, up to as many as the text has.

    Returns:
        layer -> Block of these rows.
    """
    ids = torch.as_tensor(input_ids).reshape(1, -1)
    if not 1 <= rows <= ids.shape[1]:
        raise GeomlibError(f"rows = {rows} is not usable: the text has {ids.shape[1]} tokens.")
    kept: dict[int, list[Block]] = {}

    def keep(block: Block) -> None:
        late = block.queries >= ids.shape[1] - rows
        if late.any():
            kept.setdefault(block.layer, []).append(block.only(late))

    hf = _hf(model)
    with torch.no_grad(), observe(model, keep):
        hf.base_model(input_ids=ids.to(input_device(hf)), use_cache=False)
    return {layer: _joined(blocks) for layer, blocks in kept.items()}


def _joined(blocks: list[Block]) -> Block:
    masses = [b.learned_sink_mass for b in blocks]
    return replace(
        blocks[0],
        queries=torch.cat([b.queries for b in blocks]),
        weights=torch.cat([b.weights for b in blocks], dim=1),
        visible=torch.cat([b.visible for b in blocks]),
        learned_sink_mass=None if masses[0] is None else torch.cat(masses, dim=1),
        outputs=torch.cat([b.outputs for b in blocks], dim=1),
        shared={},
    )


@contextmanager
def intervene(
    model, head_mask: torch.Tensor | None = None, top_n: int | None = None, renormalize: bool = False
) -> Iterator[None]:
    """Change what attention does inside the `with`: scale heads, or keep only the N largest weights of each query.

    Args:
        model: a geomlib `Model` or transformers' own causal language model.
        head_mask: factor on each query head's output before the output projection, (layer, query head); 0 removes it.
        top_n: keep the N largest visible weights for every query, head and layer, ties to the lower index. N at least
            the number of visible sources changes nothing.
        renormalize: scale the kept weights to the row's total before the cut (1, less a learned sink's share).

    Several contexts stack: masks multiply, and cuts apply in the order of entering.

    Raises:
        GeomlibError: wrong shape, N < 1, or a model that cannot be observed.
    """
    hf = _hf(model)
    if hf not in _checked and id(hf) not in _states:
        self_check(hf)
    config = hf.config.get_text_config()
    if head_mask is not None:
        refuse_ragged(hf)
        head_mask = torch.as_tensor(head_mask)
        shape = (config.num_hidden_layers, config.num_attention_heads)
        if tuple(head_mask.shape) != shape:
            raise GeomlibError(
                f"head_mask has shape {tuple(head_mask.shape)}: give (layer, query head) = {shape} for this model."
            )
    if top_n is not None and (isinstance(top_n, bool) or int(top_n) != top_n or top_n < 1):
        raise GeomlibError(f"top_n is {top_n!r}: give a whole number of sources, 1 or more.")
    state = _enter(hf)
    intervention = _Intervention(head_mask, None if top_n is None else int(top_n), renormalize)
    state.interventions.append(intervention)
    try:
        yield
    finally:
        state.interventions[:] = [i for i in state.interventions if i is not intervention]
        _leave(hf, state)


# --- the standing self-check ------------------------------------------------------------------------------------------

_CHECK_LENGTH = 12
_CHECK_ROWS_SUM = 1e-5
# Of max |logit|. In float64 too `eager` computes its softmax in float32.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}


def short_input(hf: PreTrainedModel) -> torch.Tensor:
    """Token ids of one short input that any model can be checked on, (1, token)."""
    vocabulary = hf.get_input_embeddings().weight.shape[0]
    return (torch.arange(_CHECK_LENGTH, device=input_device(hf))[None] * 7919 + 11) % vocabulary


def input_device(hf: PreTrainedModel) -> torch.device:
    """Where input ids go: to the embedding, or to the CPU where a device_map keeps its weights elsewhere (`meta`)."""
    device = hf.get_input_embeddings().weight.device
    return torch.device("cpu") if device.type == "meta" else device


def readable(module: torch.nn.Module | None) -> bool:
    """Whether a map's weights are plain numbers, not packed or scaled ones (8 bits and less)."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.element_size() > 1


def weights_of(module: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of a map, fetched where a device_map keeps them in memory or on disk."""
    with ExitStack() as stack:
        if module.weight.device.type == "meta":
            from accelerate.utils import align_module_device

            stack.enter_context(align_module_device(module))
        return module.weight, getattr(module, "bias", None)


@contextmanager
def _watching(hf: PreTrainedModel, called: Callable) -> Iterator[None]:
    """Call `called(attention module, child, args)` before each linear map or norm that an attention module calls itself."""
    hooks = [
        child.register_forward_pre_hook(lambda child, args, module=module: called(module, child, args))
        for module in hf.modules()
        if "Attention" in type(module).__name__ and isinstance(getattr(module, "layer_idx", None), int)
        for child in module.children()
        if isinstance(child, (torch.nn.Linear, Conv1D)) or hasattr(child, "weight")
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def output_projections(model) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """Each layer's attention module and its output projection W_O: the last map with weights that the module calls.

    `self_check` verifies that what enters it is the heads' outputs, side by side in order of the query heads.
    """
    hf = _hf(model)
    found: dict[int, tuple] = {}
    with _watching(hf, lambda attention, child, args: found.__setitem__(attention.layer_idx, (attention, child))):
        hf.base_model(input_ids=short_input(hf), use_cache=False)
    layers = hf.config.get_text_config().num_hidden_layers
    if sorted(found) != list(range(layers)):
        raise GeomlibError(f"the output projections of {type(hf).__name__} were not found in every layer.")
    return [found[layer] for layer in range(layers)]


@torch.no_grad()
def self_check(model) -> str:
    """Verify on one short input that this model is measured right: logits under observation equal the model's own,
    every layer is seen, each row of weights sums to 1 (less a learned sink's share), nothing lies above the diagonal,
    and weights times values equal what enters the output projection.

    Runs once per model (load_model and the first observe call it), whatever its family.

    Returns:
        What was found, in a sentence.

    Raises:
        GeomlibError: naming what does not hold; the model is refused.
    """
    hf = _hf(model)
    who = type(hf).__name__
    training = [m for m in hf.modules() if m.training]
    hf.eval()
    config = hf.config.get_text_config()
    ids = short_input(hf)
    worst = {"rows": 0.0, "future": 0.0}
    outputs: dict[int, list[torch.Tensor]] = {}
    alone: dict[int, torch.Tensor] = {}  # what enters the output projections of the model left alone
    observed: dict[int, torch.Tensor] = {}

    def look(block: Block) -> None:
        total = block.weights.sum(-1) + (0 if block.learned_sink_mass is None else block.learned_sink_mass)
        future = torch.arange(block.weights.shape[-1], device=total.device) > block.queries[:, None]
        worst["rows"] = max(worst["rows"], float((total - 1).abs().max()))
        worst["future"] = max(worst["future"], float((block.weights * future).max()))
        outputs.setdefault(block.layer, []).append((block.weights @ block.values).transpose(0, 1).flatten(1).cpu())

    def into(entered):
        def called(attention, child, args):
            if args and isinstance(args[0], torch.Tensor):
                entered[attention.layer_idx] = args[0].detach()[0].flatten(1).cpu()  # the last call is the projection's

        return called

    try:
        with _watching(hf, into(alone)):
            own = hf(input_ids=ids, use_cache=False).logits
        state = _enter(hf)
        state.observers.append(look)
        try:
            with _watching(hf, into(observed)):
                ours = hf(input_ids=ids, use_cache=False).logits
        finally:
            state.observers.remove(look)
            _leave(hf, state)
    finally:
        for module in training:
            module.training = True
    layers = config.num_hidden_layers
    if len(state.layers_seen) < layers:
        raise GeomlibError(
            f"{who} cannot be observed: only {len(state.layers_seen)} of its {layers} layers compute attention through "
            f"the interface that geomlib reads (state-space and hand-written attention do not); nothing was measured."
        )
    scale = float(own.abs().max().clamp(min=1e-6))
    difference = float((own - ours).abs().max()) / scale
    if not torch.isfinite(ours).all():
        raise GeomlibError(
            f"{who} gives NaN or infinite numbers after the attention of its last layer ({layers - 1}): load it in float32 "
            f"or check its weights."
        )
    problems = []
    if not difference <= _tolerance(hf, own.dtype):
        problems.append(f"its logits change under observation (by {difference:.1e} of the largest)")
    if worst["rows"] > _CHECK_ROWS_SUM:
        problems.append(f"its attention rows do not sum to 1 (off by {worst['rows']:.1e})")
    if worst["future"] > 0:
        problems.append("it attends to later tokens")
    for layer, parts in outputs.items():
        z, found = torch.cat(parts), (alone.get(layer), observed.get(layer))
        if any(x is None or x.shape != z.shape for x in found):
            problems.append(f"the output projection of layer {layer} was not found")
            break
        # Alone, the model may have come here by other roundings; observed, the same numbers are rounded once.
        bounds = 10 * _tolerance(hf, found[0].dtype), max(1e-5, 4 * torch.finfo(found[1].dtype).eps)
        size = float(z.abs().max().clamp(min=1e-6))
        if not all(float((z - x).abs().max()) <= bound * size for x, bound in zip(found, bounds, strict=True)):
            problems.append(
                f"weights times values do not give what enters the output projection of layer {layer} (a gate or a norm may "
                f"stand between)"
            )
            break
    if problems:
        raise GeomlibError(f"{who} cannot be measured: {'; '.join(problems)}; nothing was measured.")
    _checked.add(hf)
    return (
        f"{who}: geomlib's attention equals the model's own (logits differ by at most {difference:.1g} of the largest, on "
        f"{ids.shape[1]} tokens)."
    )


def _tolerance(hf: PreTrainedModel, dtype: torch.dtype) -> float:
    packed = torch.float16 if getattr(hf, "is_quantized", False) else dtype  # products of packed weights round to it
    return max(_TOLERANCE.get(dtype, 1e-3), _TOLERANCE[packed])
