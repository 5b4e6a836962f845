import { empty } from "../dom.js";

/** Health. */
export const room = {
  id: "health",
  title: "Health",
  sentence: "Which rows were trained, which were not, and how the table uses its dimensions.",
  needs: ["vectors"],
  open,
};

/** @param {HTMLElement} element */
function open(element, context) {
  element.replaceChildren(empty("Not built yet", "This room comes soon."));
  return { close() {}, stateChanged() {} };
}
