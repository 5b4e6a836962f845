/** Scene: one text becomes windows, and windows become a batch of inputs and targets. */

import { h, slider } from "../dom.js";
import { fromRows } from "../math.js";
import { tiles } from "../positions/scene.js";
import { changingPlace, check, claimList, numberTable, timesOf } from "./parts.js";
import { IDS, TEXT, idsOf, windowsOf } from "./windows.js";

/** @import { Child } from "../types" */
/** @import { Claim } from "./parts.js" */
/** @import { Scene, Stage } from "./stage.js" */
/** @import { Cut } from "./windows.js" */
/** @typedef {ReturnType<typeof windowsOf>} Windows */
/** @typedef {Cut & {row: number, hasTargets: boolean}} Settings `row`: of the batch, shown on the strip */

const QUESTION = { tokens: 96, length: 8, stride: 8, batchSize: 1, dropLast: true };
const WORDS_OF_TEXT = TEXT.split(" ");
const [LENGTH, STRIDE, BATCH, MOST] = [4, 4, 8, 8];
const LINE = 20; // tokens in a line of the strip

/** @type {Scene} */
export const scene = {
  id: "batch",
  name: "Text to a batch",
  question: "How does one long text become a batch?",
  sentences: [
    "The IDs of a text are cut into windows of T tokens. The next window starts stride tokens later. B windows are a "
    + "batch: a table of IDs of shape (B, T).",
    "At each of its T places the model predicts the token that follows. So the targets are the same window, one token "
    + "to the right.",
  ],
  words: ["drop_last"],
  task: `Another text has ${QUESTION.tokens} tokens. How many windows of length ${QUESTION.length} with stride `
    + `${QUESTION.stride} does it give? Type the number.`,
  draw,
};

/** @param {Stage} stage */
function draw(stage) {
  /** @type {Settings} */
  const settings = {
    tokens: IDS.length, length: Math.round(stage.number("length", LENGTH, 1, MOST)),
    stride: Math.round(stage.number("stride", STRIDE, 1, MOST)),
    batchSize: Math.round(stage.number("size", BATCH, 1, MOST)), dropLast: stage.text("last", "0") === "0",
    row: Math.round(stage.number("row", 0, 0, MOST - 1)), hasTargets: stage.text("targets") === "1",
  };
  const [strip, tables, claims] = [tape(), tablesOf(stage), claimList(stage)];
  const [formula, reading, numbers] = [fact("formula"), fact("row"), h("div")];
  const answer = h("input", {
    type: "number", min: 0, max: 999, value: stage.text("answer"), onInput: () => update(),
  });
  const update = () => {
    const { length, stride, batchSize, dropLast, row, hasTargets } = settings;
    stage.set({
      length: unless(length, LENGTH), stride: unless(stride, STRIDE), size: unless(batchSize, BATCH),
      last: dropLast ? null : "1", row: row || null, targets: hasTargets ? "1" : null, answer: answer.value || null,
    });
    const windows = windowsOf(settings);
    strip.show(settings, windows);
    tables.show(settings, windows);
    formula.textContent = formulaOf(settings, windows);
    reading.textContent = rowSentence(settings, windows);
    numbers.replaceChildren(counts(settings, windows));
    claims.show(claimsOf(settings, windows));
    stage.judge(...verdict(answer.value));
  };
  const controls = controlsOf(settings, update);
  update();
  const question = `Windows of ${QUESTION.tokens} tokens, length ${QUESTION.length}, stride ${QUESTION.stride}`;
  const legend = h("p", { class: "note" },
    "A bar is a window. The colour changes from batch to batch; a dashed one is left out by drop_last.");
  return [controls, strip.element, legend, formula, h("div", { class: "learn-batch" }, tables.element,
    h("div", { class: "learn-part" }, reading, numbers,
      h("label", { class: "field learn-answer" }, h("span", null, question), answer))), claims.element];
}

/** @param {number} value @param {number} usual */
function unless(value, usual) {
  return value === usual ? null : value;
}

/** @param {string} name */
function fact(name) {
  return h("p", { class: "pipe-fact", "data-value": name });
}

