/** What to look at first in a table, each as a picture with its threshold. */

import { chart, chartLegend, histogram } from "../charts/chart.js";
import { short } from "../charts/numbers.js";
import { h, token, visibleText } from "../dom.js";
import { VERDICTS, VERDICT_COLOURS } from "../map/groups.js";
import { spread } from "../map/viewport.js";

/** @import { Child, Closable, Health, Point, Theme, ViewContext } from "../types" */
/** @import { Rule } from "../charts/chart.js" */

/**
 * @typedef {object} Columns numbers of each row
 * @property {string[]} texts
 * @property {Float32Array} norms
 * @property {Uint8Array} verdicts index in `VERDICTS` of each row
 * @property {Float32Array} xs place on the map
 * @property {Float32Array} ys
 *
 * @typedef {(values: Float32Array, range: Point, colour: string) => Rule[]} Marked the chosen token on a scale
 * @typedef {Closable & {redraw: () => void}} Picture
 */

const BINS = 60;
const ENDS = 0.0005; // share of the values beyond each end of a histogram's scale
const DOTS = 6000; // most rows that the map draws
const HEIGHT = 150;
const NAMED = 5; // rows that are named below the map

/**
 * Create the four pictures.
 * @param {Health} health
 * @param {Columns} columns
 * @param {ViewContext} context
 * @returns {Picture}
 */
export function pictures(health, columns, context) {
  const marked = markOf(context, columns.texts);
  const parts = [rowsOnMap(health, columns, context), normsPicture(health, columns, marked),
    duplicatesPicture(health, columns)];
  const [map, norms, near] = parts.map((part) => part.element);
  return {
    element: h("div", { class: "grid-2 pictures" }, map, sharedPicture(health), norms, near),
    redraw: () => parts.forEach((part) => part.redraw()),
    close: () => parts.forEach((part) => part.close()),
  };
}

/**
 * Create the panel of a picture: its subject, what was found in one line, and the picture.
 * @param {Child} title
 * @param {string} found
 * @param {"fine" | "noted" | "fault"} state
 * @param {...Child} children
 */
function panel(title, found, state, ...children) {
  return h("section", { class: `panel picture is-${state}` }, h("h2", null, title),
    h("p", { class: "picture-found" }, found), children);
}

