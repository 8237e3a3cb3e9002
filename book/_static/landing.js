// A log that is pasted here is answered on the page of the error clinic: this tab takes it there. What is
// typed waits for the button.
const paste = one("#paste");

function explain() {
  sessionStorage.setItem("log", paste.value);
  location.href = `${paste.dataset.clinic}#log-says`;
}

paste.addEventListener("input", ({ inputType }) => /Paste|Drop/.test(inputType) && explain());
one("#explain").addEventListener("click", explain);
