// A block of code, a table or a formula that scrolls is a tab stop, so that the keyboard can scroll it, too.
const observer = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.scrollWidth > target.clientWidth || target.scrollHeight > target.clientHeight) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});
for (const region of document.querySelectorAll("article :is(pre, .table-wrapper, .math-wrapper)")) observer.observe(region);

// The theme's landmarks have no names, and its buttons at the top of a page are in no landmark.
const NAMES = { "sidebar-drawer": "Pages", "toc-drawer": "On this page", "content-icon-container": "Tools" };
for (const [part, name] of Object.entries(NAMES)) {
  document.querySelector(`.${part}`)?.setAttribute("aria-label", name);
}
document.querySelector(".content-icon-container")?.setAttribute("role", "region");
