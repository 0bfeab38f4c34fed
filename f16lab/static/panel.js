// What all panels share: a head with title, run and state; large numbers; tables that are searched, sorted and picked
// from; bars; a tree map; a job that runs in Python. No exports; comes after canvas.js and before a panel's own text.
//
// The model has plain traits: head { title, help, runs, run, status, empty }, body [block, …], detail { key, blocks },
// job { … }, problem, theme. What a person does goes back as { kind: "run" | "pick" | "job", … }.

const ROWS_AT_ONCE = 120;

function panelRoot(el, model) {
  const root = make("div", { class: "f16p-panel", "data-lm-suppress-shortcuts": "true" });
  el.append(root);
  const theme = watchTheme(root, () => model.get("theme"), () => root.dispatchEvent(new Event("f16-theme")));
  return { root, theme };
}

// ---------------------------------------------------------------- head
function panelHead(model, send) {
  const title = make("h3", { class: "f16p-title" });
  const run = make("select", { class: "f16p-select", "aria-label": "run", title: "which run is shown" });
  const status = make("span", { class: "f16p-status", role: "status" });
  const help = make("p", { class: "f16p-help" });
  const problem = make("div", { class: "f16p-problem", role: "alert" });
  const empty = make("div", { class: "f16p-empty" });
  run.addEventListener("change", () => send({ kind: "run", index: run.selectedIndex }));
  const node = make("div", {}, make("div", { class: "f16p-head" }, title, run, status), help, problem, empty);
  const update = () => {
    const head = model.get("head");
    title.textContent = head.title ?? "";
    help.textContent = head.help ?? "";
    status.textContent = head.status ?? "";
    problem.textContent = model.get("problem") ?? "";
    problem.hidden = !problem.textContent;
    const runs = head.runs ?? [];
    run.hidden = runs.length < 2;
    if (run.dataset.runs !== JSON.stringify(runs)) {
      run.dataset.runs = JSON.stringify(runs);
      run.replaceChildren(...runs.map((name) => make("option", {}, name)));
    }
    run.selectedIndex = head.run ?? 0;
    empty.hidden = !head.empty;
    empty.replaceChildren(...(head.empty ? [make("p", {}, head.empty.words),
      ...(head.empty.how ? [make("code", {}, head.empty.how)] : [])] : []));
  };
  return { node, update };
}

// ---------------------------------------------------------------- simple blocks
function tilesBlock() {
  const node = make("div", { class: "f16p-tiles" });
  const update = (block) => node.replaceChildren(...block.items.map((t) => make("div",
    { class: `f16p-tile ${t.tone ? `f16p-${t.tone}` : ""}`, title: t.title || undefined },
    make("b", {}, t.value), make("span", {}, t.label))));
  return { node, update };
}

function wordsBlock() {
  const node = make("div", { class: "f16p-words" });
  const update = (block) => {
    node.className = `f16p-words ${block.tone ? `f16p-say-${block.tone}` : ""}`;
    node.replaceChildren(...(block.title ? [make("h4", {}, block.title)] : []),
      ...block.paragraphs.map((text) => make("p", {}, text)));
    node.classList.toggle("f16p-card", Boolean(block.title));
  };
  return { node, update };
}

// Stacked bars to one scale; the parts are listed below with their own numbers, so that colour is not the only cue.
function barsBlock(theme) {
  const node = make("div", { class: "f16p-bars" });
  const update = (block) => {
    const most = Math.max(...block.items.map((b) => b.total), 1e-300);
    const names = [...new Set(block.items.flatMap((b) => b.parts.map((p) => p.name)))];
    const color = (p) => (theme.name === "dark" && p.color === RUN_COLORS.light[0] ? RUN_COLORS.dark[0] : p.color) || RUN_COLORS[theme.name][(names.indexOf(p.name) + 1) % 8];
    const rows = block.items.map((b) => make("div", { class: "f16p-bar" },
      make("span", { class: "f16p-bar-name", title: b.label }, b.label),
      make("div", { class: "f16p-bar-line" }, ...b.parts.map((p) => {
        const part = make("div", { class: "f16p-part", title: `${p.name}: ${p.text}` });
        part.style.cssText = `width:${(100 * p.value) / most}%;background:${color(p)}`;
        return part;
      })),
      make("span", { class: "f16p-bar-text" }, b.text),
      make("div", { class: "f16p-bar-legend" }, ...b.parts.map((p) => {
        const dot = make("i");
        dot.style.background = color(p);
        return make("span", {}, dot, `${p.name} `, make("em", {}, p.text));
      }))));
    node.replaceChildren(...rows, make("p", { class: "f16p-muted" }, block.unit));
  };
  return { node, update };
}

