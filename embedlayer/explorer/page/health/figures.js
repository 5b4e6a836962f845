/** All figures of a table: what was measured, by chance and from which value on it is a fault; and the rows by kind. */

import { chart } from "../charts/chart.js";
import { short } from "../charts/numbers.js";
import { definitions, empty, h, scroller, select, token } from "../dom.js";
import { bars, markOf, percent, usualRange } from "./pictures.js";

/** @import { Child, Closable, Health, RowGroups, Spectrum, UnderTrainedToken, ViewContext } from "../types" */
/** @import { Picture } from "./pictures.js" */
/** @typedef {[name: string, value: number | string, note: string]} Tile a measure beside its value by chance */

const SHOWN = 100;

/** @type {Record<string, string>} names of the tiles of the whole table, by measure */
const TILES = {
  dimension_share: "Largest dimension", component_share: "Largest direction", offset_share: "Shared offset",
  constant: "Constant columns", rank: "Directions", scale: "Scale", loss: "Loss",
};

/**
 * Create the figures, folded.
 * @param {Health} health
 * @param {Spectrum} spectrum
 * @param {{texts: string[], noise: Float32Array, verdicts: Uint8Array, counts: Float32Array | null}} columns
 * @param {ViewContext} context
 * @returns {Picture}
 */
export function figures(health, spectrum, { texts, noise, verdicts, counts }, context) {
  const { manifest, state } = context;
  const shares = spectrumChart(spectrum);
  const marked = markOf(context, texts);
  const [least, most] = usualRange(noise);
  const { noise_share: limit } = health.verdicts.random;
  /** @type {[number, number]} */
  const range = [least, Math.max(most, (limit ?? most) * 1.05)];
  const noiseChart = bars("noise share", noise, verdicts, range, (colours) => [
    ...(limit === null ? [] : [{ at: limit, text: "random rows", upright: true, colour: colours.bad }]),
    ...marked(noise, range, colours.ink)]);
  const onToggle = () => state.set({ figures: element.open ? "open" : null });
  const element = h("details", { class: "figures", open: state.get("figures") === "open", onToggle },
    h("summary", null, "All figures"),
    tiles(rowTiles(health, manifest.vocab_size)),
    tiles([...sharedTiles(health), ...measures(health, spectrum, manifest.embed_dim)], health.at_fault),
    h("div", { class: "grid-2" },
      panel("Noise share of the rows", "Share of a row that lies outside of the directions that the rows of this table "
        + "prefer. Rows of random numbers are at the mark or to its right.", noiseChart.element),
      panel("Spectrum of all rows", "Share of the variance along each principal component, largest first, rows that "
        + `are not learned included. Effective rank: ${spectrum.effective_rank.toFixed(0)} of ${manifest.embed_dim} `
        + `dimensions (random numbers: ${spectrum.chance.effective_rank.toFixed(0)}).`, shares.element),
      kindsPanel(health), unlearnedPanel(health, counts, context)));
  return {
    element,
    redraw: () => noiseChart.redraw(),
    close: () => [shares, noiseChart].forEach((each) => each.close()),
  };
}

/** @param {string} title @param {Child} note @param {...Child} children */
export function panel(title, note, ...children) {
  return h("section", { class: "panel" }, h("h2", null, title), h("p", { class: "note" }, note), children);
}

/**
 * Show measures; those that are faults have another border.
 * @param {Tile[]} items
 * @param {string[]} faults measures that are faults
 */
function tiles(items, faults = []) {
  const list = definitions("tiles", items.map(([name, value, note]) =>
    [name, typeof value === "number" ? tileNumber(value) : value, h("small", null, note)]));
  items.forEach(([name], i) =>
    list.children[i].classList.toggle("is-fault", faults.some((each) => TILES[each] === name)));
  return list;
}

/**
 * Return the numbers of rows with each finding.
 * @param {Health} health
 * @param {number} vocabSize
 * @returns {Tile[]}
 */
