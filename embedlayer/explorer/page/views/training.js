/** The view Training: losses and looked-up rows over the steps of a run. */

import { chart, chartLegend } from "../charts/chart.js";
import { monitorPanels } from "../charts/monitor.js";
import { short } from "../charts/numbers.js";
import { definitions, empty, h, scroller, token } from "../dom.js";
import { next } from "../missing.js";

/** @import { Child, Closable, Metrics, MetricsLine, View, ViewContext } from "../types" */

/** @type {View} */
export const view = {
  id: "training",
  title: "Training",
  sentence: "The loss over the run, and the number of rows of the table that each step looked up.",
  needs: ["metrics"],
  open,
};

const NEIGHBORS = 5;

/** @param {HTMLElement} element @param {ViewContext} context */
async function open(element, context) {
  /** @type {Metrics} */
  const metrics = await context.data.load("metrics");
  if (!metrics.lines.length) {
    element.replaceChildren(empty("No step was logged",
      "The run's metrics.jsonl is empty. Continue the run:",
      next(h("code", null, `${context.command} train --resume -o DIR`))));
    return { close() {} };
  }
  const loss = lossChart(metrics);
  const rows = rowsChart(metrics.lines, context.manifest.vocab_size);
  const rate = rateChart(metrics.lines);
  const monitor = monitorPanels(metrics.lines, panel);
  element.replaceChildren(tiles(metrics),
    panel("Loss", "Mean cross-entropy of the next token, in nats. The dashed line is ln V, the loss of a uniform "
      + "prediction: at the first step the loss should be close to it.",
    chartLegend([{ name: "training", colour: "var(--s1)" }, { name: "validation", colour: "var(--s2)" }]),
    loss.element),
    h("div", { class: "grid-2" }, rowsPanel(rows, context.manifest.vocab_size),
      panel("Learning rate", "Linear warm-up, then a cosine decay.", rate.element)),
    ...(monitor ? monitor.elements : []),
    panel("Configuration", null, configuration(metrics)),
    metrics.neighbors_before.length ? neighborsPanel(metrics.neighbors_before, context) : "");
  const charts = [loss, rate, ...(rows ? [rows] : []), ...(monitor ? [monitor] : [])];
  return {
    close() {
      for (const each of charts) each.close();
    },
  };
}

/** @param {string} title @param {string | null} note @param {...Child} children */
function panel(title, note, ...children) {
  return h("section", { class: "panel" }, h("h2", null, title), note ? h("p", { class: "note" }, note) : null,
    children);
}

/** @param {Metrics} metrics */
function tiles({ lines, uniform_loss: uniform }) {
  const first = lines.find((line) => line.step === 0) ?? lines[0];
  const last = validatedLines(lines).at(-1);
  const speeds = lines.flatMap((line) => line.tokens_per_second || []).sort((a, b) => a - b);
  /** @type {[string, string, string][]} */
  const items = [["First loss", first.loss.toFixed(2), `ln V = ${uniform.toFixed(2)} nats`]];
  if (last) {
    items.push(["Validation loss", last.validation_loss.toFixed(3), "nats per token"],
      ["Bits per byte", last.validation_bits_per_byte?.toFixed(3) ?? "", "on the validation split"]);
  }
  items.push(["Steps", lines[lines.length - 1].step.toLocaleString("en"), ""]);
  if (speeds.length) {
    items.push(["Speed", speeds[speeds.length >> 1].toLocaleString("en"), "tokens per second, median"]);
  }
  return definitions("tiles", items.map(([name, value, note]) => [name, value, note ? h("small", null, note) : null]));
}

/** @typedef {MetricsLine & {validation_loss: number}} ValidatedLine */

/** @param {MetricsLine[]} lines */
function validatedLines(lines) {
  return /** @type {ValidatedLine[]} */ (lines.filter((line) => line.validation_loss !== undefined));
}

/** @param {Metrics} metrics @returns {Closable} */
function lossChart({ lines, uniform_loss: uniform }) {
  const trained = lines.filter((line) => line.loss !== undefined);
  const validated = validatedLines(lines);
  const [steps, losses] = [validated.map((line) => line.step), validated.map((line) => line.validation_loss)];
  return chart((colours) => ({
    series: [
      { xs: trained.map((line) => line.step), ys: trained.map((line) => line.loss), colour: colours.series[0] },
      { xs: steps, ys: losses, colour: colours.series[1], width: 2.5 },
      { xs: steps, ys: losses, colour: colours.series[1], kind: "dots" },
    ],
    xLabel: "step", yLabel: "nats per token",
    rules: [{ at: uniform, text: `ln V = ${uniform.toFixed(2)}`, colour: colours.muted }],
    read: (i) => lossText(trained[i], validated),
  }), { height: 300, label: "Training and validation loss over steps" });
}

