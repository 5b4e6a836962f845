/** The view Health: untrained and broken rows, and how the table uses its dimensions. */

import { chart, chartLegend, histogram } from "../charts/chart.js";
import { short } from "../charts/numbers.js";
import { definitions, empty, h, scroller, select, token, visibleText } from "../dom.js";
import { spread } from "../map/viewport.js";

/** @import { Child, Closable, Health, Point, RowGroups, RowList, Spectrum } from "../types" */
/** @import { UnderTrainedToken, View, ViewContext } from "../types" */
/** @import { Rule } from "../charts/chart.js" */
/** @typedef {[name: string, value: number | string, note: string]} Tile a measure beside its value by chance */
/** @typedef {(values: Float32Array, range: Point, colour: string) => Rule[]} Marked the chosen token on a scale */

/** @type {View} */
export const view = {
  id: "health",
  title: "Health",
  sentence: "Which rows are untrained or broken, and how the table uses its dimensions.",
  needs: ["vectors"],
  open,
};

const SHOWN = 100;
const SHOWN_IDS = 60;
const SHOWN_GROUPS = 12;
const SHOWN_DUPLICATES = 6;
const BINS = 60;
const ENDS = 0.0005; // share of the values beyond each end of a histogram's scale

/** @type {Record<string, string>} names of the tiles of the whole table, by measure */
const TILES = {
  dimension_share: "Largest dimension", component_share: "Largest direction", offset_share: "Shared offset",
  constant: "Constant columns", rank: "Directions", scale: "Scale", loss: "Loss",
};

/** @param {HTMLElement} element @param {ViewContext} context */
async function open(element, context) {
  const { data, manifest } = context;
  const [health, spectrum, norms, scores, { texts }, counts] = await Promise.all([
    data.load("health"), data.load("spectrum"), data.load("norms"), data.load("scores"), data.load("tokens"),
    manifest.has.includes("frequency") ? data.load("frequencies") : null,
  ]);
  const marked = markOf(context, texts);
  const charts = histograms(health, new Float32Array(norms), new Float32Array(scores), marked);
  const shares = spectrumChart(spectrum);
  element.replaceChildren(
    h("p", { class: `verdict ${health.state}`, role: "status" }, health.summary),
    tiles(rowTiles(health, manifest.vocab_size)),
    tiles([...sharedTiles(health), ...measures(health, spectrum, manifest.embed_dim)], health.at_fault),
    health.state === "faulty" ? otherRows(health) : "",
    h("div", { class: "grid-2" },
      panel("Norms of the rows", "Euclidean norms. The norm alone does not separate trained from untrained rows: in "
        + "tied tables untrained rows can have the largest norm.", underTrainedLegend(), charts.norms.element,
      h("p", { class: "note" }, beyondNote(new Float32Array(norms)))),
      panel("Under-training score", "Rows of tokens that did not occur in training got gradients in one common "
        + "direction, so they form a narrow cone. "
        + (health.under_trained.cones.length ? "The score is 1 on the axis of the cone and 0 at its edge."
          : "There is none here, so no score is above 0: rows nearest to the densest direction score highest."),
      underTrainedLegend(), charts.scores.element),
      panel("Spectrum of the variance", "Share of the variance along each principal component, largest first. "
        + `Effective rank: ${spectrum.effective_rank.toFixed(0)} of ${manifest.embed_dim} dimensions (random numbers: `
        + `${spectrum.chance.effective_rank.toFixed(0)}).`, shares.element),
      kindsPanel(health)),
    underTrainedPanel(health, counts && new Float32Array(counts), context),
    health.state === "faulty" ? "" : otherRows(health));
  return {
    tokenChosen() {
      for (const each of [charts.norms, charts.scores]) each.redraw();
    },
    close() {
      for (const each of [charts.norms, charts.scores, shares]) each.close();
    },
  };
}

/** @param {string} title @param {Child} note @param {...Child} children */
function panel(title, note, ...children) {
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
      `nats per token on held-out text; token frequencies alone give ${loss.unigram_entropy.toFixed(2)}`]);
  }
  return items;
}

/** Write a power of ten. @param {number} value */
function power(value) {
  return value.toExponential(0).replace("e+", "e");
}

