/** The legend of a heat map: its colours and the numbers at their ends. */

import { css, diverging, sequential } from "../colour.js";
import { fit, h } from "../dom.js";
import { theme } from "../theme.js";
import { shortest } from "./numbers.js";

const [WIDTH, HEIGHT] = [96, 10];

/**
 * Create a legend.
 * @param {boolean} isSequential whether numbers start at 0
 * @param {string} unit
 * @returns {{element: HTMLElement, draw: (limit: number, isCut: boolean) => void}} `isCut`: some numbers are outside
 *   the limit
 */
export function heatLegend(isSequential, unit) {
  const bar = h("canvas", { class: "heat-bar", "aria-hidden": "true" });
  const [low, high] = [h("span"), h("span")];
  const element = h("div", { class: "heat-legend" }, h("span", { class: "heat-unit" }, unit), low, bar, high);
  return {
    element,
    draw(limit, isCut) {
      drawBar(bar, isSequential);
      low.textContent = isSequential ? "0" : `${isCut ? "≤ " : ""}${shortest(-limit)}`;
      high.textContent = `${isCut ? "≥ " : ""}${isSequential ? "" : "+"}${shortest(limit)}`;
    },
  };
}

/** @param {HTMLCanvasElement} bar @param {boolean} isSequential */
function drawBar(bar, isSequential) {
  const { dark } = theme();
  const context = fit(bar, WIDTH, HEIGHT);
  for (let x = 0; x < WIDTH; x++) {
    const share = x / (WIDTH - 1);
    context.fillStyle = css(isSequential ? sequential(share, dark) : diverging(2 * share - 1, dark));
    context.fillRect(x, 0, 1, HEIGHT);
  }
}
