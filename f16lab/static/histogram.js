// One tensor's exponents over time, and what another format or another scale would do to it: counted here, in the page,
// from the same counts that Python has. Comes after canvas.js and panel.js.
//
// Traits: sites [{ phase, layer, tensor, held, text, trouble, amax }], chosen { phase, layer, tensor, step },
// history { steps, first, width, held, notes }, counts (float64, a row a step: `width` binades, then zeros, subnormals,
// infs, nans, amax, elements), formats [{ tag, name, emin, emax, mantissa, edge, strict, max, text }].

const STRIP = 15, GUTTER = 26, SITES_AT_ONCE = 400, SCALES = 40;

// ---------------------------------------------------------------- counting
// Row i of the history as a histogram.
function histogramAt(history, i) {
  const { first, width, values } = history, at = i * (width + 6);
  const [zeros, subnormals, infs, nans, amax, elements] = values.subarray(at + width, at + width + 6);
  return { first, counts: values.subarray(at, at + width), zeros, subnormals, infs, nans, amax, elements };
}

// Shares of all elements if 2^k · x were rounded to format p, as f16lab.probes.what_if counts them.
function whatIf(h, p, k) {
  const some = (least, end) => {
    let sum = 0;
    for (let i = 0; i < h.counts.length; i += 1) {
      const e = h.first + i + k;
      if (e >= least && e < end) sum += h.counts[i];
    }
    return sum;
  };
  const n = Math.max(1, h.elements), smallest = p.emin - p.mantissa - 1, top = h.amax * 2 ** k;
  const above = some(p.emax + 1, Infinity);
  const edge = (p.strict ? top > p.edge : top >= p.edge) ? some(p.emax, p.emax + 1) : 0;
  const sure = above + h.infs + (edge > 0 && above === 0 ? 1 : 0);
  return { flushed: some(-Infinity, smallest) / n, subnormal: some(smallest, p.emin) / n, overflow: sure / n,
    overflowMost: (above + h.infs + edge) / n };
}

const shareText = (x) => (x === 0 ? "0 %" : x < 0.0005 ? "< 0.1 %" : x >= 0.9995 ? "100 %" : `${(100 * x).toPrecision(3)} %`);
const scaleText = (k) => (k === 0 ? "1" : k > 0 && k < 24 ? `2${raised(k)} = ${countText(2 ** k)}` : `2${raised(k)}`);

// ---------------------------------------------------------------- which tensor
const KINDS = { weights: (t) => !/^output|\.(grad|update|m|v)(\.|$)/.test(t), outputs: (t) => /^output(?!.*grad)/.test(t),
  gradients: (t) => /\.grad/.test(t), updates: (t) => /\.update$/.test(t), moments: (t) => /\.(m|v)$/.test(t) };
const siteKey = (s) => `${s.phase}|${s.layer}|${s.tensor}`;