// ---------------------------------------------------------------- cells
function sparkline(values, limit) {
  const wide = 92, high = 20, NS = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(NS, "svg");
  for (const [k, v] of Object.entries({ width: wide, height: high, class: "f16p-spark", "aria-hidden": "true" })) {
    svg.setAttribute(k, v);
  }
  const known = values.filter((v) => v !== null);
  if (!known.length) return svg;
  const top = Math.max(1, ...known), low = Math.min(0, ...known);
  const x = (i) => 2 + (i * (wide - 4)) / Math.max(1, values.length - 1);
  const y = (v) => high - 2 - ((v - low) / (top - low)) * (high - 4);
  const add = (name, attributes) => {
    const part = document.createElementNS(NS, name);
    for (const [k, v] of Object.entries(attributes)) part.setAttribute(k, v);
    svg.append(part);
  };
  add("line", { x1: 0, x2: wide, y1: y(limit), y2: y(limit), class: "f16p-limit" });
  const points = values.map((v, i) => (v === null ? "" : `${x(i).toFixed(1)},${y(v).toFixed(1)}`)).filter(Boolean);
  add("polyline", { points: points.join(" "), class: "f16p-curve" });
  const [lastX, lastY] = points[points.length - 1].split(",");
  add("circle", { cx: lastX, cy: lastY, r: 2, class: "f16p-dot" });
  return svg;
}

function tableCell(column, [text, , more = {}]) {
  const td = make("td", { class: [column.right ? "f16p-n" : "", more.tone ? `f16p-tone-${more.tone}` : ""].join(" ") });
  if (more.spark) td.append(sparkline(more.spark, more.limit ?? 0));
  else td.append(text);
  if (more.bar !== undefined) {
    const fill = make("i");
    fill.style.width = `${Math.max(0, Math.min(1, more.bar)) * 100}%`;
    td.append(make("span", { class: "f16p-meter", "aria-hidden": "true" }, fill));
  }
  return td;
}

// ---------------------------------------------------------------- table
function compareCells(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return 1; // nothing is last, whichever way
  if (b === null || b === undefined) return -1;
  return typeof a === "number" && typeof b === "number" ? a - b
    : String(a).localeCompare(String(b), "en", { numeric: true });
}

function sortedRows(rows, [column, way]) {
  if (column < 0) return rows;
  const key = (row) => row.cells[column][1];
  return [...rows].sort((a, b) => {
    const missing = (key(a) === null) - (key(b) === null);
    return missing || way * compareCells(key(a), key(b));
  });
}

// Words of the search field that all occur somewhere in the row.
function rowMatches(row, words) {
  if (!words.length) return true;
  row.find ??= row.cells.map((c) => c[0]).join(" ").toLowerCase();
  return words.every((word) => row.find.includes(word));
}

