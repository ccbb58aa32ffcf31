"""The page "Move the tokens" in a browser: its numbers against geomlib's and the exact cases, and all ways to use it."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from browser import HTML, url

from geomlib import bounds
from geomlib.geometry import separability

pytestmark = pytest.mark.browser

PAGE = "book/playground.html"
SCRIPT = Path(__file__).parent.parent / "book" / "static" / "playground" / "playground.js"
CASES = json.loads((Path(__file__).parent / "cases" / "geometry.json").read_text())
LEVELS = ("constant_norm", "global", "rowwise")
# All arguments of one call of `measure` each.
MEASURE = "calls => calls.map(c => geomlibPlayground.measure(...c))"
NAMES = {
    "false_positives": "falsePositives",
    "false_negatives": "falseNegatives",
    "rho_max": "rhoMax",
    "rho_min": "rhoMin",
}
NUMBERS = (
    "precision",
    "recall",
    "f",
    "inversions",
    "false_positives",
    "false_negatives",
    "rho_max",
    "rho_min",
    "margin",
)


def same(got, want) -> bool:
    return (math.isnan(got) and math.isnan(want)) or math.isclose(got, want, rel_tol=1e-12, abs_tol=1e-14)


def compare(call, got) -> None:
    """One result of the page's `measure` with geomlib's for the same arguments, in double precision."""
    weights, values, n, ranking, without = call
    weights, values = (torch.tensor(x, dtype=torch.float64) for x in (weights, values))
    sources = len(weights)
    gone = torch.zeros(sources, dtype=torch.bool)
    gone[0] = without
    want = separability(weights[None], values, [n], ranking=ranking, exclude=gone)
    f_without = separability(weights[None], values, [n], ranking=ranking, exclude=torch.arange(sources) == 0).f.item()
    for name in NUMBERS:
        assert same(got[NAMES.get(name, name)], getattr(want, name).item()), (name, call)
    assert same(got["fWithout"], f_without), call
    if n >= sources - without:
        assert math.isnan(got["f"]) and math.isnan(got["jointBound"])
        assert all(math.isnan(got["certificates"][level]["f"]) for level in LEVELS)
        return
    paper = bounds.inversion_bound(want.inversions, n)
    for name in ("precision", "recall", "f"):
        assert same(got["inversionBound"][name], getattr(paper, name).item()), (name, call)
    assert same(got["jointBound"], bounds.joint_inversion_bound(want.inversions, n).item()), call
    assert got["inversionBound"]["f"] <= got["jointBound"] + 1e-12 and got["jointBound"] <= got["f"] + 1e-12, call
    selected = torch.zeros(sources, dtype=torch.bool)
    selected[got["selected"]] = True
    assert selected.sum() == n and not (selected & gone).any()
    norms = values.norm(dim=-1)
    most, least = norms[1:].max(), norms[1:].min()
    assert got["oneLength"] == bool(most > 0 and most - least <= 1e-12 * most), call
    for level in LEVELS:
        magnitudes = weights if level == "constant_norm" else weights * norms
        wanted = bounds.certificate(magnitudes, selected, level, values=values, visible=~gone)
        for name in ("precision", "recall", "f"):
            assert same(got["certificates"][level][name], getattr(wanted, name).item()), (level, name, call)
            if level != "constant_norm" or got["oneLength"]:
                assert got["certificates"][level][name] <= got[name] + 1e-12, (level, name, call)


@pytest.fixture
def page(open_page):
    return open_page(PAGE)


# --- the numbers ------------------------------------------------------------------------------------------------------


def test_exact_cases(page):
    calls = [[c["alpha"], c["v"], c["n"], c["ranking"], without] for c in CASES for without in (False, True)]
    wanted = [c[key] for c in CASES for key in ("expected", "expected_without_sink")]
    assert len(calls) == 96 and sum(len(c[1][0]) == 2 for c in calls) >= 20
    checked = 0
    for call, want, got in zip(calls, wanted, page.evaluate(MEASURE, calls), strict=True):
        if want is None:
            assert math.isnan(got["f"])
            continue
        checked += 1
        assert got["selected"] == want["selected"], call
        for name in set(want) - {"selected", "joint_inversion_bound"}:
            assert same(got[NAMES.get(name, name)], want[name]), (name, call)
        assert same(got["jointBound"], want["joint_inversion_bound"]), call
        compare(call, got)
    assert checked > 70


def test_random_configurations(page):
    draw, calls = random.Random(0), []
    ranked = ("attention", "contribution")
    for k in range(300):
        sources, dim = draw.randint(2, 12), 2 if k % 4 else draw.choice([1, 3, 5])
        shares = [draw.random() ** 2 + 1e-3 for _ in range(sources)]
        values = [[draw.gauss(0, 1) for _ in range(dim)] for _ in range(sources)]
        if k % 5 == 0:  # a common direction and a sink against it: certificates that say something
            values = [[4 + v[0], *(0.3 * x for x in v[1:])] for v in values]
            values[0] = [-0.5, *values[0][1:]]
        if k % 7 == 0:  # one length
            values = [values[0]] + [[x / math.hypot(*v) for x in v] for v in values[1:]]
        calls.append([[s / sum(shares) for s in shares], values, draw.randint(1, sources), ranked[k % 2], k % 3 == 0])
    # Ties of weights, lengths and distances, duplicates and zeros; all products and lengths are exact.
    lattice = [[3, 4], [4, 3], [5, 0], [0, 5], [-3, 4], [-5, 0], [3, -4], [6, 8], [0, 0], [0, -5]]
    for k in range(300):
        sources = draw.randint(2, 12)
        weights = [draw.choice([0, 1, 1, 2, 4]) / 16 for _ in range(sources)]
        calls.append([weights, draw.choices(lattice, k=sources), draw.randint(1, sources), ranked[k % 2], k % 3 == 0])
    results = page.evaluate(MEASURE, calls)
    for call, got in zip(calls, results, strict=True):
        compare(call, got)
    # The draws reach what they are for.
    assert sum(len(got["selected"]) >= len(c[0]) - c[4] for c, got in zip(calls, results, strict=True)) > 20
    for level in LEVELS:
        assert sum(0 < got["certificates"][level]["f"] < got["f"] for got in results) > 15, level
    assert sum(got["oneLength"] for got in results) > 20


def test_measure_refuses_what_is_no_operation(page):
    for bad in ("[[0.5, NaN], [[1], [2]], 1, 'attention']", "[[1], [[1], [2]], 1, 'attention']",
                "[[0.5, 0.5], [[1], [2]], 0, 'attention']", "[[0.5, 0.5], [[1], [2]], 1, 'length']"):  # fmt: skip
        said = page.evaluate(
            "() => { try { geomlibPlayground.measure(...CALL); } catch (e) { return e.name; } }".replace("CALL", bad)
        )
        assert said == "RangeError", bad


# --- using the page ---------------------------------------------------------------------------------------------------


def text(page, name: str) -> str:
    return page.locator(f'#playground [data-value="{name}"]').inner_text()


def number(page, name: str) -> float:
    return float(text(page, name).replace("−", "-"))


def press(page, preset: str) -> None:
    page.click(f'[data-preset="{preset}"]')
    page.evaluate("document.querySelector('.pg-plane').scrollIntoView({block: 'center', behavior: 'instant'})")


def state(page) -> dict:
    """What the address holds, once it was written."""
    page.wait_for_function("location.hash.startsWith('#n=')")
    page.wait_for_timeout(220)
    return page.evaluate("geomlibPlayground.decode(location.hash)")


def measured(page, found: dict) -> dict:
    return page.evaluate(
        "s => geomlibPlayground.measure(geomlibPlayground.weightsOf(s), s.values, s.n, s.ranking)", found
    )


def centre(page, source: int) -> tuple[float, float]:
    box = page.locator(f'.pg-point[data-source="{source}"] .pg-mark').bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_presets_show_what_they_promise(page):
    press(page, "separated")
    assert number(page, "f") == 1 and number(page, "margin") > 0.1 and number(page, "rowwise") == 1
    assert "Separable" in page.inner_text(".pg-verdict")
    press(page, "sink in")
    assert number(page, "f") < 0.6 and number(page, "fWithout") == 1
    tokens = state(page)
    assert measured(page, tokens)["selected"][0] == 0
    press(page, "sink out")
    assert number(page, "f") == 1
    out = state(page)
    assert (
        0 not in measured(page, out)["selected"]
        and out["shares"] == tokens["shares"]
        and out["values"] == tokens["values"]
    )
    assert "Sink out" in page.inner_text(".pg-note")
    page.locator('.pg-point[data-source="1"]').press("ArrowUp")
    assert page.locator(".pg-note").is_hidden()  # what is there now is the reader's own
    seen = set()
    for seed in (1, 2, 3):
        press(page, "random")
        assert f"seed {seed}" in page.inner_text(".pg-note")
        seen.add(text(page, "rhoMax"))
    assert len(seen) == 3
    again = page.evaluate("JSON.stringify(geomlibPlayground.presets.random(2))")
    assert again == page.evaluate("JSON.stringify(geomlibPlayground.presets.random(2))")


def test_what_the_page_says_to_try(page):
    """Each item of "Try this" is so."""
    call = "([s, change]) => { const p = geomlibPlayground; const found = []; %s; return found; }"
    lost, turned, lined, scattered = (page.evaluate(call % body, [None, None]) for body in (
        # Drag source 3 to the other side.
        """for (let k = 0; k <= 40; k++) { const s = p.presets.separated(); s.values[3] = s.values[3].map(x => x * (1 - k / 20));
           found.push(p.measure(p.weightsOf(s), s.values, s.n, s.ranking)); }""",
        # Turn the sink.
        """for (let t = -180; t <= 180; t++) { const s = p.presets['sink in'](), a = t * Math.PI / 180;
           s.values[0] = [0.6 * Math.cos(a), 0.6 * Math.sin(a)]; found.push(p.measure(p.weightsOf(s), s.values, s.n, s.ranking)); }""",
        # All on one side, about on a line (to ten degrees), and with one length.
        """for (let k = 0; k < 50; k++) { const s = p.presets.separated();
           s.values = s.values.map((v, i) => { const a = (45 + 10 * Math.sin(7 * i + k)) * Math.PI / 180, r = i ? 2 : 0.8;
             return [r * Math.cos(a), r * Math.sin(a)]; }); found.push(p.measure(p.weightsOf(s), s.values, s.n, s.ranking)); }""",
        """for (let k = 0; k < 300; k++) { const s = p.presets.random(k);
           for (const n of [2, 3, 4]) found.push(p.measure(p.weightsOf(s), s.values, n, s.ranking)); }"""))  # fmt: skip
    assert lost[0]["f"] == 1 and lost[-1]["f"] < 1 and all(3 in m["selected"] for m in lost)
    assert all((m["falsePositives"] > 0) == (m["falseNegatives"] > 0) == (m["inversions"] > 0) for m in lost + turned)
    assert len({round(m["rhoMax"], 9) for m in turned}) == 1 and all(m["farthest"] == 0 for m in turned)
    assert all(4 in m["intruders"] for m in turned) and any(m["intruders"] == [4] for m in turned)
    assert any(len(m["intruders"]) == 5 for m in turned) and all(m["fWithout"] == 1 for m in turned)
    assert all(m["oneLength"] and m["certificates"][level]["f"] == 1 for m in lined for level in LEVELS)
    assert 0.05 < sum(m["f"] == 1 for m in scattered) / len(scattered) < 0.5
    press(page, "separated")
    assert number(page, "global") == 0 and number(page, "rowwise") == 1
    page.locator('input[name="n"]').fill("1")
    assert number(page, "f") == 1 and "says nothing" in page.inner_text(".pg-verdict")


def test_mouse(page):
    press(page, "separated")
    before, scores = state(page), [number(page, "f")]
    x, y = centre(page, 3)
    page.mouse.move(x, y)
    page.mouse.down()
    plane = page.locator(".pg-plane").bounding_box()
    ends = plane["x"] + 8, plane["y"] + plane["height"] - 8
    for part in range(1, 6):
        page.mouse.move(x + (ends[0] - x) * part / 5, y + (ends[1] - y) * part / 5)
        scores.append(number(page, "f"))
    at = centre(page, 3)
    assert math.dist(at, ends) < 12  # it follows, but for the edge
    page.mouse.up()
    after = state(page)
    assert scores[0] == 1 and min(scores) < 1 and number(page, "falsePositives") >= 1 <= number(page, "falseNegatives")
    assert after["values"][3] != before["values"][3] and after["shares"] == before["shares"]
    assert [v for i, v in enumerate(after["values"]) if i != 3] == [v for i, v in enumerate(before["values"]) if i != 3]
    assert measured(page, after)["f"] == pytest.approx(number(page, "f"), abs=5e-4)
    assert page.evaluate("document.activeElement.dataset.source") == "3"
    page.mouse.move(x, y)  # let go
    assert state(page) == after


def test_touch(open_page):
    page = open_page(PAGE, has_touch=True, is_mobile=True, viewport={"width": 390, "height": 800})
    press(page, "separated")
    before, scrolled = state(page), page.evaluate("scrollY")
    finger = page.context.new_cdp_session(page)

    def touch(kind, *points):
        finger.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": x, "y": y} for x, y in points]})

    x, y = centre(page, 2)
    touch("touchStart", (x, y))
    for k in range(1, 9):
        touch("touchMove", (x - 2 * k, y + 12 * k))
    touch("touchEnd")
    after = state(page)
    assert after["values"][2][1] < before["values"][2][1] - 0.5 and page.evaluate("scrollY") == scrolled
    assert number(page, "f") == pytest.approx(measured(page, after)["f"], abs=5e-4)
    # Beside the points a finger scrolls the page as anywhere.
    box = page.locator(".pg-plane").bounding_box()
    x, y = box["x"] + box["width"] - 30, box["y"] + box["height"] - 40
    touch("touchStart", (x, y))
    for k in range(1, 9):
        touch("touchMove", (x, y - 15 * k))
    touch("touchEnd")
    page.wait_for_function("before => scrollY > before + 20", arg=scrolled)
    assert state(page) == after


def test_keyboard(page):
    press(page, "separated")
    before = state(page)
    page.locator('.pg-point[data-source="3"]').focus()
    page.keyboard.press("ArrowLeft")
    one = state(page)
    page.keyboard.press("Shift+ArrowDown")
    two = state(page)
    step = [one["values"][3][0] - before["values"][3][0], two["values"][3][1] - one["values"][3][1]]
    assert step[0] < 0 and one["values"][3][1] == pytest.approx(before["values"][3][1], abs=2e-4)
    assert step[1] == pytest.approx(5 * step[0], rel=0.01)
    for _ in range(12):
        page.keyboard.press("Shift+ArrowDown")
        page.keyboard.press("Shift+ArrowLeft")
    assert number(page, "f") < 1
    page.wait_for_timeout(800)
    said = page.locator(".pg-hidden").inner_text()
    assert "Source 3" in said and "Not separable" in said
    assert "distance" in page.locator('.pg-point[data-source="3"]').get_attribute("aria-valuetext")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.dataset.source") == "4"


def test_controls(page):
    press(page, "sink in")
    page.check('input[value="contribution"]')
    assert number(page, "f") == 1
    page.check('input[value="attention"]')
    page.locator('input[name="angle"]').fill("40")
    turned = state(page)
    assert math.degrees(math.atan2(*reversed(turned["values"][0]))) == pytest.approx(40, abs=0.05)
    page.locator('input[name="norm"]').fill("0")
    page.locator('input[name="norm"]').fill("2")  # a value of no length remembers where it pointed
    assert state(page)["values"][0] == pytest.approx(
        [2 * math.cos(math.radians(40)), 2 * math.sin(math.radians(40))], abs=1e-3
    )
    page.get_by_label("Share of source 1", exact=True).fill("100")
    shares = state(page)["shares"]
    assert shares[1] == 100
    shown = [float(x) for x in page.locator(".pg-sources tbody td:nth-child(3)").all_inner_texts()]
    assert shown == [pytest.approx(s / sum(shares), abs=5e-4) for s in shares]
    assert text(page, "constant_norm") == "no bound"
    page.click('[data-do="even"]')
    found = state(page)
    assert found["values"][0] == pytest.approx(
        [2 * math.cos(math.radians(40)), 2 * math.sin(math.radians(40))], abs=1e-3
    )
    assert number(page, "constant_norm") == pytest.approx(
        measured(page, found)["certificates"]["constant_norm"]["f"], abs=5e-4
    )
    # N = T: nothing is unselected, and nothing is defined.
    page.locator('input[name="n"]').fill("9")
    assert {text(page, name) for name in ("f", "precision", "margin", "joint", "rowwise", "fWithout")} == {"–"}
    assert "not defined" in page.inner_text(".pg-verdict")
    for _ in range(3):
        page.click('[data-do="add"]')
    assert page.locator(".pg-point").count() == page.locator(".pg-sources tbody tr").count() == 12
    assert page.locator('[data-do="add"]').is_disabled() and text(page, "f") != "–"
    page.locator('input[name="n"]').fill("12")
    for _ in range(6):
        page.click('[data-do="remove"]')
    found = state(page)
    assert found["n"] == len(found["shares"]) == 6 and page.locator('[data-do="remove"]').is_disabled()


def test_a_link_restores_the_state(page, open_page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    press(page, "random")
    page.click('[data-do="even"]')  # numbers with all their digits
    page.locator('input[name="n"]').fill("4")
    page.check('input[value="contribution"]')
    page.click('[data-do="copy"]')
    page.wait_for_function("document.querySelector('.pg-copied').textContent === 'Copied.'")
    link = page.evaluate("navigator.clipboard.readText()")
    kept, shown = state(page), page.locator("#playground table").all_inner_texts()
    assert link == page.url and "%" not in link and len(link.split("#")[1]) < 600
    other = open_page(f"{PAGE}#{link.split('#')[1]}")
    assert other.evaluate("geomlibPlayground.decode(location.hash)") == kept
    assert other.locator("#playground table").all_inner_texts() == shown
    # Another link in the same page; then addresses that are no state: a heading, and numbers out of bounds.
    press(other, "separated")
    assert state(other) != kept
    other.evaluate(f"location.hash = {json.dumps(link.split('#')[1])}")
    other.wait_for_function("document.querySelector('.pg-note').textContent.includes('link')")
    assert other.locator("#playground table").all_inner_texts() == shown
    tokens = "~".join(["10_1_0"] * 6)
    for wrong in ("try-this", f"n=0&by=attention&t={tokens}", f"n=7&by=attention&t={tokens}", f"n=2&by=length&t={tokens}",
                  "n=2&by=attention&t=10_1_0~10_1_0", f"n=2&by=attention&t={tokens.replace('10_1_0', '0_1_0', 1)}",
                  f"n=2&by=attention&t={tokens.replace('1_0', '1e9_0', 1)}", f"n=2&by=attention&t={tokens}~..."):  # fmt: skip
        assert other.evaluate("text => geomlibPlayground.decode('#' + text)", wrong) is None, wrong
        other.evaluate("text => { location.hash = text; }", wrong)
    assert other.locator("#playground table").all_inner_texts() == shown
    other.wait_for_function("document.querySelector('.pg-note').textContent === 'The link is damaged.'")
    # As some programs write it that pass links on, and damaged from the start.
    coded = "".join(c if c.isalnum() else f"%{ord(c):02X}" for c in link.split("#")[1])
    assert open_page(f"{PAGE}#{coded}").locator("#playground table").all_inner_texts() == shown
    damaged = open_page(f"{PAGE}#{coded[:-40]}%zz")
    assert damaged.inner_text(".pg-note") == "The link is damaged." and number(damaged, "f") < 0.6
    assert other.evaluate("text => geomlibPlayground.decode(text).n", f"n=6&by=attention&t={tokens}") == 6


# --- the files and the page -------------------------------------------------------------------------------------------


def test_small_and_on_one_page_only():
    assert SCRIPT.stat().st_size < 30_000
    assert not any(word in SCRIPT.read_text() for word in ("http", "fetch(", "import ", "XMLHttpRequest", "console."))
    holders = [p.relative_to(HTML).as_posix() for p in HTML.rglob("*.html") if "playground.js" in p.read_text()]
    assert holders == [PAGE]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessible(open_page, scheme):
    page = open_page(PAGE, color_scheme=scheme)
    press(page, "random")
    found = Axe().run(page, context="#playground", options={"preload": False}).response["violations"]
    assert [v["id"] for v in found if v["impact"] in ("serious", "critical")] == []


def test_fits_the_screen(page):
    beyond = """(() => { const right = e => e.getBoundingClientRect().right, root = document.getElementById('playground');
        return [...root.querySelectorAll('*')].filter(e => !e.closest('svg, .pg-hidden') && right(e) > right(root) + 1).length;
    })()"""
    for width in (390, 768, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
        assert page.evaluate(beyond) == 0, width


def test_without_javascript(browser):
    context = browser.new_context(offline=True, java_script_enabled=False)
    page = context.new_page()
    page.goto(url(PAGE))
    assert "JavaScript" in page.inner_text("#playground") and page.locator("#playground button").count() == 0
    context.close()
