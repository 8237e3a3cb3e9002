// The chosen rung's program is shown from its first new line.
one(".ladder").addEventListener("change", ({ target }) => {
  const mark = one(`.rung-panel[data-rung="${target.id.slice(5)}"] mark`);
  if (mark) mark.closest("pre").scrollTop = mark.offsetTop - mark.offsetHeight; // and the line before it
});

// A phone shows the parts, and their chapters when one is opened or a route is chosen.
const parts = all(".index details");
if (matchMedia("(max-width: 600px)").matches) for (const part of parts) part.open = false;
one(".routes").addEventListener("change", () => parts.forEach((part) => { part.open = true; }));

// A log that is pasted here is answered on the page of the error clinic: this tab takes it there in its
// name, which no browser blocks, which has room, and which no history keeps. What is typed waits for the button.
const paste = one("#paste");

function explain(log) {
  one("#paste-says").textContent = log.trim() ? "" : "The box is empty. Paste the error's message, or all of the log.";
  if (!log.trim()) return paste.focus();
  window.name = `log:${log}`;
  location.href = `${paste.dataset.clinic}#log-says`;
}

paste.addEventListener("input", ({ inputType }) => /Paste|Drop/.test(inputType) && explain(paste.value));
onLong(paste, explain);
one("#explain").addEventListener("click", () => explain(paste.value));
