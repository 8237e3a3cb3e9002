function make(tag, kind, ...parts) {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  element.append(...parts);
  return element;
}

const one = (selector, around = document) => around.querySelector(selector);
const all = (selector, around = document) => [...around.querySelectorAll(selector)];
const filled = (text, gaps) => text.replace(/\{(\w+)\}/g, (gap, key) => gaps[key] ?? gap);
const phrase = (name, gaps = {}) => filled(one(`[data-phrase="${name}"]`).textContent, gaps); // in the page

// The keyboard must reach what scrolls sideways. It is measured when the browser has laid it out: at
// first, when it is unfolded, when its width changes.
const scrolling = new ResizeObserver((entries) => {
  for (const { target } of entries)
    if (target.scrollWidth > target.clientWidth || target.scrollHeight > target.clientHeight) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
});

document.addEventListener("DOMContentLoaded", () => {
  for (const part of document.querySelectorAll("pre, .cell_output > .output, .pst-scrollable-table-container"))
    scrolling.observe(part);
  // The theme's button that opens the pages under a page has no name; that page's own will do.
  for (const summary of document.querySelectorAll(".bd-links summary"))
    summary.setAttribute("aria-label", summary.closest("li").querySelector("a").textContent.trim());
});
