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
  // What all have is no choice.
  select.parentElement.hidden = found.length < 2 && index.every((sample) => sample[name]?.includes(found[0]) ?? !found.length);
});
on(one("#filters"), "change", () => { most = STEP; filter(); });
on(one("#filters"), "reset", (event) => { event.preventDefault(); choose({}); });
on(one("#more"), "click", () => { most += STEP; filter(); });
all(".go").forEach((button) => on(button, "click", () => choose({ reason: button.dataset.reason })));
if (cards.length) filter();

// All samples: a table of which only the rows in sight are there.
const columns = JSON.parse(one("#rows-data").textContent);
const HEIGHT = 32, AROUND = 12;
const count = columns.length ? (columns[0].values ?? columns[0].texts).length : 0;
const valueOf = (column, row) => (column.values ? column.values[row] : row);
function textOf(column, row) {
  const value = valueOf(column, row);
  return value === null ? "\u2013" : column.texts ? column.texts[value] : String(value);
}
let shown = Array.from({ length: count }, (_, row) => row);
let sorted = { at: -1, way: 1 };
const tests = new Map();  // by what is asked, a function of a row
const box = one("#rows-table");

function paint() {
  const first = Math.max(0, Math.floor(box.scrollTop / HEIGHT) - AROUND);
  const last = Math.min(shown.length, first + Math.ceil(box.clientHeight / HEIGHT) + 2 * AROUND);
  const rows = [gap(first)];
  for (let at = first; at < last; at++) {
    const row = document.createElement("tr");
    columns.forEach((column, place) => {
      const cell = document.createElement(place ? "td" : "th");
      const text = textOf(column, shown[at]);
      if (place) cell.textContent = cell.title = text;
      else {
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = button.title = text;
        button.dataset.row = shown[at];
        cell.scope = "row";
        cell.append(button);
      }
      if (column.texts) cell.className = "text";
      row.append(cell);
    });
    rows.push(row);
  }
  one("#rows-table tbody").replaceChildren(...rows, gap(shown.length - last));
}
function gap(rows) {
  const row = document.createElement("tr");
  const cell = row.appendChild(document.createElement("td"));
  cell.className = "gap";
  cell.colSpan = columns.length;
  cell.style.height = `${rows * HEIGHT}px`;
  row.hidden = rows === 0;
  row.setAttribute("aria-hidden", "true");
  return row;
}
function select() {
  const asked = [...tests.values()];
  shown = [];
  for (let row = 0; row < count; row++) if (asked.every((fits) => fits(row))) shown.push(row);
  if (sorted.at >= 0) sort();
  one("#rows-found").textContent = `${shown.length.toLocaleString("en")} of ${count.toLocaleString("en")} samples`;
  box.scrollTop = 0;
  paint();
}
function sort() {
  const column = columns[sorted.at];
  // Texts by their order among all, so that rows are compared as numbers.
  const order = column.texts?.map((_, at) => at).sort((a, b) => (column.texts[a] < column.texts[b] ? -1 : 1));
  const ranks = order && new Float64Array(order.length);
  order?.forEach((place, at) => { ranks[place] = at; });
  const keys = new Float64Array(count);
  for (let row = 0; row < count; row++) {
    const value = valueOf(column, row);
    keys[row] = value === null ? Infinity : sorted.way * (ranks ? ranks[value] : value);
  }
  shown.sort((a, b) => (keys[a] < keys[b] ? -1 : keys[a] > keys[b] ? 1 : a - b));
}
function field(label, control) {
  const element = document.createElement("label");
  element.append(`${label} `, control);
  one("#row-filters button").before(element);
}
if (count) {
  box.hidden = false;
  one("#no-rows").hidden = true;
  columns.forEach((column, at) => {
    const heading = document.createElement("th");
    heading.scope = "col";
    heading.setAttribute("aria-sort", "none");
    if (column.texts) heading.className = "text";
    const button = heading.appendChild(document.createElement("button"));
    button.type = "button";
    button.className = "by";
    button.textContent = column.name;
    on(button, "click", () => {
      sorted = { at, way: sorted.at === at ? -sorted.way : column.texts ? 1 : -1 };
      all("#rows-table thead th").forEach((each) => each.setAttribute("aria-sort", "none"));
      heading.setAttribute("aria-sort", sorted.way > 0 ? "ascending" : "descending");
      sort();
      box.scrollTop = 0;
      paint();
    });
    one("#rows-table thead tr").append(heading);
    if (column.texts && column.values && column.texts.length <= 300) {
      const control = document.createElement("select");
      control.append(new Option("all", ""));
      column.texts.map((text, place) => [text, place]).sort((a, b) => a[0].localeCompare(b[0], "en", { numeric: true }))
        .forEach(([text, place]) => control.append(new Option(text, place)));
      on(control, "change", () => {
        const wanted = Number(control.value);
        control.value === "" ? tests.delete(at) : tests.set(at, (row) => column.values[row] === wanted);
        select();
      });
      field(column.name, control);
    } else if (!column.texts) {
      ["from", "to"].forEach((end, sign) => {
        const control = document.createElement("input");
        control.type = "number";
        control.step = "any";
        on(control, "input", () => {
          const bound = Number(control.value), name = `${at} ${end}`;
          const fits = (row) => column.values[row] !== null && (sign ? column.values[row] <= bound : column.values[row] >= bound);
          control.value === "" ? tests.delete(name) : tests.set(name, fits);
          select();
        });
        field(`${column.name} ${end}`, control);
      });
    }
  });
  // Changed answers, where two runs say what is right.
  const own = columns.find((column) => column.name === "right");
  columns.filter((column) => own && column.name.startsWith("right, ")).forEach((column) => {
    const control = document.createElement("select");
    [["all", ""], ["right there, wrong here", "right"], ["wrong there, right here", "wrong"]].forEach((each) => control.append(new Option(...each)));
    on(control, "change", () => {
      const name = `flip ${column.name}`;
      const fits = (row) => textOf(column, row) === control.value && textOf(own, row) === { right: "wrong", wrong: "right" }[control.value];
      control.value ? tests.set(name, fits) : tests.delete(name);
      select();
    });
    field(`flips, ${column.name.slice(7)}`, control);
  });
  const searched = columns.filter((column) => column.texts).map((column) => [column, column.texts.map((text) => text.toLowerCase())]);
  on(one("#search"), "input", (event) => {
    const wanted = event.target.value.toLowerCase();
    const found = searched.map(([column, texts]) => [column, texts.map((text) => text.includes(wanted))]);
    const fits = (row) => found.some(([column, has]) => { const value = valueOf(column, row); return value !== null && has[value]; });
    wanted ? tests.set("search", fits) : tests.delete("search");
    select();
  });
  on(one("#row-filters"), "reset", () => { tests.clear(); setTimeout(select); });
  on(one("#row-filters"), "submit", (event) => event.preventDefault());
  on(box, "scroll", () => requestAnimationFrame(paint));
  on(box, "click", (event) => { if (event.target.dataset.row) show(textOf(columns[0], Number(event.target.dataset.row)), "rows"); });
  select();
}

