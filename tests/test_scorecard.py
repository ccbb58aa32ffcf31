"""Which of a run's tables each claim is asked of, and that every claim is answered: planted folders, and a small model's run."""

import json
import re
import shutil
import time
from pathlib import Path

import pandas as pd
import pytest
from made import plant, record
from test_claims import HIGH_M, HIGH_R, LABELS, M, O, cosines, effect, labelled, norms, planted, promises, sinks
from test_cli import run
from test_sparsify import REGIMES, curves, flat, planted_scan

from geomlib import claims, scorecard, sparsify, taxonomy
from geomlib.claims import STATEMENTS, Verdict
from geomlib.cli import app
from geomlib.errors import GeomlibError
from geomlib.runs import Run
from geomlib.theory import THEOREMS

EVERY = {(level, "aware"): 0.3 for level in THEOREMS} | {("constant_norm", "aware"): 0.1, ("exact", "none"): 0.5}
RETENTIONS = (0.9, 0.5, 0.3, 0.1)


def asked(model: str = "m", **more) -> Run:
    return Run(model=model, **more)


def rows_of(card: dict, claim: str) -> list[dict]:
    return [r for r in card["rows"] if r["claim"] == claim]


def same(row: dict, verdict: Verdict) -> None:
    """A row is this verdict: words to the letter, numbers as plain numbers."""
    for name in ("claim", "statement", "rule", "measured", "verdict", "quantity"):
        assert row[name] == getattr(verdict, name), name
    for name in ("value", "low", "high"):
        wanted = getattr(verdict, name)
        assert row[name] == (None if wanted is None else pytest.approx(float(wanted), rel=1e-12)), name
        assert row[name] is None or type(row[name]) in (int, float)


def by_head(curve_orders: dict) -> pd.DataFrame:
    return curves({n: flat(d, RETENTIONS) for n, d in curve_orders.items()})


# --- which table ------------------------------------------------------------------------------------------------------


def test_each_claim_is_answered_with_its_rule_on_its_table(tmp_path):
    """One planted table for each rule; the rows are what the rules say of these very tables."""
    out = record(tmp_path, asked())
    tables = {
        "separability": planted({2: 0.1, 8: 0.3, 64: 0.05}), "bounds": promises(EVERY, {"constant_norm": 0.97}),
        "sinks": sinks("times_smaller", [[2.0, 3.0, 4.0], [2.5, 3.5, 5.0]]), "coherence": norms([0.1] * 8 + [0.5] * 2),
        "sink_effect": effect([("a", 0, 2, 0.1, 0.6), ("b", 0, 2, 0.4, 0.5)]), "taxonomy": cosines(LABELS, HIGH_M, HIGH_R),
    }  # fmt: skip
    for analysis, table in tables.items():
        plant(out, {analysis: table}, "a", queries="last" if analysis != "taxonomy" else "all", kind=analysis)
    plant(out, {"taxonomy": labelled(LABELS[::-1], 3)}, "b")
    rules = {
        "separability": (claims.c1, claims.c2), "bounds": (claims.c3,), "sinks": (claims.c4, claims.c5),
        "coherence": (claims.c7,), "sink_effect": (claims.c6,), "taxonomy": (claims.c8, claims.c10),
    }  # fmt: skip
    card = scorecard.card(out)
    verdicts = set()
    for analysis, each in rules.items():
        for rule in each:
            wanted = rule(tables[analysis])
            (row,) = [r for r in rows_of(card, wanted.claim) if r["corpus"] == "a"]
            same(row, wanted)
            assert row["documents"] == tables[analysis]["document"].nunique() and row["tokens"] == 512
            assert row["model"] == "m" and row["queries"] in ("last", "all", "")
            verdicts.add(row["verdict"])
    assert {"holds", "holds in part"} <= verdicts
    (nine,) = rows_of(card, "C9")
    same(nine, claims.c9({"m": {"a": tables["taxonomy"], "b": labelled(LABELS[::-1], 3)}}))
    assert nine["corpus"] == "a and b"
    for claim in ("C11", "C12", "C13"):
        (row,) = rows_of(card, claim)
        assert (row["verdict"], row["measured"], row["rule"]) == ("not testable here", "not measured in this run", "")
        assert row["value"] is row["low"] is row["high"] is None and row["documents"] == 0
    assert [r["claim"] for r in card["rows"]] == sorted([r["claim"] for r in card["rows"]], key=list(STATEMENTS).index)


