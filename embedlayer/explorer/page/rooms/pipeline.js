import { empty, fit, h, onResize, select, visible } from "../dom.js";
import { heatMap, limitOf, palette, shown } from "../heat.js";
import { cosine, fromRows, row, unpackMatrix } from "../math.js";

/** Pipeline: one text, every step from its tokens to the gradient of its loss, with the model's own numbers. */
export const room = {
  id: "pipeline",
  title: "Pipeline",
  sentence: "A text becomes vectors, and vectors become guesses at what comes next: step through it with the slider or the arrow keys.",
  needs: ["tokenizer"],
  keys: [["← →", "one step back or on (Pipeline)"], ["[ ]", "the token before or after (Pipeline)"]],
  open,
};

const WAIT = 300;
const PERCENT = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 1, minimumFractionDigits: 1 });
const SMALL = new Intl.NumberFormat("en", { style: "percent", maximumSignificantDigits: 1 });
const COUNT = new Intl.NumberFormat("en");

/** @param {HTMLElement} element */
async function open(element, context) {
  const { texts } = await context.data.load("pipeline");
  const view = { walk: null, step: 0, token: 0, head: 0, turn: 0, timer: 0, drawn: [] };

  const field = context.data.exported ? choiceOfTexts(texts, ask) : inputOfText(texts, ask);
  const chips = h("div", { class: "pipe-chips", role: "group", "aria-label": "Tokens" });
  const about = h("p", { class: "note pipe-about", "aria-live": "polite" });
  const range = h("input", { type: "range", min: "0", max: "1", value: "0", "aria-label": "Step", onInput: () => goTo(Number(range.value)) });
  const rail = h("ol", { class: "pipe-rail" });
  const back = h("button", { type: "button", class: "icon", "aria-label": "One step back", onClick: () => goTo(view.step - 1) }, "‹");
  const on = h("button", { type: "button", class: "icon", "aria-label": "One step on", onClick: () => goTo(view.step + 1) }, "›");
  const steps = h("div", { class: "pipe-steps" }, back, h("div", { class: "pipe-track" }, range, rail), on);
  const stage = h("article", { class: "panel pipe-stage", "aria-live": "off" });
  element.replaceChildren(field.element, h("div", { class: "pipe-tokens" }, chips, about), steps, stage);

  document.addEventListener("keydown", onKey);
  document.addEventListener("themechange", draw);
  read();
  return {
    close() {
      clearTimeout(view.timer);
      view.turn += 1;
      clear();
      document.removeEventListener("keydown", onKey);
      document.removeEventListener("themechange", draw);
    },
    stateChanged: read,
  };

  /** Follow the hash. */
  function read() {
    const text = context.state.get("text", texts[0] ?? "");
    field.set(text);
    load(text);
  }

  /** A text that was typed or chosen. */
  function ask(text) {
    clearTimeout(view.timer);
    context.state.set({ text, token: null });
    view.timer = setTimeout(() => load(text), context.data.exported ? 0 : WAIT);
  }

  async function load(text) {
    view.turn += 1;
    const { turn } = view;
    if (!text) return fail("Type a text", "Its tokens and their way through the model appear here.");
    const waiting = setTimeout(() => stage.classList.add("pipe-wait"), 200);
    try {
      const walk = await context.data.load("pipeline", { text });
      if (turn !== view.turn) return;
      view.walk = walk;
      const named = walk.steps.findIndex((step) => step.name === context.state.get("step", "one_hot"));
      view.step = Math.max(0, named);
      view.token = Math.min(Math.max(0, Number.parseInt(context.state.get("token", "1"), 10) || 0), walk.tokens.length - 1);
      view.head = Math.max(0, Number.parseInt(context.state.get("head", "0"), 10) || 0);
      showTokens();
      showSteps();
      draw();
    } catch (error) {
      if (turn === view.turn) fail("This text cannot be shown", error.message);
    } finally {
      clearTimeout(waiting);
      if (turn === view.turn) stage.classList.remove("pipe-wait");
    }
  }

  function fail(title, sentence) {
    view.walk = null;
    clear();
    chips.replaceChildren();
    about.textContent = "";
    steps.hidden = true;
    stage.replaceChildren(empty(title, sentence));
  }

  function showTokens() {
    const { tokens, left_out: leftOut, vocab_size: size, embed_dim: width } = view.walk;
    chips.replaceChildren(...tokens.map((token, t) => chip(token, {
      id: token.id,
      title: `position ${t}, ID ${token.id}${token.kind === "text" ? "" : ` (${KINDS[token.kind]})`}`,
      pressed: t === view.token,
      onClick: () => choose(t),
    })));
    const kinds = [...new Set(tokens.map((token) => token.kind))].filter((kind) => kind !== "text");
    const legend = [tokens.some((token) => token.piece.includes(" ")) ? "· is a space" : "", ...kinds.map((kind) => `${kind === "byte" ? "<0x..>" : "a dashed frame"} is ${KINDS[kind]}`)].filter(Boolean);
    about.textContent = `${COUNT.format(tokens.length)} ${tokens.length === 1 ? "token" : "tokens"} out of ${COUNT.format(size)}, each a vector of ${COUNT.format(width)} numbers${legend.length ? `; ${legend.join(", ")}` : ""}.`
      + (leftOut ? ` ${COUNT.format(leftOut)} more tokens are left out.` : "");
  }

  function showSteps() {
    const list = view.walk.steps;
    steps.hidden = false;
    steps.style.setProperty("--steps", String(list.length));
    range.max = String(list.length - 1);
    rail.replaceChildren(...list.map((step, i) => h("li", null,
      h("button", { type: "button", tabIndex: -1, onClick: () => goTo(i) }, h("b", null, String(i + 1)), h("span", null, step.title)))));
  }

  function goTo(step) {
    if (!view.walk) return;
    view.step = Math.min(Math.max(step, 0), view.walk.steps.length - 1);
    context.state.set({ step: view.step ? view.walk.steps[view.step].name : null });
    draw();
  }

  function choose(token) {
    if (!view.walk) return;
    view.token = Math.min(Math.max(token, 0), view.walk.tokens.length - 1);
    context.state.set({ token: view.token === 1 ? null : view.token });
    [...chips.children].forEach((button, t) => button.setAttribute("aria-pressed", String(t === view.token)));
    draw();
  }

  function clear() {
    for (const part of view.drawn) part.close();
    view.drawn = [];
  }

  function draw() {
    if (!view.walk) return;
    const { walk } = view;
    const step = walk.steps[view.step];
    range.value = String(view.step);
    range.setAttribute("aria-valuetext", `${view.step + 1} of ${walk.steps.length}: ${step.title}`);
    back.disabled = view.step === 0;
    on.disabled = view.step === walk.steps.length - 1;
    [...rail.children].forEach((item, i) => item.firstChild.setAttribute("aria-current", i === view.step ? "step" : "false"));
    const focused = [...stage.querySelectorAll("canvas, select, button")].indexOf(document.activeElement);
    clear();
    const scene = {
      walk, step, token: view.token, head: view.head, choose,
      chooseHead: (head) => {
        view.head = head;
        context.state.set({ head: head || null });
        draw();
      },
      keep: (part) => {
        view.drawn.push(part);
        return part.element;
      },
    };
    stage.replaceChildren(
      h("header", { class: "pipe-head" },
        h("h2", null, h("span", { class: "pipe-number" }, `${view.step + 1}`), step.title), h("code", null, step.formula),
        h("p", null, step.sentence), h("p", { class: "note" }, step.note)),
      ...(DRAW[step.name] ?? drawResult)(scene));
    if (focused >= 0) stage.querySelectorAll("canvas, select, button")[focused]?.focus();
  }

  /** @param {KeyboardEvent} event */
  function onKey(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.ctrlKey || event.metaKey || event.altKey || target.closest?.("input, textarea, select, canvas, [role=tab], dialog[open]")) return;
    const act = {
      ArrowRight: () => goTo(view.step + 1), ArrowLeft: () => goTo(view.step - 1),
      "]": () => choose(view.token + 1), "[": () => choose(view.token - 1),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }
}