/** Create the sliders and switches. @param {Settings} settings changed by them @param {() => void} update */
function controlsOf(settings, update) {
  /** @type {(name: "length" | "stride" | "batchSize" | "row", label: string, min: number) => HTMLElement} */
  const number = (name, label, min) => slider({
    label, min, max: name === "row" ? MOST - 1 : MOST, value: settings[name], onInput: (value) => {
      settings[name] = value;
      update();
    },
  });
  /** @type {(name: "dropLast" | "hasTargets", label: string) => HTMLElement} */
  const flag = (name, label) => check(label, settings[name], (checked) => {
    settings[name] = checked;
    update();
  });
  return h("div", { class: "learn-controls learn-sliders" }, number("length", "Length T (max_length)", 1),
    number("stride", "Stride", 1), number("batchSize", "Batch size B", 1), number("row", "Batch row shown", 0),
    flag("hasTargets", "show the targets"), flag("dropLast", "drop_last"));
}

/** Create the strip of the text's tokens, in two lines, with the windows below it. */
function tape() {
  const element = h("div", { class: "learn-tapes", role: "img" });
  return {
    element,
    /** @param {Settings} settings @param {Windows} windows */
    show: (settings, windows) => {
      element.setAttribute("aria-label", `${IDS.length} tokens and ${windows.starts.length} windows, which start at `
        + `${windows.starts.join(", ")}${settings.hasTargets ? ", shifted by one token to the targets" : ""}.`);
      element.replaceChildren(...[0, LINE].map((from) => tapeLine(from, settings, windows)));
    },
  };
}

/** @param {number} from first token of the line @param {Settings} settings @param {Windows} windows */
function tapeLine(from, { length, stride, row, hasTargets, batchSize }, { starts, batches }) {
  const [used, shown, lanes] = [batches.flat().length, batches[0]?.[row], Math.ceil(length / stride)];
  const shift = Number(hasTargets);
  const isShown = (/** @type {number} */ i) => shown !== undefined && i >= shown + shift && i < shown + shift + length;
  const tokens = IDS.slice(from, from + LINE).map((id, i) => placed(h("b", {
    class: isShown(from + i) ? "learn-used" : null,
  }, h("span", null, WORDS_OF_TEXT[from + i]), String(id)), i, i + 1, 2));
  const ticks = [0, 5, 10, 15].map((i) => placed(h("small", null, String(from + i)), i, i + 5, 1));
  const bars = starts.flatMap((start, w) => {
    const [first, end] = [start + shift - from, start + shift + length - from];
    if (end <= 0 || first >= LINE) return [];
    const kinds = [w >= used ? "learn-dropped" : start === shown ? "learn-shown"
      : Math.floor(w / batchSize) % 2 ? "learn-odd" : "", first < 0 ? "learn-from" : "", end > LINE ? "learn-on" : ""];
    return [placed(h("i", { class: kinds.join(" ") }, String(w)), Math.max(0, first), Math.min(LINE, end),
      3 + (w % lanes))];
  });
  return h("div", { class: "learn-tape" }, ticks, tokens, bars);
}

/**
 * Place a part of a line of the strip over some tokens.
 * @param {HTMLElement} element
 * @param {number} first
 * @param {number} end the token after the last one
 * @param {number} line
 */
function placed(element, first, end, line) {
  element.style.gridColumn = `${first + 1} / ${end + 1}`;
  element.style.gridRow = String(line);
  return element;
}

/** Create the tables of the first batch: its inputs, and its targets. @param {Stage} stage */
function tablesOf(stage) {
  const { element, show } = changingPlace(stage, "learn-batch");
  return {
    element,
    /** @param {Settings} settings @param {Windows} windows */
    show: ({ length, row, hasTargets }, { batches: [first = []] }) => {
      const names = !first.length ? [] : hasTargets ? ["inputs", "targets"] : ["inputs"];
      show(names.map((name, shift) => {
        const table = numberTable({
          caption: `${name} (${first.length}, ${length})`, rowNames: first.map((_, r) => String(r)), digits: 0,
          limit: Infinity,
        });
        table.show(fromRows(idsOf(first, length, shift)), { mark: (r) => r === row });
        return table;
      }), first.length ? null : h("p", { class: "note" }, "There is no full batch: drop_last leaves out all windows."));
    },
  };
}

/** @param {Settings} settings @param {Windows} windows */
function formulaOf({ tokens, length, stride }, { starts }) {
  const places = tokens - length;
  return `windows = ⌈(tokens − T) / stride⌉ = ⌈(${tokens} − ${length}) / ${stride}⌉ = ⌈${places} / ${stride}⌉ = `
    + `${starts.length}. They start at ${starts.length > 12 ? `${starts.slice(0, 8).join(", ")}, … ${starts.at(-1)}`
      : starts.join(", ")}.`;
}

