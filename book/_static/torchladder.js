function make(tag, kind, ...parts) {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  element.append(...parts);
  return element;
}

const one = (selector, around = document) => around.querySelector(selector);
const all = (selector, around = document) => [...around.querySelectorAll(selector)];
const filled = (text, gaps) => text.replace(/\{(\w+)\}/g, (gap, key) => gaps[key] ?? gap);
const phrases = {}; // in the page, which is long
const phrase = (name, gaps = {}) => filled(phrases[name] ??= one(`[data-phrase="${name}"]`).textContent, gaps);

const inAddress = (text) => encodeURIComponent(text.toWellFormed()); // which half a letter would end

const FIELD_HOLDS = 20_000; // letters; of some, such as line ends, it would take seconds to show more
/** Keeps a long text from a field, however it is to come in, and gives what would be there to `take`. */
function onLong(field, take) {
  field.addEventListener("beforeinput", (event) => {
    if (!(event.data?.length > FIELD_HOLDS)) return;
    event.preventDefault();
    take(field.value.slice(0, field.selectionStart) + event.data + field.value.slice(field.selectionEnd));
  });
}

/** What the address says, and what Back brings again. Safari refuses more than ten a second. */
function note(address, state = null) {
  try { history.replaceState(state, "", address); } catch { /* the next one counts */ }
}

// The keyboard must reach what scrolls sideways. It is measured when the browser has laid it out: at
// first, when it is unfolded, when its width changes.
const scrolling = new ResizeObserver((entries) => {
  for (const { target } of entries)
    if (target.scrollWidth > target.clientWidth || target.scrollHeight > target.clientHeight) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
});