function tableBlock(theme, send, pick) {
  const ui = { words: [], tag: "", sort: null, shown: ROWS_AT_ONCE, picked: "", block: null, touched: false, path: [] };
  const search = make("input", { class: "f16p-search", type: "search", placeholder: "search", "aria-label": "search" });
  const tags = make("div", { class: "f16p-choice", role: "group", "aria-label": "show" });
  const count = make("span", { class: "f16p-muted" });
  const tree = treeBlock(theme, (row) => choose(row), (path) => { ui.path = path; ui.shown = ROWS_AT_ONCE; lines(); });
  const head = make("thead"), body = make("tbody");
  const more = make("button", { class: "f16p-button", type: "button" });
  const scroll = make("div", { class: "f16p-scroll" }, make("table", { class: "f16p-table" }, head, body), more);
  const bar = make("div", { class: "f16p-bar-of-table" }, search, tags, count);
  const detail = make("div", { class: "f16p-detail", "aria-live": "polite" });
  const node = make("div", { class: "f16p-tabled" }, bar, tree.node, make("div", { class: "f16p-split" }, scroll, detail));

  function choose(row) {
    ui.picked = row.key;
    mark();
    pick(row, ui.block, detail);
    detail.hidden = !detail.childNodes.length;
    detail.scrollIntoView({ block: "nearest" });  // it may stand below a long table
    send({ kind: "pick", key: row.key });
  }
  const mark = () => {
    for (const tr of body.children) tr.setAttribute("aria-selected", String(tr.dataset.key === ui.picked));
  };
  const visible = () => sortedRows(ui.block.rows.filter((row) => rowMatches(row, ui.words)
    && (!ui.tag || row.tags.includes(ui.tag))), ui.sort);

  const inside = (row) => ui.path.every((part, i) => row.path[i] === part);
  const lines = () => {
    const found = visible();
    tree.update(ui.block.tree ? found : null);
    const rows = ui.block.tree ? found.filter(inside) : found;
    count.textContent = rows.length === ui.block.rows.length ? `${rows.length} ${ui.block.noun}`
      : `${rows.length} of ${ui.block.rows.length} ${ui.block.noun}`;
    const focused = body.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    body.replaceChildren(...rows.slice(0, ui.shown).map((row) => {
      const cells = row.cells.map((c, i) => tableCell(ui.block.columns[i], c));
      return make("tr", { "data-key": row.key, tabindex: "-1", "aria-selected": String(row.key === ui.picked) }, ...cells);
    }));
    if (body.firstChild) body.firstChild.tabIndex = 0;
    if (focused !== null) body.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    more.hidden = rows.length <= ui.shown;
    more.textContent = `show ${Math.min(500, rows.length - ui.shown)} more of ${rows.length}`;
  };
  const heads = () => head.replaceChildren(make("tr", {}, ...ui.block.columns.map((column, i) => {
    const way = ui.sort[0] === i ? (ui.sort[1] > 0 ? "ascending" : "descending") : "none";
    const button = make("button", { type: "button", title: column.title ?? `sort by ${column.name}` }, column.name,
      make("span", { class: "f16p-way", "aria-hidden": "true" }, way === "none" ? "" : way === "ascending" ? " ▲" : " ▼"));
    button.addEventListener("click", () => {
      ui.sort = [i, ui.sort[0] === i ? -ui.sort[1] : column.right ? -1 : 1];
      ui.touched = true;
      heads();
      lines();
    });
    return make("th", { class: column.right ? "f16p-n" : "", "aria-sort": way, scope: "col" }, button);
  })));
  const choices = () => tags.replaceChildren(...["", ...(ui.block.tags ?? [])].map((tag) => {
    const button = make("button", { type: "button", "aria-pressed": String(ui.tag === tag) }, tag || "all");
    button.addEventListener("click", () => { ui.tag = tag; choices(); lines(); });
    return button;
  }));

  search.addEventListener("input", () => {
    ui.words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    ui.shown = ROWS_AT_ONCE;
    lines();
  });
  more.addEventListener("click", () => { ui.shown += 500; lines(); });
  body.addEventListener("click", (event) => {
    const tr = event.target.closest("tr");
    if (tr) choose(ui.block.rows.find((row) => row.key === tr.dataset.key));
  });
  body.addEventListener("keydown", (event) => {
    const tr = event.target.closest("tr");
    const to = { ArrowDown: tr?.nextSibling, ArrowUp: tr?.previousSibling, Home: body.firstChild, End: body.lastChild }[event.key];
    if (to) { to.focus(); event.preventDefault(); event.stopPropagation(); }
    if (tr && (event.key === "Enter" || event.key === " ")) { tr.click(); event.preventDefault(); }
  });

  const update = (block) => {
    ui.block = block;
    if (!ui.touched || !ui.sort) ui.sort = block.sort ?? [-1, 1];
    bar.hidden = Boolean(block.small);
    tags.hidden = !(block.tags ?? []).length;
    if (block.search !== undefined && block.search !== ui.given) {
      ui.given = block.search;
      search.value = block.search;
      ui.words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    }
    heads();
    choices();
    lines();
    if (block.picked !== undefined && block.picked !== ui.told) {
      ui.picked = ui.told = block.picked;
      const tr = body.querySelector(`[data-key="${CSS.escape(ui.picked)}"]`);
      if (tr) requestAnimationFrame(() => { scroll.scrollTop = tr.offsetTop - scroll.clientHeight / 2; });
    }
    const row = block.rows.find((r) => r.key === ui.picked);
    if (row) { mark(); pick(row, block, detail); } else detail.replaceChildren();
    detail.hidden = !detail.childNodes.length;
  };
  return { node, update, redraw: () => ui.block && lines(), detail };
}

