/** Which tokens the map leaves out: groups that are hidden, and numbers outside a range. */

import { h } from "../dom.js";

/** @import { Column, Groups, NumberColumn, Point } from "../types" */

/**
 * @typedef {object} Filter of one column
 * @property {string} label
 * @property {Column} column
 * @property {Set<number>} hidden groups
 * @property {number} low smallest number that is shown
 * @property {number} high largest number that is shown
 */

const STEPS = 200;

/** Whether a column has groups. @param {Column} column @returns {column is Groups} */
export function isGroups(column) {
  return "names" in column;
}

/** Whether a filter leaves tokens out. @param {Filter} filter */
function isActive({ hidden, low, high }) {
  return hidden.size > 0 || low > -Infinity || high < Infinity;
}

/** The filters of all columns; a token is shown if all of them keep it. */
export class Filters {
  /** @type {Map<string, Filter>} */ #of = new Map();

  /**
   * Return the filter of a column. Where the column has changed since, its groups are all shown again.
   * @param {string} name
   * @param {string} label
   * @param {Column} column
   */
  of(name, label, column) {
    const known = this.#of.get(name);
    if (known?.column === column) return known;
    const isSameRange = known && !isGroups(column) && !isGroups(known.column);
    const made = {
      label, column, hidden: new Set(), low: isSameRange ? known.low : -Infinity,
      high: isSameRange ? known.high : Infinity,
    };
    this.#of.set(name, made);
    return made;
  }

  /**
   * Return 1 for each token that is shown, else 0; null if all are.
   * @param {number} size number of tokens
   * @param {Int32Array | null} only tokens beside which none is shown
   */
  mask(size, only) {
    const active = [...this.#of.values()].filter(isActive);
    if (!active.length && !only) return null;
    const shown = new Uint8Array(size).fill(only ? 0 : 1);
    for (const id of only ?? []) shown[id] = 1;
    for (const filter of active) leaveOut(filter, shown);
    return shown;
  }

  /**
   * Return a button for the filter of each column but one, which removes it.
   * @param {string} name the other column
   * @param {() => void} onRemove
   */
  buttons(name, onRemove) {
    return [...this.#of].filter(([key, filter]) => key !== name && isActive(filter)).map(([key, filter]) =>
      h("button", {
        type: "button", class: "map-filter", title: "Remove this filter", onClick: () => {
          this.#of.delete(key);
          onRemove();
        },
      }, `${filter.label}: ${sentence(filter)} ×`));
  }
}

/** @param {Filter} filter @param {Uint8Array} shown */
function leaveOut({ column, hidden, low, high }, shown) {
  if (isGroups(column)) {
    column.of.forEach((group, id) => {
      if (hidden.has(group)) shown[id] = 0;
    });
  } else {
    column.values.forEach((value, id) => {
      if (!(value >= low && value <= high)) shown[id] = 0;
    });
  }
}

/** @param {Filter} filter */
function sentence({ column, hidden, low, high }) {
  if (isGroups(column)) return hidden.size === 1 ? "1 group hidden" : `${hidden.size} groups hidden`;
  return [low > -Infinity ? `from ${column.format(low)}` : "", high < Infinity ? `to ${column.format(high)}` : ""]
    .filter(Boolean).join(" ");
}

/**
 * Create the two handles that choose a range of a column of numbers, around its scale.
 * @param {NumberColumn} column
 * @param {Filter} filter
 * @param {Node} scale
 * @param {() => void} onChange
 */
export function rangeHandles({ values, range: [first, last], format }, filter, scale, onChange) {
  const ends = endsOf(values, [first, last], format);
  const width = last - first || 1;
  /** @param {number} step */
  const valueOf = (step) => first + (width * step) / STEPS;
  const lowText = h("output");
  const highText = h("output");
  /** @param {string} label @param {number} value @param {(step: number) => void} take */
  const handle = (label, value, take) => {
    const step = Math.round(((Math.min(Math.max(value, first), last) - first) / width) * STEPS);
    const input = h("input", {
      type: "range", min: 0, max: STEPS, value: String(step), "aria-label": label,
      onInput: () => {
        take(Number(input.value));
        show();
        onChange();
      },
    });
    return input;
  };
  const from = handle("Smallest value shown", filter.low, (step) => {
    filter.low = step > 0 ? valueOf(Math.min(step, Number(to.value))) : -Infinity;
    if (step > Number(to.value)) from.value = to.value;
  });
  const to = handle("Largest value shown", filter.high, (step) => {
    filter.high = step < STEPS ? valueOf(Math.max(step, Number(from.value))) : Infinity;
    if (step < Number(from.value)) to.value = from.value;
  });
  const show = () => {
    lowText.textContent = filter.low > first ? format(filter.low) : ends[0];
    highText.textContent = filter.high < last ? format(filter.high) : ends[1];
    from.setAttribute("aria-valuetext", lowText.textContent);
    to.setAttribute("aria-valuetext", highText.textContent);
  };
  show();
  return [lowText, h("span", { class: "map-range" }, scale, from, to), highText];
}

/**
 * Return the texts at the ends of a scale; values beyond an end are said to be there, and are drawn in its colour.
 * @param {Float32Array} values
 * @param {Point} range
 * @param {(value: number) => string} format
 */
function endsOf(values, [first, last], format) {
  let [low, high] = [first, last];
  for (const value of values) { // NaN and infinity are no numbers of the scale
    if (value < low && value > -Infinity) low = value;
    if (value > high && value < Infinity) high = value;
  }
  const [start, end] = [format(first), format(last)];
  return [format(low) === start ? start : `${start} or less`, format(high) === end ? end : `${end} or more`];
}
