"""The command line: fetch, measure, run, estimate, scorecard, compare, prune, teach. Bad input is one sentence on stderr and exit code 2, never a traceback."""

import json
import os
import sys
import warnings
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from geomlib.errors import GeomlibError


class _OneSentence(TyperGroup):
    """What a user can mend becomes one sentence and exit code 2; Ctrl-C says that nothing is lost."""

    def main(self, *args, **kwargs):
        """Typer's own complaints (an unknown option, a missing one) and warnings in one line as well."""
        warnings.formatwarning = lambda message, *_: f"geomlib: {message}\n"
        try:
            sys.exit(super().main(*args, **{**kwargs, "standalone_mode": False}) or 0)
        except Exception as e:
            if not hasattr(e, "format_message"):
                raise
            nothing_given = type(e).__name__ == "NoArgsIsHelpError"  # its message is the help text
            message = e.format_message()
            print(message if nothing_given else f"geomlib: {message.rstrip('.')}.", file=sys.stderr)
            sys.exit(e.exit_code)

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except GeomlibError as e:
            print(f"geomlib: {e}", file=sys.stderr)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            print("geomlib: stopped; what is finished is kept, run the same again to continue.", file=sys.stderr)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_OneSentence,
    no_args_is_help=True,
    add_completion=False,
    help=__doc__.split("\n")[0],
    pretty_exceptions_enable=False,
)
measure = typer.Typer(no_args_is_help=True, help="Measure a model on texts and write tidy tables.")
app.add_typer(measure, name="measure")

DEFAULT_MODEL, DEFAULT_CORPORA = "smollm2-135m", ("vital-articles", "django-docs")


class Queries(StrEnum):
    all = "all"
    last = "last"


class Ranking(StrEnum):
    attention = "attention"
    contribution = "contribution"


class Distance(StrEnum):
    euclidean = "euclidean"
    cosine = "cosine"


class Unit(StrEnum):
    head = "head"
    group = "group"


class Control(StrEnum):
    random = "random"
    magnitude = "magnitude"


class Profile(StrEnum):
    quick = "quick"
    standard = "standard"
    paper = "paper"


# What several commands share.
ModelName = Annotated[
    str, typer.Option("--model", help="Embedded name, Hugging Face id (also id@revision), or folder.")
]
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit of a hub model.")]
Corpora = Annotated[
    list[str] | None,
    typer.Option("--corpus", help="Embedded name, Hugging Face data set, or a file of yours; repeat for several."),
]
Profiles = Annotated[Profile, typer.Option("--profile", help="How much is measured; the book's rerun page has them.")]
Chapters = Annotated[
    list[str] | None,
    typer.Option("--chapters", "--chapter", help="Names or numbers, with commas or repeated; none: all."),
]
Settings = Annotated[list[str] | None, typer.Option("--set", help="name=value of a notebook's parameter; repeat.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1; default: the GPU if there is one.")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="float32, bfloat16, ...; default: float32 on CPU, bfloat16 on a GPU.")
]
DeviceMap = Annotated[
    str | None, typer.Option("--device-map", help="auto: spread a large model over the GPUs and the CPU's memory.")
]
Bits = Annotated[int | None, typer.Option("--bits", help="8 or 4: load quantised, if you have bitsandbytes.")]
Scheduler = Annotated[
    str | None, typer.Option("--scheduler", help="tcp://... of a Dask cluster that windows are sent to.")
]
Runs = Annotated[list[Path], typer.Argument(help="Folders of runs, as geomlib run wrote them.")]


@app.command()
def fetch(
    names: Annotated[
        list[str] | None, typer.Argument(help="Embedded models and corpora; none: the default ones.")
    ] = None,
) -> None:
    """Fetch embedded models and corpora into the cache, check and convert them once."""
    from geomlib import corpora, models

    known = [*models.EMBEDDED, *corpora.EMBEDDED]
    for name in names or [DEFAULT_MODEL, *DEFAULT_CORPORA]:
        if name not in known:
            raise GeomlibError(
                f"{name} is not embedded: fetch one of {', '.join(known)}, or load a hub id when you use it."
            )
        if name in models.EMBEDDED:
            where = models.embedded_folder(name)
        else:
            where = corpora.load_corpus(name).source["file"]
        typer.echo(f"{name}: ready ({where})")