/** @param {number | null} share */
function percent(share) {
  return share === null ? "–" : `${Number((100 * share).toPrecision(share < 0.1 ? 2 : 3))}\u00a0%`;
}

/** Say which norms the histogram counts at its ends, and which it leaves out. @param {Float32Array} norms */
function beyondNote(norms) {
  const finite = norms.filter(Number.isFinite);
  const [low, high] = spread(finite, ENDS);
  const beyond = finite.filter((norm) => norm < low || norm > high).length;
  const broken = norms.length - finite.length;
  /** @param {number} count */
  const rows = (count) => (count === 1 ? "1 row" : `${count.toLocaleString("en")} rows`);
  const largest = finite.reduce((most, norm) => Math.max(most, norm), 0);
  const parts = [];
  const most = `the largest norm is ${short(largest)}`;
  if (beyond) parts.push(`${rows(beyond)} beyond the scale counted in the end bars; ${most}.`);
  if (broken) parts.push(`${rows(broken)} with NaN or infinity left out.`);
  return parts.join(" ");
}

/** @param {RowGroups} list */
function groupsNote({ groups }) {
  return `${groups ? `in ${groupCount(groups)}; ` : ""}by chance 0`;
}

/** @param {number} groups */
function groupCount(groups) {
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

function underTrainedLegend() {
  return chartLegend([{ name: "all rows", colour: "var(--s1)" }, { name: "score above 0", colour: "var(--s2)" }]);
}

/**
 * Return the function that marks the chosen token on a scale; it returns nothing if there is none.
 * @param {ViewContext} context
 * @param {string[]} texts
 * @returns {Marked}
 */
function markOf({ token: chosen }, texts) {
  return (values, [low, high], colour) => {
    const id = chosen.get();
    if (id === null || !Number.isFinite(values[id])) return [];
    const at = Math.min(Math.max(values[id], low), high);
    return [{ at, text: `${visibleText(texts[id])} ${short(values[id])}`, upright: true, colour }];
  };
}

/** @param {Health} health @param {Float32Array} norms @param {Float32Array} scores @param {Marked} marked */
function histograms({ under_trained: { threshold, cones } }, norms, scores, marked) {
  const isUnder = Uint8Array.from(scores, (score) => Number(score > threshold));
  const [low] = spread(scores.filter(Number.isFinite), ENDS);
  return {
    norms: histogramChart("norm", norms, isUnder, spread(norms.filter(Number.isFinite), ENDS), marked),
    scores: histogramChart("score", scores, isUnder, [Math.min(low, -0.2), 1], marked,
      cones.length ? { at: threshold, text: "edge of the cone" } : undefined),
  };
}

/**
 * Draw how many rows have which value; values outside the range are counted at its ends.
 * @param {string} what
 * @param {Float32Array} values
 * @param {Uint8Array} isUnder
 * @param {Point} range
 * @param {Marked} marked
 * @param {Pick<Rule, "at" | "text">} [rule]
 */
function histogramChart(what, values, isUnder, range, marked, rule) {
  const [low, high] = range[0] === range[1] ? [range[0] - 0.5, range[1] + 0.5] : range;
  /** @param {Float32Array} list */
  const count = (list) => histogram(list.filter(Number.isFinite).map((value) =>
    Math.min(Math.max(value, low), high)), low, high, BINS);
  const [all, under] = [count(values), count(values.filter((_, id) => isUnder[id]))];
  return chart((colours) => ({
    series: [
      { xs: all.edges, ys: all.counts, colour: colours.series[0], kind: "bars" },
      { xs: under.edges, ys: under.counts, colour: colours.series[1], kind: "bars" },
    ],
    xLabel: what, yLabel: "rows, logarithmic", yLog: true, yFloor: 0.8,
    rules: [...(rule ? [{ ...rule, upright: true, colour: colours.muted }] : []),
      ...marked(values, [low, high], colours.ink)],
    read: (i) => `${what} ${short(all.edges[i])} to ${short(all.edges[i + 1])}: `
      + `${all.counts[i].toLocaleString("en")} rows, ${under.counts[i].toLocaleString("en")} of them above 0`,
  }), { height: 210, label: `Histogram of the ${what}` });
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
function underTrainedPanel({ under_trained: { tokens, rows, explanation } }, counts, { state }) {
  const reasons = explanation.split("\n").map((line) => [line, h("br")]).flat().slice(0, -1);
  if (!tokens.length) return panel("Rows that are not learned", reasons);
  const kinds = ["all", ...new Set(tokens.flatMap((each) => each.kind || []))];
  const body = h("tbody");
  const note = h("p", { class: "note" });
  const fill = () => {
    const kind = state.get("kind", "all");
    const chosen = tokens.filter((each) => kind === "all" || each.kind === kind);
    note.textContent = chosen.length > SHOWN
      ? `The first ${SHOWN} of ${chosen.length.toLocaleString("en")}${tokens.length < rows ? " listed" : ""}.` : "";
    body.replaceChildren(...chosen.slice(0, SHOWN).map((each) => underTrainedRow(each, counts)));
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
  return panel("Rows that are not learned", reasons,
    h("div", { class: "toolbar" }, kinds.length > 2 ? choice : null, note),
    scroller("Rows that are not learned", "scroll list-scroll", table(columns, body)));
}

/** @param {UnderTrainedToken} each @param {Float32Array | null} counts */
function underTrainedRow({ id, text, kind, score, norm }, counts) {
  const number = { class: "number" };
  return h("tr", null, h("td", null, token(text, { of: id })), h("td", number, id), h("td", null, kind ?? ""),
    h("td", number, score.toFixed(3)), h("td", number, norm.toFixed(3)),
    counts ? h("td", number, counts[id].toLocaleString("en")) : null);
}

/** List broken, unchanged and equal rows. @param {Health} health */
function otherRows(health) {
  const { texts } = health;
  const parts = [
    ...idList("Rows with NaN or infinity", health.nonfinite_rows, texts),
    ...idList("Zero rows", health.zero_rows, texts),
    ...groupList("Equal rows", health.duplicates, texts),
    ...idList("Rows at the mean of the others, within 1 %", health.at_mean, texts),
    ...health.norm_outliers.flatMap((group) => idList(normsTitle(group), group, texts)),
    ...idList("Rows unlike their spelling variants, although these are similar", health.spelling?.odd_rows, texts),
    ...groupList("Nearly equal rows, within 1 %", health.near_duplicates, texts),
    ...idList("Unchanged rows", health.never_touched, texts),
  ];
  return parts.length ? h("section", { class: "panel others" }, h("h2", null, "Rows to look at"), parts) : "";
}

/** @param {Health["norm_outliers"][number]} group */
function normsTitle({ low, high, nearest }) {
  const side = low > nearest ? `of ${short(low)} or more, the others at most`
    : `of ${short(high)} or less, the others at least`;
  return `Rows with norms ${side} ${short(nearest)}`;
}

/** @param {number} id @param {Record<string, string>} texts */
function rowChip(id, texts) {
  return token(texts[id] ?? `row ${id}`, { id });
}

/** @param {string} title @param {RowList | null | undefined} list @param {Record<string, string>} texts */
function idList(title, list, texts) {
  if (!list?.rows) return [];
  const rest = list.rows > SHOWN_IDS ? `… and ${(list.rows - SHOWN_IDS).toLocaleString("en")} more` : "";
  return [h("div", null, h("h3", null, `${title}: ${list.rows.toLocaleString("en")}`),
    h("p", { class: "chips" }, list.ids.slice(0, SHOWN_IDS).map((id) => rowChip(id, texts)), rest))];
}

/** @param {string} title @param {RowGroups} list @param {Record<string, string>} texts */
function groupList(title, list, texts) {
  if (!list.groups) return [];
  const rest = list.groups > SHOWN_GROUPS ? h("p", { class: "note" },
    `… and ${(list.groups - SHOWN_GROUPS).toLocaleString("en")} more`) : "";
  const groups = list.ids.slice(0, SHOWN_GROUPS).map((ids) => h("p", { class: "chips" },
    ids.slice(0, SHOWN_DUPLICATES).map((id) => rowChip(id, texts)), ids.length > SHOWN_DUPLICATES ? "…" : ""));
  const count = `${list.rows.toLocaleString("en")} in ${groupCount(list.groups)}`;
  return [h("div", null, h("h3", null, `${title}: ${count}`), groups, rest)];
}
