// Light or dark: as the system says, until the reader chooses.

import { attribute, say } from "./dom.js";

const KEY = "hetero-pp theme";

// Browsers may refuse storage, such as for a file from disk.
function stored() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null;
  }
}

function store(theme) {
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // the choice holds until the page is closed
  }
}

export function useTheme(button, changed) {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = stored();
  const apply = () => {
    const theme = chosen ?? (system.matches ? "dark" : "light");
    document.documentElement.dataset.theme = theme;
    say(button, theme === "dark" ? "Light" : "Dark");
    attribute(button, "aria-label", `Change to ${theme === "dark" ? "light" : "dark"} colours`);
    changed();
  };
  button.addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    store(chosen);
    apply();
  });
  system.addEventListener("change", apply);
  apply();
}
