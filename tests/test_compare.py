"""Models side by side: what is taken of each run's tables, and that tables, files and figures say it."""

import math
import shutil

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from made import plant, record
from test_claims import M, O, effect, labelled, planted, sinks
from test_cli import run
from test_sparsify import curves, flat

from geomlib import claims, compare, figures, scorecard
from geomlib.cli import app
from geomlib.errors import GeomlibError
from geomlib.runs import Run


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


GAINS = {2: 0.1, 8: 0.3, 64: [0.0, 0.1, 0.2, 0.0, 0.1, 0.2]}
KEPT = (0.8, 0.5, 0.2)
CELLS = [("a", 0, 2, 0.1, 0.6), ("a", 0, 8, 0.3, 0.4), ("b", 0, 2, 0.4, 0.5), ("c", 0, 64, 0.1, 0.9)]


def made(out, model: str = "m", labels: str = M, corpora=("a", "b"), queries=("last", "all")):
    """A run with a planted table of each kind on each corpus."""
    record(out, Run(model=model))
    for corpus in corpora:
        for q in queries:
            plant(out, {"separability": planted(GAINS)}, corpus, model, queries=q)
            plant(out, {"sink_effect": effect(CELLS)}, corpus, model, queries=q, kind="sink_effect")
        plant(out, {"sinks": sinks("times_smaller", [[2.0, 4.0, 5.0], [4.0, 4.0, 7.0]])}, corpus, model, kind="sinks")
        plant(out, {"taxonomy": labelled(labels, 3)}, corpus, model, kind="taxonomy")
    orders = {
        "random 0": 0.6,
        "random 1": 0.8,
        "magnitude": 0.5,
        "gradient": [0.1, 0.2, 0.3, 0.4],
        "reset-retriever-mixer": 0.4,
    }
    table = curves({n: flat(d, KEPT) for n, d in orders.items()}, full=(2.0,) * 4)
    plant(out, {"retention": table}, corpora[0], model, skip=4, mark="1" * 16)
    return out


def of(table: pd.DataFrame, **same) -> pd.DataFrame:
    for name, value in same.items():
        table = table[table[name] == value]
    return table


# --- what is measured -------------------------------------------------------------------------------------------------


def test_measures_are_the_means_of_the_tables(tmp_path):
    """Planted: random sets have F 0.4, attention's 0.4 + gain; two orders 'random' of damage 0.6 and 0.8 are one of 0.7."""
    table = compare.measures(made(tmp_path))
    assert table.columns.tolist() == compare.COLUMNS and set(table["model"]) == {"m"}
    for queries in ("last", "all"):
        here = {"corpus": "a", "queries": queries}
        top = of(table, quantity="F", group="none", **here)
        assert top["x"].tolist() == [2, 8, 64] and top["mean"].tolist() == pytest.approx([0.5, 0.7, 0.5])
        assert top["documents"].tolist() == [6] * 3
        assert of(table, quantity="F", group="random", **here)["mean"].tolist() == pytest.approx([0.4] * 3)
        more = of(table, quantity="advantage", **here)
        assert more["mean"].tolist() == pytest.approx([0.1, 0.3, 0.1])
        last = more.iloc[-1]
        assert 0 <= last["low"] < 0.1 < last["high"] <= 0.2 and more.iloc[0]["low"] == pytest.approx(0.1)
        cost = of(table, quantity="sink cost", **here)
        assert cost["x"].tolist() == [2]  # one document alone has the others
        assert cost["mean"].tolist() == pytest.approx([(0.5 + 0.1) / 2])
    smaller = of(table, quantity="times smaller", corpus="b").set_index("group")["mean"]
    assert smaller.to_dict() == pytest.approx({"median": 4.0, "10% of heads": 3.2, "90% of heads": 5.6})  # of 3, 4, 6
    share = of(table, quantity="share", corpus="a").set_index("group")["mean"].to_dict()
    assert share == pytest.approx({"Retriever": 0.1, "Mixer": 0.6, "Reset": 0.3})
    damage = of(table, quantity="damage")
    assert set(damage["corpus"]) == {"a"} and set(damage["x"]) == set(KEPT)
    each = of(damage, x=0.5).set_index("group")["mean"].to_dict()
    assert each == pytest.approx({"random": 0.7, "magnitude": 0.5, "gradient": 0.25, "reset-retriever-mixer": 0.4})