function rowTiles(health, vocabSize) {
  const [cone] = health.under_trained.cones;
  const contrast = cone?.contrast ? `; contrast ${cone.contrast.toFixed(1)}, clusters have 1` : "";
  /** @type {Tile[]} */
  const items = [
    ["Learned", health.verdicts.learned.rows, `${percent(health.verdicts.learned.rows / vocabSize)} of the rows`],
    ["Not learned", health.verdicts.not_learned.rows, `as random rows, or in a narrow cone${contrast}`],
    ["Never seen", health.verdicts.never_seen.rows, "no training text has their tokens"],
    ["Zero", health.zero_rows.rows, "all values are 0"],
    ["NaN or infinity", health.nonfinite_rows.rows, "invalid values"],
    ["Duplicates", health.duplicates.rows, groupsNote(health.duplicates)],
    ["Nearly equal", health.near_duplicates.rows, `within 1 %; ${groupsNote(health.near_duplicates)}`],
  ];
  const undecided = health.verdicts.cannot_tell.rows;
  if (undecided) items.splice(3, 0, ["Cannot tell", undecided, "learned or not, see below"]);
  if (health.never_touched) items.push(["Unchanged", health.never_touched.rows, "as before training"]);
  return items;
}

/**
 * Return what all rows share, and what the run learned: each with the value from which on it is a fault.
 * @param {Health} health
 * @returns {Tile[]}
 */
function sharedTiles({ shared, limits, loss }) {
  const learned = shared.learned_only ? ` of the ${shared.rows.toLocaleString("en")} learned rows` : "";
  const ofVariance = `of the variance${learned}; a fault above ${percent(limits.variance)}`;
  /** @param {number | null} share @param {string} note @returns {[string, string]} */
  const measured = (share, note) => (shared.is_measured ? [percent(share), note] : ["–", "too few rows"]);
  /** @type {Tile[]} */
  const items = [
    [TILES.dimension_share, ...measured(shared.dimension_share, `dimension ${shared.dimension}, ${ofVariance}`)],
    [TILES.component_share, ...measured(shared.component_share, `first principal component, ${ofVariance}`)],
    [TILES.offset_share, ...measured(shared.offset_share,
      `of the squared length${learned}, the mean row; a fault above ${percent(limits.offset)}`)],
    [TILES.constant, shared.is_measured ? shared.constant.length : "–", "the same number in all rows"],
    [TILES.rank, shared.is_measured ? shared.rank : "–",
      `of ${shared.most_rank} with variance, in a sample; not decided below ${percent(limits.rank)}`],
    [TILES.scale, shared.scale === null ? "–" : short(shared.scale),
      `root mean square of the numbers; a fault outside ${limits.scale.map(power).join(" to ")}`],
  ];
  if (loss) {
    items.push([TILES.loss, loss.validation_loss.toFixed(2),
      `nats per token on held-out text, as recorded; frequencies alone give ${loss.unigram_entropy.toFixed(2)}`]);
  }
  return items;
}

/** Write a power of ten. @param {number} value */
function power(value) {
  return value.toExponential(0).replace("e+", "e");
}

/** @param {RowGroups} list */
function groupsNote({ groups }) {
  return `${groups ? `in ${groupCount(groups)}; ` : ""}by chance 0`;
}

/** @param {number} groups */
export function groupCount(groups) {
  return groups === 1 ? "one group" : `${groups.toLocaleString("en")} groups`;
}

/**
 * Return the measures of the geometry, each beside its value for random numbers.
 * @param {Health} health
 * @param {Spectrum} spectrum
 * @param {number} embedDim
 * @returns {Tile[]}
 */
function measures({ nearest, spelling }, spectrum, embedDim) {
  const { chance } = spectrum;
  /** @type {Tile[]} */
  const items = [
    ["Effective rank", spectrum.effective_rank, `of ${embedDim}; by chance ${chance.effective_rank.toFixed(0)}`],
    ["Isotropy", spectrum.isotropy, `by chance ${chance.isotropy.toFixed(3)}`],
    ["Mean cosine", spectrum.mean_cosine, `of two rows; by chance ${aroundZero(short(chance.mean_cosine_deviation))}`],
  ];
  if (nearest.median !== null && nearest.by_chance !== null) {
    items.push(["Nearest cosine", nearest.median, `median; by chance ${nearest.by_chance.toFixed(3)}`]);
  }
  if (spelling && spelling.cosine !== null && spelling.error !== null) {
    items.push(["Spelling variants", spelling.cosine,
      `cosine of ${spelling.pairs.toLocaleString("en")} pairs (dog, dogs); by chance `
      + aroundZero(spelling.error.toFixed(3))]);
  }
  if (spelling && spelling.unlike !== null) {
    items.push(["Unlike variants", spelling.unlike, "share of the pairs as unlike as unrelated tokens; by chance 1"]);
  }
  return items;
}