def test_of_each_corpus_and_protocol_the_study_with_most_documents_counts(tmp_path):
    out = record(tmp_path, asked())
    wanted, other = labelled("RMMMMMMMMM", 4), labelled("RRRRRRRRRR", 3)
    plant(out, {"taxonomy": other}, "a", length=1024)
    plant(out, {"taxonomy": wanted}, "a", length=512)
    plant(out, {"taxonomy": labelled("OOOOO", 2)}, "a", length=256)
    plant(out, {"taxonomy": labelled("OOOOO", 9)}, "a", queries="last")  # votes of the final query are not the claim's
    plant(out, {"taxonomy": labelled("MMMMRMMMMM", 2)}, "b")
    found = {r["corpus"]: r for r in rows_of(scorecard.card(out), "C8")}
    assert set(found) == {"a", "b"}
    same(found["a"], claims.c8(wanted))
    assert (found["a"]["documents"], found["a"]["tokens"], found["b"]["documents"]) == (4, 512, 2)


def test_final_query_and_all_queries_are_rows_of_their_own(tmp_path):
    out = record(tmp_path, asked())
    last, every = planted({2: 0.1, 64: 0.2}), planted({2: 0.3, 64: -0.2})
    plant(out, {"separability": last}, queries="last")
    plant(out, {"separability": every}, queries="all")
    found = {r["queries"]: r for r in rows_of(scorecard.card(out), "C1")}
    same(found["last"], claims.c1(last))
    same(found["all"], claims.c1(every))
    assert (found["last"]["verdict"], found["all"]["verdict"]) == ("holds", "holds in part")


def test_a_model_beside_the_runs_own_is_not_its_card(tmp_path):
    out = record(tmp_path, asked())
    plant(out, {"taxonomy": labelled("RMMMMMMMMM", 3)})
    plant(out, {"taxonomy": labelled("RRRRRRRRRR", 9), "sinks": sinks("times_smaller", [[1.0]] * 9)}, model="other")
    card = scorecard.card(out)
    assert {r["model"] for r in card["rows"]} == {"m"} and card["model"] == "m"
    assert rows_of(card, "C8")[0]["documents"] == 3 and rows_of(card, "C4")[0]["rule"] == ""


def test_calibration_and_judged_documents_are_told_apart(tmp_path):
    """The order by regime is chosen where the scan was made, and judged on the documents that were left out there."""
    out = record(tmp_path, asked())
    scans = planted_scan({(0, 3): 5.0})
    orders = {n: 0.3 + 0.01 * i for i, n in enumerate(sparsify.REGIME_ORDERS[::-1])}  # the last is best
    best = sparsify.REGIME_ORDERS[-1]
    tried = by_head(orders | {"entropy": 0.5, "entropy-reversed": 0.4})
    single = dict.fromkeys(sparsify.METRICS, 0.5) | {"random 0": 0.6, "random 1": 0.7}
    judged = by_head({n: 0.9 - d for n, d in orders.items()} | single)  # there it is the worst
    labels = pd.concat([REGIMES.assign(document=d) for d in ("d0", "d1")]).assign(queries=8)
    for name, vote in zip(("Retriever", "Mixer", "Reset"), taxonomy.VOTES, strict=True):
        labels[vote] = (labels["regime"] == name).astype(float)
    calibration = plant(out, {"scan": scans, "taxonomy": labels.reset_index(drop=True)}, length=256)
    for_marks = plant(out, {"retention": judged}, length=256, skip=4, mark="2" * 16)
    more = by_head({f"layers of {best} 0": 0.1, f"layers of {best} 1": 0.2}).query("document != 'd3'")
    _retention(for_marks, more, "3" * 16)  # stopped before its last document: asked of no claim
    _retention(calibration, tried, "1" * 16)
    card = scorecard.card(out)
    (eleven,), (twelve,), (thirteen,) = (rows_of(card, c) for c in ("C11", "C12", "C13"))
    same(eleven, claims.c11(judged, best, "entropy-reversed"))
    same(twelve, claims.c12(judged, best))
    assert eleven["measured"].startswith(f"{best}: ")
    same(thirteen, claims.c13(scans, REGIMES))
    assert (eleven["documents"], thirteen["documents"], thirteen["tokens"]) == (4, 4, 256)


