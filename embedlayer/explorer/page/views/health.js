/** The view Health: whether the table is sound, what to look at as pictures, and all figures, folded. */

import { short } from "../charts/numbers.js";
import { h, token } from "../dom.js";
import { figures, groupCount } from "../health/figures.js";
import { pictures } from "../health/pictures.js";

/** @import { Health, RowGroups, RowList, View, ViewContext } from "../types" */

/** @type {View} */
export const view = {
  id: "health",
  title: "Health",
  sentence: "Whether the table is sound, and which rows to look at.",
  needs: ["vectors"],
  open,
};

const SHOWN_IDS = 60;
const SHOWN_GROUPS = 12;
const SHOWN_DUPLICATES = 6;

/** @param {HTMLElement} element @param {ViewContext} context */
async function open(element, context) {
  const { data, manifest } = context;
  const count = manifest.exported ? "3" : "6"; // those of the map
  const [health, spectrum, norms, noise, verdicts, coordinates, { texts }, counts] = await Promise.all([
    data.load("health"), data.load("spectrum"), data.load("norms"), data.load("noise-shares"), data.load("verdicts"),
    data.load("coordinates", { count }), data.load("tokens"),
    manifest.has.includes("frequency") ? data.load("frequencies") : null,
  ]);
  const size = manifest.vocab_size;
  const ofRows = { texts, verdicts: new Uint8Array(verdicts) };
  const drawn = pictures(health, {
    ...ofRows, norms: new Float32Array(norms),
    xs: new Float32Array(coordinates, 0, size), ys: new Float32Array(coordinates, 4 * size, size),
  }, context);
  const folded = figures(health, spectrum,
    { ...ofRows, noise: new Float32Array(noise), counts: counts && new Float32Array(counts) }, context);
  const [first, ...rest] = health.state === "undecided" ? health.reasons
    : [health.state === "sound" ? "Sound." : "Faulty.", ...health.reasons];
  element.replaceChildren(
    h("div", { class: `verdict ${health.state}`, role: "status" }, h("p", null, first), " ",
      h("ul", null, [...rest, ...health.notes].map((text) => h("li", null, text, " ")))),
    drawn.element, otherRows(health), folded.element);
  return {
    tokenChosen() {
      for (const each of [drawn, folded]) each.redraw();
    },
    close() {
      for (const each of [drawn, folded]) each.close();
    },
  };
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