const KINDS = { byte: "a part of a character", special: "a special token" };

function inputOfText(texts, ask) {
  const input = h("input", { type: "text", id: "pipe-text", maxLength: 4000, autocomplete: "off", spellcheck: false, placeholder: "Type a text …", onInput: () => ask(input.value) });
  const examples = texts.map((text) => h("button", { type: "button", class: "pipe-example", onClick: () => { input.value = text; ask(text); } }, text));
  const element = h("div", { class: "pipe-entry" },
    h("div", { class: "pipe-entry-head" }, h("label", { for: "pipe-text" }, "Text"), h("div", { class: "pipe-examples", role: "group", "aria-label": "Examples" }, examples)), input);
  return { element, set: (text) => { if (input.value !== text) input.value = text; } };
}

/** Without a server nothing can be computed anew: the texts that the file holds. */
function choiceOfTexts(texts, ask) {
  const choice = select({ label: "Text", options: texts.map((text) => [text, text]), value: texts[0] ?? "", onChange: ask });
  const element = h("div", { class: "pipe-entry" }, choice,
    h("p", { class: "note" }, "This is an exported page: it holds these texts. Any other text needs the model itself: embedlayer explore DIR."));
  return { element, set: choice.set };
}

/** A token as a chip, its ID below. */
function chip(token, { id, title, pressed, onClick } = {}) {
  const runs = token.piece ? visible(token.piece).map((run) => (run.mark ? h("i", null, run.text) : run.text)) : [h("i", null, token.text)];
  const content = [h("span", null, runs), id === undefined ? null : h("small", null, String(id))];
  const properties = { class: `pipe-chip pipe-${token.kind}`, title };
  return onClick ? h("button", { ...properties, type: "button", "aria-pressed": String(pressed), onClick }, content) : h("span", properties, content);
}

