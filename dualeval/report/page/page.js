"use strict";
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const one = (selector) => document.querySelector(selector);
const on = (element, event, act) => element?.addEventListener(event, act);
function made(tag, properties = {}, ...within) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...within);
  return element;
}

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
const { reasons, samples } = JSON.parse(one("#index").textContent);
const cards = all("#cards > .card");
const filters = new Map();
let most = STEP;
const counted = (found, of, what) => `${found ? found.toLocaleString("en") : "nothing found: 0"} of ${of.toLocaleString("en")} ${what}`;
function filter() {
  let found = 0;
  cards.forEach((card, at) => {
    const fits = ([name, { value }]) => !value || samples[at][name]?.includes(value);
    card.hidden = ![...filters].every(fits) || ++found > most;
  });
  one("#found").textContent = counted(found, cards.length, "cards");
  one("#more").hidden = found <= most;
}
// A menu of texts with their values.
const newSelect = (pairs) => made("select", {}, ...[["all", ""], ...pairs].map((pair) => new Option(...pair)));
const byText = ([a], [b]) => a.localeCompare(b, "en", { numeric: true });
function field(form, label, control, name = label) {
  control.dataset.by = name;
  one(`${form} button`).before(made("label", {}, `${label} `, control));
}
function choose(reason) {
  filters.forEach((select, name) => { select.value = name === "reason" ? reason : ""; });
  most = STEP;
  filter();
  one("#samples").scrollIntoView();
}
new Set(samples.flatMap(Object.keys)).forEach((name) => {
  const found = [...new Set(samples.flatMap((sample) => sample[name] ?? []))];
  // What all have is no choice, nor is what none has.
  if (found.length < 2 && samples.every((sample) => !found.length || sample[name]?.includes(found[0]))) return;
  const pairs = found.map((each) => [name === "reason" ? reasons[each] : each, each]);
  filters.set(name, newSelect(name === "reason" ? pairs : pairs.sort(byText)));
  field("#filters", { reason: "Why", target: "Target", prediction: "Prediction" }[name] ?? name.slice(6), filters.get(name), name);
});
on(one("#filters"), "change", () => { most = STEP; filter(); });
on(one("#filters"), "reset", (event) => { event.preventDefault(); choose(""); });
on(one("#more"), "click", () => { most += STEP; filter(); });
all(".go").forEach((button) => on(button, "click", () => choose(button.dataset.reason)));
if (cards.length) {
  one("#filters button").hidden = !filters.size;
  filter();
}

// All samples: a table of which only the rows in sight are there. Its rows are in the page, or a server has them.
const { columns, of, served, gaps } = JSON.parse(one("#rows-data").textContent);
// JSON has no such numbers; a NaN is the worst of its column.
columns.forEach((column) => {
  const numbers = { nan: column.low ? -Infinity : Infinity, inf: Infinity, "-inf": -Infinity };
  column.shown = column.values;
  if (!column.texts) column.values = column.shown?.map((value) => numbers[value] ?? value);
});
const HEIGHT = 32, AROUND = 12, LETTERS = 60, DIGITS = 4;
// Browsers draw nothing that is much higher: of more rows, those in sight go by faster than the bar.
const HIGHEST = 15e6;
const count = served ? of : columns.length ? (columns[0].values ?? columns[0].texts).length : 0;
const source = served ? atServer() : inPage();
const query = { search: "", tests: {}, sorted: [-1, 1] };  // a test: a column, and from what to what
const box = one("#rows-table");
let found = 0, asked = 0, painted = 0;

