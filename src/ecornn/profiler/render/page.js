// The page's own script. Text enters the page by textContent alone, never as markup.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  for (let left = Math.abs(bytes); left >= 1024 && power < 4; left /= 1024) power++;
  return power ? (bytes / 1024 ** power).toFixed(2) + " " + units[power] : bytes + " B";
}

function sum(numbers) {
  return numbers.reduce((a, b) => a + b, 0);
}

function draw(parent, tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const name in attributes) made.setAttribute(name, attributes[name]);
  if (text !== undefined) made.textContent = text;
  return parent.appendChild(made);
}

// ---- memory over the step: a stack of areas, one a kind, with steps and not slopes
// `highest`: bytes at the top of the picture, the same for all pictures of a page
function timeline(place, told, { unit, times, values, peak, names, named, marks }, highest) {
  const width = 1000, height = 280, top = 18;
  if (times.length < 2) return void (told.textContent = "no timeline was recorded");
  const first = times[0], span = times[times.length - 1] - first || 1;
  const totals = times.map((_, i) => sum(values.map((kind) => kind[i])));
  // A difference may be negative ("no tensor"): it is told, but has no area.
  const areas = values.map((kind) => kind.map((bytes) => Math.max(0, bytes)));
  const x = (time) => ((time - first) / span) * width;
  const y = (bytes) => height - (bytes / highest) * (height - top);
  const svg = draw(place, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  draw(svg, "title", {}, "memory by kind over the step");
  let below = times.map(() => 0);
  areas.forEach((kind, k) => {
    const above = below.map((bytes, i) => bytes + kind[i]);
    let path = "";
    for (let i = 0; i < times.length; i++) {
      path += (i ? "H" + x(times[i]).toFixed(2) : "M0 " + y(below[0]).toFixed(2)) + "V" + y(above[i]).toFixed(2);
    }
    for (let i = times.length - 1; i >= 0; i--) {
      path += "V" + y(below[i]).toFixed(2) + "H" + x(times[i]).toFixed(2);
    }
    draw(svg, "path", { d: path + "Z", fill: data.colours[k] });
    below = above;
  });
  for (const [time, name] of marks) {
    draw(svg, "line", { x1: x(time), x2: x(time), y1: 0, y2: height, class: "mark" });
    if (name) draw(svg, "text", { x: x(time) + 4, y: 12 }, name);
  }
  for (const share of [0.5, 1]) {
    const level = y(highest * share);
    draw(svg, "line", { x1: 0, x2: width, y1: level, y2: level, class: "mark" });
    draw(svg, "text", { x: width - 4, y: level - 4, "text-anchor": "end" }, size(Math.round(highest * share)));
  }
  const cursor = draw(svg, "line", { y1: 0, y2: height, class: "cursor" });
  const dot = draw(svg, "circle", { r: 4, class: "cursor" });
  const show = (i) => {
    cursor.setAttribute("x1", x(times[i]));
    cursor.setAttribute("x2", x(times[i]));
    dot.setAttribute("cx", x(times[i]));
    dot.setAttribute("cy", y(sum(areas.map((kind) => kind[i]))));
    const parts = data.kinds.map((name, k) => [name, values[k][i]]).filter((part) => part[1]);
    parts.sort((a, b) => b[1] - a[1]);
    told.textContent = `${i === peak ? "the peak: " : ""}${unit} ${times[i]}, ` +
      `${names[named[i]]}: ${size(totals[i])}: ` + parts.map(([name, bytes]) => `${name} ${size(bytes)}`).join(", ");
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const time = first + ((event.clientX - box.left) / box.width) * span;
    let low = 0, high = times.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (times[middle] <= time) low = middle; else high = middle - 1;
    }
    show(low);
  });
  svg.addEventListener("pointerleave", () => show(peak));
  show(peak);
}

// ---- one level of the tree of modules at a time, in rectangles as square as they can be
function squares(items, x, y, width, height) {
  const made = [];
  let left = sum(items.map((item) => item.bytes));
  for (let i = 0; i < items.length; ) {
    const side = Math.min(width, height), scale = (width * height) / left;
    let row = 0, worst = Infinity, end = i;
    while (end < items.length) {
      const next = row + items[end].bytes, thick = (next * scale) / side;
      const longest = (items[i].bytes * scale) / thick, shortest = (items[end].bytes * scale) / thick;
      const ratio = Math.max(longest / thick, thick / shortest);
      if (ratio > worst) break;
      [row, worst, end] = [next, ratio, end + 1];
    }
    const thick = (row * scale) / side;
    for (let along = 0; i < end; i++) {
      const long = (items[i].bytes * scale) / thick;
      made.push(width >= height
        ? [items[i], x, y + along, thick, long] : [items[i], x + along, y, long, thick]);
      along += long;
    }
    if (width >= height) { x += thick; width -= thick; } else { y += thick; height -= thick; }
    left -= row;
  }
  return made;
}

const byKind = (node) => node[2].map(byKind).reduce((a, b) => a.map((n, k) => n + b[k]), node[1]);

