// A block of code, a table or a formula that scrolls is a tab stop, so that the keyboard can scroll it, too.
const observer = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.scrollWidth > target.clientWidth || target.scrollHeight > target.clientHeight) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});
for (const region of document.querySelectorAll("article :is(pre, .table-wrapper, .math-wrapper)")) observer.observe(region);