def test_other_distances_rankings_and_n_1_are_no_part_of_it(tmp_path):
    table = planted({1: 0.6, 2: 0.1})
    ranked = table[table["control"] == "none"].assign(ranking="contribution", f=0.9)
    other = pd.concat([table, planted({2: 0.5}, distance="cosine"), ranked], ignore_index=True)
    plant(record(tmp_path, Run(model="m")), {"separability": other}, queries="last")
    top = of(compare.measures(tmp_path), quantity="F", group="none")
    assert top["x"].tolist() == [2] and top["mean"].tolist() == pytest.approx([0.5])


def test_the_same_numbers_as_the_scorecards(measured):
    """Of a run on a small model: where both have a number they have it from one table."""
    table, card = compare.measures(measured.out), scorecard.card(measured.out)
    pairs = {"C4": ("times smaller", "median"), "C5": ("negative cosine", "heads"), "C8": ("share", "Retriever")}
    for row in card["rows"]:
        if row["claim"] in pairs and row["value"] is not None:
            quantity, group = pairs[row["claim"]]
            (mine,) = of(table, quantity=quantity, group=group, corpus=row["corpus"]).itertuples()
            assert (mine.mean, mine.low, mine.high) == pytest.approx((row["value"], row["low"], row["high"]))
        if row["claim"] == "C1":
            part = of(table, quantity="advantage", corpus=row["corpus"], queries=row["queries"])
            assert part["mean"].min() == pytest.approx(row["value"])
    assert {"F", "advantage", "times smaller", "negative cosine", "share", "damage"} <= set(table["quantity"])
    assert (table["low"].isna() | (table["low"] <= table["high"])).all()


def test_one_document_has_no_intervals_and_still_its_figures(tmp_path):
    out = record(tmp_path, Run(model="m"))
    tables = {"separability": planted({2: [0.1], 8: [0.2]}), "sinks": sinks("times_smaller", [[2.0, 4.0]])}
    tables |= {"taxonomy": labelled(M, 1), "sink_effect": effect(CELLS[:1])}
    for analysis, table in tables.items():
        plant(out, {analysis: table}, kind=analysis)
    found = compare.measures(out)
    assert found[["mean", "low", "high"]].dtypes.tolist() == [float] * 3
    assert of(found, quantity="F")["low"].isna().all() and of(found, quantity="sink cost").empty
    assert set(figures.comparison(found)) == {"separability", "shares"}
    figures.sink_compared(found)


# --- several models ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    place = tmp_path_factory.mktemp("compare")
    return [made(place / "one", "org/one"), made(place / "two", "two", O, corpora=("a",))]


def test_models_stand_one_after_the_other(both):
    table = compare.over(both)
    assert list(dict.fromkeys(table["model"])) == ["org/one", "two"]
    parts = [compare.measures(out) for out in both]
    pd.testing.assert_frame_equal(table, pd.concat(parts, ignore_index=True))
    with pytest.raises(GeomlibError, match="2 of the runs are of two: give one run a model"):
        compare.over([both[1], both[0], both[1]])


def test_what_is_left_without_tables_gives_the_same_measures(both, tmp_path):
    for out in both:
        small = tmp_path / out.name
        small.mkdir()
        table = compare.measures(out)
        compare.save(table, small)
        shutil.copy(out / "run.json", small)
        pd.testing.assert_frame_equal(compare.measures(small), table, rtol=1e-5, check_dtype=False)
    assert compare.over([tmp_path / "one", both[1]])["model"].nunique() == 2