function siteList(model, send) {
  const ui = { words: [], kind: "", worst: false, key: "", rows: [], from: 0 };
  const search = make("input", { class: "f16p-search", type: "search", placeholder: "search a layer or tensor",
    "aria-label": "search tensors" });
  const kinds = make("select", { class: "f16p-select", "aria-label": "kind of tensor" },
    ...["all tensors", ...Object.keys(KINDS)].map((name) => make("option", {}, name)));
  const order = make("button", { class: "f16p-button", type: "button", "aria-pressed": "false",
    title: "tensors that f16 would hurt most come first" }, "worst first");
  const list = make("div", { class: "f16p-sites", role: "listbox", tabindex: "0", "aria-label": "tensors" });
  const count = make("div", { class: "f16p-muted" });
  const node = make("div", { class: "f16p-side" }, search, make("div", { class: "f16p-sidebar" }, kinds, order), list, count);

  const choose = (site) => {
    ui.key = siteKey(site);
    mark();
    send({ kind: "site", phase: site.phase, layer: site.layer, tensor: site.tensor });
  };
  const mark = () => {
    for (const option of list.children) {
      const on = option.dataset.key === ui.key;
      option.setAttribute("aria-selected", String(on));
      if (on) { option.id ||= `f16p-${Math.random().toString(36).slice(2)}`; list.setAttribute("aria-activedescendant", option.id); }
    }
  };
  // Scrolls the list, not the page, so that the chosen tensor is seen.
  const reveal = (centre = false) => {
    const option = list.querySelector('[aria-selected="true"]');
    if (!option) return;
    const top = option.offsetTop, below = top + option.offsetHeight - list.clientHeight;
    if (centre) list.scrollTop = top - list.clientHeight / 2;
    else list.scrollTop = Math.min(top, Math.max(below, list.scrollTop));
  };
  const draw = () => {
    const sites = model.get("sites"), wanted = KINDS[kinds.value];
    ui.rows = sites.filter((s) => (!wanted || wanted(s.tensor))
      && ui.words.every((word) => `${s.layer} ${s.tensor} ${s.held}`.toLowerCase().includes(word)));
    if (ui.worst) ui.rows.sort((a, b) => b.trouble - a.trouble);
    const place = list.scrollTop;
    const at = ui.rows.findIndex((s) => siteKey(s) === ui.key);
    if (ui.rows.length <= SITES_AT_ONCE) ui.from = 0;
    else if (at < ui.from || at >= ui.from + SITES_AT_ONCE) ui.from = Math.max(0, at - SITES_AT_ONCE / 2);
    list.replaceChildren(...ui.rows.slice(ui.from, ui.from + SITES_AT_ONCE).map((s) => make("div", { role: "option", class: "f16p-site",
      "data-key": siteKey(s), title: `${s.layer || "the model"} ${s.tensor}, held in ${s.held}, largest ${s.amax}; f16: ${s.text || "holds all of it"}` },
    make("b", {}, s.layer || "(model)"), make("span", {}, s.tensor),
    make("em", { class: s.trouble > 1 ? "f16p-tone-bad" : s.trouble > 0.02 ? "f16p-tone-warn" : "" }, s.text || ""))));
    list.scrollTop = place;
    count.textContent = `${ui.rows.length === sites.length ? "" : `${ui.rows.length} of `}${sites.length} tensors`
      + (ui.rows.length > SITES_AT_ONCE ? `, ${SITES_AT_ONCE} shown: search` : "");
    mark();
  };
  const move = (by) => {
    const i = ui.rows.findIndex((s) => siteKey(s) === ui.key);
    const site = ui.rows[Math.max(0, Math.min(ui.rows.length - 1, i + by))];
    if (!site) return;
    choose(site);
    if (!list.querySelector('[aria-selected="true"]')) draw();
    reveal();
  };
  search.addEventListener("input", () => { ui.words = search.value.toLowerCase().split(/\s+/).filter(Boolean); draw(); });
  kinds.addEventListener("change", draw);
  order.addEventListener("click", () => {
    ui.worst = !ui.worst;
    order.setAttribute("aria-pressed", String(ui.worst));
    draw();
  });
  list.addEventListener("click", (event) => {
    const key = event.target.closest(".f16p-site")?.dataset.key;
    if (key) choose(ui.rows.find((s) => siteKey(s) === key));
  });
  list.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
    if (by) { move(by); event.preventDefault(); event.stopPropagation(); }
  });
  const follow = () => {
    const key = siteKey(model.get("chosen"));
    if (key === ui.key) return;
    ui.key = key;
    draw();
    reveal(true);
  };
  return { node, draw, follow };
}

// ---------------------------------------------------------------- the picture
// Lowest and highest binade that is drawn: all of the data, and f16's range.
function drawnBinades(history) {
  return [Math.min(history.first, -26) - 2, Math.max(history.first + history.width, 17) + 2];
}