@measure.command()
def separability(
    out: Annotated[Path, typer.Option(help="Folder of the results; an interrupted run continues there.")],
    model: ModelName = DEFAULT_MODEL,
    revision: Revision = None,
    corpus: Annotated[
        str | None, typer.Option(help=f"Embedded name or Hugging Face data set; default: {DEFAULT_CORPORA[0]}.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="A text, JSONL or Parquet file of your own instead.")] = None,
    detokenise: Annotated[bool, typer.Option(help="Undo WikiText's spaced punctuation.")] = False,
    windows: Annotated[
        int, typer.Option(help="Number of windows, one a document; of a plain text file, passages of it.")
    ] = 8,
    length: Annotated[int, typer.Option(help="Tokens of a window, BOS included.")] = 512,
    queries: Annotated[Queries, typer.Option(help="Every query of the window, or the final one.")] = Queries.all,
    sizes: Annotated[str, typer.Option(help="The N to measure.")] = "1,2,4,8,16,32,64,128,256",
    ranking: Annotated[list[Ranking], typer.Option(help="Repeat for several.")] = [Ranking.attention],  # noqa: B006
    distance: Annotated[list[Distance], typer.Option(help="Repeat for several.")] = [Distance.euclidean],  # noqa: B006
    control: Annotated[list[Control], typer.Option(help="Repeat for several.")] = [Control.random, Control.magnitude],  # noqa: B006
    random_rankings: Annotated[int, typer.Option(help="Random rankings per query.")] = 16,
    bins: Annotated[int, typer.Option(help="Bins of query position.")] = 8,
    seed: Annotated[int, typer.Option(help="Decides windows and random draws.")] = 0,
    device: Device = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
    bits: Bits = None,
    scheduler: Scheduler = None,
) -> None:
    """F_N, precision and recall of every head's top-N sources, with their controls."""
    if text is not None and corpus is not None:
        raise GeomlibError("both --text and --corpus are given: give one of them.")
    try:
        grid = tuple(int(n) for n in sizes.split(","))
    except ValueError:
        raise GeomlibError(
            f"--sizes {sizes!r} is not usable: give whole numbers with commas, such as 2,8,32."
        ) from None
    os.environ |= _load_options(device, None, device_map, bits)
    from geomlib.stats import summary
    from geomlib.study import Study

    study = Study(
        model=model, revision=revision, corpus=corpus or DEFAULT_CORPORA[0], text=None if text is None else str(text), windows=windows,
        detokenise=detokenise,
        length=length, seed=seed, dtype=dtype, queries=queries.value, sizes=grid,
        rankings=tuple(r.value for r in ranking), distances=tuple(d.value for d in distance),
        controls=tuple(c.value for c in control), random_rankings=random_rankings, bins=bins,
    )  # fmt: skip
    table = study.run(out, progress=True, scheduler=scheduler)
    table = table[table["size"] > 1]  # N = 1 says nothing: F is 1 whatever is selected
    if len(table):
        shown, documents = (
            summary(table, "f", by=["distance", "ranking", "control", "size"]),
            table["document"].nunique(),
        )
        noun = "passage" if text is not None and table["document"].str.contains("#").all() else "document"
        what = f"{documents} {noun}s, with 95 % intervals" if documents > 1 else f"1 {noun}"
        if documents < windows:
            typer.echo(f"The text holds {documents} of up to {windows} windows.")
        typer.echo(f"Mean F_N over heads, layers and {what}:")
        typer.echo((shown if documents > 1 else shown.drop(columns=["low", "high"])).round(3).to_string(index=False))
    typer.echo(f"Tables and study.json are in {out}.")


@app.command()
def prune(
    out: Annotated[Path, typer.Option(help="New folder for the smaller model.")],
    retention: Annotated[float, typer.Option(help="Share of the heads (or KV groups) that stays.")],
    order: Annotated[
        str,
        typer.Option(
            help="Which go first: random, magnitude, contribution, gradient, entropy, entropy-reversed, damage, or a regime order "
            "such as mixer-reset-retriever."
        ),
    ] = "gradient",
    model: ModelName = DEFAULT_MODEL,
    revision: Revision = None,
    unit: Annotated[
        Unit, typer.Option(help="Query heads, or KV heads with all query heads that share them.")
    ] = Unit.head,
    zero_only: Annotated[
        bool, typer.Option("--zero-only", help="Keep all shapes, for plain transformers; saves no time.")
    ] = False,
    corpus: Annotated[
        str | None, typer.Option(help=f"Where the order comes from; default: {DEFAULT_CORPORA[0]}.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="A text, JSONL or Parquet file of your own instead.")] = None,
    windows: Annotated[int, typer.Option(help="Windows that the order is made from, one a document.")] = 4,
    judge: Annotated[int, typer.Option(help="Windows of other documents that the result is judged on.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens of a window, BOS included.")] = 256,
    seed: Annotated[int, typer.Option(help="Decides windows and the random order.")] = 0,
    dtype: Dtype = None,
) -> None:
    """Remove the heads that matter least and save the smaller model."""
    if text is not None and corpus is not None:
        raise GeomlibError("both --text and --corpus are given: give one of them.")
    from geomlib.pruning import export
    from geomlib.study import Study

    fields = {
        "model": model,
        "revision": revision,
        "corpus": corpus or DEFAULT_CORPORA[0],
        "length": length,
        "seed": seed,
    }
    fields |= {"text": None if text is None else str(text), "dtype": dtype}
    calibration, judged = Study(windows=windows, **fields), Study(windows=judge, skip=windows, **fields)
    for line in export(calibration, judged, order, retention, out, unit.value, cut=not zero_only, progress=True):
        typer.echo(line)


@app.command()
def run(
    model: ModelName = DEFAULT_MODEL,
    revision: Revision = None,
    corpus: Corpora = None,
    profile: Profiles = Profile.standard,
    chapters: Chapters = None,
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; default: one under runs/ by what was asked.")
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
    bits: Bits = None,
    scheduler: Scheduler = None,
) -> None:
    """Run the book's chapters on a model: notebooks, tables, figures and scorecard in a folder; the committed ones stay."""
    from geomlib import runs

    asked = _asked(model, revision, corpus, profile, settings, chapters, dtype, bits)
    environ = _load_options(device, dtype, device_map, bits) | ({"GEOMLIB_SCHEDULER": scheduler} if scheduler else {})
    out, failed = runs.execute(asked, out, _names(chapters), environ)
    try:
        _conclude(out)
    except GeomlibError as e:
        if not failed:
            raise
        print(f"geomlib: {e}", file=sys.stderr)  # what failed is said all the same
    if failed:
        print(
            f"geomlib: {', '.join(failed)} failed: open the executed notebook in {out} to see where.", file=sys.stderr
        )
        raise typer.Exit(1)


@app.command()
def estimate(
    model: ModelName = DEFAULT_MODEL,
    revision: Revision = None,
    corpus: Corpora = None,
    profile: Profiles = Profile.standard,
    chapters: Chapters = None,
    settings: Settings = None,
    device: Device = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
    bits: Bits = None,
) -> None:
    """How long a run will take here and how much memory, from a short timed probe."""
    asked = _asked(model, revision, corpus, profile, settings, chapters, dtype, bits)
    os.environ |= _load_options(device, dtype, device_map, bits)
    from geomlib import estimate as e

    found = e.estimate(asked, _names(chapters), lambda line: print(line, file=sys.stderr, flush=True))
    for line in e.lines(found):
        typer.echo(line)


@app.command()
def scorecard(
    folders: Runs,
    out: Annotated[Path | None, typer.Option(help="Folder for scorecard.md and scorecard.json.")] = None,
) -> None:
    """The paper's claims on one model or several, with values, intervals, rules and verdicts."""
    from geomlib import scorecard as s

    cards = [s.card(folder) for folder in folders]
    rows = s.over(cards)
    _print_table(s.overview(rows), "The paper's claims")
    for claim, rule in s.rules(rows).items():
        typer.echo(f"{claim}: {rule}")
    if out:
        s.save(cards, out)
        typer.echo(f"scorecard.md and scorecard.json, with every measurement, are in {out}.")


@app.command()
def compare(
    folders: Runs,
    out: Annotated[Path | None, typer.Option(help="Folder for measures.csv and the figures.")] = None,
) -> None:
    """Models side by side: separability, sink, taxonomy and retention, beside what the paper published."""
    from geomlib import compare as c

    table = c.over(folders)
    for title, wide in c.side_by_side(table).items():
        _print_table(wide.reset_index(), title)
    _print_table(c.published().drop(columns="group"), "Published in the paper, for its own models")
    if out:
        from geomlib import figures

        figures.style()
        c.save(table, out)
        for name, figure in figures.comparison(table).items():
            figure.savefig(out / f"{name}.png")
        typer.echo(f"measures.csv and the figures are in {out}.")


def _asked(model, revision, corpus, profile, settings, chapters, dtype, bits):
    """What was asked for as a `Run`, the model pinned: what is wrong with it shows before anything is fetched or started."""
    from geomlib import runs
    from geomlib.models import pinned
    from geomlib.notebooks import parse_settings

    corpora = tuple(str(Path(c).absolute()) if Path(c).is_file() else c for c in corpus or [])
    load = {k: v for k, v in (("dtype", dtype), ("bits", bits)) if v is not None}
    fields = {"corpora": corpora, "profile": profile.value, "settings": parse_settings(settings or []), "load": load}
    runs.check(runs.Run(model=model, **fields), _names(chapters))
    return runs.Run(model=pinned(model, revision), **fields)


def _load_options(device, dtype, device_map, bits) -> dict[str, str]:
    """How kernels and workers load models, as the environment variable that `load_model` reads."""
    options = {"device": device, "dtype": dtype, "device_map": device_map, "bits": bits}
    options = {k: v for k, v in options.items() if v is not None}
    if options:  # now, and not inside the first chapter
        from geomlib.models import _placement

        _placement(dtype, device, {"device_map": device_map})
    return {"GEOMLIB_LOAD": json.dumps(options)} if options else {}


def _names(chapters: list[str] | None) -> list[str]:
    return [name for text in chapters or [] for name in text.split(",") if name]


def _conclude(out: Path) -> None:
    """Scorecard and measures of a run into its folder, and the verdicts on the terminal."""
    from geomlib import compare as c
    from geomlib import scorecard as s

    if s.studies(out):
        found = s.card(out)
        s.save([found], out)
        measured = [r for r in found["rows"] if r["documents"]]
        if measured:
            table = s.overview(measured)
            _print_table(table[table[found["model"]] != ""], "The paper's claims")
        try:
            c.save(c.measures(out), out)
        except GeomlibError:
            pass  # chapters without curves only
    typer.echo(f"Notebooks, tables, figures and scorecard are in {out}.")


def _print_table(table, title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=title, title_justify="left", title_style="bold")
    for column in table.columns:
        shown.add_column(str(column), overflow="fold")
    for row in table.astype(object).fillna("").itertuples(index=False):
        shown.add_row(*map(str, row))
    Console().print(shown)


@app.command()
def notebooks(
    names: Annotated[
        list[str] | None, typer.Argument(help="Notebook names; none: those whose sources changed.")
    ] = None,
) -> None:
    """Execute the committed notebooks again, in place, with their default parameters."""
    from geomlib.notebooks import regenerate

    regenerate(names or [])


@app.command()
def teach(
    out: Annotated[
        Path | None, typer.Option(help="Folder of the copy; default: teach/student, or teach/instructor.")
    ] = None,
    solutions: Annotated[
        bool, typer.Option("--solutions", help="The instructor's copy: solutions as cells that run.")
    ] = False,
    keep_outputs: Annotated[bool, typer.Option("--keep-outputs", help="Leave the outputs of the book in.")] = False,
) -> None:
    """Copy the chapters for a class: exercises with room for answers, without their solutions."""
    from geomlib import teach as t

    out = out or Path("teach") / ("instructor" if solutions else "student")
    for chapter, what in t.copy(out, solutions, keep_outputs).items():
        typer.echo(f"{chapter}: {what}")
    typer.echo(f"The {'instructor' if solutions else 'student'}'s copy is in {out}.")
