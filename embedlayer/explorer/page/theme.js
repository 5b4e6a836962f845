/** Light and dark: the system's setting until the user chooses; and the page's colours for canvases. */

/** @import { Theme } from "./types" */

const NAMES = ["page", "paper", "raised", "ink", "muted", "line", "accent", "accent-soft", "warm", "good", "bad"];
const SERIES = ["s1", "s2", "s3", "s4", "s5", "s6", "s7", "s8"];
const STORAGE_KEY = "embedlayer-theme";

/** @type {Theme | null} */
let cached = null;

/** Whether the page is dark now. */
function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Return the page's colours. They are read once for each theme, since reading them costs a layout. */
export function theme() {
  cached ??= readTheme();
  return cached;
}

/** @returns {Theme} */
function readTheme() {
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  /** @param {string} name */
  const read = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const colours = Object.fromEntries(NAMES.map((name) => [name, read(name)]));
  const found = { dark: isDark(), series: SERIES.map(read), ...colours };
  probe.remove();
  return /** @type {Theme} */ (found);
}

/** Switch to the other theme, and store the choice if the browser allows it. */
export function switchTheme() {
  const next = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem(STORAGE_KEY, next);
  } catch { /* a page opened from a file may not store anything */ }
  announce();
}

/** Apply the stored choice, and follow the system. */
export function startTheme() {
  try {
    const stored = localStorage.getItem(STORAGE_KEY);
    if (stored === "light" || stored === "dark") document.documentElement.dataset.theme = stored;
  } catch { /* nothing is stored */ }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", announce);
}

/** Tell all pictures that the colours have changed. */
function announce() {
  cached = null;
  document.dispatchEvent(new CustomEvent("themechange"));
}
