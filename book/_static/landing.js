// A log that is pasted here is answered on the page of the error clinic: this tab takes it there in its
// name, which no browser blocks, which has room, and which no history keeps. What is typed waits for the button.
const paste = one("#paste");

function explain(log) {
  window.name = `log:${log}`;
  location.href = `${paste.dataset.clinic}#log-says`;
}

paste.addEventListener("input", ({ inputType }) => /Paste|Drop/.test(inputType) && explain(paste.value));
onLong(paste, explain);
one("#explain").addEventListener("click", () => explain(paste.value));