def _retention(folder: Path, table: pd.DataFrame, mark: str) -> None:
    """More orders into a study that is there."""
    from made import fitted

    from geomlib.store import Tables

    key = json.loads((folder / "study.json").read_text())["key"]
    kept = Tables(folder, {"retention": f"{key} code {mark}"}, {"retention": mark})
    for i, (document, rows) in enumerate(table.groupby("document")):
        kept.keep(fitted(rows, "retention"), "retention", f"{i:05d}-{document}.parquet")


# --- of several models ------------------------------------------------------------------------------------------------


def two(tmp_path: Path) -> tuple[list[dict], dict]:
    """Cards of a model of Mixers and one of Resets, and their taxonomy tables."""
    tables = {
        "one": {"a": labelled(M, 3), "b": labelled(M, 2)},
        "two": {"a": labelled(O, 2), "b": labelled("O" * 5 + "M" * 4 + "R", 2)},
    }
    cards = []
    for model, each in tables.items():
        out = record(tmp_path / model, asked(model))
        for corpus, table in each.items():
            plant(out, {"taxonomy": table}, corpus, model)
        cards.append(scorecard.card(out))
    return cards, tables


def test_c9_over_several_models_is_that_of_all_their_tables(tmp_path):
    cards, tables = two(tmp_path)
    rows = scorecard.over(cards)
    (together,) = [r for r in rows if r["model"] == "all models"]
    same(together, claims.c9(tables))
    assert (
        together["verdict"] == "holds" and "one: Mixer" in together["measured"] and "two: Reset" in together["measured"]
    )
    alone = [r for r in rows if r["claim"] == "C9" and r["model"] in tables]
    assert [r["verdict"] for r in alone] == ["holds in part"] * 2
    assert [r["claim"] for r in rows] == sorted([r["claim"] for r in rows], key=list(STATEMENTS).index)
    assert not [r for r in scorecard.over(cards[:1]) if r["model"] == "all models"]
    assert json.loads(json.dumps(scorecard.over(json.loads(json.dumps(cards))))) == json.loads(json.dumps(rows))


def test_a_model_with_one_corpus_is_left_out_of_c9_over_all(tmp_path):
    cards, _ = two(tmp_path)
    out = record(tmp_path / "three", asked("three"))
    plant(out, {"taxonomy": labelled(M)}, "a", "three")
    cards.append(scorecard.card(out))
    assert cards[2]["dominance"] is None and rows_of(cards[2], "C9")[0]["verdict"] == "not testable here"
    (together,) = [r for r in scorecard.over(cards) if r["model"] == "all models"]
    assert together["measured"].count("least kappa") == 2


def test_an_overview_has_a_line_a_claim_and_a_column_a_model(tmp_path):
    cards, _ = two(tmp_path)
    table = scorecard.overview(scorecard.over(cards))
    assert table["claim"].tolist() == list(STATEMENTS) and table["statement"].tolist() == list(STATEMENTS.values())
    assert table.columns.tolist() == ["claim", "statement", "number", "one", "two", "all models"]
    line = table.set_index("claim").loc["C8"]
    assert line["one"] == "holds\n0.10 [0.10, 0.10]\n0.10 [0.10, 0.10]" and line["all models"] == ""
    assert line["number"] == "Retriever heads"
    assert table.set_index("claim").loc["C1", "one"] == "not measured"