// `find` keeps and sorts the rows that a query asks for, and says how many; `rows` has some of them, the number of each
// in the run before its texts; `card` is an element.
function inPage() {
  let before = 0;
  const numbers = Array.from({ length: count }, (_, row) => (gaps ? (before += gaps[row]) : row));
  const valueOf = (column, row) => (column.values ? column.values[row] : row);
  const textOf = (column, row) => {
    const value = valueOf(column, row);
    return value === null ? null : column.texts ? column.texts[value] : column.shown[row];
  };
  const searched = columns.filter((column) => column.texts).map((column) => [column, column.texts.map((text) => text.toLowerCase())]);
  let shown = [];
  function find({ search, tests, sorted }) {
    const words = search.toLowerCase().split(/\s+/).filter(Boolean);
    const hits = words.map((word) => searched.map(([column, texts]) => [column, texts.map((text) => text.includes(word))]));
    const has = ([column, hit]) => { const value = valueOf(column, row); return value !== null && hit[value]; };
    const fits = ([at, low, high]) => { const value = valueOf(columns[at], row); return value !== null && value >= (low ?? -Infinity) && value <= (high ?? Infinity); };
    const limits = Object.values(tests).flat();
    let row = 0;
    shown = [];
    for (; row < count; row++) if (limits.every(fits) && hits.every((hit) => hit.some(has))) shown.push(row);
    if (sorted[0] >= 0) sort(...sorted);
    return shown.length;
  }
  function sort(at, way) {
    const column = columns[at];
    // Texts by their order among all, so that rows are compared as numbers.
    const order = column.texts?.map((_, place) => place).sort((a, b) => (column.texts[a] < column.texts[b] ? -1 : 1));
    const ranks = order && new Float64Array(order.length);
    order?.forEach((place, rank) => { ranks[place] = rank; });
    const keys = new Float64Array(count);
    for (let row = 0; row < count; row++) {
      const value = valueOf(column, row);
      keys[row] = value === null ? Infinity : way * (ranks ? ranks[value] : Math.max(-Number.MAX_VALUE, Math.min(value, Number.MAX_VALUE)));
    }
    shown.sort((a, b) => (keys[a] < keys[b] ? -1 : keys[a] > keys[b] ? 1 : a - b));
  }
  const rows = (first, last) => shown.slice(first, last).map((row) => [numbers[row], ...columns.map((column) => textOf(column, row))]);
  function card({ row, id }) {
    const at = row === undefined ? columns[0]?.texts.indexOf(id) ?? -1 : numbers.indexOf(row);
    return at < 0 ? null : ofRow(columns.map((column) => textOf(column, at)));
  }
  return { find, rows, card };
}
function atServer() {
  let query = "";
  async function ask(what, values) {
    try {
      const answer = await fetch(`${what}?${new URLSearchParams(values)}`);
      if (answer.status !== 409) return answer;
      large.close();
      one("#rows-found").textContent = await answer.text();
      return new Promise(() => {});
    } catch {
      one("#rows-found").textContent = "The server of this page has ended. Type its command again, and open the address that it prints.";
      return new Promise(() => {});  // nothing follows
    }
  }
  const some = async (first, last) => (await ask("rows", { query, first, last })).json();
  return {
    find: async ({ search, tests, sorted }) => {
      query = JSON.stringify({ search, tests: Object.values(tests).flat(), sorted });
      return (await some(0, 0)).found;
    },
    rows: async (first, last) => (await some(first, last)).rows,
    card: async (which) => {
      const body = document.createElement("template");
      body.innerHTML = await (await ask("card", which)).text();
      const off = all(".legend input:not(:checked)").map((each) => each.value);
      all("[data-layer]", body.content).forEach((each) => { each.hidden = off.includes(each.dataset.layer); });
      return body.content.firstElementChild;
    },
  };
}
const shownText = (value) => (value === null ? "\u2013" : typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(DIGITS))) : String(value));
const begun = (text) => ([...text.slice(0, 2 * LETTERS + 2)].length > LETTERS ? `${[...text].slice(0, LETTERS).join("")}\u2026` : text);