// ---------------------------------------------------------------- tree map
const TONES = { narrow: "#7CC4EC", widen: "#EDB33D", same: "#DDA0C2", "": "#b9bec6" };

// Boxes { x, y, w, h } for sizes that descend, as square as can be (Bruls, Huizing, van Wijk 2000).
function squares(sizes, box) {
  const out = [], total = sizes.reduce((a, b) => a + b, 0);
  let { x, y, w, h } = box, from = 0, rest = total;
  while (from < sizes.length && rest > 0) {
    const side = Math.min(w, h), area = (w * h) / rest;
    const worst = (end) => {
      let sum = 0, low = Infinity, high = 0;
      for (let i = from; i < end; i += 1) { sum += sizes[i]; low = Math.min(low, sizes[i]); high = Math.max(high, sizes[i]); }
      const s = (sum * area) ** 2, q = side * side;
      return Math.max((q * high * area) / s, s / (q * low * area));
    };
    let end = from + 1;
    while (end < sizes.length && worst(end + 1) <= worst(end)) end += 1;
    const sum = sizes.slice(from, end).reduce((a, b) => a + b, 0), thick = (sum * area) / side;
    let at = 0;
    for (let i = from; i < end; i += 1) {
      const long = (sizes[i] / sum) * side;
      out.push(w >= h ? { x, y: y + at, w: thick, h: long } : { x: x + at, y, w: long, h: thick });
      at += long;
    }
    if (w >= h) { x += thick; w -= thick; } else { y += thick; h -= thick; }
    rest -= sum;
    from = end;
  }
  return out;
}

// The tree of rows with paths: { name, size, tone, rows, below }, tone of most bytes.
function treeOf(rows) {
  const root = { name: "all", size: 0, tones: {}, below: new Map(), rows: [] };
  for (const row of rows) {
    let node = root;
    for (const part of [null, ...row.path]) {
      if (part !== null) {
        if (!node.below.has(part)) node.below.set(part, { name: part, size: 0, tones: {}, below: new Map(), rows: [] });
        node = node.below.get(part);
      }
      node.size += row.size;
      node.tones[row.tone] = (node.tones[row.tone] ?? 0) + row.size;
      node.rows.push(row);
    }
  }
  return root;
}

// A cast in the colour of its direction; a place that holds several has a stripe of them, each as wide as its bytes.
function toneGround(node) {
  if (!node.below.size) return TONES[Object.keys(node.tones)[0] ?? ""];
  const stops = [];
  let at = 0;
  for (const [tone, size] of Object.entries(node.tones).sort()) {
    const next = at + (100 * size) / node.size;
    stops.push(`${TONES[tone]} ${at.toFixed(1)}% ${next.toFixed(1)}%`);
    at = next;
  }
  return `linear-gradient(90deg, ${stops.join(", ")}) bottom / 100% 6px no-repeat, var(--f16-leaf)`;
}
const bytesText = (n) => (n >= 1e9 ? `${(n / 1e9).toPrecision(3)} GB` : n >= 1e6 ? `${(n / 1e6).toPrecision(3)} MB`
  : n >= 1e3 ? `${(n / 1e3).toPrecision(3)} kB` : `${Math.round(n)} B`);

