/**
 * The page "Move the tokens": one attention operation in the plane, drawn and measured while the reader moves it.
 *
 * First what is measured: pure functions, in any dimension, with the definitions of geomlib.geometry and geomlib.bounds.
 * Then the state and its form in a link, then the drawing. A classic script: a book is also read from files, from which
 * browsers load no modules.
 */
(function () {
  "use strict";

  // --- measuring ----------------------------------------------------------------------------------------------------

  const EPS = 2 ** -52, TINY = 2 ** -1022, GUARD = 4; // outward rounding of certificates, as geomlib.bounds has it
  const sum = (xs) => xs.reduce((total, x) => total + x, 0);
  const dot = (x, y) => sum(x.map((xd, d) => xd * y[d]));
  const length = (x) => Math.sqrt(dot(x, x));
  const scale = (x, by) => x.map((xd) => xd * by);
  const minus = (x, y) => x.map((xd, d) => xd - y[d]);
  /** Least and greatest of numbers, 0 and 0 where there are none. */
  const range = (xs) => (xs.length ? [Math.min(...xs), Math.max(...xs)] : [0, 0]);

  /**
   * Intruders, strays and inversions of keys, indexed by source.
   * @param {number[]} upper keys (or bounds above them) of the selected
   * @param {number[]} lower keys (or bounds below them) of the unselected
   * @param {number[]} chosen the selected sources; `rest` the unselected ones; neither empty
   */
  function extremal(upper, lower, chosen, rest) {
    const farthest = chosen.reduce((i, k) => (upper[k] > upper[i] ? k : i));
    const nearest = rest.reduce((i, k) => (lower[k] < lower[i] ? k : i));
    return {
      farthest, nearest,
      intruders: rest.filter((j) => lower[j] <= upper[farthest]),
      strays: chosen.filter((i) => upper[i] >= lower[nearest]),
      inversions: sum(chosen.map((i) => rest.filter((j) => lower[j] <= upper[i]).length)),
    };
  }

  /** Precision N / (N + FP), recall (N - FN) / N and their harmonic mean, 0 where both are 0. */
  function prf(n, falsePositives, falseNegatives) {
    const precision = n / (n + falsePositives), recall = (n - falseNegatives) / n, both = precision + recall;
    return { precision, recall, f: both > 0 ? (2 * precision * recall) / both : 0 };
  }

  /** The best bound on F that knows only the inversions and N. */
  function jointBound(inversions, n) {
    return inversions === 0 ? 1 : inversions < n ? 2 / (1 + 1 / n + n / (n - inversions)) : 0;
  }

  /**
   * Lower bounds on precision, recall and F from lengths and intervals of cosines, the sink's apart.
   * @param {"constant_norm"|"global"|"rowwise"} level
   * @param {number[]} chosen the selected sources; `rest` the unselected ones; source 0 may be in neither
   */
  function certificate(level, weights, values, chosen, rest) {
    const all = chosen.concat(rest).sort((i, k) => i - k), n = chosen.length;
    const norms = values.map(length), units = values.map((v, i) => scale(v, 1 / Math.max(norms[i], TINY)));
    const cosine = (i, k) => dot(units[i], units[k]);
    const others = all.filter((i) => i > 0), aware = all[0] === 0;
    let sizes = norms;
    if (level === "constant_norm") { // in units of the others' mean, which may be 0
      const mean = sum(others.map((i) => norms[i])) / Math.max(1, others.length);
      sizes = norms.map((x, i) => (mean === 0 || i === 0 ? x / (mean || x || 1) : 1));
    }
    const a = weights.map((w, i) => w * sizes[i]);
    const mu = range(others.flatMap((i) => others.filter((k) => k > i).map((k) => cosine(i, k))));
    const kappa = range(aware ? others.map((k) => cosine(0, k)) : []);
    const partners = chosen.filter((k) => k > 0), mass = sum(partners.map((k) => a[k]));
    const total = sum(chosen.map((k) => a[k])), upper = [], lower = [];
    for (const i of all) {
      let low, high, own = kappa;
      if (level === "rowwise") {
        [low, high] = range(partners.filter((k) => k !== i).map((k) => cosine(i, k)));
        if (aware) own = [cosine(0, i), cosine(0, i)];
      } else {
        [low, high] = i === 0 ? kappa : mu;
      }
      const sigma = i > 0 && chosen.includes(0) ? a[0] : 0; // nobody's partner is itself
      const mine = i > 0 ? Math.max(0, mass - a[i]) : mass;
      const slack = GUARD * EPS * (n + values[0].length + 8) * a[i] * (a[i] + total) + TINY;
      upper[i] = -a[i] * a[i] - 2 * a[i] * (low * mine + own[0] * sigma) + slack;
      lower[i] = a[i] * a[i] - 2 * a[i] * (high * mass + own[1] * sigma) - slack;
    }
    const found = extremal(upper, lower, chosen, rest);
    return prf(n, found.intruders.length, found.strays.length);
  }

  /** Whether all values but the sink's have one length, not 0: what `constant_norm` assumes. */
  function oneLength(values) {
    const [least, most] = range(values.slice(1).map(length));
    return most > 0 && most - least <= 1e-12 * most;
  }

  /**
   * All that the page shows of one operation. Euclidean distance; ties go to the lower index.
   * @param {number[]} weights attention weights, as they are
   * @param {number[][]} values one for each weight, of any dimension
   * @param {number} n how many are selected
   * @param {"attention"|"contribution"} ranking
   * @param {boolean} [withoutSink] leave source 0 out, as if it were not there
   * @returns {object} numbers; NaN, and empty lists, where nothing is unselected (N >= T)
   */
  function measure(weights, values, n, ranking, withoutSink) {
    const finite = [weights, ...values].every((x) => x.every(Number.isFinite));
    const scores = { attention: weights, contribution: weights.map((w, i) => w * length(values[i])) }[ranking];
    if (!finite || weights.length !== values.length || !Number.isInteger(n) || n < 1 || !scores) {
      throw new RangeError("measure needs finite weights, as many values, a whole number N from 1, and a known ranking.");
    }
    const y = values.map((v, i) => scale(v, weights[i]));
    const order = weights.map((_, i) => i).filter((i) => i > 0 || !withoutSink)
      .sort((i, k) => scores[k] - scores[i] || i - k);
    const selected = order.slice(0, n), rest = order.slice(n);
    const s = y[0].map((_, d) => sum(selected.map((i) => y[i][d])));
    const distances = y.map((yi) => length(minus(yi, s)));
    const found = { selected, y, s, distances, sLength: length(s), intruders: [], strays: [], farthest: -1, nearest: -1 };
    if (!rest.length) {
      const none = { precision: NaN, recall: NaN, f: NaN };
      const levels = { constant_norm: none, global: none, rowwise: none };
      return { ...found, ...none, falsePositives: NaN, falseNegatives: NaN, inversions: NaN, rhoMax: NaN, rhoMin: NaN,
        margin: NaN, inversionBound: none, jointBound: NaN, oneLength: false, certificates: levels,
        fWithout: withoutSink ? NaN : measure(weights, values, n, ranking, true).f };
    }
    // Keys order as distances do, and lose no digits to the length of s: the squared distance less that of s.
    const keys = y.map((yi) => dot(yi, yi) - 2 * dot(yi, s));
    Object.assign(found, extremal(keys, keys, selected, rest));
    const rhoMax = distances[found.farthest], rhoMin = distances[found.nearest], span = rhoMin + rhoMax;
    const difference = keys[found.nearest] - keys[found.farthest], inversions = found.inversions;
    const by = (level) => certificate(level, weights, values, selected, rest);
    const scored = prf(n, found.intruders.length, found.strays.length);
    return {
      ...found, ...scored, rhoMax, rhoMin,
      falsePositives: found.intruders.length, falseNegatives: found.strays.length,
      margin: span > 0 ? difference / span : difference,
      inversionBound: prf(n, inversions, Math.min(n, inversions)), jointBound: jointBound(inversions, n),
      oneLength: oneLength(values),
      certificates: { constant_norm: by("constant_norm"), global: by("global"), rowwise: by("rowwise") },
      fWithout: withoutSink ? scored.f : measure(weights, values, n, ranking, true).f,
    };
  }

  // --- the state: {n, ranking, shares, values}, shares whole numbers from 1 to 100 ----------------------------------

  const LEAST = 6, MOST = 12, RANKINGS = ["attention", "contribution"], SHARE = 100, LONGEST = 1e5;
  const round = (x, digits = 4) => Number(x.toFixed(digits)) + 0;
  const polar = (r, degrees) => [Math.cos, Math.sin].map((f) => round(r * f((degrees * Math.PI) / 180)));
  /** Weights: each share over the sum of all. */
  const weightsOf = (state) => state.shares.map((share) => share / sum(state.shares));
  const measured = (state) => measure(weightsOf(state), state.values, state.n, state.ranking);

  /** A state as text for a link: every number in the shortest form that gives it back exactly. */
  function encode({ n, ranking, shares, values }) {
    return `n=${n}&by=${ranking}&t=${shares.map((share, i) => [share, ...values[i]].join("_")).join("~")}`;
  }

  /** The state of a link's text, also with signs as %xx, or null where it is none. */
  function decode(text) {
    const plain = text.replace(/%(\w\w)/g, (_, code) => String.fromCharCode(parseInt(code, 16)));
    const found = /^#?n=(\d+)&by=(\w+)&t=([-+.\de_~]+)$/.exec(plain);
    if (!found) return null;
    const tokens = found[3].split("~").map((token) => token.split("_").map(Number));
    const state = { n: Number(found[1]), ranking: found[2], shares: tokens.map((t) => t[0]), values: tokens.map((t) => t.slice(1)) };
    const fits = (t) => t.length === 3 && Number.isInteger(t[0]) && t[0] >= 1 && t[0] <= SHARE &&
      t.slice(1).every((x) => Math.abs(x) <= LONGEST);
    const whole = tokens.length >= LEAST && tokens.length <= MOST && tokens.every(fits);
    return whole && state.n >= 1 && state.n <= tokens.length && RANKINGS.includes(state.ranking) ? state : null;
  }

  /** Tokens given as [share, length of the value, its angle in degrees]. */
  const built = (n, ranking, tokens) => ({ n, ranking, shares: tokens.map((t) => t[0]), values: tokens.map((t) => polar(t[1], t[2])) });

  const SINK = [[38, 0.6, 215], [14, 2.6, 42], [13, 2.5, 20], [12, 2.8, 65], [11, 2.7, 33],
    [4, 2.6, 100], [3, 3.4, 170], [3, 3.2, 265], [2, 4.4, 325]];

  /** Seeded random numbers from 0 to 1 (the generator mulberry32). */
  function generator(seed) {
    let a = seed >>> 0;
    return () => {
      a = (a + 0x6d2b79f5) | 0;
      let t = Math.imul(a ^ (a >>> 15), 1 | a);
      t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
      return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
    };
  }

  const presets = {
    separated: () => built(3, "attention", [[5, 0.8, 200], [24, 1.9, 38], [22, 2.1, 62], [20, 2.0, 50],
      [6, 1.8, 130], [5, 2.2, 245], [4, 2.0, 310], [4, 1.5, 15]]),
    random: (seed = 1) => {
      const next = generator(seed);
      return built(3, "attention", Array.from({ length: 8 }, () => [1 + Math.floor(40 * next() ** 2), 0.5 + 2.5 * next(), 360 * next()]));
    },
    "sink in": () => built(4, "attention", SINK),
    "sink out": () => built(4, "contribution", SINK),
  };

  /** What the numbers mean, in a sentence or two. */
  function verdict({ n }, m) {
    const names = (sources, one, more) => sources.length ? [`${sources.length > 1 ? more : one} ${[...sources].sort((i, k) => i - k).join(", ")}`] : [];
    const wrong = [...names(m.intruders, "intruder", "intruders"), ...names(m.strays, "stray", "strays")];
    if (Number.isNaN(m.f)) return "Nothing is unselected, so there is nothing to tell apart: F is not defined.";
    const said = wrong.length ? `Not separable: ${wrong.join("; ")}.` : "Separable: one ball holds the selected and nobody else.";
    return said + (n === 1 ? " But one source alone is its own aggregate: N = 1 says nothing." : "");
  }

  // --- the page -----------------------------------------------------------------------------------------------------

  const SIZE = 400, KEYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
  const SHAPES = { circle: "M-9,0a9,9 0 1,0 18,0a9,9 0 1,0 -18,0z", square: "M-8.5,-8.5h17v17h-17z", diamond: "M0,-18L18,0L0,18L-18,0z",
    star: "M0,-10L2.4,-3.2L9.5,-3.1L3.8,1.2L5.9,8.1L0,4L-5.9,8.1L-3.8,1.2L-9.5,-3.1L-2.4,-3.2z", cross: "M-5,-5L5,5M5,-5L-5,5" };
  const NOTES = {
    separated: "Separated: three sources with most of the weight lean one way, and the rest contribute little.",
    random: "Random: weights and values drawn at random",
    "sink in": "Sink in: source 0 has most of the weight and a short value that points against the others. It is selected.",
    "sink out": "Sink out: the same tokens and weights, but ranked by contribution. Source 0 is too short to be selected.",
    link: "This configuration comes from a link.",
    damaged: "The link is damaged.",
  };
  const rho = (which) => `<i>ρ</i><sub>${which}</sub>`;
  /** Rows of the two tables: the name of a number, its symbol, plain words. */
  const NUMBERS = [
    ["precision", "<i>P</i>", "precision, N / (N + intruders)"],
    ["recall", "<i>R</i>", "recall, (N − strays) / N"],
    ["falsePositives", "FP", "intruders: unselected within " + rho("max")],
    ["falseNegatives", "FN", "strays: selected at " + rho("min") + " or beyond"],
    ["inversions", "GInv", "inversions: pairs in the wrong order"],
    ["rhoMax", rho("max"), "to the farthest selected"],
    ["rhoMin", rho("min"), "to the nearest unselected"],
    ["margin", "<i>γ</i>", "margin, " + rho("min") + " − " + rho("max")],
    ["sLength", "‖<i>s<sub>N</sub></i>‖", "from the origin to <i>s<sub>N</sub></i>"],
    ["fWithout", "<i>F</i>", "without source 0 (the next takes its place)"],
  ];
  const BOUNDS = [
    ["paper", "paper’s", "from <i>N</i> and the inversions"],
    ["joint", "joint", "from the same, the best possible"],
    ["constant_norm", "constant_norm", "weights; only where lengths are equal"],
    ["global", "global", "lengths, two intervals of cosines"],
    ["rowwise", "rowwise", "lengths, two intervals for each source"],
  ];
  const rows = (table) => table.map(([name, symbol, words]) =>
    `<tr><th scope="row">${symbol}</th><td>${words}</td><td class="pg-value" data-value="${name}"></td></tr>`).join("");
  const slider = (name, words, least, most, step) =>
    `<label>${words} <output data-value="${name}"></output><input type="range" name="${name}" min="${least}" max="${most}" step="${step}"></label>`;
  const key = (kind, shape, words) =>
    `<li><svg viewBox="-20 -20 40 40" class="pg-${kind}" aria-hidden="true"><path class="pg-mark" d="${SHAPES[shape]}"/></svg><span>${words}</span></li>`;
  const PAGE = `
<div class="pg-buttons" role="group" aria-label="Examples">
 ${Object.keys(presets).map((name) => `<button type="button" data-preset="${name}">${name[0].toUpperCase() + name.slice(1)}</button>`).join("")}
</div>
<p class="pg-note"></p>
<p class="pg-verdict"><b><i>F<sub>N</sub></i> = <span data-value="f"></span></b> <span class="pg-words"></span></p>
<div class="pg-columns">
 <div>
  <svg class="pg-plane" viewBox="0 0 ${SIZE} ${SIZE}" role="group" aria-label="Plane of contributions. Each point can be moved with the arrow keys.">
   <g class="pg-grid"></g>
   <circle class="pg-max"/><line class="pg-max"/><circle class="pg-min"/><line class="pg-min"/>
   <text class="pg-max"><tspan font-style="italic">ρ</tspan><tspan dy="3" font-size="9">max</tspan></text>
   <text class="pg-min"><tspan font-style="italic">ρ</tspan><tspan dy="3" font-size="9">min</tspan></text>
   <path class="pg-origin" d="${SHAPES.cross}"/><path class="pg-star" d="${SHAPES.star}"/>
   <g class="pg-points"></g>
  </svg>
  <ul class="pg-legend">
   ${key("selected", "circle", "selected")}${key("stray", "square", "stray")}
   ${key("unselected", "circle", "unselected")}${key("intruder", "square", "intruder")}
   ${key("max", "circle", rho("max"))}${key("min", "circle", rho("min"))}${key("sink", "diamond", "source 0, the sink")}${key("star", "star", "<i>s<sub>N</sub></i>")}${key("origin", "cross", "origin")}
  </ul>
  <div class="pg-controls">
   ${slider("n", "<i>N</i>, how many are selected", 1, LEAST, 1)}
   <fieldset><legend>Ranking by</legend>
    ${RANKINGS.map((by) => `<label><input type="radio" name="ranking" value="${by}"> ${by}</label>`).join("")}
   </fieldset>
   ${slider("norm", "Length of the sink’s value", 0, 4, 0.05)}
   ${slider("angle", "Its direction, in degrees", -180, 180, 1)}
  </div>
 </div>
 <div>
  <table><caption>The numbers</caption><tbody>${rows(NUMBERS)}</tbody></table>
  <table><caption>Lower bounds on <i>F<sub>N</sub></i>, and what they know</caption><tbody>${rows(BOUNDS)}</tbody></table>
 </div>
</div>
<table class="pg-sources"><caption>The sources</caption>
 <thead><tr>${["Source", "Share", "<i>α</i>", "‖<i>v</i>‖", "<i>D</i>", "Is"].map((x) => `<th scope="col">${x}</th>`).join("")}</tr></thead>
 <tbody></tbody></table>
<div class="pg-buttons">
 <button type="button" data-do="add">Add a source</button><button type="button" data-do="remove">Remove the last</button>
 <button type="button" data-do="even">Give all but the sink one length</button><button type="button" data-do="copy">Copy link</button>
 <span class="pg-copied" role="status"></span>
</div>
<p class="pg-hidden" role="status" aria-live="polite"></p>`;

  function set(of, attributes) {
    for (const [name, value] of Object.entries(attributes)) of.setAttribute(name, value);
  }

  function start(root) {
    root.innerHTML = PAGE;
    const find = (selector) => root.querySelector(selector);
    const plane = find(".pg-plane"), points = find(".pg-points"), body = find(".pg-sources tbody");
    let state, seed = 0, middle = [0, 0], half = 0, turned = 0, held = null, spoken, written;

    const pixels = (x) => (x * SIZE) / 2 / half;
    const across = (x) => SIZE / 2 + pixels(x - middle[0]), down = (y) => SIZE / 2 - pixels(y - middle[1]);
    const shown = (x, digits = 3) => (Number.isNaN(x) ? "–" : x.toFixed(digits).replace("-", "−"));
    const write = (name, text) => find(`[data-value="${name}"]`).replaceChildren(text);
    const kind = (i, m) => m.strays.includes(i) ? "stray" : m.intruders.includes(i) ? "intruder" : m.selected.includes(i) ? "selected" : "unselected";

    /** As many points and rows as sources. Those that stay are kept, so that the focus is. */
    function match() {
      for (const list of [points, body]) while (list.children.length > state.shares.length) list.lastChild.remove();
      for (let i = points.children.length; i < state.shares.length; i++) {
        points.insertAdjacentHTML("beforeend", `<g tabindex="0" role="slider" aria-roledescription="movable point" data-source="${i}">
          <circle class="pg-hit" r="21"/>${i ? "" : `<path class="pg-halo" d="${SHAPES.diamond}"/>`}<path class="pg-mark"/><text y="3.8">${i}</text></g>`);
        body.insertAdjacentHTML("beforeend", `<tr><th scope="row">${i}${i ? "" : " (sink)"}</th><td><input type="range" name="share"
          min="1" max="${SHARE}" aria-label="Share of source ${i}"></td><td></td><td></td><td></td><td></td></tr>`);
      }
    }

    /** The part of the plane that is shown: points, origin, some of the ball. Changed only where it must be. */
    function fit(m) {
      const some = 0.55 * (m.rhoMax || 0);
      const ends = [0, 1].map((d) => range([0, m.s[d] - some, m.s[d] + some, ...m.y.map((yi) => yi[d])]));
      const extent = Math.max(1e-3, ...ends.map(([low, high]) => high - low));
      const outside = ends.some(([low, high], d) => low < middle[d] - 0.95 * half || high > middle[d] + 0.95 * half);
      if (half && !outside && extent > half) return;
      middle = ends.map(([low, high]) => (low + high) / 2);
      half = 0.6 * extent;
    }

    function drawGrid() {
      const power = 10 ** Math.floor(Math.log10(half)), step = (half / power < 2 ? 0.5 : half / power < 5 ? 1 : 2) * power;
      const lines = [0, 1].map((d) => {
        const made = [];
        for (let k = Math.ceil((middle[d] - half) / step); k * step <= middle[d] + half; k++) {
          const at = d ? down(k * step) : across(k * step), label = String(round(k * step, 6)).replace("-", "−");
          made.push(`<path${k ? "" : ' class="pg-axis"'} d="${d ? `M0,${at}H` : `M${at},0V`}${SIZE}"/>`);
          if (at > 12 && at < SIZE - 12) made.push(d ? `<text x="3" y="${at + 3}" class="pg-left">${label}</text>` : `<text x="${at}" y="${SIZE - 4}">${label}</text>`);
        }
        return made.join("");
      });
      find(".pg-grid").innerHTML = lines.join("");
    }

    /** A ball around s_N, a line to the source that it reaches, and its name where it is seen. */
    function drawBall(name, source, radius, m, turn) {
      const [circle, line, text] = ["circle", "line", "text"].map((tag) => find(`${tag}.pg-${name}`));
      for (const part of [circle, line, text]) part.style.visibility = source >= 0 ? "visible" : "hidden";
      if (source < 0) return;
      const x = across(m.s[0]), y = down(m.s[1]), r = pixels(radius);
      set(circle, { cx: x, cy: y, r });
      set(line, { x1: x, y1: y, x2: across(m.y[source][0]), y2: down(m.y[source][1]) });
      const clear = (at) => at.every((z) => z > 20 && z < SIZE - 30) &&
        m.y.every((yi) => Math.hypot(across(yi[0]) - at[0] - 10, down(yi[1]) - at[1]) > 30);
      const turns = Array.from({ length: 24 }, (_, k) => turn + (k * Math.PI) / 12);
      const places = [r + 14, r - 14].flatMap((far) => turns.map((t) => [x + far * Math.cos(t) - 8, y - far * Math.sin(t) + 4]));
      const [labelX, labelY] = places.find(clear) || [-99, 0];
      set(text, { x: labelX, y: labelY });
    }

    function draw() {
      const m = measured(state), weights = weightsOf(state);
      match();
      if (!held) fit(m);
      drawGrid();
      drawBall("max", m.farthest, m.rhoMax, m, 1);
      drawBall("min", m.nearest, m.rhoMin, m, 2);
      set(find(".pg-plane .pg-star"), { transform: `translate(${across(m.s[0])},${down(m.s[1])})` });
      set(find(".pg-plane .pg-origin"), { transform: `translate(${across(0)},${down(0)})` });
      m.y.forEach(([x, y], i) => {
        const is = kind(i, m), point = points.children[i], cells = body.children[i].children, share = cells[1].firstChild;
        const place = `${shown(x, 2)}, ${shown(y, 2)}`, name = i ? `Source ${i}` : "Source 0, the sink";
        set(point, { class: `pg-point pg-${is}`, transform: `translate(${across(x)},${down(y)})`, "aria-label": name,
          "aria-valuemin": middle[0] - half, "aria-valuemax": middle[0] + half, "aria-valuenow": x,
          "aria-valuetext": `at ${place}; ${is}, distance ${shown(m.distances[i], 2)}` });
        set(point.querySelector(".pg-mark"), { d: is === "stray" || is === "intruder" ? SHAPES.square : SHAPES.circle });
        share.value = state.shares[i];
        set(share, { "aria-valuetext": `share ${state.shares[i]}, weight ${shown(weights[i])}` });
        [weights[i], length(state.values[i]), m.distances[i]].forEach((value, k) => { cells[2 + k].textContent = shown(value, k === 1 ? 2 : 3); });
        cells[5].textContent = is;
        body.children[i].className = `pg-${is}`;
      });
      const counts = ["falsePositives", "falseNegatives", "inversions"], bounds = m.certificates;
      const values = { f: m.f, paper: m.inversionBound.f, joint: m.jointBound, global: bounds.global.f, rowwise: bounds.rowwise.f };
      for (const [name] of NUMBERS) values[name] = m[name];
      for (const [name, value] of Object.entries(values)) write(name, shown(value, counts.includes(name) ? 0 : 3));
      write("constant_norm", m.oneLength ? shown(bounds.constant_norm.f) : "no bound");
      find(".pg-words").textContent = verdict(state, m);
      drawControls();
      return m;
    }

    function drawControls() {
      const norm = length(state.values[0]), many = state.shares.length;
      const angle = norm > 0 ? (Math.atan2(state.values[0][1], state.values[0][0]) * 180) / Math.PI : turned;
      if (Math.abs(angle - turned) > 0.5) turned = angle; // a short value keeps its direction only roughly
      const put = (name, value, text) => { find(`input[name="${name}"]`).value = value; write(name, text); };
      set(find('input[name="n"]'), { max: many });
      set(find('input[name="norm"]'), { max: Math.max(Number(find('input[name="norm"]').max), Math.ceil(norm)) });
      put("n", state.n, `${state.n} of ${many}`);
      put("norm", norm, shown(norm, 2));
      put("angle", turned, shown(turned, 0));
      find(`input[value="${state.ranking}"]`).checked = true;
      find('[data-do="add"]').disabled = many >= MOST;
      find('[data-do="remove"]').disabled = many <= LEAST;
    }

    const note = (text) => {
      if (text) find(".pg-note").replaceChildren(text);
      find(".pg-note").style.visibility = text ? "" : "hidden"; // so that nothing moves
    };

    /** After each change: draw, and a little later say it and write it into the address. */
    function changed(said = "", words = "") {
      const m = draw();
      note(words);
      find(".pg-copied").textContent = "";
      clearTimeout(spoken);
      clearTimeout(written);
      spoken = setTimeout(() => { find(".pg-hidden").textContent = `${said} F ${shown(m.f, 2)}. ${verdict(state, m)}`; }, 600);
      written = setTimeout(() => { try { history.replaceState(null, "", link()); } catch { /* too often for this browser */ } }, 150);
    }

    const link = () => `${location.href.split("#")[0]}#${encode(state)}`;

    function show(next) {
      state = next;
      turned = (Math.atan2(state.values[0][1], state.values[0][0]) * 180) / Math.PI;
      find('input[name="norm"]').max = 4;
      half = 0; // look anew
      clearTimeout(written);
    }

    function preset(name) {
      if (name === "random") seed++;
      show(presets[name](seed));
      return NOTES[name] + (name === "random" ? ` (seed ${seed}).` : "");
    }

    /** Move a contribution. Its weight stays, so what changes is its value, v = y / α. */
    function move(i, place) {
      const weight = weightsOf(state)[i], edge = 0.98 * half;
      state.values[i] = place.map((x, d) => round(Math.max(middle[d] - edge, Math.min(middle[d] + edge, x)) / weight));
      changed(`Source ${i}.`);
    }

    /** Where the pointer is, in the units of the plane. */
    function under(event) {
      const box = plane.getBoundingClientRect();
      const part = [(event.clientX - box.left) / box.width, 1 - (event.clientY - box.top) / box.height];
      return part.map((x, d) => middle[d] + (2 * x - 1) * half);
    }

    plane.addEventListener("pointerdown", (event) => {
      if (held || event.button || !event.target.closest(".pg-point")) return;
      event.preventDefault();
      const at = under(event), { y } = measured(state);
      const i = y.reduce((best, yi, k) => (length(minus(yi, at)) < length(minus(y[best], at)) ? k : best), 0);
      held = { i, pointer: event.pointerId, by: minus(y[i], at) };
      plane.setPointerCapture(event.pointerId);
      points.children[i].focus({ preventScroll: true });
    });
    plane.addEventListener("pointermove", (event) => {
      if (held && event.pointerId === held.pointer) move(held.i, under(event).map((x, d) => x + held.by[d]));
    });
    for (const type of ["pointerup", "pointercancel"]) {
      plane.addEventListener(type, (event) => {
        if (!held || event.pointerId !== held.pointer) return;
        held = null;
        draw();
      });
    }
    // Where a browser knows no touch-action in a drawing: a finger moves the point and not the page.
    plane.addEventListener("touchstart", (event) => {
      if (event.cancelable && event.target.closest(".pg-point")) event.preventDefault();
    }, { passive: false });
    plane.addEventListener("keydown", (event) => {
      const point = event.target.closest(".pg-point"), way = KEYS[event.key];
      if (!point || !way || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      const i = Number(point.dataset.source), step = (half / 50) * (event.shiftKey ? 5 : 1);
      move(i, measured(state).y[i].map((x, d) => x + step * way[d]));
    });
    root.addEventListener("input", ({ target }) => {
      const value = Number(target.value), row = target.closest(".pg-sources tr");
      if (row) state.shares[[...body.children].indexOf(row)] = value;
      else if (target.name === "n") state.n = value;
      else if (target.name === "ranking") state.ranking = target.value;
      else if (target.name === "norm") state.values[0] = polar(value, turned);
      else if (target.name === "angle") state.values[0] = polar(length(state.values[0]), (turned = value));
      changed();
    });
    root.addEventListener("click", ({ target }) => {
      const { preset: name, do: what } = target.dataset, { shares, values } = state;
      if (name) return changed("", preset(name));
      if (what === "add") shares.push(10), values.push(polar(2, 137.5 * shares.length));
      else if (what === "remove") shares.pop(), values.pop(), (state.n = Math.min(state.n, shares.length));
      else if (what === "even") {
        const norms = values.map(length), mean = sum(norms.slice(1)) / (norms.length - 1);
        state.values = values.map((v, i) => (i === 0 ? v : norms[i] > 0 ? scale(v, mean / norms[i]) : [mean, 0]));
      } else if (what === "copy") return copy();
      else return;
      changed();
    });
    async function copy() {
      let said = "Copied.";
      history.replaceState(null, "", link());
      try { await navigator.clipboard.writeText(link()); } catch { said = "Not allowed here: copy the address of this page."; }
      find(".pg-copied").textContent = said;
    }
    function restore() {
      const found = decode(location.hash);
      if (found) show(found), draw(), note(NOTES.link);
      else if (/^#n[=%]/.test(location.hash)) note(NOTES.damaged);
    }
    window.addEventListener("hashchange", restore);
    note(preset("sink in"));
    restore();
    draw();
  }

  window.geomlibPlayground = { measure, encode, decode, presets, weightsOf, verdict };
  const root = document.getElementById("playground");
  if (root) start(root);
})();