/** A heat strip for each token. */
function strips(scene, name, matrix, { title, note, limit, blank, height } = {}) {
  const { tokens } = scene.walk;
  const heat = heatMap({
    label: title ?? name, unit: "value", rowLabels: true, axes: ["dimension"], cellHeight: height ?? heightFor(tokens.length),
    rowName: (t) => tokens[t].text, columnName: (d) => `dimension ${d}`, onPick: (t) => scene.choose(t),
  });
  heat.show(matrix, { limit, blank, marks: [{ row: scene.token }] });
  return h("section", { class: "pipe-picture" }, title ? h("h3", null, title) : null, note ? h("p", { class: "note" }, note) : null, scene.keep(heat));
}

function heightFor(rows) {
  return Math.round(Math.min(30, Math.max(14, 300 / rows)));
}

/** A few rows under each other whose numbers belong together: what the chosen token is made of. */
function parts(scene, title, names, rows, { columnName = (d) => `dimension ${d}`, axis = "dimension", note, limit } = {}) {
  const heat = heatMap({ label: title, unit: "value", rowLabels: true, axes: [axis], cellHeight: 28, rowName: (r) => names[r], columnName });
  const matrix = fromRows(rows);
  heat.show(matrix, { limit: limit ?? limitOf(matrix) });
  return h("section", { class: "pipe-picture" }, h("h3", null, title), note ? h("p", { class: "note" }, note) : null, scene.keep(heat));
}

function valueOf(scene, name, index = 0) {
  return unpackMatrix(scene.step.values[name], index);
}

function nameOf(scene, token = scene.token) {
  return `“${scene.walk.tokens[token].text}”`;
}

const DRAW = {
  one_hot: drawOneHot,
  rows: drawLookUp,
  scale: drawScale,
  types: (scene) => drawAdded(scene, "types", "What is added"),
  positions: drawPositions,
  sum: drawSum,
  norm: drawResult,
  project: drawResult,
  dropout: drawDropout,
  rotation: drawRotation,
  bias: drawBias,
  head: drawHead,
  gradient: drawGradient,
};

/** Each token as a line of V places with one mark. */
function drawOneHot({ walk, token, choose }) {
  const last = Math.max(1, walk.vocab_size - 1);
  const lines = walk.tokens.map((shownToken, t) => {
    const mark = h("i");
    const number = h("small", null, `1 at ${COUNT.format(shownToken.id)}`);
    const share = shownToken.id / last;
    mark.style.left = `${100 * share}%`;
    if (share > 0.5) number.style.right = `calc(${100 * (1 - share)}% + 8px)`;
    else number.style.left = `calc(${100 * share}% + 8px)`;
    return h("li", null, h("button", { type: "button", "aria-pressed": String(t === token), onClick: () => choose(t) },
      h("span", { class: "pipe-name" }, shownToken.text), h("span", { class: "pipe-onehot" }, mark, number)));
  });
  return [
    h("ol", { class: "pipe-onehots", "aria-label": "One-hot lines" }, lines),
    h("div", { class: "pipe-scale", "aria-hidden": "true" }, h("span", null, "place 0"), h("span", null, `place ${COUNT.format(last)}`)),
  ];
}

