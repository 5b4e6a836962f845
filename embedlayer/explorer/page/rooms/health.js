import { chart, histogram, key } from "../chart.js";
import { empty, h, select, token } from "../dom.js";
import { short } from "../lines.js";
import { spread } from "../map/view.js";

/** What is wrong with a table, and how it uses its dimensions. */
export const room = {
  id: "health",
  title: "Health",
  sentence: "Which rows training has reached and which it has not, and how the table uses its dimensions.",
  needs: ["vectors"],
  open,
};

const SHOWN = 100;

/** @param {HTMLElement} element */
async function open(element, context) {
  const { data, manifest, state } = context;
  const [found, shares, normBytes, scoreBytes, frequencyBytes] = await Promise.all([
    data.load("health"), data.load("spectrum"), data.load("norms"), data.load("scores"),
    manifest.has.includes("frequency") ? data.load("frequencies") : null,
  ]);
  const norms = new Float32Array(normBytes);
  const scores = new Float32Array(scoreBytes);
  const seen = frequencyBytes ? new Float32Array(frequencyBytes) : null;
  const isUnder = (id) => scores[id] > found.under_trained.threshold;
  const charts = [];
  const add = (made) => { charts.push(made); return made.element; };
  element.replaceChildren(
    tiles(found, shares, manifest),
    h("div", { class: "grid-2" },
      h("section", { class: "panel" }, h("h2", null, "How long the rows are"),
        h("p", { class: "note" }, "Euclidean norms. Length alone does not tell trained rows from others: in tied tables the untouched can be the longest."),
        key([{ name: "all rows", colour: "var(--s1)" }, { name: "under-trained", colour: "var(--s2)" }]),
        add(bars(norms, isUnder, context, "norm"))),
      h("section", { class: "panel" }, h("h2", null, "How little each row has learned"),
        h("p", { class: "note" }, "Rows that were only ever pushed, never told apart, point the same way: a tight cone. The score is 1 on its axis and 0 at its edge."),
        key([{ name: "all rows", colour: "var(--s1)" }, { name: "under-trained", colour: "var(--s2)" }]),
        add(bars(scores, isUnder, context, "score", { at: found.under_trained.threshold, text: "edge of the cone" }))),
      h("section", { class: "panel" }, h("h2", null, "How the variance is spread"),
        h("p", { class: "note" }, `Share of the variance along each principal direction, widest first. Effective rank: ${shares.effective_rank.toFixed(0)} of ${manifest.embedDim} dimensions.`),
        add(spectrum(shares, context))),
      kinds(found)),
    list(found, seen, manifest, state),
    others(found));
  return { close() { for (const each of charts) each.close(); } };
}

function tiles(found, shares, manifest) {
  const under = found.under_trained.rows;
  const percent = (count) => `${((100 * count) / manifest.vocabSize).toFixed(count && count / manifest.vocabSize < 0.001 ? 2 : 1)} % of the rows`;
  const items = [
    ["Under-trained", under, percent(under)],
    ["Zero", found.zero_rows.rows, "never filled"],
    ["NaN or infinity", found.nonfinite_rows.rows, "would spoil a batch"],
    ["Duplicates", found.duplicates.rows, `in ${found.duplicates.groups.toLocaleString("en")} groups`],
  ];
  if (found.never_touched) items.push(["Never touched", found.never_touched.rows, "as before training"]);
  items.push(["Effective rank", shares.effective_rank, `of ${manifest.embedDim} dimensions`], ["Isotropy", shares.isotropy, "1 is even"], ["Mean cosine", shares.mean_cosine, "of two rows"]);
  return h("dl", { class: "tiles" }, items.map(([name, value, note]) =>
    h("div", null, h("dt", null, name), h("dd", null, Number.isInteger(value) ? value.toLocaleString("en") : value >= 10 ? value.toFixed(0) : value.toFixed(3), h("small", null, note)))));
}

function bars(values, isUnder, context, what, rule) {
  const finite = values.filter(Number.isFinite);
  let [low, high] = spread(finite, 0.0005);
  if (what === "score") [low, high] = [Math.min(low, -0.2), 1];
  if (high === low) [low, high] = [low - 0.5, high + 0.5];
  const clamped = finite.map((value) => Math.min(Math.max(value, low), high));
  const all = histogram(clamped, low, high, 60);
  const under = histogram(Float32Array.from(values).filter((value, id) => Number.isFinite(value) && isUnder(id)).map((value) => Math.min(Math.max(value, low), high)), low, high, 60);
  return chart(() => {
    const colours = context.theme();
    return {
      series: [{ xs: all.edges, ys: all.counts, colour: colours.series[0], kind: "bars" }, { xs: under.edges, ys: under.counts, colour: colours.series[1], kind: "bars" }],
      xLabel: what, yLabel: "rows, logarithmic", yLog: true, yFloor: 0.8,
      rules: rule ? [{ ...rule, upright: true, colour: colours.muted }] : [],
      read: (i) => `${what} ${short(all.edges[i])} to ${short(all.edges[i + 1])}: ${all.counts[i].toLocaleString("en")} rows, ${under.counts[i].toLocaleString("en")} of them under-trained`,
    };
  }, { height: 210, label: `Histogram of ${what}`, theme: context.theme });
}

