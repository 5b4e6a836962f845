import { empty } from "../dom.js";

/** Compare. */
export const room = {
  id: "compare",
  title: "Compare",
  sentence: "Two tables laid over one another, and the tokens that moved most between them.",
  needs: ["vectors"],
  open,
};

/** @param {HTMLElement} element */
function open(element, context) {
  element.replaceChildren(empty("Not built yet", "This room comes soon."));
  return { close() {}, stateChanged() {} };
}