document.addEventListener("DOMContentLoaded", () => {
  for (const part of all("pre, .cell_output > .output, .pst-scrollable-table-container")) scrolling.observe(part);
  // The theme's button that opens the pages under a page has no name; that page's own will do.
  for (const summary of all(".bd-links summary"))
    summary.setAttribute("aria-label", summary.closest("li").querySelector("a").textContent.trim());
  // A long name breaks after a dot, an underscore, a bracket, and before a word's capital, but not in cuDNN.
  for (const name of all(":is(.bd-article, .bd-sidebar-secondary) code > .pre, .bd-sidebar-secondary a.nav-link:not(:has(*))"))
    if (name.textContent.length > 24) name.replaceChildren(...name.textContent.split(/(?<=\w[._(])(?=.)|(?<=[a-z]{3})(?=[A-Z])/).flatMap((part) => [part, make("wbr")]).slice(0, -1));
  for (const code of all(".highlight pre")) code.classList.toggle("room", code.textContent.indexOf("\n") < 34); // for the button beside its first line
  for (const line of all(".highlight-udiff pre > span:not(:empty)"))
    line.replaceChildren(...line.textContent.split(/(?<=[.(,])(?=\S)/).flatMap((part) => [part, make("wbr")]));
  // The menu shows the parts, and the pages of the one that is read.
  for (const caption of all(".bd-links .caption")) {
    const pages = caption.nextElementSibling, part = make("details", "part");
    part.open = one(".current", pages) !== null;
    caption.replaceWith(part);
    part.append(make("summary", "", caption), pages);
  }
  one(".search-button-field")?.removeAttribute("aria-label"); // it shows its keys, too
  for (const home of all(".sidebar-primary-item:has(.navbar-brand)")) Object.assign(home, { role: "navigation", ariaLabel: "Home" });
  // Its name says which theme is on, and is what its tooltip says.
  const theme = one(".theme-switch-button");
  const named = () => {
    const { mode } = document.documentElement.dataset;
    theme.setAttribute("aria-label", `Theme: ${mode === "auto" ? "the system's" : mode}`);
  };
  if (theme) new MutationObserver(named).observe(document.documentElement, { attributeFilter: ["data-mode"] });
  if (theme) named();
  for (const dialog of all("dialog[id^=pst-]")) { // the search, and the two drawers
    const close = Object.assign(make("button", "dialog-close", "×"), { type: "button", ariaLabel: "Close" });
    close.addEventListener("click", () => dialog.close());
    const form = one("form:only-child", dialog);
    if (form) form.append(close);
    else dialog.prepend(close);
  }
});

/** Scrolls a list until a link in it is in sight. */
function scrollToLink(list, link) {
  const [box, at] = [list.getBoundingClientRect(), link.getBoundingClientRect()];
  if (at.top < box.top || at.bottom > box.bottom) list.scrollTop += at.top - box.top - box.height / 3;
}

// The menu shows the page that is read, also after Back, and when it opens as a drawer: the theme puts it
// where the last page had it.
function showCurrent() {
  const scroller = one("#pst-primary-sidebar-modal[open]") ?? one(".bd-sidebar-primary");
  const link = all("a.current", scroller).at(-1);
  scroller.scrollTop = 0; // with the book's name in sight, if the page is; that for dead links is not in it
  if (link) scrollToLink(scroller, link);
}

addEventListener("pageshow", () => setTimeout(showCurrent)); // after the theme

// On this page: the section that is read, also after a jump, which the theme's marks miss; and the head says
// which page it is once its title has scrolled away.
const HEAD = 90; // pixels from the top, where a section has begun
function showSection() {
  const links = all(".bd-sidebar-secondary a.nav-link[href^='#']:not([href='#next'])");
  const tops = links.map((link) => document.getElementById(decodeURIComponent(link.hash.slice(1)))?.getBoundingClientRect().top);
  const end = innerHeight + scrollY >= document.documentElement.scrollHeight - 2;
  const now = end ? links.at(-1) : links[tops.findLastIndex((top) => top < HEAD)];
  for (const link of links) {
    link.classList.toggle("active", link.parentNode.contains(now ?? null)); // and what it is a part of
    if (link === now) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  const list = now?.closest(".bd-sidebar-secondary");
  if (list?.offsetParent) scrollToLink(list, now);
}

function showTitle() {
  const [name, title] = [one(".bd-header-article .site-name"), one(".bd-article h1")];
  if (!name || !title) return;
  name.dataset.name ??= name.textContent;
  name.dataset.home ??= name.getAttribute("href");
  const away = title.getBoundingClientRect().bottom < 0;
  name.classList.toggle("away", away);
  name.href = away ? "#" : name.dataset.home; // a page's name leads to its top
  name.textContent = away ? title.firstChild.textContent + (title.querySelector(".section-number") ? title.childNodes[1].textContent : "") : name.dataset.name;
}

let still;
addEventListener("scroll", () => {
  clearTimeout(still);
  still = setTimeout(() => [showSection(), showTitle()], 80); // after the theme
}, { passive: true });

// A term's definition: under the mouse, at the keyboard's focus, at a first tap; a second one follows the link.
const definition = make("span", "definition");
definition.popover = "auto"; // the browser closes it at Escape and at a tap elsewhere
let firstTap;

function define({ type, target, pointerType }) {
  const term = target.closest?.("a[aria-description]");
  const shown = definition.matches(":popover-open") && definition.previousSibling;
  if (type === "pointerdown") firstTap = pointerType === "touch" && term !== shown && term;
  else if (term && term !== shown && pointerType !== "touch") {
    const more = Object.assign(make("a", "", "In the glossary"), { href: term.href, tabIndex: -1 });
    definition.replaceChildren(`${term.getAttribute("aria-description")} `, more);
    term.after(definition);
    definition.showPopover({ source: term }); // and so below it
  } else if (!term && shown !== document.activeElement && !definition.contains(target)) definition.hidePopover();
}

for (const type of ["pointerdown", "pointerover", "focusin"]) addEventListener(type, define);

addEventListener("click", (event) => {
  event.target.closest("figure.torchladder-figure")?.classList.toggle("large"); // on a phone; it is scrolled then
  const link = event.target.closest("a, .primary-toggle");
  if (link && link === firstTap) {
    event.preventDefault();
    define({ target: link });
  } else if (link?.matches("button")) setTimeout(showCurrent, 100); // when it is open
  else if (link?.matches("dialog a[href^='#']")) link.closest("dialog").close(); // the page has gone there
}, true); // before the theme stops the event