/** The table as a column, and lines from the rows that are read to where they go. */
function drawLookUp(scene) {
  const { walk, token } = scene;
  const rows = valueOf(scene, "rows");
  const height = heightFor(rows.rows);
  const canvas = h("canvas", { class: "pipe-table", role: "img", "aria-label": `The table, and the ${rows.rows} rows that are read from it` });
  const picture = strips(scene, "Rows of the table", rows, { height });
  const box = h("div", { class: "pipe-table-box" }, canvas);
  picture.querySelector(".heat-body").prepend(box);
  const paint = () => {
    const [width, tall] = [box.clientWidth, rows.rows * height];
    if (width < 20) return;
    const colours = palette();
    const context = fit(canvas, width, tall);
    const bar = { left: 1, width: Math.min(34, width * 0.35) };
    context.fillStyle = colours.raised;
    context.strokeStyle = colours.line;
    context.fillRect(bar.left, 0, bar.width, tall);
    context.strokeRect(bar.left + 0.5, 0.5, bar.width - 1, tall - 1);
    const order = [...walk.tokens.keys()].sort((a, b) => Number(a === token) - Number(b === token));
    for (const t of order) {
      const from = 2 + (walk.tokens[t].id / Math.max(1, walk.vocab_size - 1)) * (tall - 4);
      const to = (t + 0.5) * height;
      context.strokeStyle = t === token ? colours.accent : colours.muted;
      context.globalAlpha = t === token ? 1 : 0.5;
      context.lineWidth = t === token ? 2 : 1;
      context.beginPath();
      context.moveTo(bar.left, from);
      context.lineTo(bar.left + bar.width, from);
      context.bezierCurveTo(width * 0.7, from, width * 0.6, to, width, to);
      context.stroke();
      context.globalAlpha = 1;
    }
  };
  const stop = onResize(box, paint);
  scene.keep({ element: null, close: stop });
  return [picture, h("p", { class: "note" }, `Left the table, row 0 on top and row ${COUNT.format(walk.vocab_size - 1)} at the bottom: ${nameOf(scene)} is row ${COUNT.format(walk.tokens[token].id)}.`)];
}

function drawScale(scene) {
  const after = valueOf(scene, "scaled");
  const { factor, scaled } = scene.step.facts;
  if (!scaled) return [strips(scene, "Rows", after, {})];
  const before = unpackMatrix(scene.walk.steps.find((step) => step.name === "rows").values.rows);
  const limit = limitOf(after);
  return [
    strips(scene, "Before", before, { title: "Before", limit, height: Math.min(20, heightFor(after.rows)) }),
    strips(scene, "After", after, { title: `After: times ${shown(factor)}`, limit, height: Math.min(20, heightFor(after.rows)), note: "The same pattern, in the same colours for the same numbers." }),
  ];
}

function drawAdded(scene, name, title) {
  return [strips(scene, title, valueOf(scene, name), { title }), strips(scene, "Sum", valueOf(scene, "result"), { title: "Sum" })];
}

function drawPositions(scene) {
  const { kind } = scene.step.facts;
  if (kind !== "added") return [strips(scene, "Vectors", valueOf(scene, "result"), { title: "The vectors, unchanged" })];
  const heat = heatMap({
    label: "Position vectors", unit: "value", rowLabels: true, axes: ["dimension", "position"], cellHeight: heightFor(scene.walk.tokens.length),
    rowName: (t) => `position ${t}`, rowLabel: String, columnName: (d) => `dimension ${d}`, onPick: (t) => scene.choose(t),
  });
  heat.show(valueOf(scene, "positions"), { marks: [{ row: scene.token }] });
  return [h("section", { class: "pipe-picture" }, scene.keep(heat))];
}

function drawSum(scene) {
  const { walk, token } = scene;
  const [tokens, positions, result] = ["tokens", "positions", "result"].map((name) => valueOf(scene, name));
  const picture = parts(scene, `${nameOf(scene)} at position ${token}: token + position = sum`, [walk.tokens[token].text, `+ p[${token}]`, "= sum"],
    [row(tokens, token), row(positions, token), row(result, token)]);
  return [picture, strips(scene, "Sums", result, { title: "All sums" }), twins(scene, result, "sums")].filter(Boolean);
}

