/** What the token card says about a row: its faults in sentences, its numbers, and lists of other tokens. */

import { definitions, h, token } from "../dom.js";

/** @import { Child, SourceManifest, TableState, TokenFacts } from "../types" */

/** @type {Record<string, string>} a fault in one or two words */
const FAULTS = {
  broken: "NaN or infinity", zero: "Zero", not_learned: "Not learned", never_seen: "Never seen",
  cannot_tell: "Cannot tell",
  unchanged: "Unchanged", duplicate: "Duplicate", at_mean: "At the mean", near_duplicate: "Nearly a duplicate",
  norm: "Norm beyond a gap", unlike_variants: "Unlike its variants",
};
/** @type {Record<TableState, string>} what the card says of a row without faults, by the verdict about its table */
const STATES = { sound: "Sound", faulty: "Table not sound", undecided: "Table not decided" };
const NO_FAULT = "No fault of this row"; // of a table that is not sound, or of which that is not known

/** @param {number | null | undefined} value */
function share(value) {
  if (value === null || value === undefined) return "unknown";
  return value < 1 && value >= 0.9995 ? "more than 99.9 %" : `${(100 * value).toFixed(1)} %`;
}

/** @param {number | null | undefined} value @param {number} [digits] */
function fixed(value, digits = 3) {
  return value === null || value === undefined ? "none" : value.toFixed(digits).replace("-", "−");
}

/** @param {number} value */
const counted = (value) => value.toLocaleString("en");

/** Return the facts in a few words. @param {TokenFacts} facts */
export function summaryOf({ findings, table_state: state, norm_share: below, count_rank: rank }) {
  const parts = [findings ? findings.map((name) => FAULTS[name]).join(", ") : STATES[state]];
  if (below !== null) parts.push(`norm above ${share(below)} of the rows`);
  if (rank !== undefined) parts.push(`frequency rank ${counted(rank)}`);
  return parts.join(" · ");
}

/** Say whether the row is sound, or what is wrong with it. @param {TokenFacts} facts @param {string[]} texts */
export function verdict(facts, texts) {
  const { findings, table_state: state, table_reasons: reasons } = facts;
  const ofTable = reasons.map((reason) => h("p", null, h("b", null, "The table. "), reason));
  if (findings) {
    return h("div", { class: "card-verdict card-faults" }, findings.map((name) =>
      h("p", null, h("b", null, `${FAULTS[name]}. `), sentence(name, facts, texts))), ofTable);
  }
  return h("div", { class: `card-verdict${state === "sound" ? "" : " card-faults"}` },
    h("p", null, h("b", null, `${state === "sound" ? STATES.sound : NO_FAULT}. `), learned(facts)), ofTable);
}

/** Say by which measure a row is learned, or why that is not known. @param {TokenFacts} facts */
function learned({ because, noise_share: noise, nearest, random }) {
  if (because) return because;
  const byNoise = random.noise_share !== null && noise !== null && noise < random.noise_share;
  const [name, value, limit] = byNoise ? ["noise share", noise, `${fixed(random.noise_share, 2)} or more`]
    : ["nearest cosine", nearest, `at most ${fixed(random.nearest, 2)}`];
  return `Learned: its ${name} is ${fixed(value, 2)}, and random rows have ${limit}.`;
}

/** @param {string} fault @param {TokenFacts} facts @param {string[]} texts @returns {Child[]} */
function sentence(fault, { because, equal_rows: equal, near_rows: near }, texts) {
  if (fault === "broken") return ["This row holds NaN or infinity, so it has no cosine with any other."];
  if (fault === "zero") return ["All numbers of this row are 0. That is right for a padding token only."];
  if (fault === "not_learned" || fault === "never_seen" || fault === "cannot_tell") return [because ?? ""];
  if (fault === "unchanged") return ["The row has the direction that it had before training."];
  if (fault === "at_mean") return ["The row is the mean of the others within 1 %, as a resize adds it, untrained."];
  if (fault === "norm") {
    return ["There is a wide gap between its norm and those of the other rows, as if it was multiplied by a factor."];
  }
  if (fault === "unlike_variants") {
    return ["It is as unlike its spelling variants as unrelated tokens, although these are similar to one another."];
  }
  return fault === "duplicate" ? others("The row is equal to ", equal, texts)
    : others("The row differs by 1 % or less from ", near, texts);
}

/** @param {string} words @param {{rows: number, ids: number[]} | null} group @param {string[]} texts */
function others(words, group, texts) {
  if (!group) return [];
  const rest = group.rows - group.ids.length;
  return [words, h("span", { class: "chips" }, group.ids.map((id) => token(texts[id], { id }))),
    rest ? ` and ${counted(rest)} more` : "", "."];
}

/** Show the numbers. @param {TokenFacts} facts @param {SourceManifest} manifest */
export function factList(facts, manifest) {
  const { kind, norm, norm_share: below, count, count_rank: rank, cosine_before: cosine, norm_before: before } = facts;
  /** @type {[string, ...Child[]][]} */
  const entries = [];
  if (kind) entries.push(["Kind", kind]);
  entries.push(["Norm", norm === null ? "unknown" : `${fixed(norm)}, above ${share(below)} of the rows`]);
  if (count !== undefined && rank !== undefined) {
    const times = count === 1 ? "once" : `${counted(count)} times`;
    entries.push(["Frequency", `${times} in the corpus, rank ${counted(rank)} of ${counted(manifest.vocab_size)}`]);
  }
  if (before !== undefined) {
    entries.push(["Before training", `norm ${fixed(before)}; cosine of the row before and after ${fixed(cosine)}`]);
  }
  return definitions("card-facts", entries);
}

/**
 * List tokens with their cosines; each chooses its token.
 * @param {[id: number, cosine: number | null][]} list
 * @param {string[]} texts
 * @param {{showIds?: boolean}} [options]
 */
export function listOf(list, texts, { showIds = false } = {}) {
  return h("ol", { class: "near" }, list.map(([id, cosine]) => {
    const item = h("li", null, h("button", { type: "button", "data-token": id, title: `ID ${id}` }, token(texts[id]),
      h("span", { class: "score" }, showIds ? h("small", null, `#${id} `) : null, fixed(cosine))));
    item.style.setProperty("--share", String(Math.max(0, cosine ?? 0)));
    return item;
  }));
}