def test_the_overview_takes_the_final_query_and_says_where_it_cannot():
    def row(model, queries, verdict, value):
        return {"claim": "C1", "model": model, "queries": queries, "verdict": verdict, "rule": "r", "quantity": "q",
                "value": value, "low": None, "high": None}  # fmt: skip

    rows = [
        row("a", "last", "holds", 0.5),
        row("a", "all", "does not hold", 0.1),
        row("b", "all", "holds in part", 0.2),
    ]
    line = scorecard.overview(rows).set_index("claim").loc["C1"]
    assert (line["a"], line["b"]) == ("holds\n0.50", "holds in part (all queries)\n0.20")
    line = scorecard.overview(rows[2:]).set_index("claim").loc["C1"]
    assert line["b"] == "holds in part\n0.20"


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((0.1934, 0.17, 0.2149), "0.19 [0.17, 0.21]"),
        ((8, 4.0, 32.0), "8 [4, 32]"),
        ((0, None, None), "0"),
        ((1234, None, None), "1234"),
        ((None, None, None), ""),
        ((-0.001, -0.0049, 0.0), "0.00 [0.00, 0]"),  # no -0.00
        ((-0.5, -0.75, -0.251), "-0.50 [-0.75, -0.25]"),
        ((0.25, None, None), "0.25"),
    ],
)
def test_numbers_as_text(numbers, text):
    assert scorecard.number(dict(zip(("value", "low", "high"), numbers, strict=True))) == text


# --- as files ---------------------------------------------------------------------------------------------------------


def strict(text: str):
    """JSON without NaN and Infinity, which other readers refuse."""

    def wrong(name):
        raise AssertionError(f"{name} in JSON")

    return json.loads(text, parse_constant=wrong)


def test_of_one_document_there_are_no_intervals_and_json_has_no_nan(tmp_path):
    out = record(tmp_path, asked())
    tables = {
        "separability": planted({2: [0.1], 64: [0.2]}),
        "coherence": norms([0.1, 0.5], 1),
        "taxonomy": labelled("RM", 1),
    }
    tables |= {"sinks": sinks("times_smaller", [[5.0, 4.0]]), "bounds": promises(EVERY).query("document == 'a'")}
    for analysis, table in tables.items():
        plant(out, {analysis: table}, kind=analysis)
    card = scorecard.card(out)
    scorecard.save([card], out)
    assert strict((out / "scorecard.json").read_text()) == card
    assert {r["claim"] for r in card["rows"]} == set(STATEMENTS)
    assert all(r["low"] is None and r["high"] is None for r in card["rows"])
    assert rows_of(card, "C7")[0]["value"] == 0.5 and rows_of(card, "C3")[0]["value"] == 0
    for claim in ("C1", "C2", "C4", "C5", "C8", "C9", "C10"):
        assert {r["verdict"] for r in rows_of(card, claim)} == {"not testable here"}, claim


def test_what_is_left_without_tables_gives_the_same_card(tmp_path):
    out = record(tmp_path / "full", asked())
    plant(out, {"taxonomy": labelled(M, 3)}, "a")
    plant(out, {"taxonomy": labelled(M, 2)}, "b")
    card = scorecard.card(out)
    scorecard.save([card], out)
    (tmp_path / "compact").mkdir()
    for name in ("run.json", "scorecard.json"):
        shutil.copy(out / name, tmp_path / "compact" / name)
    assert scorecard.card(tmp_path / "compact") == card
    assert scorecard.markdown([scorecard.card(tmp_path / "compact")]) == (out / "scorecard.md").read_text()
    cards, _ = two(tmp_path)
    assert scorecard.over([scorecard.card(tmp_path / "compact"), cards[1]]) == scorecard.over([card, cards[1]])