function treeBlock(theme, choose, entered) {
  const crumbs = make("nav", { class: "f16p-crumbs", "aria-label": "where the map is" });
  const legend = make("div", { class: "f16p-legend" }, ...[["narrow", "to fewer bits"], ["widen", "to more bits"],
    ["same", "as many"]].map(([tone, text]) => {
    const dot = make("i");
    dot.style.background = TONES[tone];
    return make("span", {}, dot, text);
  }), make("span", { class: "f16p-muted" }, "area = bytes"));
  const map = make("div", { class: "f16p-map", role: "group", "aria-label": "casts by place, area is bytes" });
  const node = make("div", {}, make("div", { class: "f16p-maphead" }, crumbs, legend), map);
  const ui = { path: [], rows: null };

  const nodeAt = (root) => {
    let at = root;
    for (const part of ui.path) {
      if (!at.below.has(part)) { ui.path = []; entered([]); return root; }
      at = at.below.get(part);
    }
    return at;
  };
  const go = (path) => { ui.path = path; entered(path); map.querySelector("button")?.focus({ preventScroll: true }); };
  const act = (path, place) => { if (place.below.size > 0) go(path); else choose(place.rows[0]); };

  function boxFor(place, path, b, kind) {
    const title = `${path.join(" › ")}: ${bytesText(place.size)} a step, ${place.rows.length} kinds of casts`;
    const box = make("button", { type: "button", class: `f16p-box f16p-${kind}${place.below.size ? "" : " f16p-cast"}`, title });
    const roomy = b.w > 34 && b.h > 15;
    if (roomy) box.append(make("span", {}, place.name), ...(b.h > 32 && kind === "leaf" && b.w > 52 ? [make("small", {}, bytesText(place.size))]
      : kind === "group" && b.w > 110 ? [make("small", {}, bytesText(place.size))] : []));
    box.style.cssText = `left:${b.x}px;top:${b.y}px;width:${Math.max(1, b.w - 1)}px;height:${Math.max(1, b.h - 1)}px;`
      + (kind === "leaf" ? `background:${toneGround(place)}` : "");
    if (!roomy) box.tabIndex = -1;
    box.addEventListener("click", () => act(path, place));
    return box;
  }
  const bySize = (place) => [...place.below.values()].sort((a, b) => b.size - a.size);

  function draw() {
    node.hidden = !ui.rows || !ui.rows.length;
    if (node.hidden) return;
    const wide = map.clientWidth, high = map.clientHeight;
    if (!wide) return;
    const here = nodeAt(treeOf(ui.rows)), boxes = [];
    const children = bySize(here);
    squares(children.map((c) => c.size), { x: 0, y: 0, w: wide, h: high }).forEach((b, i) => {
      const child = children[i], path = [...ui.path, child.name], below = bySize(child);
      if (!below.length || b.w < 46 || b.h < 40) { boxes.push(boxFor(child, path, b, "leaf")); return; }
      boxes.push(boxFor(child, path, b, "group"));
      const inner = { x: b.x + 2, y: b.y + 17, w: b.w - 5, h: b.h - 20 };
      squares(below.map((c) => c.size), inner).forEach((small, k) => {
        boxes.push(boxFor(below[k], [...path, below[k].name], small, "leaf"));
      });
    });
    map.replaceChildren(...boxes);
    crumbs.replaceChildren(...["all layers", ...ui.path].map((name, i) => {
      const button = make("button", { type: "button", disabled: i === ui.path.length ? "" : undefined }, name);
      button.addEventListener("click", () => go(ui.path.slice(0, i)));
      return button;
    }));
  }
  map.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && ui.path.length) { go(ui.path.slice(0, -1)); event.stopPropagation(); }
  });
  new ResizeObserver(() => draw()).observe(map);
  return { node, update: (rows) => { ui.rows = rows; draw(); } };
}