function heatImage(history, theme, [low, high]) {
  const n = history.steps.length, rows = high - low;
  const image = new ImageData(Math.max(1, n), rows);
  for (let i = 0; i < n; i += 1) {
    const h = histogramAt(history, i), total = Math.max(1, h.elements);
    for (let j = 0; j < h.counts.length; j += 1) {
      const y = high - 1 - (h.first + j);
      if (!h.counts[j] || y < 0 || y >= rows) continue;
      const [r, g, b] = heatColor(theme, 0.12 + 0.88 * (1 + Math.log10(h.counts[j] / total) / 5));
      image.data.set([r, g, b, 255], 4 * (y * n + i));
    }
  }
  const canvas = document.createElement("canvas");
  canvas.width = image.width;
  canvas.height = rows;
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

// Named strips above and below the heat: shares of what is no binade, and of what the format makes of it.
const STRIPS = [
  { name: "NaN", above: true, of: (h) => h.nans / Math.max(1, h.elements), bad: true },
  { name: "infinite", above: true, of: (h) => h.infs / Math.max(1, h.elements), bad: true },
  { name: "overflow", above: true, of: (h, w) => w.overflowMost, bad: true },
  { name: "subnormal", above: false, of: (h, w) => w.subnormal },
  { name: "becomes 0", above: false, of: (h, w) => w.flushed, warn: true },
  { name: "zeros", above: false, of: (h) => h.zeros / Math.max(1, h.elements) },
];

function drawStrip(ctx, theme, strip, shares, box, y) {
  const colors = theme.name === "dark" ? { bad: "#ff6b6b", warn: "#f2bb4a", plain: "#8fb7dd" } : { bad: "#c1121f", warn: "#b07a00", plain: "#33658f" };
  const wide = (box.right - box.left) / shares.length;
  ctx.fillStyle = theme.colors.grid;
  ctx.globalAlpha = 0.5;
  ctx.fillRect(box.left, y + 1, box.right - box.left, STRIP - 3);
  ctx.fillStyle = strip.bad ? colors.bad : strip.warn ? colors.warn : colors.plain;
  shares.forEach((share, i) => {
    if (!share) return;
    ctx.globalAlpha = Math.max(0.18, Math.min(1, 1 + Math.log10(share) / 4));
    ctx.fillRect(box.left + i * wide, y + 1, Math.max(1, wide), STRIP - 3);
  });
  ctx.globalAlpha = 1;
  write(ctx, strip.name, box.left - 7, y + STRIP / 2, { color: theme.colors.muted, align: "right" });
}

function drawBand(ctx, theme, p, k, box, y) {
  const clamp = (v) => Math.max(box.top, Math.min(box.bottom, v));
  const top = clamp(y(p.emax + 1 - k)), normal = clamp(y(p.emin - k)), end = clamp(y(p.emin - p.mantissa - k));
  ctx.fillStyle = theme.colors.alert;
  ctx.globalAlpha = theme.name === "dark" ? 0.2 : 0.1;
  ctx.fillRect(box.left, box.top, box.right - box.left, top - box.top);
  ctx.fillRect(box.left, end, box.right - box.left, box.bottom - end);
  ctx.globalAlpha = theme.name === "dark" ? 0.1 : 0.05;
  ctx.fillRect(box.left, normal, box.right - box.left, end - normal);
  ctx.globalAlpha = 1;
  ctx.lineWidth = 1.5;
  for (const [at, dash, text, over] of [[top, [], `${p.name}: largest number`, true], [normal, [7, 4], "smallest normal", false],
    [end, [2, 3], "smallest subnormal", false]]) {
    if (at <= box.top || at >= box.bottom) continue;
    ctx.strokeStyle = theme.colors.alert;
    ctx.setLineDash(dash);
    line(ctx, box.left, crisp(at), box.right, crisp(at));
    ctx.setLineDash([]);
    label(ctx, theme, text, box.left + 6, over ? at - 8 : at + 9);
  }
}

// Text on a patch of the page's colour, readable on any heat.
function label(ctx, theme, text, x, y) {
  ctx.font = `600 11px ${FONT}`;
  ctx.fillStyle = theme.colors.paper;
  ctx.globalAlpha = 0.82;
  ctx.fillRect(x - 3, y - 7, ctx.measureText(text).width + 6, 14);
  ctx.globalAlpha = 1;
  write(ctx, text, x, y, { color: theme.colors.alert, weight: 600 });
}

// One bar a format at the right: from its smallest subnormal (thin) over its normal numbers (thick) to its largest.
function drawLadder(ctx, theme, formats, tag, k, box, y) {
  formats.forEach((p, i) => {
    const x = box.right + 12 + i * GUTTER, on = p.tag === tag;
    const clamp = (v) => Math.max(box.top, Math.min(box.bottom, v));
    const top = clamp(y(p.emax + 1 - k)), normal = clamp(y(p.emin - k)), end = clamp(y(p.emin - p.mantissa - k));
    ctx.fillStyle = on ? theme.colors.alert : theme.colors.muted;
    ctx.globalAlpha = on ? 0.95 : 0.5;
    ctx.fillRect(x + 4, top, 10, normal - top);
    ctx.fillRect(x + 8, normal, 2, end - normal);
    if (top > box.top) ctx.fillRect(x + 2, top, 14, 2);
    if (end < box.bottom) ctx.fillRect(x + 5, end - 2, 8, 2);
    if (top <= box.top) triangle(ctx, x + 9, box.top - 6, 4, -1);
    if (end >= box.bottom) triangle(ctx, x + 9, box.bottom + 6, 4, 1);
    ctx.globalAlpha = 1;
    write(ctx, p.name, x + 9, box.top - 22 - 12 * (i % 2), { color: on ? theme.colors.alert : theme.colors.muted, align: "center",
      size: 10, weight: on ? 700 : 400 });
  });
}

function drawSteps(ctx, theme, history, box, bottom, column) {
  const n = history.steps.length, wide = (box.right - box.left) / n;
  const every = Math.max(1, Math.ceil(70 / wide));
  for (let i = 0; i < n; i += every) {
    const x = box.left + (i + 0.5) * wide;
    if (x < box.right - 20 || n === 1) write(ctx, countText(history.steps[i]), x, bottom + 11, { color: theme.colors.muted, align: "center" });
  }
  write(ctx, "step", box.left - 7, bottom + 11, { color: theme.colors.muted, align: "right" });
  const x = box.left + column * wide;
  ctx.strokeStyle = theme.colors.ink;
  ctx.lineWidth = 1.5;
  ctx.strokeRect(x - 0.5, box.top - 3 * STRIP - 0.5, Math.max(3, wide + 1), bottom - box.top + 3 * STRIP);
}

function binadeAxis(ctx, theme, box, y, [low, high]) {
  const every = Math.max(1, Math.ceil(20 / ((box.bottom - box.top) / (high - low)))), step = [1, 2, 4, 5, 8, 10, 16, 20].find((s) => s >= every) ?? 32;
  for (let e = Math.ceil(low / step) * step; e < high; e += step) {
    if (y(e) > box.bottom - 5) continue;
    write(ctx, `2${raised(e)}`, box.left - 7, y(e) , { color: theme.colors.muted, align: "right" });
    ctx.strokeStyle = theme.colors.grid;
    ctx.lineWidth = 1;
    line(ctx, box.left - 4, crisp(y(e)), box.left, crisp(y(e)));
  }
}

// ---------------------------------------------------------------- the panel
function picture(root, model, theme, ui, changed) {
  const place = make("div", { class: "f16p-picture" });
  const layout = { box: null, y: null, binades: null };
  const history = () => ui.history;
  const board = makeBoard(place, { height: 430,
    label: "Exponents over time. Up and down arrows move the format's range, left and right arrows choose a step.",
    draw(ctx, width, height) {
      const past = history();
      if (!past || !past.steps.length) { emptyWords(ctx, theme, "choose a tensor", { left: 0, right: width, top: 0, bottom: height }); return; }
      const formats = model.get("formats"), p = formats.find((f) => f.tag === ui.format);
      const box = { left: 74, right: width - 18 - GUTTER * formats.length, top: 8 + 3 * STRIP, bottom: height - 26 - 3 * STRIP };
      const binades = drawnBinades(past), [low, high] = binades;
      const y = (e) => box.bottom - ((e - low) / (high - low)) * (box.bottom - box.top);
      Object.assign(layout, { box, y, binades });
      ctx.fillStyle = theme.colors.panel;
      ctx.fillRect(box.left, box.top, box.right - box.left, box.bottom - box.top);
      ctx.imageSmoothingEnabled = false;
      ui.image ??= heatImage(past, theme, binades);
      ctx.drawImage(ui.image, box.left, box.top, box.right - box.left, box.bottom - box.top);
      drawBand(ctx, theme, p, ui.k, box, y);
      const all = past.steps.map((_, i) => { const h = histogramAt(past, i); return [h, whatIf(h, p, ui.k)]; });
      let up = 0, down = 0;
      for (const strip of STRIPS) {
        const at = strip.above ? box.top - (3 - up++) * STRIP : box.bottom + 2 + STRIP * down++;
        drawStrip(ctx, theme, strip, all.map(([h, w]) => strip.of(h, w)), box, at);
      }
      binadeAxis(ctx, theme, box, y, binades);
      drawLadder(ctx, theme, formats, ui.format, ui.k, box, y);
      drawSteps(ctx, theme, past, box, box.bottom + 2 + 3 * STRIP, ui.column);
    } });
  const columnAt = (x) => Math.max(0, Math.min(ui.history.steps.length - 1,
    Math.floor(((x - layout.box.left) / (layout.box.right - layout.box.left)) * ui.history.steps.length)));

  let drag = null;
  board.canvas.addEventListener("pointerdown", (event) => {
    if (!layout.box || !ui.history?.steps.length) return;
    const at = pointIn(board.canvas, event);
    if (at.x > layout.box.right + 8) {
      const format = model.get("formats")[Math.floor((at.x - layout.box.right - 12) / GUTTER)];
      if (format) changed({ format: format.tag });
      return;
    }
    drag = { y: at.y, k: ui.k, moved: false };
    board.canvas.setPointerCapture(event.pointerId);
  });
  board.canvas.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const at = pointIn(board.canvas, event), binade = (layout.box.bottom - layout.box.top) / (layout.binades[1] - layout.binades[0]);
    if (Math.abs(at.y - drag.y) > 3) drag.moved = true;
    if (drag.moved) changed({ k: drag.k + Math.round((at.y - drag.y) / binade) }); // down: the range sinks, numbers grow
  });
  board.canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) changed({ column: columnAt(pointIn(board.canvas, event).x) });
    drag = null;
  });
  board.canvas.addEventListener("keydown", (event) => {
    if (!ui.history?.steps.length) return;
    const change = { ArrowUp: { k: ui.k - 1 }, ArrowDown: { k: ui.k + 1 }, ArrowLeft: { column: ui.column - 1 },
      ArrowRight: { column: ui.column + 1 }, Home: { column: 0 }, End: { column: Infinity }, 0: { k: 0 } }[event.key];
    if (change) { changed(change); event.preventDefault(); event.stopPropagation(); }
  });
  root.append(place);
  return board;
}