// A sample by itself: its card, or what its row says; the next and the previous of the list that it is from.
const large = one("#large");
const byId = new Map(cards.map((card) => [card.querySelector(".id").textContent, card]));
let among = "cards", current = null;
const listed = () => (among === "rows" ? shown.map((row) => textOf(columns[0], row)) : cards.filter((card) => !card.hidden).map((card) => card.querySelector(".id").textContent));
function show(id, list = among) {
  among = list;
  const row = count ? columns[0].texts?.indexOf(id) ?? -1 : -1;
  const body = byId.has(id) ? byId.get(id).cloneNode(true) : row >= 0 ? ofRow(row) : null;
  if (!body) return;
  body.hidden = false;
  current = id;
  one("#large > div").replaceChildren(body);
  if (!large.open) large.showModal();
  history.replaceState(null, "", `#sample=${encodeURIComponent(id)}`);
}
function ofRow(row) {
  const card = document.createElement("article");
  card.className = "card";
  const list = card.appendChild(document.createElement("dl"));
  columns.forEach((column) => {
    list.append(Object.assign(document.createElement("dt"), { textContent: column.name }));
    list.append(Object.assign(document.createElement("dd"), { textContent: textOf(column, row) }));
  });
  return card;
}
function step(by) {
  const ids = listed(), at = ids.indexOf(current) + by;
  if (at >= 0 && at < ids.length) show(ids[at]);
}
on(one("#previous"), "click", () => step(-1));
on(one("#next"), "click", () => step(1));
on(one("#close"), "click", () => large.close());
on(large, "keydown", (event) => { if (event.key === "ArrowRight") step(1); if (event.key === "ArrowLeft") step(-1); });
on(large, "click", (event) => { if (event.target === large) large.close(); });
on(large, "close", () => history.replaceState(null, "", location.pathname));
on(one("#cards"), "click", (event) => { if (event.target.tagName === "IMG") show(event.target.closest(".card").querySelector(".id").textContent, "cards"); });
function open() {
  const match = /^#sample=(.*)$/.exec(location.hash);
  if (match) show(decodeURIComponent(match[1]));
}
on(window, "hashchange", open);
open();

// Layers over pictures, switched in all of them.
on(document, "change", ({ target }) => {
  if (!target.matches(".legend input")) return;
  const same = (selector, name) => all(selector).filter((each) => name(each) === target.value);
  same(".legend input", (each) => each.value).forEach((each) => { each.checked = target.checked; });
  same("[data-layer]", (each) => each.dataset.layer).forEach((each) => { each.hidden = !target.checked; });
});

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