// The rows in sight, first to last, and how much is above the first.
function inSight() {
  const whole = Math.min(found * HEIGHT, HIGHEST), seen = box.clientHeight;
  const at = Math.max(0, Math.min(box.scrollTop, whole - seen));
  const top = whole > seen ? (at / (whole - seen)) * (found - seen / HEIGHT) : 0;
  const first = Math.max(0, Math.floor(top) - AROUND, Math.ceil(top - at / HEIGHT - 1e-6));
  const last = Math.min(found, Math.ceil(top + seen / HEIGHT) + AROUND, Math.floor(top + (whole - at) / HEIGHT + 1e-6));
  const above = at - (top - first) * HEIGHT;
  return { first, last, above, below: whole - above - (last - first) * HEIGHT };
}
async function paint() {
  const mine = ++painted;
  const { first, last, above, below } = inSight();
  const rows = (await source.rows(first, last)).map(([number, ...values], at) => {
    const cells = values.map((value, place) => {
      const text = shownText(value), className = columns[place].texts ? "text" : "";
      if (place) return made("td", { textContent: begun(text), title: value ?? text, className });
      const button = made("button", { type: "button", textContent: text, title: text });
      Object.assign(button.dataset, { row: number, at: first + at });
      return made("th", { scope: "row", className }, button);
    });
    return made("tr", {}, ...cells);
  });
  if (mine === painted) one("#rows-table tbody").replaceChildren(gap(above), ...rows, gap(below));
}
function gap(height) {
  const cell = made("td", { className: "gap", colSpan: columns.length });
  cell.style.height = `${height}px`;
  return made("tr", { hidden: height < 1, ariaHidden: "true" }, cell);
}
async function select() {
  const mine = ++asked;
  const number = await source.find(query);
  // A later key may have been answered earlier.
  if (mine !== asked) return;
  found = number;
  one("#rows-found").textContent = counted(found, count, "samples");
  box.scrollTop = 0;
  await paint();
}
// By a name, a control's tests, or none where it is empty.
function test(name, ...tests) {
  query.tests[name] = tests;
  select();
}
// Upwards or downwards by a column.
function sortRows(at, way) {
  query.sorted = [at, way];
  showSorted(all("#rows-table thead th")[at], way);
  select();
}
// By names of filters their choices; one that is no menu, as of many classes, is searched for; by a column of null it is
// sorted.
function chooseRows(wanted) {
  const words = [];
  one("#row-filters").reset();
  Object.entries(wanted).forEach(([name, text]) => {
    const at = columns.findIndex((column) => column.name === name);
    if (text === null) {
      sortRows(at, -1);
      const [first, heading] = [0, at].map((each) => all("#rows-table thead th")[each]);
      box.scrollLeft = heading.offsetLeft - first.offsetWidth;
      return;
    }
    const control = all("#row-filters select").find((each) => each.dataset.by === name);
    const place = columns[at]?.texts?.indexOf(text) ?? text;
    if (!control || place < 0) { words.push(text); return; }
    control.value = place;
    control.dispatchEvent(new Event("change"));
  });
  query.search = one("#search").value = words.join(" ");
  one("#rows").scrollIntoView();
  box.focus({ preventScroll: true });
}
if (count) {
  box.hidden = false;
  one("#no-rows").hidden = true;
  columns.forEach((column, at) => {
    const button = made("button", { type: "button", textContent: column.name });
    on(button, "click", () => sortRows(at, query.sorted[0] === at ? -query.sorted[1] : column.texts ? 1 : -1));
    one("#rows-table thead tr").append(made("th", { scope: "col", ariaSort: "none", className: column.texts ? "text" : "" }, button));
    if (column.choice) {
      const control = newSelect(column.texts.map((text, place) => [begun(text), place]).sort(byText));
      on(control, "change", () => test(at, ...(control.value === "" ? [] : [[at, Number(control.value), Number(control.value)]])));
      field("#row-filters", column.name, control);
    } else if (!column.texts && !column.plain) {
      ["from", "to"].forEach((end, sign) => {
        const control = made("input", { type: "number", step: "any" });
        on(control, "input", () => {
          const bound = Number(control.value);
          test(`${at} ${end}`, ...(control.value === "" ? [] : [[at, sign ? null : bound, sign ? bound : null]]));
        });
        field("#row-filters", `${column.name} ${end}`, control);
      });
    }
  });
  // Changed answers, where two runs say what is right.
  const own = columns.findIndex((column) => column.name === "right");
  columns.forEach((column, at) => {
    if (own < 0 || !column.name.startsWith("right in ")) return;
    const other = column.name.slice(9), { run } = one("#row-filters").dataset;
    const control = newSelect([[`right in ${other}, wrong in ${run}`, "right"], [`wrong in ${other}, right in ${run}`, "wrong"]]);
    on(control, "change", () => {
      const is = (place, text) => { const value = columns[place].texts.indexOf(text); return [place, value, value]; };
      test(`flip ${at}`, ...(control.value ? [is(at, control.value), is(own, { right: "wrong", wrong: "right" }[control.value])] : []));
    });
    field("#row-filters", `flips, ${other}`, control);
  });
  on(one("#search"), "input", (event) => { query.search = event.target.value; select(); });
  on(one("#row-filters"), "reset", () => { Object.assign(query, { search: "", tests: {} }); setTimeout(select); });
  on(one("#row-filters"), "submit", (event) => event.preventDefault());
  on(box, "scroll", () => requestAnimationFrame(paint));
  on(box, "click", ({ target }) => { if (target.dataset.row) openRow(Number(target.dataset.at), [Number(target.dataset.row), target.textContent]); });
  on(document, "click", ({ target }) => { if (target.matches("[data-rows]")) chooseRows(JSON.parse(target.dataset.rows)); });
  select();
}

