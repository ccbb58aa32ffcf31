"""A forward pass that is resumed in the middle: what lies before the layer that changes is computed once.

No architecture has code of its own here: the model's own forward pass runs, and modules that have nothing new to compute answer
with what they answered before. `resumes` asks a model whether that gives what removing a head gives.
"""

from collections.abc import Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from transformers.pytorch_utils import Conv1D

from geomlib.attention import intervene, output_projections, readable, short_input, weights_of
from geomlib.nll import NOISE, evaluating, score


def head_columns(projection: torch.nn.Module, heads: int) -> torch.Tensor:
    """W_O of each query head, (query head, dim, hidden): z @ columns is what the head adds to the layer's output."""
    weight, _ = weights_of(projection)
    if isinstance(projection, Conv1D):  # stored transposed to Linear
        columns = weight
    elif isinstance(projection, torch.nn.Linear) and readable(projection):
        columns = weight.T
    else:  # packed weights: what the projection does to each basis vector
        size = projection.in_features
        basis = torch.eye(size, device=weight.device)
        columns = projection(basis) - projection(torch.zeros(1, size, device=weight.device))
    columns = columns if columns.dtype == torch.float64 else columns.float()
    return columns.reshape(heads, -1, columns.shape[-1])


class Recording:
    """One input's pass through the whole model, kept so that it can be resumed at any layer: the output of each layer, of
    each layer's attention, and what enters each output projection."""

    def __init__(self, hf, ids: torch.Tensor):
        self.hf, self.ids = hf, ids
        self.attention, self.projections = zip(*output_projections(hf), strict=True)
        self.layers = _decoder_layers(hf, self.attention)
        self.heads = hf.config.get_text_config().num_attention_heads
        self.outputs, self.attended, self.entered = {}, {}, {}

        def keeping(kept, i):
            return lambda module, args, output: kept.__setitem__(i, output)

        def entering(i):
            return lambda module, args: self.entered.__setitem__(i, args[0])

        hooks = []
        for i in range(len(self.layers)):
            hooks.append(self.layers[i].register_forward_hook(keeping(self.outputs, i)))
            hooks.append(self.attention[i].register_forward_hook(keeping(self.attended, i)))
            hooks.append(self.projections[i].register_forward_pre_hook(entering(i)))
        try:
            self.scores = score(hf, ids)
        finally:
            for hook in hooks:
                hook.remove()

    def resumed(self, layer: int, head: int):
        """Context in which the model's forward pass on the same input gives what it gives without one head."""
        z = self.entered[layer].unflatten(-1, (self.heads, -1))[..., head, :]
        columns = head_columns(self.projections[layer], self.heads)[head]
        output = self.attended[layer]
        attended = output[0] if isinstance(output, tuple) else output
        less = attended - (z.to(columns) @ columns).to(attended)
        answers = [(self.layers[i], self.outputs[i]) for i in range(layer)]
        answers.append((self.attention[layer], (less, *output[1:]) if isinstance(output, tuple) else less))
        return _answering(answers)

    def without(self, layer: int, head: int) -> torch.Tensor:
        """NLL of each target without one head."""
        with self.resumed(layer, head):
            return score(self.hf, self.ids)


@contextmanager
def _answering(answers: Sequence[tuple[torch.nn.Module, object]]):
    """Inside, these modules compute nothing and return what is given for them."""
    before = [(module, module.__dict__.get("forward")) for module, _ in answers]
    try:
        for module, answer in answers:
            module.forward = lambda *args, answer=answer, **kwargs: answer
        yield
    finally:
        for module, forward in before:
            if forward is None:
                del module.forward  # the class's own again
            else:
                module.forward = forward


def _decoder_layers(hf, attention: Sequence[torch.nn.Module]) -> torch.nn.ModuleList | None:
    for module in hf.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == len(attention):
            inside = zip(module, attention, strict=True)
            if all(any(x is a for x in layer.modules()) for layer, a in inside):
                return module
    return None


_resumable: WeakKeyDictionary = WeakKeyDictionary()


@torch.no_grad()
def resumes(hf) -> bool:
    """Whether a resumed pass gives the hidden states of an ablated one, at every layer (a layer that hands something to later
    ones on the side, as shared keys and values, would not)."""
    if hf not in _resumable:
        with evaluating(hf):
            _resumable[hf] = _resumes(hf)
    return _resumable[hf]


def _resumes(hf) -> bool:
    attention = [a for a, _ in output_projections(hf)]
    if _decoder_layers(hf, attention) is None:
        return False
    ids = short_input(hf)
    recording = Recording(hf, ids)

    def hidden():
        return hf.base_model(input_ids=ids, use_cache=False)[0]

    full = hidden()
    for layer in range(len(attention)):
        head = layer % recording.heads
        mask = torch.ones(len(attention), recording.heads)
        mask[layer, head] = 0
        with intervene(hf, head_mask=mask):
            ablated = hidden()
        try:
            with recording.resumed(layer, head):
                off = (hidden() - ablated).norm()
        except (RuntimeError, TypeError, KeyError, AttributeError, ValueError):
            return False
        if not off <= 0.01 * (ablated - full).norm() + NOISE[hf.dtype] * full.norm():
            return False
    return True