function treemap(place, trail) {
  const [, own, children] = trail[trail.length - 1];
  const width = 1000, height = 420;
  const items = children.map((node) => ({ name: node[0], node, kinds: byKind(node) }));
  own.forEach((bytes, k) => items.push({
    name: data.kinds[k], kinds: own.map((_, other) => (other === k ? bytes : 0)) }));
  for (const item of items) item.bytes = sum(item.kinds.map((bytes) => Math.max(0, bytes)));
  const shown = items.filter((item) => item.bytes > 0).sort((a, b) => b.bytes - a.bytes);
  place.replaceChildren();
  const path = document.createElement("p");
  trail.forEach((node, depth) => {
    const button = document.createElement("button");
    button.textContent = node[0] || "the model";
    button.addEventListener("click", () => treemap(place, trail.slice(0, depth + 1)));
    path.append(depth ? " › " : "", button);
  });
  path.append(" " + size(sum(byKind(trail[trail.length - 1]))));
  place.append(path);
  const svg = draw(place, "svg", { viewBox: `0 0 ${width} ${height}` });
  for (const [item, x, y, w, h] of squares(shown, 0, 0, width, height)) {
    const group = draw(svg, "g", item.node && item.node[2].length ? { tabindex: 0, role: "button" } : {});
    draw(group, "title", {}, `${item.name}: ${size(sum(item.kinds))}\n` + data.kinds
      .map((name, k) => (item.kinds[k] ? `${name} ${size(item.kinds[k])}` : "")).filter(Boolean).join("\n"));
    let at = 0;
    item.kinds.forEach((bytes, k) => {
      if (bytes <= 0) return;
      const share = bytes / item.bytes;
      draw(group, "rect", w >= h
        ? { x: x + at * w, y, width: share * w, height: h, fill: data.colours[k] }
        : { x, y: y + at * h, width: w, height: share * h, fill: data.colours[k] });
      at += share;
    });
    draw(group, "rect", { x, y, width: w, height: h, class: "edge" });
    const room = Math.floor((w - 8) / 7);
    if (room >= 3 && h >= 18) draw(group, "text", { x: x + 5, y: y + 15 }, item.name.slice(0, room));
    if (room >= 8 && h >= 34) draw(group, "text", { x: x + 5, y: y + 30 }, size(sum(item.kinds)));
    if (item.node && item.node[2].length) {
      const enter = () => treemap(place, [...trail, item.node]);
      group.addEventListener("click", enter);
      group.addEventListener("keydown", (event) => event.key === "Enter" && enter());
    }
  }
}

// ---- tables: rows are in the page already; a click on a head sorts them, words filter them
const words = new Intl.Collator("en", { numeric: true });  // "layers.2" before "layers.10"
const valueOf = (cell) => Number(cell.dataset.v ?? NaN);

function sortable(table) {
  table.querySelectorAll("th").forEach((head, column) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const body = table.tBodies[0], rows = [...body.rows];
      const numbers = head.className === "n";
      const down = head.ariaSort ? head.ariaSort === "ascending" : numbers;
      const keyed = rows.map((row) => [numbers ? valueOf(row.cells[column])
        : row.cells[column].textContent, row]);
      keyed.sort(([a], [b]) => (numbers ? a - b : words.compare(a, b)) * (down ? -1 : 1));
      table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      head.ariaSort = down ? "descending" : "ascending";
      body.replaceChildren(...keyed.map(([, row]) => row));
    });
  });
}

function filterable(table, form, told) {
  const rows = [...table.tBodies[0].rows];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const columns = {};
  for (const head of table.tHead.rows[0].cells) columns[head.dataset.name] = head.cellIndex;
  const apply = () => {
    const words = form.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean);
    const kind = form.elements.kind.value, peak = form.elements.peak?.checked;
    let count = 0, bytes = 0;
    rows.forEach((row, i) => {
      const fits = words.every((word) => texts[i].includes(word)) &&
        (!kind || row.cells[columns.kind].textContent === kind) &&
        (!peak || row.cells[columns.peak].textContent === "yes");
      row.hidden = !fits;
      if (fits) { count++; bytes += valueOf(row.cells[columns.bytes]); }
    });
    told.textContent = `${count} of ${rows.length} rows, ${size(bytes)} (${bytes.toLocaleString("en")} bytes)`;
  };
  form.hidden = false;
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  apply();
}

const drawn = ({ values, times }) => times.map((_, i) => sum(values.map((kind) => Math.max(0, kind[i]))));
const highest = data.timelines.flatMap(drawn).reduce((a, b) => Math.max(a, b), 1);
data.timelines.forEach((points, i) => timeline(
  document.getElementById(`timeline-${i}`), document.getElementById(`moment-${i}`), points, highest));
if (data.tree) treemap(document.getElementById("treemap"), [data.tree]);
document.querySelectorAll("table.sortable").forEach(sortable);
document.querySelectorAll("form.filter").forEach((form) =>
  filterable(document.getElementById(form.dataset.table), form, form.querySelector("output")));
document.documentElement.dataset.ready = "yes";
