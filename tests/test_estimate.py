"""What a run will measure, and what it will take: against what the chapters do measure, and a made-up cost."""

from types import SimpleNamespace

import nbformat
import pytest
from test_notebooks import write

from geomlib import estimate as E
from geomlib import notebooks
from geomlib.errors import GeomlibError
from geomlib.estimate import PROBE, Estimate, Work, plan
from geomlib.runs import Run
from geomlib.study import Study


def studies(work: list[Work], corpora: list[str]) -> dict[str, set[tuple[Study, str]]]:
    """Each chapter's pairs (study, analysis) as planned; work on every corpus is listed with the first."""
    found: dict[str, set] = {}
    for w in work:
        assert w.studies == 1 or (w.studies == len(corpora) and w.fields["corpus"] == corpora[0])
        for corpus in corpora if w.studies > 1 else [w.fields["corpus"]]:
            study = Study(**w.fields | {"corpus": corpus})
            found.setdefault(w.chapter, set()).update((study, a) for a in w.analyses)
    return found


def test_the_plan_is_what_the_chapters_measure(measured):
    """Study by study, chapter by chapter, of a run on a small model."""
    planned = studies(plan(measured.asked), list(measured.asked.corpora))
    assert set(planned) == set(measured.studies) and len(planned) == 5
    for chapter, pairs in measured.studies.items():
        assert planned[chapter] == pairs, chapter
    there = {(p.parent.name, a.name.split("-")[0]) for p in measured.out.glob("tables/*/study.json") for a in p.parent.iterdir()
             if a.is_dir()}  # fmt: skip
    assert len(there) == len(set().union(*planned.values()))  # and that is all that lies in tables/


@pytest.mark.parametrize("profile", ["quick", "standard", "paper"])
def test_every_profile_can_be_planned(profile):
    work = plan(Run(model="m", profile=profile))
    assert {w.chapter.split("_")[0] for w in work} == {"01", "02", "03", "04", "05"}
    assert all(w.fields["model"] == "m" and w.fields["windows"] >= 1 and w.studies >= 1 for w in work)
    for w in work:
        Study(**w.fields)  # nothing that a study refuses


def test_the_plan_follows_chapters_corpora_and_settings():
    run = Run(model="m", corpora=("x", "y", "z"), settings={"windows": 17, "length": 100})
    work = plan(run, ["02"])
    assert [w.chapter for w in work] == ["02_separability"] * 2 and [w.studies for w in work] == [3, 3]
    assert work[0].fields["windows"] == 17 and {w.fields["length"] for w in work} == {100}
    assert plan(run, ["00"]) == []
    more = plan(Run(model="m", settings={"other_model": "n"}), ["05"])
    assert [w.fields["model"] for w in more].count("n") == 1


def test_a_model_beside_it_that_is_the_same_is_planned_once():
    once, twice = plan(Run(model="m"), ["03"]), plan(Run(model="m", settings={"compare_with": "n"}), ["03"])
    assert len(twice) > len(once) and {w.fields["model"] for w in twice} == {"m", "n"}


# --- from probes to a whole run ---------------------------------------------------------------------------------------

MODEL = SimpleNamespace(layers=2, query_heads=4, name="m")


@pytest.mark.parametrize("length", [*PROBE, 150, 512, 4096])
@pytest.mark.parametrize(("linear", "square"), [(0.01, 0.0), (0.01, 2e-5), (0.0, 1e-4)])
def test_a_cost_of_a_length_and_its_square_is_found_exactly(monkeypatch, length, linear, square):
    monkeypatch.setattr(E, "_timed", lambda w, model, n: linear * n + square * n**2)
    w = Work("c", {"model": "m", "length": length, "windows": 3}, ("taxonomy",))
    assert E._window(w, MODEL, {}) == pytest.approx(linear * length + square * length**2, rel=1e-9)


def test_a_window_shorter_than_the_probes_is_timed_as_it_is(monkeypatch):
    asked = []
    monkeypatch.setattr(E, "_timed", lambda w, model, n: asked.append(n) or 0.5)
    w = Work("c", {"model": "m", "length": 64, "windows": 3}, ("taxonomy",))
    assert E._window(w, MODEL, {}) == pytest.approx(0.5) and set(asked) == {64}


def test_noise_never_gives_less_than_nothing(monkeypatch):
    monkeypatch.setattr(E, "_timed", lambda w, model, n: 1.0 if n == PROBE[0] else 0.5)  # the longer one faster
    w = Work("c", {"model": "m", "length": 4096, "windows": 3}, ("taxonomy",))
    assert E._window(w, MODEL, {}) > 0


def test_the_same_kind_of_work_is_timed_once(monkeypatch):
    asked = []
    monkeypatch.setattr(E, "_timed", lambda w, model, n: asked.append(n) or 0.01 * n)
    timed: dict = {}
    for fields in ({"length": 512}, {"length": 1024, "windows": 9, "corpus": "x", "seed": 3, "skip": 2}):
        E._window(Work("c", {"model": "m", "windows": 1} | fields, ("taxonomy",)), MODEL, timed)
    assert len(asked) == len(PROBE)
    E._window(Work("c", {"model": "m", "windows": 1, "length": 512, "queries": "last"}, ("taxonomy",)), MODEL, timed)
    assert len(asked) == 2 * len(PROBE)


# --- as it is said ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"),
        (12.4, "12 s"),
        (89, "89 s"),
        (120, "2 min"),
        (3600, "60 min"),
        (5400, "1.5 h"),
        (100_000, "27.8 h"),
    ],
)
def test_spans_of_time(seconds, text):
    assert E._span(seconds) == text


def test_a_line_a_chapter_and_one_together():
    lines = E.lines(Estimate({"01_theory": 30.0, "02_separability_of_sets": 90.0}, 3.2e9))
    assert len(lines) == 3 and [line.split()[0] for line in lines] == [
        "01_theory",
        "02_separability_of_sets",
        "together",
    ]
    assert lines[0].split()[1:] == ["30", "s"] and lines[2].split()[1:] == ["2", "min,", "memory", "about", "3.2", "GB"]
    assert lines[0].index("30 s") == lines[1].index("2 min") == lines[2].index("2 min")


def test_a_model_larger_than_the_memory_is_refused_in_one_sentence():
    E.fits(8 * 10**9, 9 * 10**9, "m")
    with pytest.raises(
        GeomlibError, match=r"m needs 14 GB for its weights and 9 GB are free: give --dtype bfloat16"
    ) as found:
        E.fits(14 * 10**9, 9 * 10**9, "m")
    assert "\n" not in str(found.value) and str(found.value).endswith(".")


def test_chapters_that_measure_nothing_are_no_work(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    write(tmp_path / "notebooks" / "00_first.ipynb", "print(1)")
    write(tmp_path / "notebooks" / "42_last.ipynb", "print(1)")
    monkeypatch.chdir(tmp_path)
    assert plan(Run(model="m")) == []
    with pytest.raises(GeomlibError, match="there is no notebook 01: give one of 00_first, 42_last"):
        plan(Run(model="m"), ["01"])


def test_every_chapter_with_studies_has_a_plan():
    """One that runs studies and is not in the plan would take no time."""
    for book in notebooks.chapters([]):
        cells = nbformat.read(book, as_version=4).cells
        if any(c.cell_type == "code" and "Study(" in c.source for c in cells):
            assert book.stem.split("_")[0] in E._PLANS, book.stem
