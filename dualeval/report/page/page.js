"use strict";
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const one = (selector) => document.querySelector(selector);
const on = (element, event, act) => element?.addEventListener(event, act);

// What needs this script is hidden without it.
all("[hidden]").forEach((element) => { element.hidden = element.id === "more"; });

// The theme, kept where a file may keep something.
const themes = ["as the system", "light", "dark"];
let theme = themes[0];
function wear(name) {
  theme = document.documentElement.dataset.theme = themes.includes(name) ? name : themes[0];
  one("#theme").textContent = `Theme: ${theme}`;
}
try { theme = localStorage.getItem("theme"); } catch { /* none */ }
wear(theme);
on(one("#theme"), "click", () => {
  wear(themes[(themes.indexOf(theme) + 1) % themes.length]);
  try { localStorage.setItem("theme", theme); } catch { /* none */ }
});

// Samples: some at a time, those that fit all filters.
const STEP = 24;
const index = JSON.parse(one("#index").textContent);
const cards = all("#cards > .card");
const filters = new Map(all("#filters select").map((select) => [select.dataset.by, select]));
let most = STEP;
function filter() {
  let found = 0;
  cards.forEach((card, at) => {
    const fits = ([name, { value }]) => !value || index[at][name]?.includes(value);
    card.hidden = ![...filters].every(fits) || ++found > most;
  });
  one("#found").textContent = `${found} of ${cards.length} samples`;
  one("#more").hidden = found <= most;
}
function choose(wanted) {
  filters.forEach((select, name) => {
    const value = wanted[name] ?? "";
    if (value && ![...select.options].some((each) => each.value === value)) select.add(new Option(value, value));
    select.value = value;
  });
  most = STEP;
  filter();
  one("#samples").scrollIntoView();
}
filters.forEach((select, name) => {
  if (name === "reason") return;
  const found = [...new Set(index.flatMap((sample) => sample[name] ?? []))];
  found.sort((a, b) => a.localeCompare(b, "en", { numeric: true })).forEach((each) => select.add(new Option(each, each)));
  select.parentElement.hidden = found.length < 2;
});
on(one("#filters"), "change", () => { most = STEP; filter(); });
on(one("#filters"), "reset", (event) => { event.preventDefault(); choose({}); });
on(one("#more"), "click", () => { most += STEP; filter(); });
all(".go").forEach((button) => on(button, "click", () => choose({ reason: button.dataset.reason })));
if (cards.length) filter();

// The confusion matrix: its size, and from a cell to its samples.
on(one("#zoom"), "input", (event) => one("#matrix").style.setProperty("--cell", `${event.target.value}rem`));
on(one("#matrix"), "click", (event) => {
  const cell = event.target.closest("tbody td");
  if (!cell?.textContent || !cards.length) return;
  const prediction = all("#matrix thead th")[cell.cellIndex - 1].textContent;
  choose({ target: cell.parentElement.cells[0].textContent, prediction });
});

// Tables: by numbers or by texts, what has no value last.
function compare(a, b) {
  if (a === "" || b === "") return 0;
  return isNaN(a) || isNaN(b) ? a.localeCompare(b, "en", { numeric: true }) : a - b;
}
all(".sort").forEach((button) => on(button, "click", () => {
  const heading = button.closest("th");
  const way = heading.getAttribute("aria-sort") === "descending" ? 1 : -1;
  all("th", heading.parentElement).forEach((each) => each.setAttribute("aria-sort", "none"));
  heading.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
  const body = heading.closest("table").tBodies[0];
  const key = (row) => row.cells[heading.cellIndex].dataset.v;
  [...body.rows].sort((a, b) => (key(a) === "") - (key(b) === "") || way * compare(key(a), key(b)))
    .forEach((row) => body.append(row));
}));

all(".copy").forEach((button) => on(button, "click", async () => {
  const text = button.previousElementSibling;
  try {
    await navigator.clipboard.writeText(text.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(text);
    button.textContent = "Selected";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}));