// A sample by itself: its card, or what its row says; the next and the previous of the list that it is from.
const large = one("#large");
const idOf = (card) => card.querySelector(".id").textContent;
const rowOf = (card) => Number(card.dataset.row);
// By its row's number in the run: ids may look the same.
const byRow = new Map(cards.map((card) => [rowOf(card), card]));
// The row that is shown, and its place among those that the table has found; -1 of a card. The card touched last.
let current, place = -1, opened = 0, touched;
const listed = () => cards.filter((card) => !card.hidden).map(rowOf);
async function show(id, row) {
  const mine = ++opened, was = large.open;
  const body = byRow.get(row)?.cloneNode(true) ?? await source.card(row === undefined ? { id } : { row });
  // A later sample may have been answered earlier, and the view closed meanwhile.
  if (mine !== opened || was !== large.open) return;
  current = row;
  one("#large > div").replaceChildren(body ?? paragraph(`There is no sample of this id in this page: ${id}`));
  one("#large > div").firstChild.hidden = false;
  const [at, of] = place < 0 ? [listed().indexOf(row), listed().length] : [place, found];
  one("#previous").ariaDisabled = at < 1;
  one("#next").ariaDisabled = at < 0 || at + 1 >= of;
  if (!large.open) large.showModal();
  history.replaceState(null, "", `#sample=${encodeURIComponent(id)}`);
}
function openRow(at, [row, id]) {
  place = at;
  return show(id, row);
}
function openCard(card, id = idOf(card)) {
  place = -1;
  return show(id, card && rowOf(card));
}
const paragraph = (text) => made("p", { className: "note" }, text);
function ofRow(values) {
  const pairs = columns.flatMap(({ name }, at) => [made("dt", {}, name), made("dd", {}, shownText(values[at]))]);
  return made("article", { className: "card" }, paragraph(large.dataset.row), made("dl", {}, ...pairs));
}
async function step(by) {
  if (one(by < 0 ? "#previous" : "#next").ariaDisabled === "true") return;
  if (place < 0) { openCard(byRow.get(listed()[listed().indexOf(current) + by])); return; }
  const [row] = await source.rows(place + by, place + by + 1);
  if (row && large.open) openRow(place + by, row);  // none where keys were faster than a server's card
}
on(one("#previous"), "click", () => step(-1));
on(one("#next"), "click", () => step(1));
on(one("#close"), "click", () => large.close());
on(large, "keydown", (event) => { if (event.target.closest(".tokens")) return; if (event.key === "ArrowRight") step(1); if (event.key === "ArrowLeft") step(-1); });
on(large, "click", (event) => { if (event.target === large) large.close(); });
// The event comes after the view has closed: meanwhile another sample may be open.
on(large, "close", () => { if (!large.open && location.hash.startsWith("#sample=")) history.replaceState(null, "", location.pathname); });
on(one("#cards"), "click", ({ target }) => { touched = target.closest(".card"); if (target.tagName === "IMG") openCard(touched); });
// What somebody has typed, such as "100%.png", may be no encoded text.
function decoded(text) {
  try { return decodeURIComponent(text); } catch { return text; }
}
function open() {
  const match = /^#sample=(.*)$/.exec(location.hash);
  if (!match && large.open) large.close();
  if (!match) return;
  const id = decoded(match[1]);
  openCard([touched, ...cards].find((card) => card && idOf(card) === id), id);
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

// Tokens: arrow keys lead from one to the next, and one with the focus shows its number.
const focusToken = (token) => {
  if (!token) return;
  // Its number stays within the text.
  const [{ right }, whole] = [token, token.closest(".tokens")].map((each) => each.getBoundingClientRect());
  token.classList.toggle("late", right > whole.left + whole.width / 2);
  token.tabIndex = -1;
  token.focus();
};
on(document, "click", ({ target }) => { if (target.matches(".tokens span")) focusToken(target); });
on(document, "keydown", (event) => {
  const within = event.target.closest(".tokens"), by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!within || !by) return;
  const tokens = all("span", within);
  event.preventDefault();
  focusToken(tokens[tokens.indexOf(event.target) + by]);
});

