// The theme lets the keyboard reach what scrolls sideways, but only what is visible at first:
// the code inside "Show the solution" is not.
document.addEventListener(
  "toggle",
  (event) => {
    for (const pre of event.target.querySelectorAll("pre")) {
      if (pre.scrollWidth > pre.clientWidth) pre.tabIndex = 0;
    }
  },
  true,
);