function controls(model, ui, changed) {
  const formats = make("div", { class: "f16p-choice", role: "group", "aria-label": "format" });
  const slider = make("input", { type: "range", min: -SCALES, max: SCALES, step: 1, "aria-label": "scale as a power of two" });
  const scale = make("output", { class: "f16p-scale" });
  const reset = make("button", { class: "f16p-button", type: "button" }, "back to 1");
  const node = make("div", { class: "f16p-controls" }, make("span", { class: "f16p-muted" }, "what if it were held in"), formats,
    make("span", { class: "f16p-muted" }, "and scaled by"), slider, scale, reset);
  slider.addEventListener("input", () => changed({ k: Number(slider.value) }));
  reset.addEventListener("click", () => changed({ k: 0 }));
  const update = () => {
    const all = model.get("formats");
    if (formats.childElementCount !== all.length) {
      formats.replaceChildren(...all.map((p) => {
        const button = make("button", { type: "button", "data-tag": p.tag, title: p.text }, p.name);
        button.addEventListener("click", () => changed({ format: p.tag }));
        return button;
      }));
    }
    for (const button of formats.children) button.setAttribute("aria-pressed", String(button.dataset.tag === ui.format));
    slider.value = ui.k;
    slider.setAttribute("aria-valuetext", `times two to the ${ui.k}`);
    scale.textContent = scaleText(ui.k);
    reset.disabled = ui.k === 0;
  };
  return { node, update };
}