/** Describe a step with the validation nearest to it. @param {MetricsLine} line @param {ValidatedLine[]} validated */
function lossText(line, validated) {
  /** @param {ValidatedLine} other */
  const distance = (other) => Math.abs(other.step - line.step);
  const [nearest] = [...validated].sort((a, b) => distance(a) - distance(b));
  const validation = nearest
    ? `, validation ${nearest.validation_loss.toFixed(3)} (step ${nearest.step.toLocaleString("en")})` : "";
  return `step ${line.step.toLocaleString("en")}: training ${line.loss.toFixed(3)}${validation}, `
    + `learning rate ${short(line.lr ?? 0)}`;
}

/**
 * Draw the rows looked up in each step; null for a run that did not count them.
 * @param {MetricsLine[]} lines
 * @param {number} vocabSize
 * @returns {Closable | null}
 */
function rowsChart(lines, vocabSize) {
  const counted = lines.filter((line) => (line.rows_touched ?? 0) > 0);
  if (!counted.length) return null;
  const counts = counted.map((line) => line.rows_touched ?? 0);
  return chart((colours) => ({
    series: [{ xs: counted.map((line) => line.step), ys: counts, colour: colours.series[2] }],
    xLabel: "step", yLabel: "rows", zero: true,
    read: (i) => `step ${counted[i].step.toLocaleString("en")}: ${counts[i].toLocaleString("en")} rows, `
      + `${((100 * counts[i]) / vocabSize).toFixed(1)} % of the table`,
  }), { height: 220, label: "Rows of the table that each logged step looked up" });
}

/** @param {Closable | null} rows @param {number} vocabSize */
function rowsPanel(rows, vocabSize) {
  const title = "Rows looked up per step";
  if (!rows) return panel(title, null, empty("Not measured", "This run did not count them. Train again to see them."));
  return panel(title, `Different tokens in the batch of each step, of ${vocabSize.toLocaleString("en")} rows. Only `
    + "these rows are looked up.", rows.element);
}

/** @param {MetricsLine[]} lines @returns {Closable} */
function rateChart(lines) {
  const rates = lines.map((line) => line.lr ?? 0);
  return chart((colours) => ({
    series: [{ xs: lines.map((line) => line.step), ys: rates, colour: colours.series[5] }],
    xLabel: "step", yLabel: "learning rate", zero: true,
    read: (i) => {
      const speed = lines[i].tokens_per_second;
      return `step ${lines[i].step.toLocaleString("en")}: learning rate ${short(rates[i])}`
        + (speed ? `, ${speed.toLocaleString("en")} tokens per second` : "");
    },
  }), { height: 220, label: "Learning rate over steps" });
}

/** @param {Metrics} metrics */
function configuration({ options, made_of: parts }) {
  const items = [...Object.entries(parts), ...Object.entries(options)];
  return definitions("made", items.filter(([, value]) => value !== "" && value !== null).map(([name, value]) =>
    [name.replaceAll("_", " "), typeof value === "number" ? short(value) : String(value)]));
}

/**
 * Show the neighbours of the run's probe tokens before and after training.
 * @param {Metrics["neighbors_before"]} before
 * @param {ViewContext} context
 */
function neighborsPanel(before, context) {
  const head = ["token", "nearest before training", "nearest now"].map((text) => h("th", { scope: "col" }, text));
  const table = h("table", { class: "neighbors" }, h("thead", null, h("tr", null, head)),
    h("tbody", null, before.map((row) => h("tr", null, h("th", { scope: "row" }, token(row.token, { of: row.id })),
      nearestBefore(row.near, context), nearestNow(row.id, context)))));
  return panel("Nearest tokens before and after training",
    "The rows nearest by cosine similarity. Before training they are random. A dot is a space.",
    scroller("Nearest tokens before and after training", "scroll", table));
}

/** @param {number[]} ids -1 for a text that is no token @param {string[]} texts */
function chips(ids, texts) {
  return h("span", { class: "chips" }, ids.map((id, i) => token(texts[i], id < 0 ? {} : { of: id })));
}

/** @param {[string, number][]} near @param {ViewContext} context */
function nearestBefore(near, { data }) {
  const shown = near.slice(0, NEIGHBORS).map(([text]) => text);
  const cell = h("td", null, chips(shown.map(() => -1), shown));
  data.load("tokens").then(({ texts }) =>
    cell.replaceChildren(chips(shown.map((text) => texts.indexOf(text)), shown)));
  return cell;
}

/** @param {number} id @param {ViewContext} context */
function nearestNow(id, { data }) {
  const cell = h("td", null, "…");
  Promise.all([data.load("neighbors", { plus: id, minus: "", topn: NEIGHBORS }), data.load("tokens")])
    .then(([near, { texts }]) => {
      const ids = near.map((/** @type {[number, number]} */ [neighbor]) => neighbor);
      cell.replaceChildren(chips(ids, ids.map((/** @type {number} */ id) => texts[id])));
    })
    .catch((error) => cell.replaceChildren(h("span", { class: "note" }, error.message)));
  return cell;
}
