import { empty } from "../dom.js";

/** Map. */
export const room = {
  id: "map",
  title: "Map",
  sentence: "Every token of the table as a point; close together where their vectors point alike.",
  needs: ["vectors"],
  open,
};

/** @param {HTMLElement} element */
function open(element, context) {
  element.replaceChildren(empty("Not built yet", "This room comes soon."));
  return { close() {}, stateChanged() {} };
}
