// A log that is pasted here is answered on the page of the error clinic: this tab takes it there.
document.getElementById("paste").addEventListener("input", ({ target }) => {
  sessionStorage.setItem("log", target.value);
  location.href = target.dataset.clinic;
});