// The confusion matrix: its size, and from a cell to its samples.
const matrix = one("#matrix");
on(one("#zoom"), "input", (event) => matrix.style.setProperty("--cell", `${event.target.value}rem`));
on(matrix, "click", (event) => {
  const cell = event.target.closest("tbody td");
  // A matrix of boxes or pixels counts no samples, and its table has no predictions.
  if (!cell?.textContent || !count || columns.every(({ name }) => name !== "prediction")) return;
  const prediction = all("#matrix thead th")[cell.cellIndex - 1].textContent;
  chooseRows({ target: cell.parentElement.cells[0].textContent, prediction });
});
// A grid, as those who hear the page know it: one cell is a stop of Tab, and arrow keys lead to the others.
if (matrix) [matrix.role, one("#matrix tbody td").tabIndex] = ["grid", 0];
on(matrix, "keydown", (event) => {
  const from = event.target, ways = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] };
  if (event.key === "Enter") from.click();
  if (!ways[event.key]) return;
  const [down, right] = ways[event.key];
  const to = matrix.rows[from.parentElement.rowIndex + down]?.cells[from.cellIndex + right];
  event.preventDefault();
  if (!to?.matches("tbody td")) return;
  [from.tabIndex, to.tabIndex] = [-1, 0];
  to.focus();
});

// Tables: by numbers or by texts, what has no value last.
function showSorted(heading, way) {
  all("th", heading.parentElement).forEach((each) => { each.ariaSort = each !== heading ? "none" : way > 0 ? "ascending" : "descending"; });
}
function compare(a, b) {
  if (a === "" || b === "") return 0;
  return isNaN(a) || isNaN(b) ? a.localeCompare(b, "en", { numeric: true }) : a - b;
}
all(".sort").forEach((button) => on(button, "click", () => {
  const heading = button.closest("th");
  const way = heading.getAttribute("aria-sort") === "descending" ? 1 : -1;
  showSorted(heading, way);
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