function readOut(model, ui) {
  const words = make("p", { class: "f16p-readout", role: "status", "aria-live": "polite" });
  const body = make("tbody");
  const table = make("table", { class: "f16p-table f16p-small" }, make("thead", {}, make("tr", {}, ...["format", "overflows", "becomes 0",
    "subnormal", "keeps all its bits", "worst step: overflows", "becomes 0"].map((name, i) => make("th", { class: i ? "f16p-n" : "", scope: "col" }, name)))), body);
  const node = make("div", { class: "f16p-read" }, words, table);
  const tone = (x, limit) => (x > limit ? "f16p-tone-bad" : "");
  const update = () => {
    node.hidden = !ui.history?.steps.length;
    if (node.hidden) return;
    const all = ui.history.steps.map((_, i) => histogramAt(ui.history, i)), h = all[ui.column];
    const p = model.get("formats").find((f) => f.tag === ui.format), w = whatIf(h, p, ui.k);
    words.replaceChildren(make("b", {}, `Step ${countText(ui.history.steps[ui.column])}, × ${scaleText(ui.k)}, in ${p.name}: `),
      ...(h.nans ? [make("span", { class: "f16p-tone-bad" }, `${shareText(h.nans / h.elements)} are NaN already, `)] : []),
      `${shareText(w.overflow)} overflow, ${shareText(w.flushed)} become 0, ${shareText(w.subnormal)} are subnormal. `,
      make("span", { class: "f16p-muted" }, `Held in ${ui.history.held}; ${countText(h.elements)} numbers counted, largest ${numberText(h.amax, 4)}, `
        + `${shareText(h.zeros / Math.max(1, h.elements))} zeros, ${countText(h.infs)} infinite, ${countText(h.nans)} NaN.`));
    body.replaceChildren(...model.get("formats").map((format) => {
      const now = whatIf(h, format, ui.k), past = all.map((one) => whatIf(one, format, ui.k));
      const worst = [Math.max(...past.map((x) => x.overflow)), Math.max(...past.map((x) => x.flushed))];
      const whole = Math.max(0, 1 - now.overflow - now.flushed - now.subnormal - (h.zeros + h.nans) / Math.max(1, h.elements)) + h.zeros / Math.max(1, h.elements);
      const cells = [[now.overflow, 0], [now.flushed, 0.01], [now.subnormal, 2], [whole, 2], [worst[0], 0], [worst[1], 0.01]];
      return make("tr", { "aria-selected": String(format.tag === ui.format) }, make("td", { title: format.text }, format.name),
        ...cells.map(([x, limit]) => make("td", { class: `f16p-n ${tone(x, limit)}` }, shareText(x))));
    }));
  };
  return { node, update };
}

