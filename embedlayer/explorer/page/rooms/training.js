import { chart, key } from "../chart.js";
import { empty, h, token } from "../dom.js";
import { short } from "../lines.js";

/** How a run went. */
export const room = {
  id: "training",
  title: "Training",
  sentence: "How the loss fell over the run, and how many rows of the table each step looked up.",
  needs: ["metrics"],
  open,
};

/** @param {HTMLElement} element */
async function open(element, context) {
  const about = await context.data.load("metrics");
  const lines = about.lines;
  if (!lines.length) {
    element.replaceChildren(empty("No step was logged", "The run's metrics.jsonl is empty. Continue it with embedlayer train --resume."));
    return { close() {} };
  }
  const charts = [lossChart(about, context)];
  const touched = lines.filter((line) => line.rows_touched > 0);
  const parts = [tiles(about, context)];
  const loss = h("section", { class: "panel" }, h("h2", null, "Loss"),
    h("p", { class: "note" }, "The mean surprise at the next token, in nats. The dashed line is ln V, which guessing evenly costs: a sound start lies on it."),
    charts[0].legend, charts[0].element);
  parts.push(loss);
  if (touched.length) {
    const rows = rowsChart(touched, context);
    charts.push(rows);
    parts.push(h("div", { class: "grid-2" },
      h("section", { class: "panel" }, h("h2", null, "Rows touched per step"),
        h("p", { class: "note" }, `Different tokens in one step's batch, of ${context.manifest.vocabSize.toLocaleString("en")} rows. Only these rows are looked up.`), rows.element),
      speedPanel(lines, context, charts)));
  } else {
    parts.push(h("div", { class: "grid-2" }, h("section", { class: "panel" }, h("h2", null, "Rows touched per step"),
      empty("Not measured", "This run is older than the measurement. Train again to see it.")), speedPanel(lines, context, charts)));
  }
  parts.push(h("section", { class: "panel" }, h("h2", null, "How it was made"), made(about)));
  if (about.neighbors_before.length) parts.push(neighborsPanel(about.neighbors_before, context));
  element.replaceChildren(...parts);
  return { close() { for (const each of charts) each.close(); } };
}

function tiles({ lines, uniform_loss: uniform }, context) {
  const first = lines.find((line) => line.step === 0) ?? lines[0];
  const validated = lines.filter((line) => line.validation_loss !== undefined);
  const last = validated.at(-1);
  const speeds = lines.filter((line) => line.tokens_per_second > 0).map((line) => line.tokens_per_second).sort((a, b) => a - b);
  const found = [["First loss", first.loss.toFixed(2), `ln V = ${uniform.toFixed(2)} nats`]];
  if (last) found.push(["Validation loss", last.validation_loss.toFixed(3), "nats per token"], ["Bits per byte", last.validation_bits_per_byte?.toFixed(3) ?? "", "on the validation part"]);
  found.push(["Steps", lines.at(-1).step.toLocaleString("en"), ""]);
  if (speeds.length) found.push(["Speed", speeds[speeds.length >> 1].toLocaleString("en"), "tokens per second"]);
  return h("dl", { class: "tiles" }, found.map(([name, value, note]) => h("div", null, h("dt", null, name), h("dd", null, value, note ? h("small", null, note) : null))));
}