/** How alike the vectors of one token at two places are. */
function twins(scene, vectors, what) {
  const { tokens } = scene.walk;
  const id = tokens[scene.token].id;
  const other = tokens.findIndex((token, t) => t !== scene.token && token.id === id);
  if (other < 0) return null;
  const alike = cosine(row(vectors, scene.token), row(vectors, other));
  return h("p", { class: "pipe-fact" }, `${nameOf(scene)} stands at position ${scene.token} and at position ${other}. Its row is the same (cosine 1); the two ${what} have cosine `, h("b", null, shown(alike)), ".");
}

/** Steps whose result says it all. */
function drawResult(scene) {
  return [strips(scene, scene.step.title, valueOf(scene, "result"), {})];
}

function drawDropout(scene) {
  const kept = valueOf(scene, "kept");
  const dropped = valueOf(scene, "dropped");
  const gone = (t, d) => dropped.data[t * dropped.cols + d] === 0 && kept.data[t * kept.cols + d] !== 0;
  let count = 0;
  for (let i = 0; i < dropped.data.length; i++) if (dropped.data[i] === 0 && kept.data[i] !== 0) count++;
  const share = count / dropped.data.length;
  const first = 64;
  const closeUp = {
    rows: 2, cols: Math.min(first, kept.cols),
    data: Float32Array.from([...row(kept, scene.token).slice(0, first), ...row(dropped, scene.token).slice(0, first)]),
  };
  const heat = heatMap({ label: "One token", unit: "value", rowLabels: true, axes: ["dimension"], cellHeight: 28, rowName: (r) => ["in use", "training"][r], columnName: (d) => `dimension ${d}` });
  const hole = (r, d) => r === 1 && gone(scene.token, d);
  heat.show(closeUp, { blank: hole, shade: hole });
  return [
    h("p", { class: "pipe-fact" }, `Of ${COUNT.format(dropped.data.length)} numbers, `, h("b", null, COUNT.format(count)), ` (${PERCENT.format(share)}) are 0 in this draw; the others are times ${shown(1 / (1 - scene.step.facts.shown_p))}.`),
    h("section", { class: "pipe-picture" }, h("h3", null, `${nameOf(scene)}, the first ${closeUp.cols} dimensions: hatched where a number was dropped`), scene.keep(heat)),
    strips(scene, "Dropped", dropped, { title: "All tokens in this draw, grey where a number was dropped", blank: gone, limit: limitOf(dropped) }),
  ];
}

/** Some pairs of the chosen token as clock hands, before and after. */
function drawRotation(scene) {
  const { step, token } = scene;
  const angles = valueOf(scene, "angles");
  const has = Boolean(step.values.queries);
  const heads = has ? step.values.queries.shape[0] : 1;
  const head = Math.min(scene.head, heads - 1);
  const pairs = angles.cols;
  const [before, after] = has
    ? [row(valueOf(scene, "queries", head), token), row(valueOf(scene, "queries_turned", head), token)]
    : [null, null];
  const channels = (i) => (step.facts.interleaved ? [2 * i, 2 * i + 1] : [i, i + pairs]);
  const chosen = [...new Set(Array.from({ length: Math.min(8, pairs) }, (_, i, list = Math.min(8, pairs)) => Math.round((i * (pairs - 1)) / Math.max(1, list - 1))))];
  const dials = chosen.map((i) => {
    const [a, b] = channels(i);
    const hand = has ? [before[a], before[b]] : [1, 0];
    const turned = has ? [after[a], after[b]] : [Math.cos(row(angles, token)[i]), Math.sin(row(angles, token)[i])];
    return dial(`pair ${i}`, row(angles, token)[i], hand, turned);
  });
  const pictures = [];
  if (has && heads > 1) {
    pictures.push(h("div", { class: "toolbar" }, select({
      label: "Head of the first block", value: String(head), options: Array.from({ length: heads }, (_, i) => [String(i), `query head ${i}`]), onChange: (value) => scene.chooseHead(Number(value)),
    })));
  }
  pictures.push(h("section", { class: "pipe-picture" },
    h("h3", null, has ? `The query of ${nameOf(scene)} at position ${token}: pairs before (grey) and after (blue)` : `Pairs of a vector at position ${token}: before (grey) and after (blue)`),
    token === 0 ? h("p", { class: "note" }, "Position 0 is not turned: choose another token.") : null,
    h("div", { class: "pipe-dials" }, dials)));
  if (has) {
    pictures.push(parts(scene, "The whole query", ["query", "turned"], [before, after]));
    const size = (vector) => Math.sqrt(vector.reduce((sum, number) => sum + number * number, 0));
    pictures.push(h("p", { class: "pipe-fact" }, "Turning changes no length: ", h("b", null, shown(size(before))), " before, ", h("b", null, shown(size(after))), " after."));
    const same = twins(scene, valueOf(scene, "queries_turned", head), "turned queries");
    if (same) pictures.push(same);
  }
  const heat = heatMap({
    label: "Angles", unit: "radians", rowLabels: true, axes: ["pair", "position"], cellHeight: Math.min(20, heightFor(angles.rows)),
    rowName: (t) => `position ${t}`, rowLabel: String, columnName: (i) => `pair ${i}`, onPick: (t) => scene.choose(t),
  });
  heat.show(angles, { limit: Math.PI, marks: [{ row: token }] });
  pictures.push(h("section", { class: "pipe-picture" }, h("h3", null, "Angle of each pair at each position, modulo one turn"), scene.keep(heat)));
  return pictures;
}