// ---------------------------------------------------------------- what was picked
function detailPane(row, block, pane) {
  const parts = [];
  if (row.reason) {
    const [layer, op, operand, direction, cast, shape, times, bytes] = row.cells.map((c) => c[0]);
    parts.push(make("h4", {}, `${layer} · ${op}(${operand})`), make("p", {},
      `${cast}, ${direction}, ${times} × a step, shape ${shape}: ${bytes} read and written.`),
    make("p", {}, make("b", {}, "Why: "), `${block.reasons[row.reason] ?? row.reason} (${row.reason}).`));
    if (row.line) parts.push(make("p", {}, make("b", {}, "Code: "), make("code", {}, row.line)));
    for (const i of row.hints ?? []) {
      const hint = block.hints[i];
      parts.push(make("p", { class: "f16p-hint" }, make("b", {}, `Hint, ${hint.kind}: `), hint.words));
    }
    if (!(row.hints ?? []).length) parts.push(make("p", { class: "f16p-muted" }, "No hint: nothing to save here that we know of."));
  } else if (row.paragraphs) {
    parts.push(make("h4", {}, row.key), ...row.paragraphs.map((text) => make("p", { class: "f16p-hint" }, text)));
    if (!row.paragraphs.length) parts.push(make("p", { class: "f16p-muted" }, "No alarm: enough of each update arrives."));
  }
  pane.replaceChildren(...parts);
  pane.hidden = !parts.length;
}

// ---------------------------------------------------------------- blocks, kept from look to look
function blockList(theme, send) {
  const makers = { tiles: tilesBlock, words: wordsBlock, bars: () => barsBlock(theme),
    table: () => tableBlock(theme, send, detailPane) };
  const node = make("div", { class: "f16p-blocks" });
  let kept = [];
  const update = (blocks) => {
    const kinds = blocks.map((b) => b.kind).join();
    if (kinds !== kept.map((k) => k.kind).join()) {
      kept = blocks.map((b) => ({ kind: b.kind, ...makers[b.kind]() }));
      node.replaceChildren(...kept.map((k) => k.node));
    }
    kept.forEach((k, i) => k.update(blocks[i]));
  };
  return { node, update, redraw: () => kept.forEach((k) => k.redraw?.()) };
}

// A job that Python does in a thread: what it is, a choice, a button, and what came of it.
function jobBlock(model, theme, send) {
  const choice = make("select", { class: "f16p-select", "aria-label": "profile" });
  const button = make("button", { class: "f16p-button f16p-primary", type: "button" });
  const told = make("span", { class: "f16p-muted", role: "status" });
  const blocks = blockList(theme, () => {});
  const node = make("div", { class: "f16p-job" }, make("div", { class: "f16p-jobline" }, button, choice, told), blocks.node);
  button.addEventListener("click", () => send({ kind: "job", option: choice.value }));
  const update = () => {
    const job = model.get("job");
    node.hidden = !job.label;
    if (node.hidden) return;
    button.textContent = job.label;
    button.disabled = job.state === "running" || Boolean(job.refused);
    choice.hidden = !(job.options ?? []).length;
    if (choice.dataset.options !== JSON.stringify(job.options)) {
      choice.dataset.options = JSON.stringify(job.options);
      choice.replaceChildren(...(job.options ?? []).map((name) => make("option", { value: name }, name)));
      if (job.option) choice.value = job.option;
    }
    told.textContent = job.words ?? "";
    told.className = job.state === "failed" ? "f16p-tone-bad" : "f16p-muted";
    node.classList.toggle("f16p-busy", job.state === "running");
    blocks.update(job.blocks ?? []);
  };
  return { node, update };
}