def test_small_tables_for_reading(both):
    found = compare.side_by_side(compare.over(both))
    f = found["F of attention's top N, by N"]
    assert f.index.tolist() == [("org/one", "a"), ("org/one", "b"), ("two", "a")] and f.columns.tolist() == [2, 8]
    assert f.loc[("two", "a")].tolist() == ["0.50 [0.50, 0.50]", "0.70 [0.70, 0.70]"]
    shares = found["share of the heads, by regime"]
    assert shares.loc[("two", "a"), "Reset"] == "0.60 [0.60, 0.60]" and shares.loc[
        ("org/one", "b"), "Mixer"
    ].startswith("0.60")
    damage = found["damage of removing heads, by order"]
    assert damage.loc[("two", "random"), "50% kept"] == "0.70 [0.70, 0.70]" and len(damage.columns) == 3
    assert len(found) == 6
    assert not any("-0.00" in str(x) or "nan" in str(x) for t in found.values() for x in t.to_numpy().ravel())


def test_the_papers_figures_are_marked_as_its_own_and_never_among_ours(both):
    published = compare.published()
    assert published["what"].str.len().gt(10).all() and published["low"].dtype == float
    smaller = of(published, quantity="times smaller").iloc[0]
    assert (smaller["low"], smaller["high"]) == claims.SMALLER
    retriever = of(published, quantity="share").iloc[0]
    assert (retriever["low"], retriever["high"]) == claims.RETRIEVERS
    assert "paper" not in " ".join(compare.over(both)["model"])


# --- figures ----------------------------------------------------------------------------------------------------------


def legend(axes) -> list[str]:
    return [t.get_text() for t in axes.get_legend().get_texts()] if axes.get_legend() else []


def test_four_figures_with_labels_and_legends(both):
    drawn = figures.comparison(compare.over(both))
    assert set(drawn) == {"separability", "sink", "shares", "retention"}
    for figure in drawn.values():
        assert any(map(legend, figure.axes)), "no legend"
        for axes in figure.axes:
            assert axes.get_xlabel() or [t.get_text() for t in axes.get_xticklabels()]
        first = figure.axes[0]
        assert first.get_ylabel() or all(t.get_text() for t in first.get_yticklabels())
        figure.canvas.draw()  # nothing that cannot be drawn


def test_curves_are_where_the_measures_are(both):
    table = compare.over(both)
    first, second = figures.separability_compared(table).axes
    assert [first.get_title(), second.get_title()] == ["a", "b"]
    assert legend(first) == ["org/one", "org/one, random sets", "two", "two, random sets"]
    lines = {line.get_label(): line for line in first.lines}
    for model in ("org/one", "two"):
        wanted = of(table, quantity="F", group="none", queries="last", model=model, corpus="a")
        assert lines[model].get_xdata().tolist() == wanted["x"].tolist()
        assert lines[model].get_ydata().tolist() == wanted["mean"].tolist()
    assert lines["org/one"].get_color() == lines["org/one, random sets"].get_color() != lines["two"].get_color()
    assert [line.get_label() for line in second.lines] == ["org/one", "org/one, random sets"]


def test_shares_and_their_bars_stand_over_their_regime_beside_the_papers_band(both):
    (axes,) = figures.shares_compared(compare.over(both)).axes
    assert [t.get_text() for t in axes.get_xticklabels()] == ["Retriever", "Mixer", "Reset"]
    assert legend(axes) == ["the paper's models", "org/one, a", "org/one, b", "two, a"]
    points = {c.get_label(): c.lines[0] for c in axes.containers}
    assert points["two, a"].get_ydata().tolist() == pytest.approx([0.1, 0.3, 0.6])
    assert np.round(points["two, a"].get_xdata()).tolist() == [0, 1, 2]
    band = axes.collections[[c.get_label() for c in axes.collections].index("the paper's models")]
    corners = band.get_paths()[0].vertices
    assert (corners[:, 1].min(), corners[:, 1].max()) == pytest.approx(claims.RETRIEVERS)
    assert -0.5 < corners[:, 0].min() < 0 < corners[:, 0].max() < 0.5  # over the Retrievers alone