function spectrum({ explained }, context) {
  const kept = explained.filter((share) => share > 1e-9);
  return chart(() => ({
    series: [{ xs: kept.map((_, i) => i + 1), ys: kept, colour: context.theme().series[0] }],
    xLabel: "direction", yLabel: "share of the variance, logarithmic", yLog: true,
    read: (i) => `direction ${i + 1}: ${(100 * kept[i]).toPrecision(3)} %, the first ${i + 1} together ${(100 * kept.slice(0, i + 1).reduce((a, b) => a + b, 0)).toFixed(1)} %`,
  }), { height: 210, label: "Share of the variance along each principal direction", theme: context.theme });
}

function kinds(found) {
  const rows = found.under_trained.by_kind;
  const body = rows.length
    ? h("div", { class: "scroll" }, h("table", null, h("thead", null, h("tr", null, h("th", { scope: "col" }, "kind"), h("th", { scope: "col", class: "number" }, "rows"), h("th", { scope: "col", class: "number" }, "under-trained"))),
      h("tbody", null, rows.map((row) => h("tr", null, h("th", { scope: "row" }, row.kind), h("td", { class: "number" }, row.rows.toLocaleString("en")), h("td", { class: "number" }, row.under_trained ? `${row.under_trained.toLocaleString("en")} · ${((100 * row.under_trained) / row.rows).toFixed(0)} %` : "–"))))))
    : empty("Kinds are not known", "They come from the tokenizer, and this source has none.");
  return h("section", { class: "panel" }, h("h2", null, "Which kinds of tokens"), h("p", { class: "note" }, "Kinds as the tokenizer makes them. Unreachable tokens are never the result of encoding a text."), body);
}

/** The under-trained rows, with what speaks for it. */
function list(found, seen, manifest, state) {
  const { tokens, rows, explanation } = found.under_trained;
  const panel = h("section", { class: "panel" });
  const names = ["all", ...new Set(tokens.map((one) => one.kind).filter(Boolean))];
  const choice = select({ label: "Kind", options: names.map((name) => [name, name]), value: state.get("kind", "all"), onChange: (value) => { state.set({ kind: value === "all" ? null : value }); fill(); } });
  const body = h("tbody");
  const note = h("p", { class: "note" });
  const head = ["token", "ID", "kind", "score", "norm", ...(seen ? ["times in the text"] : [])];
  function fill() {
    const kind = state.get("kind", "all");
    const chosen = tokens.filter((one) => kind === "all" || one.kind === kind);
    note.textContent = chosen.length > SHOWN ? `The first ${SHOWN} of ${chosen.length.toLocaleString("en")}${tokens.length < rows ? " listed" : ""}.` : "";
    body.replaceChildren(...chosen.slice(0, SHOWN).map((one) => h("tr", null,
      h("td", null, token(one.text)), h("td", { class: "number" }, one.id), h("td", null, one.kind ?? ""), h("td", { class: "number" }, one.score.toFixed(3)), h("td", { class: "number" }, one.norm.toFixed(3)),
      seen ? h("td", { class: "number" }, seen[one.id].toLocaleString("en")) : null)));
  }
  panel.append(h("h2", null, "Under-trained rows"), h("p", { class: "note" }, explanation));
  if (!tokens.length) return panel;
  fill();
  panel.append(h("div", { class: "toolbar" }, names.length > 2 ? choice : null, note), h("div", { class: "scroll list-scroll" }, h("table", null,
    h("thead", null, h("tr", null, head.map((text, i) => h("th", { scope: "col", class: i === 1 || i > 2 ? "number" : null }, text)))), body)));
  return panel;
}

/** Zero, broken, duplicate and untouched rows, by ID. */
function others(found) {
  const lists = [["Zero rows", found.zero_rows], ["Rows with NaN or infinity", found.nonfinite_rows], ["Never touched", found.never_touched]].filter(([, list]) => list?.rows);
  const parts = lists.map(([name, list]) => h("div", null, h("h3", null, name), h("p", null, listed(list.ids, list.rows))));
  if (found.duplicates.groups) parts.push(h("div", null, h("h3", null, "Equal rows"), h("p", null, found.duplicates.ids.slice(0, 12).map((ids) => `${ids.slice(0, 6).join(" = ")}${ids.length > 6 ? " = …" : ""}`).join("; "), found.duplicates.groups > 12 ? " …" : "")));
  return parts.length ? h("section", { class: "panel others" }, h("h2", null, "Other rows to look at"), parts) : "";
}

function listed(ids, count) {
  return ids.slice(0, 60).join(", ") + (count > 60 ? ` … and ${(count - 60).toLocaleString("en")} more` : "");
}