function dial(name, angle, before, after) {
  const size = 76;
  const canvas = h("canvas", { "aria-hidden": "true" });
  const colours = palette();
  const context = fit(canvas, size, size);
  const reach = size / 2 - 4;
  const longest = Math.max(Math.hypot(...before), Math.hypot(...after)) || 1;
  context.translate(size / 2, size / 2);
  context.strokeStyle = colours.line;
  context.beginPath();
  context.arc(0, 0, reach, 0, 2 * Math.PI);
  context.stroke();
  const start = -Math.atan2(before[1], before[0]);
  context.fillStyle = colours["accent-soft"];
  context.beginPath();
  context.moveTo(0, 0);
  context.arc(0, 0, reach * 0.55, start, start - angle, angle > 0);
  context.fill();
  for (const [[x, y], colour, line] of [[before, colours.muted, 2], [after, colours.accent, 2.5]]) {
    context.strokeStyle = colour;
    context.lineWidth = line;
    context.lineCap = "round";
    context.beginPath();
    context.moveTo(0, 0);
    context.lineTo((x / longest) * reach, (-y / longest) * reach);
    context.stroke();
  }
  return h("figure", { class: "pipe-dial" }, canvas, h("figcaption", null, h("b", null, name), ` ${shown(angle)} rad`));
}

function drawBias(scene) {
  const { step, walk, token } = scene;
  const heads = step.values.bias.shape[0];
  const head = Math.min(scene.head, heads - 1);
  const bias = valueOf(scene, "bias", head);
  const { causal } = step.facts;
  const heat = heatMap({
    label: "Bias", unit: "added to the score", rowLabels: true, axes: ["key", "query"], cellHeight: heightFor(bias.rows),
    rowName: (t) => walk.tokens[t].text, columnName: (t) => `key ${walk.tokens[t].text} at position ${t}`, onPick: (t) => scene.choose(t),
  });
  heat.show(bias, { marks: [{ row: token }], blank: causal ? (i, j) => j > i : null });
  return [
    h("div", { class: "toolbar" }, select({
      label: "Head", value: String(head), options: Array.from({ length: heads }, (_, i) => [String(i), `head ${i}`]), onChange: (value) => scene.chooseHead(Number(value)),
    })),
    h("section", { class: "pipe-picture" }, scene.keep(heat)),
  ];
}