// The history that came, with its counts as numbers.
function unpacked(model) {
  const history = model.get("history"), view = model.get("counts");
  const steps = history.steps ?? [];
  const bytes = view?.buffer ? view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength) : new ArrayBuffer(0);
  const values = new Float64Array(bytes);
  if (values.length !== steps.length * (history.width + 6)) return null; // the other half of this change is on its way
  return { ...history, values };
}

function render({ model, el }) {
  const { root, theme } = panelRoot(el, model);
  const ui = { k: 0, format: "f16", column: 0, follow: true, history: null, image: null, marked: "" };
  const send = (message) => model.send(message);
  const head = panelHead(model, send), list = siteList(model, send);
  const about = make("div", { class: "f16p-about" }), right = make("div", { class: "f16p-main" });
  const notes = make("p", { class: "f16p-muted" });
  const knobs = controls(model, ui, changed), read = readOut(model, ui);
  const split = make("div", { class: "f16p-histogram" }, list.node, right);
  root.append(head.node, split);
  right.append(about, knobs.node);
  const board = picture(right, model, theme, ui, changed);
  right.append(read.node, notes);

  function changed(change) {
    if (change.k !== undefined) ui.k = Math.max(-SCALES, Math.min(SCALES, change.k));
    if (change.format !== undefined) ui.format = change.format;
    if (change.column !== undefined && ui.history) {
      const last = ui.history.steps.length - 1;
      ui.column = Math.max(0, Math.min(last, change.column));
      ui.follow = ui.column === last; // at the newest step: stay with it
    }
    knobs.update();
    read.update();
    board.ask();
  }
  const arrive = () => {
    const history = unpacked(model);
    if (!history) return;
    const chosen = model.get("chosen"), step = ui.history?.steps[ui.column];
    ui.history = history;
    ui.image = null;
    const mark = `${siteKey(chosen)} ${chosen.step}`;
    if (mark !== ui.marked && Number.isInteger(chosen.step)) { ui.column = Math.max(0, nearest(history.steps, chosen.step)); ui.follow = false; }
    else if (ui.follow || step === undefined) ui.column = Math.max(0, history.steps.length - 1);
    else ui.column = Math.max(0, nearest(history.steps, step));
    ui.marked = mark;
    about.replaceChildren(make("b", {}, chosen.layer || "the model"), ` ${chosen.tensor ?? ""}`);
    notes.textContent = (history.notes ?? []).join(" ");
    changed({});
  };
  const whole = () => { head.update(); split.hidden = Boolean(model.get("head").empty); board.ask(); };
  const changes = { head: whole, problem: head.update, theme: theme.refresh, sites: list.draw, chosen: () => { list.follow(); arrive(); },
    history: arrive, counts: arrive, formats: () => changed({}) };
  for (const [name, change] of Object.entries(changes)) model.on(`change:${name}`, change);
  root.addEventListener("f16-theme", () => { ui.image = null; board.ask(); });
  theme.refresh();
  whole();
  list.draw();
  list.follow();
  arrive();
  changed({});
  return () => {
    theme.stop();
    board.stop();
    for (const [name, change] of Object.entries(changes)) model.off(`change:${name}`, change);
    root.remove();
  };
}

export { whatIf, histogramAt, unpacked };
export default { render };