/** @param {number} count @param {string} [what] */
export function rows(count, what = "row") {
  return `${count === 0 ? "no" : count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;
}

/** @param {number | null} share */
export function percent(share) {
  return share === null ? "–" : `${Number((100 * share).toPrecision(share < 0.1 ? 2 : 3))}\u00a0%`;
}

/** Begin a sentence. @param {string} text */
function sentence(text) {
  return text[0].toUpperCase() + text.slice(1);
}

/**
 * Draw all rows on the map, in the colours of their verdicts.
 * @param {Health} health
 * @param {Columns} columns
 * @param {ViewContext} context
 * @returns {Picture}
 */
function rowsOnMap({ verdicts: found, at_fault, under_trained }, { texts, verdicts, xs, ys }, { manifest }) {
  const counts = [found.learned, found.not_learned, found.never_seen, found.cannot_tell].map((each) => each.rows);
  const step = Math.max(1, Math.ceil(xs.length / DOTS));
  const [across, up] = [inRange(xs), inRange(ys)];
  const groups = VERDICTS.map((_, verdict) => ({ verdict, ids: [...verdicts.keys()]
    .filter((id) => verdicts[id] === verdict).filter((_id, place) => place % step === 0) }));
  groups.sort((a, b) => b.ids.length - a.ids.length); // few rows are drawn over many
  const drawn = chart((colours) => ({
    series: groups.map(({ verdict, ids }) => ({
      xs: ids.map((id) => across[id]), ys: ids.map((id) => up[id]), colour: colours.series[VERDICT_COLOURS[verdict]],
      kind: /** @type {const} */ ("dots"),
    })),
    xLabel: "principal component 1", yLabel: "principal component 2",
  }), { height: HEIGHT, label: "Map of the rows, in the colours of their verdicts" });
  const count = counts[1] + counts[2];
  const said = count ? `${sentence(rows(count))} of ${manifest.vocab_size.toLocaleString("en")} not learned or never `
    + `seen (${percent(count / manifest.vocab_size)})` : "All rows differ from untrained ones";
  const key = VERDICTS.map((name, verdict) => ({ name: `${name} ${counts[verdict].toLocaleString("en")}`,
    colour: `var(--s${VERDICT_COLOURS[verdict] + 1})` })).filter((_, verdict) => counts[verdict]);
  const title = ["Rows not learned ", h("a", { class: "picture-more", href: "#map?c=trained" }, "Map")];
  const state = at_fault.includes("rows") ? "fault" : count ? "noted" : "fine";
  const named = under_trained.tokens.filter((each) => each.verdict === "not learned").slice(0, NAMED);
  return { ...drawn, element: panel(title, said, state, chartLegend(key), drawn.element,
    h("p", { class: "chips" }, named.map(({ id }) => token(texts[id], { id })))) };
}

/** Move the few values outside of the usual range to its ends. @param {Float32Array} values */
function inRange(values) {
  const [low, high] = spread(values.filter(Number.isFinite), 2 * ENDS);
  return values.map((value) => Math.min(high, Math.max(low, value)));
}

/**
 * Draw the norms, and from where on a norm would be apart from the others.
 * @param {Health} health
 * @param {Columns} columns
 * @param {Marked} marked
 * @returns {Picture}
 */
function normsPicture({ norm_outliers: groups, limits: { gap } }, { norms, verdicts }, marked) {
  const isOutlier = new Set(groups.flatMap(({ ids }) => ids));
  const isUnlearned = (/** @type {number} */ id) => verdicts[id] === 1 || verdicts[id] === 2;
  const usual = norms.filter((norm, id) => norm > 0 && Number.isFinite(norm) && !isOutlier.has(id) && !isUnlearned(id));
  const [least, most] = usual.reduce(([low, high], norm) => [Math.min(low, norm), Math.max(high, norm)],
    [Infinity, -Infinity]);
  const limits = usual.length ? [least / gap, most * gap] : [];
  const finite = norms.filter((norm) => norm > 0 && Number.isFinite(norm));
  /** @type {Point} */
  const range = [Math.min(...limits, finite.reduce((a, b) => Math.min(a, b), Infinity)),
    Math.max(...limits, finite.reduce((a, b) => Math.max(a, b), 0))];
  const count = groups.reduce((sum, group) => sum + group.rows, 0);
  const drawn = bars("norm", norms, verdicts, range, (colours) => [
    ...limits.map((at) => ({ at, text: "outliers", upright: true, colour: colours.bad })),
    ...marked(norms, range, colours.ink),
  ]);
  const found = count ? `${sentence(rows(count))} with a norm apart from all others`
    : usual.length ? `No learned row is an outlier: norms of ${short(least)} to ${short(most)}`
      : "No row is learned, so none is an outlier";
  return { ...drawn, element: panel("Norms", found, count ? "fault" : "fine", drawn.element) };
}

/** Return an angle in degrees. @param {number} cosine */
function angle(cosine) {
  return (Math.acos(Math.min(1, Math.max(-1, cosine))) * 180) / Math.PI;
}

/**
 * Draw the angle to the nearest row, between equal rows and random ones.
 * @param {Health} health
 * @param {Columns} columns
 * @returns {Picture}
 */
function duplicatesPicture({ nearest, limits, near_duplicates: near, duplicates: equal }, columns) {
  const count = near.rows + equal.rows;
  const angles = Float32Array.from(nearest.cosines, angle);
  const verdicts = Uint8Array.from(nearest.ids, (id) => columns.verdicts[id]);
  const drawn = bars("angle to the nearest row, degrees", angles, verdicts, [0, 90],
    (colours) => [
      { at: angle(limits.nearest), text: "nearly equal", upright: true, colour: colours.bad },
      ...(nearest.by_chance === null ? [] : [{ at: angle(nearest.by_chance), text: "random rows", upright: true,
        colour: colours.muted }]),
    ]);
  const found = count ? `${sentence(rows(count))} equal or nearly equal to another row`
    : "No row is equal or nearly equal to another row";
  return { ...drawn, element: panel("Near duplicates", found, count ? "noted" : "fine",
    h("p", { class: "note" }, `All rows were compared; the picture shows ${rows(nearest.rows)}.`), drawn.element) };
}

/** Draw what all rows share, each share beside the value from which on it is a fault. @param {Health} health */
function sharedPicture({ shared, limits, at_fault: faults }) {
  /** @type {[name: string, key: string, share: number | null, limit: number][]} */
  const bars = [
    ["Shared offset", "offset_share", shared.offset_share, limits.offset],
    ["Largest direction", "component_share", shared.component_share, limits.variance],
    [`Largest dimension (${shared.dimension})`, "dimension_share", shared.dimension_share, limits.variance],
  ];
  const bad = bars.filter(([, key]) => faults.includes(key));
  const found = !shared.is_measured ? "Too few rows to measure"
    : bad.length ? `${bad.map(([name]) => name).join(" and ")} dominate${bad.length === 1 ? "s" : ""}`
      : "No direction dominates the rows";
  return panel("Shared direction", found, bad.length ? "fault" : "fine", h("dl", { class: "shares" }, bars.map(
    ([name, key, share, limit]) => shareBar(name, share ?? 0, limit, faults.includes(key)))),
  h("p", { class: "note" }, "Shares of the squared length of the rows, and of their variance. Above the mark, cosines "
    + "compare little else."));
}

/** @param {string} name @param {number} share @param {number} limit @param {boolean} isFault */
function shareBar(name, share, limit, isFault) {
  const bar = h("i", { class: isFault ? "is-fault" : null });
  bar.style.setProperty("--share", String(share));
  bar.style.setProperty("--limit", String(limit));
  return [h("dt", null, h("span", null, name, " ", h("b", null, percent(share))),
    h("small", null, `fault above ${percent(limit)}`)), h("dd", null, bar)];
}

/**
 * Return the function that marks the chosen token on a scale; it returns nothing if there is none.
 * @param {ViewContext} context
 * @param {string[]} texts
 * @returns {Marked}
 */
export function markOf({ token: chosen }, texts) {
  return (values, [low, high], colour) => {
    const id = chosen.get();
    if (id === null || !Number.isFinite(values[id])) return [];
    const at = Math.min(Math.max(values[id], low), high);
    return [{ at, text: `${visibleText(texts[id])} ${short(values[id])}`, upright: true, colour }];
  };
}

/** Return the range of most values of a histogram. @param {Float32Array} values @returns {Point} */
export function usualRange(values) {
  return spread(values.filter(Number.isFinite), ENDS);
}

/**
 * Draw how many rows have which value; values outside the range are counted at its ends.
 * @param {string} what
 * @param {Float32Array} values
 * @param {Uint8Array | null} verdicts of the rows; null draws all in one colour
 * @param {Point} range
 * @param {(colours: Theme) => Rule[]} rules
 */
export function bars(what, values, verdicts, range, rules) {
  const [low, high] = range[0] === range[1] ? [range[0] - 0.5, range[1] + 0.5] : range;
  /** @param {Float32Array} list */
  const count = (list) => histogram(Float64Array.from(list.filter(Number.isFinite), (value) =>
    Math.min(Math.max(value, low), high)), low, high, BINS);
  const all = count(values);
  const others = verdicts ? [1, 2].map((verdict) => ({ verdict,
    ...count(values.filter((_, place) => verdicts[place] === verdict)) })) : [];
  return chart((colours) => ({
    series: [
      { xs: all.edges, ys: all.counts, colour: colours.series[0], kind: "bars" },
      ...others.map(({ verdict, edges, counts }) => ({ xs: edges, ys: counts,
        colour: colours.series[VERDICT_COLOURS[verdict]], kind: /** @type {const} */ ("bars") })),
    ],
    xLabel: what, yLabel: "rows, logarithmic", yLog: true, yFloor: 0.8, rules: rules(colours),
    read: (i) => [`${what} ${short(all.edges[i])} to ${short(all.edges[i + 1])}: ${rows(all.counts[i])}`,
      ...others.filter(({ counts }) => counts[i]).map(({ verdict, counts }) =>
        `${counts[i].toLocaleString("en")} of them ${VERDICTS[verdict]}`)].join(", "),
  }), { height: HEIGHT, label: `Histogram of the ${what}` });
}