def test_markdown_has_every_row_and_rule_and_cells_that_stay_cells(tmp_path):
    cards, _ = two(tmp_path)
    cards[0] = json.loads(json.dumps(cards[0]).replace('"one"', '"o|ne"'))
    text = scorecard.markdown(cards)
    rows = scorecard.over(cards)
    lines = text.splitlines()
    begin = lines.index("## Every measurement")
    every = [x for x in lines[begin:] if x.startswith("| C")]
    assert len(every) == len(rows)
    for line, row in zip(every, rows, strict=True):
        cells = [c.strip().replace("\\|", "|") for c in re.split(r"(?<!\\)\|", line)[1:-1]]
        assert cells[:3] == [row["claim"], row["model"], row["corpus"]]
        assert cells[6:10] == [row["verdict"], row["quantity"], scorecard.number(row), row["measured"]]
    widths = {len(re.split(r"(?<!\\)\|", x)) for x in lines[:begin] if x.startswith("|")}
    assert widths == {8}  # claim, statement, number, three models, and the two ends
    for claim, rule in scorecard.rules(rows).items():
        assert f"- **{claim}**: {rule}" in lines
    assert {"C8", "C9", "C10"} == set(scorecard.rules(rows))
    assert "o|ne, f, float32, profile standard; texts: a: of a; b: of b" in text


def test_several_cards_in_one_file(tmp_path):
    cards, _ = two(tmp_path)
    scorecard.save(cards, tmp_path / "both")
    found = strict((tmp_path / "both" / "scorecard.json").read_text())
    assert found["cards"] == cards and found["rows"] == scorecard.over(cards)
    shutil.copy(tmp_path / "one" / "run.json", tmp_path / "both")
    with pytest.raises(GeomlibError, match="is of several models: give the folder of each run instead"):
        scorecard.card(tmp_path / "both")


