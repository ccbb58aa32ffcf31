"""geomlib: the geometry of token selection in multi-head attention, measured on any causal language model.

    model = geomlib.load_model("smollm2-135m")
    with geomlib.observe(model, observer):
        model.hf(input_ids)
    table = geomlib.Study(corpus="vital-articles", windows=8).run()

Names are loaded when first used, so that the command line starts without torch.
"""

from importlib import import_module

from geomlib.errors import GeomlibError

__version__ = "0.1.0"

_HOME = {
    "load_model": "models",
    "Model": "models",
    "observe": "attention",
    "intervene": "attention",
    "self_check": "attention",
    "Block": "attention",
    "prune": "pruning",
    "load_corpus": "corpora",
    "text_corpus": "corpora",
    "take_windows": "corpora",
    "Study": "study",
    "load_table": "study",
}
__all__ = ["GeomlibError", *_HOME]  # noqa: PLE0604 (strings all the same)


def __getattr__(name: str):
    if name in _HOME:
        return getattr(import_module(f"geomlib.{_HOME[name]}"), name)
    raise AttributeError(f"module 'geomlib' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *__all__])
