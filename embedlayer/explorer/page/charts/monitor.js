/** Panels of the view Training for a run with a monitor: rows, losses and logits by the frequency of tokens. */

import { chart, chartLegend } from "./chart.js";
import { short } from "./numbers.js";
import { h } from "../dom.js";

/** @import { Closable, MetricsLine, Monitored } from "../types" */

/** @typedef {{step: number, monitor: Monitored}} Read a line with the numbers of a monitor */
/** @typedef {(monitor: Monitored) => number | null | undefined} Pick one number */
/** @typedef {{title: string, note: string, legend: [string, Pick][], yLabel: string, yLog?: boolean}} Curves */

const DECILES = 10;

/** Deciles that are drawn. @type {[string, number][]} */
const DRAWN = [["rarest decile", 0], ["sixth", 5], ["most frequent", DECILES - 1]];

/** @param {(monitor: Monitored) => (number | null)[]} list @returns {[string, Pick][]} */
const byDecile = (list) => DRAWN.map(([name, place]) => [name, (monitor) => list(monitor)[place]]);

/** @type {Curves[]} */
const CHARTS = [
  {
    title: "Loss by token frequency",
    note: "Mean cross-entropy of the targets, by the decile of their count in the inputs so far.",
    legend: [...byDecile(({ losses }) => losses), ["new tokens", ({ new_loss: loss }) => loss]],
    yLabel: "nats per token",
  },
  {
    title: "Update-to-weight ratio",
    note: "Change of a row by the update over its norm, mean over the rows of the batch. At 1 an update replaces the "
      + "row.",
    legend: byDecile(({ update_ratios: ratios }) => ratios),
    yLabel: "ratio",
    yLog: true,
  },
  {
    title: "Row norms",
    note: "Mean norm of the rows of the batch.",
    legend: byDecile(({ norms }) => norms),
    yLabel: "norm",
  },
  {
    title: "Logits",
    note: "log Z is the logarithm of the sum of exp(logits), mean over the targets; the standard deviation is over the "
      + "vocabulary.",
    legend: [
      ["log Z", ({ log_z: level }) => level],
      ["largest logit", ({ largest_logit: top }) => top],
      ["standard deviation", ({ logit_std: spread }) => spread],
    ],
    yLabel: "logit",
  },
];

/**
 * Draw what a monitor read; null for a run without one.
 * @param {MetricsLine[]} lines
 * @param {(title: string, note: string | null, ...children: Node[]) => HTMLElement} panel
 * @returns {{elements: HTMLElement[], close(): void} | null}
 */
export function monitorPanels(lines, panel) {
  const read = /** @type {Read[]} */ (lines.filter((line) => line.monitor));
  if (!read.length) return null;
  const charts = CHARTS.map((each) => curves(each, read));
  const grid = h("div", { class: "grid-2" }, CHARTS.map(({ title, note, legend }, i) => panel(title, note,
    chartLegend(drawnOf(legend, read).map(([name, , place]) => ({ name, colour: `var(--s${place + 1})` }))),
    charts[i].element)));
  return {
    elements: [notFinite(read, panel), grid],
    close() {
      for (const each of charts) each.close();
    },
  };
}

/**
 * Return the curves with a number at some step, and the place of each, which is its colour.
 * @param {[string, Pick][]} legend
 * @param {Read[]} read
 * @returns {[string, Pick, number][]}
 */
function drawnOf(legend, read) {
  /** @type {[string, Pick, number][]} */
  const all = legend.map(([name, pick], place) => [name, pick, place]);
  return all.filter(([, pick]) => read.some(({ monitor }) => (pick(monitor) ?? null) !== null));
}

/** @param {Curves} curves @param {Read[]} read @returns {Closable} */
function curves({ title, legend, yLabel, yLog = false }, read) {
  const drawn = drawnOf(legend, read);
  return chart((colours) => ({
    series: [{ xs: read.map(({ step }) => step), ys: read.map(() => NaN), colour: colours.line },
      ...drawn.map(([, pick, place]) => {
        const points = read.filter(({ monitor }) => isDrawn(pick(monitor), yLog));
        return {
          xs: points.map(({ step }) => step), ys: points.map(({ monitor }) => Number(pick(monitor))),
          colour: colours.series[place],
        };
      })],
    xLabel: "step", yLabel, yLog,
    read: (i) => `step ${read[i].step.toLocaleString("en")}: `
      + drawn.map(([name, pick]) => `${name} ${text(pick(read[i].monitor))}`).join(", "),
  }), { height: 220, label: `${title} over steps` });
}

/** @param {number | null | undefined} value @param {boolean} isLog */
function isDrawn(value, isLog) {
  return typeof value === "number" && (!isLog || value > 0);
}

/** @param {number | null | undefined} value */
function text(value) {
  return typeof value === "number" ? short(value) : "no number";
}

/**
 * Name the tokens whose rows or gradients were not finite, and the share of tokens that no input had.
 * @param {Read[]} read
 * @param {(title: string, note: string | null, ...children: Node[]) => HTMLElement} panel
 */
function notFinite(read, panel) {
  const { never_seen: never } = read[read.length - 1].monitor;
  const bad = read.filter(({ monitor }) => monitor.rows_not_finite || monitor.gradients_not_finite);
  return panel("Rows of the table",
    `${(100 * never).toFixed(1)} % of the tokens occurred in no input so far. `
    + (bad.length ? "Rows or gradients with a number that is not finite:"
      : "All rows and gradients that were read are finite."),
    h("ul", null, bad.slice(0, 5).map(({ step, monitor }) => h("li", null, `step ${step.toLocaleString("en")}: `
      + `${monitor.rows_not_finite.toLocaleString("en")} rows (${monitor.tokens_not_finite.join(", ")}), gradients of `
      + `${(monitor.gradients_not_finite ?? 0).toLocaleString("en")} (${monitor.tokens_of_gradients.join(", ")})`))));
}