/** @param {string} deviation */
function aroundZero(deviation) {
  return `0\u00a0±\u00a0${deviation}`;
}

/** @param {number} value */
function tileNumber(value) {
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return value >= 10 ? value.toFixed(0) : value.toFixed(3);
}

/** @param {Spectrum} spectrum @returns {Closable} */
function spectrumChart({ explained }) {
  const kept = explained.filter((share) => share > 1e-9);
  return chart((colours) => ({
    series: [{ xs: kept.map((_, i) => i + 1), ys: kept, colour: colours.series[0] }],
    xLabel: "component", yLabel: "share of the variance, logarithmic", yLog: true,
    read: (i) => {
      const sum = kept.slice(0, i + 1).reduce((a, b) => a + b, 0);
      return `component ${i + 1}: ${(100 * kept[i]).toPrecision(3)} %, the first ${i + 1} together `
        + `${(100 * sum).toFixed(1)} %`;
    },
  }), { height: 210, label: "Share of the variance along each principal component" });
}

/** @param {Health} health */
function kindsPanel({ under_trained: { by_kind: kinds } }) {
  const note = "Kinds by the tokenizer. Unreachable tokens are never the result of encoding a text.";
  if (!kinds.length) {
    return panel("Kinds of tokens", note, empty("Kinds are unknown", "This source has no tokenizer."));
  }
  const rows = kinds.map(({ kind, rows: count, under_trained: under }) => {
    const share = under ? `${under.toLocaleString("en")} · ${((100 * under) / count).toFixed(0)} %` : "–";
    return h("tr", null, h("th", { scope: "row" }, kind),
      h("td", { class: "number" }, count.toLocaleString("en")), h("td", { class: "number" }, share));
  });
  return panel("Kinds of tokens", note, scroller("Kinds of tokens", "scroll",
    table([["kind", false], ["rows", true], ["not learned", true]], h("tbody", null, rows))));
}

/** @param {[name: string, isNumber: boolean][]} columns @param {HTMLElement} body */
function table(columns, body) {
  const head = columns.map(([name, isNumber]) => h("th", { scope: "col", class: isNumber ? "number" : null }, name));
  return h("table", null, h("thead", null, h("tr", null, head)), body);
}

/**
 * List the rows that are not learned or were never seen.
 * @param {Health} health
 * @param {Float32Array | null} counts
 * @param {ViewContext} context
 */
function unlearnedPanel({ under_trained: { tokens, rows, explanation } }, counts, { state }) {
  const reasons = explanation.split("\n").map((line) => [line, h("br")]).flat().slice(0, -1);
  if (!tokens.length) return panel("Rows not learned", reasons);
  const kinds = ["all", ...new Set(tokens.flatMap((each) => each.kind || []))];
  const body = h("tbody");
  const note = h("p", { class: "note" });
  const fill = () => {
    const kind = state.get("kind", "all");
    const chosen = tokens.filter((each) => kind === "all" || each.kind === kind);
    note.textContent = chosen.length > SHOWN
      ? `The first ${SHOWN} of ${chosen.length.toLocaleString("en")}${tokens.length < rows ? " listed" : ""}.` : "";
    body.replaceChildren(...chosen.slice(0, SHOWN).map((each) => unlearnedRow(each, counts)));
  };
  const choice = select({
    label: "Kind", options: kinds.map((name) => [name, name]), value: state.get("kind", "all"),
    onChange: (value) => {
      state.set({ kind: value === "all" ? null : value });
      fill();
    },
  });
  fill();
  /** @type {[string, boolean][]} */
  const columns = [["token", false], ["ID", true], ["kind", false], ["score", true], ["norm", true]];
  if (counts) columns.push(["occurrences", true]);
  return panel("Rows not learned", reasons,
    h("div", { class: "toolbar" }, kinds.length > 2 ? choice : null, note),
    scroller("Rows not learned", "scroll list-scroll", table(columns, body)));
}

/** @param {UnderTrainedToken} each @param {Float32Array | null} counts */
function unlearnedRow({ id, text, kind, score, norm }, counts) {
  const number = { class: "number" };
  return h("tr", null, h("td", null, token(text, { of: id })), h("td", number, id), h("td", null, kind ?? ""),
    h("td", number, score.toFixed(3)), h("td", number, norm.toFixed(3)),
    counts ? h("td", number, counts[id].toLocaleString("en")) : null);
}