def test_the_sinks_value_and_its_cost(both):
    left, right = figures.sink_compared(compare.over(both)).axes
    assert [t.get_text() for t in left.get_yticklabels()] == ["org/one\na", "org/one\nb", "two\na"]
    assert [c.lines[0].get_xdata()[0] for c in left.containers] == pytest.approx([4.0] * 3)
    assert "the paper's models" in legend(left) and left.get_xscale() == "log"
    assert legend(right) == ["org/one, a", "org/one, b", "two, a"]
    assert right.lines[0].get_ydata().tolist() == pytest.approx([0.3])


def test_retention_has_a_panel_a_model_and_a_line_an_order(both):
    panels = figures.retention_compared(compare.over(both)).axes
    assert [axes.get_title() for axes in panels] == ["org/one", "two"]
    lines = {line.get_label(): line for line in panels[1].lines}
    assert lines["random"].get_ydata().tolist() == pytest.approx([0.7] * 3)
    assert lines["random"].get_xdata().tolist() == [0.2, 0.5, 0.8] and panels[1].xaxis_inverted()


def test_a_run_of_all_queries_alone_is_drawn_too(tmp_path):
    table = compare.measures(made(tmp_path, queries=("all",)))
    first = figures.comparison(table)["separability"].axes[0]
    assert first.lines[0].get_ydata().tolist() == pytest.approx([0.5, 0.7, 0.5])


# --- the command, and bad folders -------------------------------------------------------------------------------------


def test_the_command_prints_tables_and_writes_figures(both, tmp_path):
    done = run("compare", *both, "--out", tmp_path / "out", COLUMNS="200", TERM="dumb")
    assert (done.returncode, done.stderr) == (0, "")
    for text in (
        "F of attention's top N, by N",
        "org/one",
        "two",
        "0.70 [0.70, 0.70]",
        "Published in the paper, for its own models",
    ):
        assert text in done.stdout, text
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "measures.csv", "retention.png", "separability.png", "shares.png", "sink.png",
    ]  # fmt: skip
    written = pd.read_csv(tmp_path / "out" / "measures.csv", keep_default_na=False, na_values=["nan"])
    assert written["mean"].tolist() == pytest.approx(compare.over(both)["mean"].tolist(), rel=1e-5, nan_ok=True)


def test_the_command_refuses_in_one_sentence(both, tmp_path, capsys):
    (tmp_path / "file").touch()
    for arguments, sentence in (
        ([tmp_path], "holds no run (no run.json)"),
        ([both[1], both[1]], "2 of the runs are of two: give one run a model"),
        ([both[1], "--out", tmp_path / "file"], f"cannot write to {tmp_path / 'file'}"),
    ):
        with pytest.raises(SystemExit) as ended:
            app(["compare", *map(str, arguments)])
        (line,) = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2 and line.startswith("geomlib: ") and sentence in line and line.endswith(".")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, r"holds no finished window and no measures\.csv yet: run it again, it continues"),
        ("model,colour\nm,blue\n", r"measures\.csv is of another version: make it anew from a run with tables"),
        ("", r"measures\.csv is of another version"),
        ("model\n\0", r"measures\.csv is of another version"),
        (",".join(compare.COLUMNS) + "\n", r"measures\.csv is of another version"),  # no row
    ],
)
def test_stored_measures_that_are_none(tmp_path, content, sentence):
    record(tmp_path, Run(model="m"))
    if content is not None:
        (tmp_path / "measures.csv").write_text(content)
    with pytest.raises(GeomlibError, match=sentence):
        compare.over([tmp_path])


def test_a_run_without_curves_says_so(tmp_path):
    out = record(tmp_path, Run(model="m"))
    plant(out, {}, "a")
    with pytest.raises(
        GeomlibError, match="has no chapter's tables to compare yet: run chapters 02 to 05, it continues"
    ):
        compare.measures(out)


def test_nothing_is_counted_as_nothing(both):
    assert not any(math.isnan(x) for x in of(compare.over(both), quantity="share")["mean"])