function drawHead(scene) {
  const { walk, step, token } = scene;
  const { likeliest, next } = step.facts;
  const most = likeliest[token][0]?.chance ?? 1;
  const following = walk.tokens[token + 1];
  const guesses = likeliest[token].map((guess) => {
    const bar = h("i");
    bar.style.width = `${(100 * (guess.chance ?? 0)) / most}%`;
    return h("li", { class: following?.id === guess.id ? "pipe-right" : null }, chip(guess), h("span", { class: "pipe-bar" }, bar), h("span", { class: "pipe-value" }, percent(guess.chance)));
  });
  const soFar = walk.tokens.slice(Math.max(0, token - 7), token + 1);
  const rows = walk.tokens.map((shownToken, t) => h("tr", { "aria-current": t === token ? "true" : null },
    h("td", null, h("button", { type: "button", class: "link pipe-row", onClick: () => scene.choose(t) }, shownToken.text)),
    h("td", null, chip(likeliest[t][0]), ` ${percent(likeliest[t][0].chance)}`),
    h("td", null, t + 1 < walk.tokens.length ? [chip(walk.tokens[t + 1]), ` ${percent(next[t])}`] : "—")));
  return [h("div", { class: "grid-2" },
    h("section", { class: "pipe-picture" },
      h("h3", null, "What may come next"),
      h("p", { class: "pipe-sofar" }, token > 7 ? "… " : "", soFar.map((each) => chip(each)), " → ?"),
      h("ol", { class: "pipe-guesses" }, guesses),
      following ? h("p", { class: "note" }, `In this text ${nameOf(scene, token + 1)} follows, to which the model gives ${percent(next[token])}.`) : h("p", { class: "note" }, "Here the text ends.")),
    h("section", { class: "pipe-picture" },
      h("h3", null, "At every position"),
      h("div", { class: "scroll pipe-table-scroll" }, h("table", null,
        h("thead", null, h("tr", null, h("th", null, "after"), h("th", null, "likeliest"), h("th", null, "what follows"))), h("tbody", null, rows)))))];
}

function percent(chance) {
  if (chance === null || chance === undefined) return "none";
  return (chance >= 0.001 ? PERCENT : SMALL).format(chance);
}

function drawGradient(scene) {
  const { walk, step } = scene;
  const { rows, rows_a_bin: wide, tied } = step.facts;
  const norms = valueOf(scene, "norms");
  const from = (bin) => bin * wide;
  const heat = heatMap({
    label: "Gradient of the rows", unit: "norm of the gradient", scale: "sequential", cellHeight: 36, axes: ["row of the table"],
    rowName: () => "", columnName: (bin) => (wide > 1 ? `largest of rows ${COUNT.format(from(bin))} to ${COUNT.format(Math.min(from(bin) + wide, walk.vocab_size) - 1)}` : `row ${bin}`),
  });
  heat.show(norms, { limit: limitOf(norms), blank: (_, bin) => norms.data[bin] === 0, marks: [{ column: Math.floor(walk.tokens[scene.token].id / wide) }] });
  const most = Math.max(...rows.map((each) => each.norm), 1e-12);
  const list = rows.map((each) => {
    const bar = h("i");
    bar.style.width = `${(100 * each.norm) / most}%`;
    const at = walk.tokens.findIndex((token) => token.id === each.id);
    return h("tr", { "aria-current": each.id === walk.tokens[scene.token].id ? "true" : null },
      h("td", null, chip(each, { onClick: () => scene.choose(at), pressed: false, title: `ID ${each.id}` })),
      h("td", { class: "number" }, COUNT.format(each.times)),
      h("td", { class: "pipe-wide" }, h("span", { class: "pipe-bar" }, bar)),
      h("td", { class: "number" }, shown(each.norm)),
      tied ? [h("td", { class: "number" }, shown(each.through_rows)), h("td", { class: "number" }, shown(each.through_head))] : null);
  });
  return [
    h("section", { class: "pipe-picture" }, h("h3", null, `All ${COUNT.format(walk.vocab_size)} rows of the table`),
      h("p", { class: "note" }, `The frame marks ${nameOf(scene)}. ${tied ? "No row is left out." : "Where the strip is empty, no gradient arrives."}`), scene.keep(heat)),
    h("section", { class: "pipe-picture" }, h("h3", null, "The rows of this text"),
      h("div", { class: "scroll pipe-table-scroll" }, h("table", { class: "pipe-rows" },
        h("thead", null, h("tr", null, h("th", null, "token"), h("th", { class: "number" }, "times"), h("th", { class: "pipe-wide" }), h("th", { class: "number" }, "norm"),
          tied ? [h("th", { class: "number" }, "by look-up"), h("th", { class: "number" }, "by head")] : null)),
        h("tbody", null, list))),
      tied ? h("p", { class: "note" }, "The two parts are vectors that may point different ways, so their norms do not add up to the norm of the sum.") : null),
  ];
}