def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(GeomlibError, match="cannot write to .*file: .*; mend it, or give another folder"):
        scorecard.save(two(tmp_path)[0], tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


# --- a run that was measured ------------------------------------------------------------------------------------------

SHOWN = {  # how `measured` writes the value and the ends of its interval
    "C1": "{:+.3f}", "C2": "N = {:.0f}", "C3": "{:.0f} violations", "C4": "{:.2f}", "C5": "{:.1%}", "C6": "{:.1%}",
    "C7": "{:.0%}", "C8": "{:.2%}", "C9": "{:.1%}", "C11": "{:+.2f}", "C12": "{:+.2f}", "C13": "{:.1%}",
}  # fmt: skip


@pytest.fixture(scope="module")
def card(measured):
    return scorecard.card(measured.out)


def test_every_claim_of_a_measured_run_has_its_numbers(card):
    assert {r["claim"] for r in card["rows"]} == set(STATEMENTS)
    for row in card["rows"]:
        assert list(row) == scorecard.COLUMNS and row["statement"] == STATEMENTS[row["claim"]]
        assert row["verdict"] in ("holds", "holds in part", "does not hold", "not testable here")
        assert row["rule"] and row["documents"] >= 2 and row["tokens"] == 64
        if row["verdict"] == "not testable here":
            assert row["value"] is None and row["quantity"] == ""
            continue
        assert row["quantity"] and row["value"] is not None
        assert (row["low"] is None) == (row["high"] is None) == (row["claim"] == "C3")
        if row["claim"] in SHOWN:
            assert SHOWN[row["claim"]].format(row["value"]) in row["measured"], row
        if row["claim"] == "C10":
            assert f"[{row['low']:+.2f}, {row['high']:+.2f}]" in row["measured"], row
        if row["claim"] in ("C1", "C4", "C5", "C6", "C7", "C8", "C9", "C11", "C12", "C13"):
            ends = SHOWN[row["claim"]].replace("N = ", "")
            assert f"[{ends.format(row['low'])}, {ends.format(row['high'])}]" in row["measured"], row
    assert strict(json.dumps(card, allow_nan=False)) == card
    assert {r["queries"] for r in card["rows"] if r["claim"] == "C1"} == {"last", "all"}
    assert {r["corpus"] for r in card["rows"] if r["claim"] == "C8"} == {"a.jsonl", "b.jsonl"}
    assert all(len(t["sha256"]) == 64 for t in card["texts"].values()) and len(card["texts"]) == 2


def test_the_command_prints_and_writes_it(measured, card, tmp_path):
    start = time.monotonic()
    done = run("scorecard", measured.out, "--out", tmp_path / "out", COLUMNS="200", TERM="dumb")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert time.monotonic() - start < 120
    for claim, rule in scorecard.rules(card["rows"]).items():
        assert f"{claim}: {rule}" in done.stdout.splitlines()
    assert strict((tmp_path / "out" / "scorecard.json").read_text()) == card
    assert (tmp_path / "out" / "scorecard.md").read_text() == scorecard.markdown([card])


# --- bad folders ------------------------------------------------------------------------------------------------------


def empty(folder: Path) -> None:
    record(folder, asked())


def without_tables(folder: Path) -> None:
    plant(record(folder, asked()), {}, "a")


def damaged_study(folder: Path) -> None:
    empty(folder)
    (folder / "tables" / "x").mkdir(parents=True)
    (folder / "tables" / "x" / "study.json").write_text("{")


def stored(content: str):
    def make(folder: Path) -> None:
        empty(folder)
        (folder / "scorecard.json").write_text(content)

    return make


def damaged_table(folder: Path) -> None:
    empty(folder)
    for path in plant(folder, {"taxonomy": labelled("RM", 2)}).glob("taxonomy/*.parquet"):
        path.write_bytes(b"")


BAD = {
    "no folder": (lambda folder: None, r"holds no run \(no run\.json\): give a folder that geomlib run wrote\."),
    "no run": (lambda folder: folder.mkdir(), r"holds no run \(no run\.json\)"),
    "an empty run": (empty, "holds no finished window and no scorecard yet: run it again, it continues"),
    "a damaged study": (damaged_study, r"x/study\.json cannot be read"),
    "a damaged card": (stored('{"format": 1,'), r"scorecard\.json cannot be read: make it anew from a run with tables"),
    "a list": (stored("[1, 2]"), "cannot be read"),
    "another format": (stored('{"format": 99}'), r"is of another version \(format 99\): make it anew"),
    "a damaged table": (damaged_table, "is damaged, or of another study or version"),
}


@pytest.mark.parametrize(("make", "sentence"), BAD.values(), ids=BAD)
def test_bad_folders_are_one_sentence(tmp_path, make, sentence):
    make(tmp_path / "run")
    with pytest.raises(GeomlibError, match=sentence) as caught:
        scorecard.card(tmp_path / "run")
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_bad_folders_on_the_command_line(tmp_path, capsys):
    """In this process: exit code 2 and one sentence."""
    for make, sentence in BAD.values():
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        make(tmp_path / "run")
        for command in ("scorecard", "compare"):
            if command == "scorecard" or not (tmp_path / "run" / "scorecard.json").exists():
                with pytest.raises(SystemExit) as ended:
                    app([command, str(tmp_path / "run")])
                shown = capsys.readouterr()
                assert ended.value.code == 2 and shown.out == ""
                (line,) = shown.err.splitlines()
                assert line.startswith("geomlib: ") and (command == "compare" or re.search(sentence, line))


def test_a_study_that_was_claimed_and_measured_nothing_is_thirteen_claims_not_measured(tmp_path, capsys):
    """As a model with NaN leaves it; the end of the command `run` stands it too."""
    from geomlib.cli import _conclude

    without_tables(tmp_path)
    card = scorecard.card(tmp_path)
    assert [r["claim"] for r in card["rows"]] == list(STATEMENTS)
    assert {r["measured"] for r in card["rows"]} == {"not measured in this run"} and scorecard.rules(card["rows"]) == {}
    _conclude(tmp_path)
    assert capsys.readouterr().out == f"Notebooks, tables, figures and scorecard are in {tmp_path}.\n"
    assert scorecard.card(tmp_path) == json.loads((tmp_path / "scorecard.json").read_text())


def test_what_a_run_ends_with(tmp_path, capsys):
    """The verdicts of what was measured on the terminal, the rest in the folder; a model's name may have any letters."""
    from geomlib.cli import _conclude

    name = "/my models/it's `one`"
    record(tmp_path, asked(name))
    plant(tmp_path, {"taxonomy": labelled(M, 3)}, "a", name)
    _conclude(tmp_path)
    shown = capsys.readouterr().out
    assert "Retriever heads" in " ".join(shown.split()) and "C13" not in shown
    assert (tmp_path / "scorecard.md").is_file() and (tmp_path / "measures.csv").is_file()