/** Say what the shown row of the first batch predicts. @param {Settings} settings @param {Windows} windows */
function rowSentence({ length, row }, { batches: [first = []] }) {
  const start = first[row];
  if (start === undefined) return `The first batch has no row ${row}.`;
  const words = (/** @type {number} */ shift) => WORDS_OF_TEXT.slice(start + shift, start + shift + length).join(" ");
  return `Row ${row}: inputs “${words(0)}”, targets “${words(1)}”. After “${WORDS_OF_TEXT[start]}” the right answer is `
    + `“${WORDS_OF_TEXT[start + 1]}”; ${length === 1 ? "1 prediction" : `${length} predictions`} in one row.`;
}

/** @param {Settings} settings @param {Windows} windows */
function counts({ length, stride, tokens, batchSize }, { starts, batches, reads }) {
  const sizes = [...new Set(batches.map((each) => each.length))].map((size) => `(${size}, ${length})`);
  const left = starts.length - batches.flat().length;
  const unread = reads.filter((count) => !count).length;
  return tiles([
    [sizes.length ? `batches of ${sizes.join(" and ")}` : `batches of (${batchSize}, ${length})`,
      String(batches.length), "batches"],
    ["windows left out by drop_last", String(left), "left"],
    ["tokens that are no input", `${unread} of ${tokens}`, "unread"],
    [stride < length ? "a token is read up to" : "a token is read at most", timesOf(Math.max(...reads)), "reads"],
  ]);
}

/** @param {Settings} settings @param {Windows} windows @returns {Claim[]} */
function claimsOf({ tokens, length, stride, batchSize, dropLast }, { starts, batches, reads }) {
  const first = batches[0]?.length ?? 0;
  const [left, most] = [starts.length - batches.flat().length, Math.max(...reads)];
  const unread = reads.filter((count) => !count).length;
  const between = reads.slice(0, (batches.flat().at(-1) ?? 0) + length).filter((count) => !count).length;
  const call = `create_dataloader(ids, batch_size=${batchSize}, max_length=${length}, stride=${stride}, shuffle=False, `
    + `drop_last=${dropLast ? "True" : "False"})`;
  return [
    ["inputs.shape is (8, 4).", first === 8 && length === 4, first
      ? `${call} yields ${batches.length === 1 ? "1 batch" : `${batches.length} batches`}, the first of shape `
        + `(${first}, ${length}). The look-up makes it (B, T, D) = (${first}, ${length}, D).`
      : `${call} raises an error: there is no full batch.`],
    ["With stride = max_length no token is read twice.", stride === length ? most <= 1 : null,
      stride < length ? `Here the stride is smaller: windows overlap, and tokens are read up to ${timesOf(most)}.`
        : stride > length ? `Here the stride is larger: ${between} tokens between the windows are never read.`
          : `None is. But ${unread} tokens at the end are no inputs: a window needs one more token as its last target`
            + `${left ? ", and drop_last leaves windows out" : ""}.`],
    ["A text of N tokens has N // T windows.", stride === length ? starts.length === Math.floor(tokens / length) : null,
      `${tokens} // ${length} is ${Math.floor(tokens / length)}, and there are ${starts.length} windows. `
      + (stride === length ? "Where T divides N, the last window would lack its last target."
        : "The rule is about windows side by side, with stride = T.")],
  ];
}

/** @param {string} typed @returns {[boolean, ...Child[]]} */
function verdict(typed) {
  const { tokens, length, stride } = QUESTION;
  const right = windowsOf(QUESTION).starts.length;
  if (!typed.trim()) return [false, "Type the number of windows."];
  if (Number(typed) === right) {
    const next = right * stride;
    return [true, `Windows start at 0, ${stride}, … ${(right - 1) * stride}. One more would start at ${next}: its `
      + `last target would be token ${next + length}, and the last one is ${tokens - 1}.`];
  }
  if (Number(typed) === tokens / stride) {
    return [false, `${typed} · ${length} = ${tokens}: no token is left as the target of the last one.`];
  }
  return [false, `Not ${typed}. A window needs ${length} inputs, and one more token as the last target.`];
}