function lossChart({ lines, uniform_loss: uniform }, context) {
  const trained = lines.filter((line) => line.loss !== undefined);
  const validated = lines.filter((line) => line.validation_loss !== undefined);
  const series = (colours) => [
    { xs: trained.map((l) => l.step), ys: trained.map((l) => l.loss), colour: colours.series[0] },
    { xs: validated.map((l) => l.step), ys: validated.map((l) => l.validation_loss), colour: colours.series[1], width: 2.5 },
    { xs: validated.map((l) => l.step), ys: validated.map((l) => l.validation_loss), colour: colours.series[1], kind: "dots" },
  ];
  const made = chart(() => {
    const colours = context.theme();
    return {
      series: series(colours), xLabel: "step", yLabel: "nats per token", rules: [{ at: uniform, text: `ln V = ${uniform.toFixed(2)}`, colour: colours.muted }],
      read: (i) => {
        const line = trained[i];
        const nearest = validated.reduce((best, other) => (Math.abs(other.step - line.step) < Math.abs((best?.step ?? Infinity) - line.step) ? other : best), null);
        return `step ${line.step.toLocaleString("en")}: training ${line.loss.toFixed(3)}` + (nearest ? `, validation ${nearest.validation_loss.toFixed(3)} (step ${nearest.step.toLocaleString("en")})` : "") + `, learning rate ${short(line.lr ?? 0)}`;
      },
    };
  }, { height: 300, label: "Training and validation loss over steps", theme: context.theme });
  const legend = key([{ name: "training", colour: "var(--s1)" }, { name: "validation", colour: "var(--s2)" }]);
  return { ...made, legend };
}

function rowsChart(lines, context) {
  return chart(() => ({
    series: [{ xs: lines.map((l) => l.step), ys: lines.map((l) => l.rows_touched), colour: context.theme().series[2] }],
    xLabel: "step", yLabel: "rows", zero: true,
    read: (i) => `step ${lines[i].step.toLocaleString("en")}: ${lines[i].rows_touched.toLocaleString("en")} rows, ${((100 * lines[i].rows_touched) / context.manifest.vocabSize).toFixed(1)} % of the table`,
  }), { height: 220, label: "Rows of the table that each logged step looked up", theme: context.theme });
}

function speedPanel(lines, context, charts) {
  const measured = lines.filter((line) => line.tokens_per_second > 0);
  const made = chart(() => ({
    series: [{ xs: lines.map((l) => l.step), ys: lines.map((l) => l.lr ?? 0), colour: context.theme().series[5] }],
    xLabel: "step", yLabel: "learning rate", zero: true,
    read: (i) => `step ${lines[i].step.toLocaleString("en")}: learning rate ${short(lines[i].lr ?? 0)}` + (lines[i].tokens_per_second ? `, ${lines[i].tokens_per_second.toLocaleString("en")} tokens per second` : ""),
  }), { height: 220, label: "Learning rate over steps", theme: context.theme });
  charts.push(made);
  return h("section", { class: "panel" }, h("h2", null, "Learning rate"), h("p", { class: "note" }, measured.length ? "It warms up, then falls along a cosine." : ""), made.element);
}

function made({ options, made_of: parts }) {
  const items = [...Object.entries(parts), ...Object.entries(options)].filter(([, value]) => value !== "" && value !== null);
  return h("dl", { class: "made" }, items.map(([name, value]) => h("div", null, h("dt", null, name.replaceAll("_", " ")), h("dd", null, typeof value === "number" ? short(value) : String(value)))));
}

/** The run's probe tokens: what was nearest before, and what is nearest now. */
function neighborsPanel(before, context) {
  const body = h("tbody");
  const table = h("table", { class: "neighbors" }, h("thead", null, h("tr", null, ["token", "nearest before training", "nearest now"].map((text) => h("th", { scope: "col" }, text)))), body);
  for (const row of before) {
    const now = h("td", null, "…");
    body.append(h("tr", null, h("th", { scope: "row" }, token(row.token)), h("td", null, h("span", { class: "chips" }, row.near.slice(0, 5).map(([text]) => token(text)))), now));
    Promise.all([context.data.load("neighbors", { plus: row.id, minus: "", topn: 5 }), context.data.load("tokens")])
      .then(([near, { texts }]) => now.replaceChildren(h("span", { class: "chips" }, near.map(([id]) => token(texts[id])))))
      .catch((error) => now.replaceChildren(h("span", { class: "note" }, error.message)));
  }
  return h("section", { class: "panel" }, h("h2", null, "Nearest tokens, before and after"),
    h("p", { class: "note" }, "The rows nearest by cosine. Before training they are nearest by chance. A dot is a space."), h("div", { class: "scroll" }, table));
}
