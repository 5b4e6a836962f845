/** Light and dark: what the system says, until a person chooses; and the page's colours for canvases. */

const NAMES = ["page", "paper", "raised", "ink", "muted", "line", "accent", "accent-soft", "warm", "good", "bad"];
const SERIES = ["s1", "s2", "s3", "s4", "s5", "s6", "s7", "s8"];
const KEPT = "embedlayer-theme";

/** Whether the page is dark now. */
function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** The page's colours, as CSS writes them: by name, and `series` of eight that are told apart. */
export function theme() {
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  const read = (name) => { probe.style.color = `var(--${name})`; return getComputedStyle(probe).color; };
  const found = { dark: isDark(), series: SERIES.map(read), ...Object.fromEntries(NAMES.map((name) => [name, read(name)])) };
  probe.remove();
  return found;
}

/** Take the other theme, and keep the choice where the browser lets a page keep something. */
export function switchTheme() {
  const next = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try { localStorage.setItem(KEPT, next); } catch { /* a page from a file may not */ }
  announce();
}

/** Begin with what was chosen last, and follow the system. */
export function startTheme() {
  try {
    const kept = localStorage.getItem(KEPT);
    if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
  } catch { /* nothing kept */ }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", announce);
}

function announce() {
  document.dispatchEvent(new CustomEvent("themechange"));
}
