// The live charts: trajectories, loss scale, exponent map. Joined behind canvas.js, whose helpers are used here.
//
// The kernel sends frames: { runs, scalars, curves: [[run, name, count, cut, whole], …], map, … } with buffers
// [steps int32, values float32, cells uint8, apart float32]. A frame holds what is new; `full` says that it holds all.
// The front end sends { type: "hello" } when it appears, "drawn" after it has drawn a frame, "range" when zoomed,
// "pick" when something is chosen. What a person has set lives in traits, so that it outlives a reload.

const SCALARS = {
  loss: ["Loss", "nats per target"], grad_norm: ["Gradient norm", ""], lr: ["Learning rate", ""],
  tokens_per_second: ["Speed", "targets per second"], seconds: ["Time of a step", "s"],
  seconds_average: ["Time of a step, running mean", "s"], loss_scale: ["Loss scale", ""],
  clip: ["Clip factor", "applied to the gradient"], tokens: ["Targets in a step", ""], mfu: ["FLOP utilisation", "share"],
  loss_z: ["Loss, deviation from its window", "σ"], norm_z: ["Gradient norm, deviation from its window", "σ"],
  margin: ["Room above the largest gradient", "binades"],
};
const titleOf = (name) => (SCALARS[name] ?? [name, ""])[0];
const unitOf = (name) => (SCALARS[name] ?? [name, ""])[1];

const STATES = {
  waiting: ["○", "waiting for the first step"], running: ["●", "running"], paused: ["❚❚", "paused"],
  finished: ["✓", "finished"], stopped: ["■", "stopped"], failed: ["✕", "failed"],
  closed: ["■", "ended without a word"], died: ["✕", "died: its process was killed"],
};
const MAX_POINTS = 2000;

// ---------------------------------------------------------------- what is known
function makeStore() {
  const store = { runs: [], scalars: [], curves: new Map(), events: [], map: null, mapSteps: [], words: {}, frames: 0 };
  store.curve = (run, name) => {
    const key = `${run}/${name}`;
    if (!store.curves.has(key)) store.curves.set(key, makeCurve(MAX_POINTS));
    return store.curves.get(key);
  };
  store.forget = () => {
    store.curves.clear();
    Object.assign(store, { runs: [], events: [], map: null, mapSteps: [], words: {} });
  };
  store.take = (frame, buffers) => takeFrame(store, frame, buffers);
  return store;
}

// A typed view of a message's buffer; copied, since buffers need not be aligned.
const typed = (Kind, buffer) => buffer ? new Kind(buffer.buffer.slice(buffer.byteOffset, buffer.byteOffset + buffer.byteLength))
  : new Kind(0);

function takeFrame(store, frame, buffers) {
  if (frame.full) store.forget();
  const steps = typed(Int32Array, buffers[0]), values = typed(Float32Array, buffers[1]);
  if (frame.runs) store.runs = frame.runs;
  if (frame.scalars) store.scalars = frame.scalars;
  if (frame.words) store.words = frame.words;
  let at = 0;
  for (const [run, name, count, cut, whole] of frame.curves ?? []) {
    const curve = store.curve(run, name);
    if (whole) curve.clear();
    if (cut !== null) curve.cut(cut);
    curve.extend(steps.subarray(at, at + count), values.subarray(at, at + count));
    at += count;
  }
  if (frame.events) addEvents(store, frame.events);
  if (frame.map_steps) store.mapSteps = frame.map_steps;
  if (frame.map_steps_new) addSteps(store.mapSteps, frame.map_steps_new);
  if (frame.map) store.map = { ...frame.map, cells: typed(Uint8Array, buffers[2]), apart: typed(Float32Array, buffers[3]) };
  store.frames += 1;
}

// Adds events; one that comes again is the same.
function addEvents(store, more) {
  const known = new Map(store.events.map((event) => [event.join("/"), event]));
  for (const event of more) known.set(event.join("/"), event);
  store.events = [...known.values()].slice(-500);
}

// Adds places to the time slider; of too many every second one stays.
function addSteps(steps, more) {
  for (const step of more) if (!steps.length || step > steps[steps.length - 1]) steps.push(step);
  if (steps.length <= 400) return;
  const kept = steps.filter((_, i) => (steps.length - 1 - i) % 2 === 0);
  steps.splice(0, steps.length, ...kept);
}

// The value of a curve at a step or the one before it; null in front of the first.
function valueAt(curve, step) {
  const i = lowerBound(curve.steps, step + 0.5) - 1;
  return i < 0 ? null : { step: curve.steps[i], value: curve.values[i] };
}

// A mean over neighbours on both sides, weighted by exp(−distance / span) however they are spaced; gaps stay gaps.
function smoothed(curve, span) {
  const { steps, values } = curve, n = steps.length, sums = new Float64Array(n), weights = new Float64Array(n);
  const sweep = (from, to, by) => {
    let sum = 0, weight = 0, last = NaN;
    for (let i = from; i !== to; i += by) {
      if (!Number.isFinite(values[i])) continue;
      const keep = Number.isNaN(last) ? 0 : Math.exp(-Math.abs(steps[i] - last) / span);
      sum = values[i] + keep * sum;
      weight = 1 + keep * weight;
      last = steps[i];
      sums[i] += sum;
      weights[i] += weight;
    }
  };
  sweep(0, n, 1);
  sweep(n - 1, -1, -1);
  const mean = (v, i) => Number.isFinite(v) ? (sums[i] - v) / (weights[i] - 1) : NaN;  // its own weight was taken twice
  return { steps, values: Array.from(values, mean) };
}

// ---------------------------------------------------------------- lines with gaps
// Draws a curve; not-finite values and what a log axis cannot show are gaps with a mark.
function drawCurve(ctx, curve, x, y, { color, dash = [], width = 1.7, alpha = 1, hold = false }) {
  ctx.save();
  ctx.strokeStyle = color;
  ctx.lineWidth = width;
  ctx.lineJoin = "round";
  ctx.globalAlpha = alpha;
  ctx.setLineDash(dash);
  ctx.beginPath();
  let open = false, before = 0, single = null;
  const dots = [];
  for (let i = 0; i < curve.steps.length; i += 1) {
    const value = curve.values[i];
    if (!Number.isFinite(value)) {
      if (single) dots.push(single);
      open = false; single = null;
      continue;
    }
    const px = x(curve.steps[i]), py = y(value);
    if (!open) { ctx.moveTo(px, py); single = [px, py]; }
    else { if (hold) ctx.lineTo(px, before); ctx.lineTo(px, py); single = null; }
    open = true;
    before = py;
  }
  if (single) dots.push(single);
  ctx.stroke();
  ctx.fillStyle = color;
  for (const [px, py] of dots) { ctx.beginPath(); ctx.arc(px, py, width + 0.8, 0, 7); ctx.fill(); }
  ctx.restore();
}

// A mark where a curve ceases to be finite, at the height of the value before: ▲ +∞, ▼ −∞, ✕ NaN; and a line below
// the box as long as the gap.
function drawOdd(ctx, theme, curve, x, y, box, lane) {
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = theme.colors.alert;
  ctx.lineWidth = 1.8;
  const first = curve.values.find(Number.isFinite);
  let height = first === undefined ? (box.top + box.bottom) / 2 : y(first), open = false, kind = "";
  for (let i = 0; i < curve.steps.length; i += 1) {
    const value = curve.values[i];
    if (Number.isFinite(value)) { height = y(value); open = false; kind = ""; continue; }
    const px = x(curve.steps[i]);
    if (px < box.left - 1 || px > box.right + 1) continue;
    const next = i + 1 < curve.steps.length ? x(curve.steps[i + 1]) : px;
    ctx.globalAlpha = 0.8;
    ctx.fillRect(px - 1, box.bottom - 3 - 4 * lane, Math.max(2, next - px), 2.5);
    ctx.globalAlpha = 1;
    const now = numberText(value);
    if (!open || now !== kind) {
      if (Number.isNaN(value)) cross(ctx, px, Math.min(Math.max(height, box.top + 5), box.bottom - 5), 4);
      else if (value > 0) triangle(ctx, px, box.top + 1, 4.5, -1);
      else triangle(ctx, px, box.bottom - 1, 4.5, 1);
    }
    open = true;
    kind = now;
  }
  ctx.restore();
}

// [lo, hi] of finite values with steps in from … to; null without any. For a log axis only what is above 0 counts.
function rangeOf(curves, from, to, log) {
  let lo = Infinity, hi = -Infinity;
  for (const { steps, values } of curves) {
    for (let i = Math.max(0, lowerBound(steps, from) - 1); i < steps.length && steps[i] <= to; i += 1) {
      const value = values[i];
      if (!Number.isFinite(value) || (log && value <= 0)) continue;
      if (value < lo) lo = value;
      if (value > hi) hi = value;
    }
  }
  return lo <= hi ? [lo, hi] : null;
}

// ---------------------------------------------------------------- a chart with steps along its width
// What trajectories and loss scale share: cursor, read-out, zoom, keys. parts: { name, title, draw, rows, click }.
function makeStepChart(app, host, { label, height, draw, rows, note, summary, click, zoomed }) {
  const chart = { cursor: null, zoom: null, drag: null, box: null, x: null };
  const wrap = make("div", { class: "f16-plot" });
  const tip = make("div", { class: "f16-tip", hidden: "" });
  const spoken = make("div", { class: "f16-spoken", "aria-live": "polite" });
  host.append(wrap);
  const board = makeBoard(wrap, { label, height, draw: (ctx, w, h) => paint(ctx, w, h) });
  wrap.append(tip, spoken);
  const canvas = board.canvas;

  const extent = () => {
    let last = 0, first = Infinity;
    for (const run of app.store.runs) {
      if (run.step !== null) last = Math.max(last, run.step);
      if (run.first !== null) first = Math.min(first, run.first);
    }
    return [Number.isFinite(first) ? first : 0, Math.max(last, (Number.isFinite(first) ? first : 0) + 1)];
  };
  chart.range = () => chart.zoom ?? extent();

  function paint(ctx, width, height) {
    const [from, to] = chart.range();
    chart.box = { left: 62, right: width - 14, top: 26, bottom: height - 22 };
    chart.x = linearScale(from, to, chart.box.left, chart.box.right);
    draw(ctx, chart, width, height);
    if (chart.drag) paintDrag(ctx);
    if (chart.cursor !== null) paintCursor(ctx, height);
    else tip.hidden = true;
  }

  function paintDrag(ctx) {
    const a = Math.min(chart.drag.from, chart.drag.to), b = Math.max(chart.drag.from, chart.drag.to);
    ctx.fillStyle = app.theme.colors.accent;
    ctx.globalAlpha = 0.14;
    ctx.fillRect(a, chart.box.top, b - a, chart.box.bottom - chart.box.top);
    ctx.globalAlpha = 1;
  }

  function paintCursor(ctx) {
    const px = crisp(chart.x(chart.cursor));
    if (px < chart.box.left - 1 || px > chart.box.right + 1) { tip.hidden = true; return; }
    ctx.strokeStyle = app.theme.colors.muted;
    ctx.lineWidth = 1;
    ctx.setLineDash([3, 3]);
    line(ctx, px, chart.box.top, px, chart.box.bottom);
    ctx.setLineDash([]);
    const shown = rows(chart.cursor, chart);
    for (const row of shown) {
      if (row.y === undefined || !Number.isFinite(row.y)) continue;
      ctx.beginPath();
      ctx.arc(px, row.y, 3.4, 0, 7);
      ctx.fillStyle = row.color;
      ctx.fill();
      ctx.strokeStyle = app.theme.colors.paper;
      ctx.lineWidth = 1.5;
      ctx.stroke();
    }
    fillTip(tip, `step ${countText(chart.cursor)}`, shown, note?.(chart.cursor, chart));
    placeTip(tip, px, chart.box.top + 6, board.width);
  }

  // The nearest step that some run has.
  const stepAt = (pixel) => {
    const [from, to] = chart.range();
    return Math.min(Math.max(Math.round(chart.x.invert(pixel)), Math.ceil(from)), Math.floor(to));
  };
  const setCursor = (step, speak = false) => {
    chart.cursor = step;
    if (speak && step !== null) {
      spoken.textContent = [`step ${countText(step)}`, ...rows(step, chart).map((r) => `${r.name} ${r.text}`)].join(", ");
    }
    board.ask();
  };
  const setZoom = (range) => {
    chart.zoom = range;
    if (zoomed) zoomed(range);
    board.ask();
  };
  chart.setZoom = setZoom;

  canvas.addEventListener("pointermove", (event) => {
    if (!chart.box || !app.store.runs.length) return;
    const { x } = pointIn(canvas, event);
    if (chart.drag) chart.drag.to = Math.min(Math.max(x, chart.box.left), chart.box.right);
    setCursor(x < chart.box.left - 8 || x > chart.box.right + 8 ? null : stepAt(x));
  });
  canvas.addEventListener("pointerleave", () => { if (!chart.drag) setCursor(null); });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !chart.box) return;
    const { x } = pointIn(canvas, event);
    const at = Math.min(Math.max(x, chart.box.left), chart.box.right);
    chart.drag = { from: at, to: at };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (!chart.drag) return;
    const { from, to } = chart.drag, point = pointIn(canvas, event);
    chart.drag = null;
    if (Math.abs(to - from) < 6) {
      const step = stepAt(point.x);
      clearTimeout(chart.clicking);
      chart.clicking = setTimeout(() => click(chart, step, point), 230);  // a double click is no pick
      board.ask();
      return;
    }
    const [a, b] = [stepAt(Math.min(from, to)), stepAt(Math.max(from, to))];
    if (b - a >= 2) setZoom([a, b]); else board.ask();
  });
  canvas.addEventListener("pointercancel", () => { chart.drag = null; setCursor(null); });
  canvas.addEventListener("dblclick", () => { clearTimeout(chart.clicking); setZoom(null); });
  canvas.addEventListener("keydown", (event) => {
    const [from, to] = chart.range();
    const jump = event.shiftKey ? Math.max(1, Math.round((to - from) / 20)) : 1;
    const now = chart.cursor ?? Math.floor(to);
    const go = { ArrowLeft: now - jump, ArrowRight: now + jump, PageDown: now - Math.round((to - from) / 10),
      PageUp: now + Math.round((to - from) / 10), Home: Math.ceil(from), End: Math.floor(to) }[event.key];
    if (go !== undefined) setCursor(Math.min(Math.max(go, Math.ceil(from)), Math.floor(to)), true);
    else if (event.key === "Enter" || event.key === " ") click(chart, now, null);
    else if (event.key === "Escape" || event.key === "0") { setZoom(null); setCursor(null); }
    else if (event.key === "+" || event.key === "=") setZoom(closer(extent(), [from, to], now, 0.5));
    else if (event.key === "-") setZoom(closer(extent(), [from, to], now, 2));
    else return;
    event.preventDefault();
  });
  canvas.addEventListener("blur", () => setCursor(null));
  chart.update = () => {
    canvas.setAttribute("aria-label", `${label}. ${summary()} Arrow keys move the cursor, plus and minus zoom, Escape resets.`);
    board.ask();
  };
  const stop = () => { clearTimeout(chart.clicking); board.stop(); };
  Object.assign(chart, { board, wrap, host, ask: board.ask, stop, setCursor });
  return chart;
}

// A range around `center`, `factor` times as long; null when it would be all there is.
function closer([first, last], [from, to], center, factor) {
  const length = Math.max(4, (to - from) * factor), share = (center - from) / Math.max(1, to - from);
  const a = Math.max(first, Math.round(center - share * length)), b = Math.min(last, Math.round(a + length));
  return a <= first && b >= last ? null : [a, b];
}

function fillTip(tip, head, rows, note) {
  const lines = rows.map((row) => make("div", { class: "f16-tip-row" },
    make("span", { class: "f16-tip-key", style: `background:${row.color}` }), make("span", { class: "f16-tip-name" }, row.name),
    make("span", { class: `f16-tip-value${row.odd ? " f16-odd" : ""}` }, row.text)));
  tip.replaceChildren(make("div", { class: "f16-tip-head" }, head), ...lines, ...(note ? [make("div", { class: "f16-tip-note" }, note)] : []));
  tip.hidden = false;
}

function placeTip(tip, x, y, width) {
  const wide = tip.offsetWidth;
  tip.style.left = `${x + 14 + wide > width ? Math.max(0, x - 14 - wide) : x + 14}px`;
  tip.style.top = `${y}px`;
}

// ---------------------------------------------------------------- trajectories
function makeTrajectories(app, host) {
  const { model, store } = app;
  const head = makeHead(host, "Loss");
  const controls = make("div", { class: "f16-controls" });
  const pickScalar = makeSelect("quantity", (value) => app.set("scalar", value));
  const pickReference = makeSelect("difference from", (value) => app.set("reference", value));
  const logButton = makeToggle("log", "logarithmic axis", () => app.set("log", !model.get("log")));
  const smoothButton = makeToggle("smooth", "running mean over the curves", () => app.set("smooth", !model.get("smooth")));
  controls.append(pickScalar.element, logButton, smoothButton, pickReference.element);
  head.append(controls);
  const legend = make("div", { class: "f16-legend", role: "group", "aria-label": "runs" });
  host.append(legend);

  const scalar = () => model.get("scalar");
  const reference = () => store.runs.findIndex((run) => run.label === model.get("reference"));
  // The coarse curve, with the detail of the zoomed stretch in its place.
  const curveOf = (run) => {
    const coarse = store.curve(run, scalar()), fine = store.curve(run, "detail");
    if (!chart?.zoom || !fine.steps.length) return coarse;
    const first = fine.steps[0], last = fine.steps[fine.steps.length - 1];
    const a = lowerBound(coarse.steps, first), b = lowerBound(coarse.steps, last + 1);
    return { steps: [...coarse.steps.slice(0, a), ...fine.steps, ...coarse.steps.slice(b)],
      values: [...coarse.values.slice(0, a), ...fine.values, ...coarse.values.slice(b)] };
  };
  const visible = () => store.runs.map((run, i) => ({ run, i, curve: curveOf(i) }));
  const faded = (run) => app.picked.run && app.picked.run !== run.label ? 0.25 : 1;
  let scaleY = null, scaleGap = null;

  function draw(ctx, chart, width, height) {
    const { theme } = app, { box } = chart, compare = reference() >= 0 && store.runs.length > 1;
    const [from, to] = chart.range();
    const main = { ...box, bottom: compare ? box.bottom - 96 : box.bottom };
    const strip = compare ? { ...box, top: main.bottom + 28 } : null;
    const shown = visible();
    const log = model.get("log");
    const found = rangeOf(shown.map((s) => s.curve), from, to, log);
    const any = shown.some((s) => s.curve.steps.length);
    if (!any) { emptyWords(ctx, theme, app.emptyText(titleOf(scalar())), main); return; }
    const [lo, hi] = padded(...(found ?? (log ? [0.1, 1] : [0, 1])), log);
    scaleY = log ? logScale(lo, hi, main.bottom, main.top) : linearScale(lo, hi, main.bottom, main.top);
    yAxis(ctx, theme, scaleY, main, unitOf(scalar()) ? `${titleOf(scalar()).toLowerCase()}, ${unitOf(scalar())}` : titleOf(scalar()).toLowerCase());
    xAxis(ctx, theme, chart.x, main, compare ? undefined : "step");
    drawRuns(ctx, chart, shown, main, to - from);
    if (!found && log) emptyWords(ctx, theme, "no value above 0 for a logarithmic axis", main);
    drawSkips(ctx, chart, main);
    drawEvents(ctx, chart, main);
    if (strip) drawGap(ctx, chart, strip);
    drawKey(ctx, shown, main);
  }

  // A diamond at the top where a person stepped in: a command, a resume, a branch.
  const steered = () => store.events.filter(([run, step, kind]) => kind !== "overflow" && run < store.runs.length);
  function drawEvents(ctx, chart, main) {
    for (const [run, step] of steered()) {
      const px = chart.x(step);
      if (px < main.left || px > main.right) continue;
      ctx.fillStyle = colorOfRun(app.theme, run);
      ctx.beginPath();
      for (const [dx, dy] of [[0, -4.5], [4, 0], [0, 4.5], [-4, 0]]) ctx.lineTo(px + dx, main.top + dy);
      ctx.fill();
    }
  }

  // What is told of the steps under the cursor, within a few pixels.
  function note(step, chart) {
    const near = store.events.filter(([run, at]) => run < store.runs.length && Math.abs(chart.x(at) - chart.x(step)) < 4);
    return near.slice(-3).map(([run, at, kind, words]) => `${store.runs[run].label}, step ${countText(at)}: ${kind === "overflow" ? "" : `${kind}: `}${words}`).join("\n");
  }

  // What the marks mean, where there are some.
  function drawKey(ctx, shown, main) {
    const { colors } = app.theme, skips = store.runs.some((_, i) => store.curve(i, "skipped").values.includes(1));
    const odd = shown.some(({ curve }) => curve.values.some((v) => !Number.isFinite(v)));
    const words = [...(skips ? ["▲ at the foot: step skipped"] : []), ...(odd ? ["red: ✕ NaN, ▲ infinite"] : []), ...(steered().length ? ["◆ command or resume"] : []), ...(model.get("smooth") ? ["pale: every step"] : [])];
    if (words.length) write(ctx, words.join("   "), main.right, main.top - 11, { color: colors.muted, align: "right", size: 10.5 });
  }

  function drawRuns(ctx, chart, shown, main, span) {
    const { theme } = app, calm = model.get("smooth");
    ctx.save();
    ctx.beginPath();
    ctx.rect(main.left - 1, main.top - 6, main.right - main.left + 2, main.bottom - main.top + 7);
    ctx.clip();
    for (const { run, i, curve } of shown) {
      const style = { color: colorOfRun(theme, i), dash: dashOfRun(i), alpha: faded(run) };
      if (calm) drawCurve(ctx, curve, chart.x, scaleY, { ...style, dash: [], width: 1, alpha: 0.22 * style.alpha });
      drawCurve(ctx, calm ? smoothed(curve, span / 50) : curve, chart.x, scaleY, { ...style, width: calm ? 2.2 : 1.7 });
      drawOdd(ctx, theme, curve, chart.x, scaleY, main, i);
      if (model.get("log")) drawZeros(ctx, curve, chart.x, main, style.color);
    }
    ctx.restore();
  }

  // Zeros and negative values on a logarithmic axis: hollow circles at its foot.
  function drawZeros(ctx, curve, x, main, color) {
    ctx.strokeStyle = color;
    ctx.lineWidth = 1.2;
    for (let i = 0; i < curve.steps.length; i += 1) {
      if (!Number.isFinite(curve.values[i]) || curve.values[i] > 0) continue;
      ctx.beginPath();
      ctx.arc(x(curve.steps[i]), main.bottom - 3, 2.5, 0, 7);
      ctx.stroke();
    }
  }

  // A triangle at the foot for each step without an update.
  function drawSkips(ctx, chart, main) {
    store.runs.forEach((run, i) => {
      const { steps, values } = store.curve(i, "skipped");
      ctx.fillStyle = colorOfRun(app.theme, i);
      ctx.globalAlpha = faded(run);
      for (let k = 0; k < steps.length; k += 1) {
        const px = chart.x(steps[k]);
        if (values[k] === 1 && px >= main.left && px <= main.right) triangle(ctx, px, main.bottom - 2, 4, -1);
      }
      ctx.globalAlpha = 1;
    });
  }

  function drawGap(ctx, chart, strip) {
    const { theme } = app, [from, to] = chart.range(), base = reference();
    const shown = store.runs.map((run, i) => ({ run, i, curve: store.curve(i, "difference") })).filter((s) => s.i !== base);
    const found = rangeOf(shown.map((s) => s.curve), from, to, true);
    const title = `|difference from ${store.runs[base].label}|`;
    if (!found) {
      write(ctx, title, 2, strip.top - 11, { color: theme.colors.muted });
      const equal = shown.some((s) => s.curve.steps.length);
      emptyWords(ctx, theme, equal ? "no difference: equal in every bit of the log" : "no common steps yet", strip);
      scaleGap = null;
    } else {
      const [lo, hi] = padded(Math.max(found[0], found[1] * 1e-9), found[1], true);
      scaleGap = logScale(lo, hi, strip.bottom, strip.top);
      yAxis(ctx, theme, scaleGap, strip, title, 3);
    }
    xAxis(ctx, theme, chart.x, strip, "step");
    if (!scaleGap) return;
    for (const { run, i, curve } of shown) {
      const positive = { steps: curve.steps, values: curve.values.map((v) => v === 0 ? scaleGap.lo : v) };
      const color = colorOfRun(theme, i);
      drawCurve(ctx, positive, chart.x, scaleGap, { color, width: 1, alpha: 0.3 * faded(run) });
      drawCurve(ctx, smoothed({ steps: positive.steps, values: positive.values.map(Math.log) }, (to - from) / 60), chart.x,
        (v) => scaleGap(Math.exp(v)), { color, dash: dashOfRun(i), width: 2, alpha: faded(run) });
      drawOdd(ctx, theme, positive, chart.x, scaleGap, strip, i);
    }
  }

  // What the read-out says at a step.
  function rows(step, chart) {
    const out = [];
    for (const { run, i, curve } of visible()) {
      const found = valueAt(curve, step);
      if (!found || (run.step !== null && step > run.step)) continue;
      const base = reference(), gap = i !== base && base >= 0 ? valueAt(store.curve(i, "difference"), step) : null;
      const skip = store.curve(i, "skipped"), k = nearest(skip.steps, step);
      const parts = [numberText(found.value)];
      if (gap) parts.push(`|Δ| ${numberText(gap.value, 3)}`);
      if (k >= 0 && skip.steps[k] === step && skip.values[k] === 1) parts.push("skipped");
      if (found.step !== step) parts.push(`at ${countText(found.step)}`);
      out.push({ name: run.label, text: parts.join("   "), color: colorOfRun(app.theme, i), odd: !Number.isFinite(found.value),
        y: scaleY && Number.isFinite(found.value) ? scaleY(found.value) : undefined });
    }
    return out;
  }

  // A click near a skip mark picks that step of that run; elsewhere the step of the nearest curve.
  function click(chart, step, point) {
    let best = null;
    const consider = (run, at, distance) => { if (!best || distance < best.distance) best = { run, step: at, distance }; };
    store.runs.forEach((run, i) => {
      const skip = store.curve(i, "skipped");
      skip.steps.forEach((s, k) => {
        const away = Math.abs(chart.x(s) - (point ? point.x : chart.x(step)));
        if (skip.values[k] === 1 && away <= 6) consider(run.label, s, away / 100);
      });
    });
    for (const { run, curve } of visible()) {
      const found = valueAt(curve, step);
      if (found) consider(run.label, step, point && scaleY ? 1 + Math.abs(scaleY(found.value) - point.y) || 1e9 : 1);
    }
    if (best) app.pick({ kind: "step", run: best.run, step: best.step, layer: "" });
  }

  const summary = () => visible().map(({ run, curve }) => {
    const last = curve.values[curve.values.length - 1];
    return `${run.label}: ${last === undefined ? "no value yet" : numberText(last)} at step ${run.step ?? "none"}, ${run.state}.`;
  }).join(" ");

  const chart = makeStepChart(app, host, { label: "Trajectories", height: 330, draw, rows, note, summary, click,
    zoomed: (range) => { for (let i = 0; i < store.runs.length; i += 1) store.curve(i, "detail").clear();
      app.send({ type: "range", range }); } });
  const update = chart.update;
  chart.update = () => {
    head.rename(titleOf(scalar()));
    pickScalar.fill(store.scalars.length ? store.scalars : [scalar()], scalar(), titleOf);
    pickReference.fill(["", ...store.runs.map((r) => r.label)], model.get("reference"), (v) => v || "no difference");
    pickReference.element.hidden = store.runs.length < 2;
    press(logButton, model.get("log"));
    press(smoothButton, model.get("smooth"));
    fillLegend(app, legend, (run, i) => {
      const { values } = store.curve(i, scalar());
      return values.length ? numberText(values[values.length - 1]) : "";
    });
    chart.board.height = (app.solo ? 330 : 262) + (reference() >= 0 && store.runs.length > 1 ? 92 : 0);
    update();
  };
  return chart;
}

// ---------------------------------------------------------------- loss scale
function makeScaleChart(app, host) {
  const { store } = app;
  makeHead(host, "Loss scale");
  const words = make("div", { class: "f16-words" });
  const scaled = () => store.runs.map((run, i) => ({ run, i, curve: store.curve(i, "loss_scale"), margin: store.curve(i, "margin") }))
    .filter((s) => s.curve.values.some((v) => v !== 1));
  let scaleY = null, scaleRoom = null;

  function draw(ctx, chart, width, height) {
    const { theme } = app, { box } = chart, shown = scaled(), [from, to] = chart.range();
    if (!shown.length) {
      const begun = store.runs.some((run) => run.step !== null);
      emptyWords(ctx, theme, begun ? "no run scales its loss (profile slot loss_scale)" : app.emptyText("Loss scale"), box);
      scaleY = scaleRoom = null;
      return;
    }
    const roomy = shown.some((s) => s.margin.steps.length);
    const main = { ...box, bottom: roomy ? box.bottom - 80 : box.bottom };
    const [lo, hi] = rangeOf(shown.map((s) => s.curve), from, to, true) ?? [1, 2];
    scaleY = logScale(lo / 1.7, hi * 1.7, main.bottom, main.top, 2);
    yAxis(ctx, theme, scaleY, main, "factor on the loss", Math.floor((main.bottom - main.top) / 24));
    xAxis(ctx, theme, chart.x, main, roomy ? undefined : "step");
    for (const { run, i, curve } of shown) {
      drawCurve(ctx, curve, chart.x, scaleY, { color: colorOfRun(theme, i), dash: dashOfRun(i), width: 2, hold: true, alpha: app.faded(run) });
      drawOverflows(ctx, chart, i, curve, main);
    }
    if (roomy) drawRoom(ctx, chart, shown, { ...box, top: main.bottom + 28 });
  }

  // A cross on the curve for each step that was skipped.
  function drawOverflows(ctx, chart, i, curve, main) {
    const skip = store.curve(i, "skipped");
    ctx.strokeStyle = app.theme.colors.alert;
    ctx.lineWidth = 1.8;
    skip.steps.forEach((step, k) => {
      const at = valueAt(curve, step), px = chart.x(step);
      if (skip.values[k] === 1 && at && px >= main.left && px <= main.right) cross(ctx, px, scaleY(at.value), 4);
    });
  }

  // Binades between the largest gradient and overflow; below the line of 0 it overflowed.
  function drawRoom(ctx, chart, shown, strip) {
    const { theme } = app, [from, to] = chart.range();
    const found = rangeOf(shown.map((s) => s.margin), from, to, false) ?? [0, 1];
    const [lo, hi] = padded(Math.min(0, found[0]), Math.max(4, found[1]), false);
    scaleRoom = linearScale(lo, hi, strip.bottom, strip.top);
    yAxis(ctx, theme, scaleRoom, strip, "room above the largest gradient, binades", 3);
    xAxis(ctx, theme, chart.x, strip, "step");
    ctx.strokeStyle = theme.colors.alert;
    ctx.setLineDash([5, 3]);
    line(ctx, strip.left, crisp(scaleRoom(0)), strip.right, crisp(scaleRoom(0)));
    ctx.setLineDash([]);
    write(ctx, "overflow", strip.right - 2, scaleRoom(0) - 7, { color: theme.colors.alert, align: "right", size: 10 });
    for (const { run, i, margin } of shown) {
      drawCurve(ctx, margin, chart.x, scaleRoom, { color: colorOfRun(theme, i), dash: dashOfRun(i), alpha: app.faded(run) });
      drawOdd(ctx, theme, margin, chart.x, scaleRoom, strip, 0);
    }
  }

  function rows(step) {
    return scaled().filter(({ run }) => run.step === null || step <= run.step).map(({ run, i, curve, margin }) => {
      const at = valueAt(curve, step), room = valueAt(margin, step), skip = store.curve(i, "skipped");
      const k = nearest(skip.steps, step), parts = [at ? powerText(at.value) : "–"];
      if (room) parts.push(`${numberText(room.value, 3)} binades free`);
      if (k >= 0 && skip.steps[k] === step && skip.values[k] === 1) parts.push("overflow, skipped");
      return { name: run.label, text: parts.join("   "), color: colorOfRun(app.theme, i), y: at && scaleY ? scaleY(at.value) : undefined };
    });
  }

  function click(chart, step, point) {
    let best = null;
    for (const { run, i } of scaled()) {
      const { steps, values } = store.curve(i, "skipped");
      steps.forEach((s, k) => {
        const away = Math.abs(chart.x(s) - (point ? point.x : chart.x(step)));
        if (values[k] === 1 && away <= 8 && (!best || away < best.away)) best = { run: run.label, step: s, away };
      });
    }
    const run = best?.run ?? scaled()[0]?.run.label;
    if (run !== undefined) app.pick({ kind: "step", run, step: best?.step ?? step, layer: "" });
  }

  const summary = () => scaled().map(({ run, curve }) => `${run.label}: ${powerText(curve.values[curve.values.length - 1])}. ${store.words[run.label] ?? ""}`).join(" ");
  const chart = makeStepChart(app, host, { label: "Loss scale", height: 250, draw, rows, summary, click });
  host.append(words);
  const update = chart.update;
  chart.update = () => {
    const lines = scaled().filter(({ run }) => store.words[run.label]);
    words.replaceChildren(...lines.map(({ run, i }) => make("p", {},
      make("span", { class: "f16-tip-key", style: `background:${colorOfRun(app.theme, i)}` }), make("b", {}, run.label), ` ${store.words[run.label]}`)));
    chart.board.height = (app.solo ? 170 : 134) + (scaled().some((s) => s.margin.steps.length) ? 80 : 0);
    update();
  };
  return chart;
}

const powerText = (x) => {
  const e = Math.log2(x);
  return Number.isInteger(e) ? `2${raised(e)} = ${numberText(x)}` : numberText(x);
};

// ---------------------------------------------------------------- exponent map
function makeMap(app, host) {
  const { model, store } = app;
  const head = makeHead(host, "Exponents, layer × binade");
  const controls = make("div", { class: "f16-controls" });
  const pickRun = makeSelect("run", (value) => app.set("map_run", value));
  const pickTensor = makeSelect("tensor", (value) => app.set("tensor", value));
  controls.append(pickRun.element, pickTensor.element);
  head.append(controls);
  const wrap = make("div", { class: "f16-plot" }), tip = make("div", { class: "f16-tip", hidden: "" });
  const spoken = make("div", { class: "f16-spoken", "aria-live": "polite" });
  host.append(wrap);
  const chart = { at: null, box: null };
  const board = makeBoard(wrap, { label: "Exponent map", height: 430, draw: (ctx, w, h) => paint(ctx, w, h) });
  wrap.append(tip, spoken);
  const time = make("input", { type: "range", min: "0", max: "0", step: "1", "aria-label": "step of the exponent map" });
  const newest = makeToggle("newest", "follow the newest step", () => app.set("map_step", -1));
  const shownStep = make("span", { class: "f16-step" });
  host.append(make("div", { class: "f16-time" }, make("span", {}, "step"), time, shownStep, newest));
  time.addEventListener("input", () => {
    const last = Number(time.value) === store.mapSteps.length - 1;
    app.set("map_step", last ? -1 : store.mapSteps[Number(time.value)] ?? -1);
  });
  const image = document.createElement("canvas");

  // Places of everything: names of layers | 0 column | binades | ∞ column.
  function layout(ctx, width, height) {
    const map = store.map;
    ctx.font = `11px ${FONT}`;
    const names = Math.min(Math.max(60, ...map.layers.map(([name]) => ctx.measureText(name || "root").width)) + 12, width * 0.3, 190);
    const ladder = 4 * 13 + 8, cell = Math.min(26, (height - ladder - 46) / Math.max(1, map.layers.length));
    const box = { left: names + 26, right: width - 30, top: ladder + 8, bottom: ladder + 8 + cell * map.layers.length };
    const columns = map.width, x = linearScale(map.first, map.first + columns, box.left, box.right);
    return { ...box, names, cell, x, columns };
  }

  function paint(ctx, width, height) {
    const map = store.map;
    if (!map || !map.layers.length) {
      emptyWords(ctx, app.theme, app.emptyText("Exponent map", "no exponents in this log: train with --probe-every 1"), { left: 0, right: width, top: 0, bottom: height });
      chart.box = null;
      tip.hidden = true;
      return;
    }
    chart.box = layout(ctx, width, height);
    paintLadder(ctx, chart.box);
    paintCells(ctx, chart.box);
    paintNames(ctx, chart.box);
    paintAxis(ctx, chart.box);
    paintAt(ctx, chart.box, width);
  }

  // Formats as bars over the map: full where all digits are there, pale where numbers are subnormal.
  function paintLadder(ctx, box) {
    const { colors } = app.theme;
    (store.map.ladder ?? []).forEach((rung, i) => {
      const y = 2 + i * 13, clampX = (e) => Math.min(Math.max(box.x(e), box.left), box.right);
      const zero = clampX(rung.zero), normal = clampX(rung.normal), top = clampX(rung.top);
      ctx.fillStyle = i === 0 ? colors.accent : colors.muted;
      ctx.globalAlpha = 0.28;
      ctx.fillRect(zero, y + 2, normal - zero, 8);
      ctx.globalAlpha = i === 0 ? 0.95 : 0.6;
      ctx.fillRect(normal, y + 2, top - normal, 8);
      ctx.globalAlpha = 1;
      write(ctx, rung.name, box.left - 6, y + 6, { color: i === 0 ? colors.ink : colors.muted, align: "right", size: 10.5, weight: i === 0 ? 600 : 400 });
    });
  }

  function paintCells(ctx, box) {
    const { theme } = app, map = store.map, rows = map.layers.length;
    image.width = box.columns;
    image.height = rows;
    const pixels = new ImageData(box.columns, rows), shades = shadesOf(theme);
    for (let k = 0; k < box.columns * rows; k += 1) {
      const shade = map.cells[k];
      if (!shade) continue;
      pixels.data.set(shades[shade], 4 * k);
    }
    image.getContext("2d").putImageData(pixels, 0, 0);
    ctx.fillStyle = theme.colors.panel;
    ctx.fillRect(box.left, box.top, box.right - box.left, box.bottom - box.top);
    ctx.imageSmoothingEnabled = false;
    ctx.drawImage(image, box.left, box.top, box.right - box.left, box.bottom - box.top);
    paintApart(ctx, box);
    paintEnds(ctx, box);
  }

  // The columns beside the binades: share of zeros at the left, of what is not finite at the right.
  function paintApart(ctx, box) {
    const { theme } = app, { apart, layers } = store.map;
    layers.forEach((_, row) => {
      const y = box.top + row * box.cell, high = Math.max(1, box.cell - 1), [zeros, , odd] = apart.subarray(4 * row, 4 * row + 4);
      if (zeros > 0) {
        const [r, g, b] = heatColor(theme, 1 + Math.log10(Math.max(zeros, 1e-6)) / 6);
        ctx.fillStyle = `rgb(${r},${g},${b})`;
        ctx.fillRect(box.left - 19, y, 13, high);
      }
      if (odd > 0) { ctx.fillStyle = theme.colors.alert; ctx.fillRect(box.right + 6, y, 13, high); }
    });
  }

  // Where f16 ends, through the whole map.
  function paintEnds(ctx, box) {
    const f16 = (store.map.ladder ?? [])[0];
    if (!f16) return;
    ctx.save();
    ctx.lineWidth = 1.2;
    for (const [e, dash] of [[f16.zero, []], [f16.normal, [3, 3]], [f16.top, []]]) {
      ctx.strokeStyle = app.theme.colors.alert;
      ctx.setLineDash(dash);
      const px = crisp(box.x(e));
      if (px > box.left && px < box.right) line(ctx, px, box.top - 3, px, box.bottom);
    }
    ctx.restore();
  }

  function paintNames(ctx, box) {
    const { colors } = app.theme, map = store.map, every = Math.max(1, Math.ceil(11 / box.cell));
    map.layers.forEach(([name], row) => {
      const picked = app.picked.layer === name && app.picked.layer !== "", under = chart.at?.row === row;
      const crowded = !under && chart.at && Math.abs(row - chart.at.row) < every;
      if (crowded || (row % every && !picked && !under)) return;
      const y = box.top + (row + 0.5) * box.cell;
      ctx.font = `${Math.min(11, Math.max(9, box.cell))}px ${FONT}`;
      write(ctx, cutFront(ctx, name || "root", box.names - 8), box.names, y, { align: "right",
        size: Math.min(11, Math.max(9, box.cell)), color: picked || under ? colors.ink : colors.muted, weight: picked ? 700 : 400 });
      if (picked) { ctx.fillStyle = colors.accent; ctx.fillRect(0, y - box.cell / 2, 3, box.cell); }
    });
  }

  function paintAxis(ctx, box) {
    const { colors } = app.theme;
    for (let e = Math.ceil(store.map.first / 8) * 8; e < store.map.first + box.columns; e += 8) {
      write(ctx, `2${raised(e)}`, box.x(e + 0.5), box.bottom + 11, { color: colors.muted, align: "center" });
    }
    write(ctx, "0", box.left - 12, box.bottom + 11, { color: colors.muted, align: "center" });
    write(ctx, "∞", box.right + 12, box.bottom + 11, { color: colors.muted, align: "center" });
    write(ctx, "binade: magnitudes from 2ˣ up to twice that", box.right, box.bottom + 27, { color: colors.muted, align: "right" });
    paintKey(ctx, box);
  }

  // What the shades mean.
  function paintKey(ctx, box) {
    const { theme } = app, wide = 70, x = 4, y = box.bottom + 23;
    if (box.right - box.left < 330) return;
    for (let k = 0; k < wide; k += 1) {
      const [r, g, b] = heatColor(theme, k / wide);
      ctx.fillStyle = `rgb(${r},${g},${b})`;
      ctx.fillRect(x + 34 + k, y, 1.2, 8);
    }
    write(ctx, "10⁻⁶", x + 30, y + 4, { color: theme.colors.muted, align: "right", size: 10 });
    write(ctx, "all of a layer", x + 38 + wide, y + 4, { color: theme.colors.muted, size: 10 });
  }

  function paintAt(ctx, box, width) {
    const { at } = chart, map = store.map;
    if (!at || at.row >= map.layers.length) { tip.hidden = true; return; }
    const y = box.top + at.row * box.cell;
    ctx.strokeStyle = app.theme.colors.ink;
    ctx.lineWidth = 1;
    ctx.strokeRect(box.left - 20.5, y - 0.5, box.right - box.left + 41, box.cell + 0.5);
    const [name, precision] = map.layers[at.row];
    const { head: title, rows, note } = wordsAt(at, name, precision);
    fillTip(tip, title, rows, note);
    const px = at.column === null ? box.left : box.x(map.first + at.column + 0.5);
    placeTip(tip, px, Math.min(y + box.cell + 6, board.height - tip.offsetHeight - 4), width);
  }

  function wordsAt({ row, column }, name, precision) {
    const map = store.map, [zeros, subnormals, odd, amax] = map.apart.subarray(4 * row, 4 * row + 4);
    const color = app.theme.colors.muted, rows = [];
    if (column !== null) {
      const shade = map.cells[row * map.width + column];
      rows.push({ name: `2${raised(map.first + column)}`, text: shade ? percentText(shadeShare(shade)) : "none", color: app.theme.colors.accent });
    }
    rows.push({ name: "largest", text: numberText(amax, 4), color }, { name: "zeros", text: percentText(zeros), color },
      { name: "subnormal", text: percentText(subnormals), color }, { name: "inf, NaN", text: percentText(odd), color, odd: odd > 0 });
    return { head: `${name || "root"} · ${map.tensor} · ${precision}`, rows, note: map.tensor.includes("grad") ? "gradients as they are stored, loss scale included" : "" };
  }

  const place = (event) => {
    const box = chart.box;
    if (!box) return null;
    const { x, y } = pointIn(board.canvas, event), row = Math.floor((y - box.top) / box.cell);
    if (row < 0 || row >= store.map.layers.length) return null;
    const column = Math.floor(box.x.invert(x)) - store.map.first;
    return { row, column: x >= box.left && column >= 0 && column < box.columns ? column : null };
  };
  const pickRow = (at) => { if (at) app.pick({ kind: "layer", run: store.map.run, layer: store.map.layers[at.row][0], step: store.map.step }); };
  board.canvas.addEventListener("pointermove", (event) => { chart.at = place(event); board.ask(); });
  board.canvas.addEventListener("pointerleave", () => { chart.at = null; board.ask(); });
  board.canvas.addEventListener("click", (event) => pickRow(place(event)));
  board.canvas.addEventListener("blur", () => { chart.at = null; board.ask(); });
  board.canvas.addEventListener("keydown", (event) => {
    if (!chart.box) return;
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (move) {
      const from = chart.at ?? { row: -1, column: null }, { layers, width } = store.map;
      const column = move[1] ? Math.min(Math.max((from.column ?? Math.floor(width / 2)) + move[1], 0), width - 1) : from.column;
      chart.at = { row: Math.min(Math.max(from.row + move[0], 0), layers.length - 1), column };
      const said = wordsAt(chart.at, ...layers[chart.at.row]);
      spoken.textContent = [said.head, ...said.rows.map((r) => `${r.name} ${r.text}`)].join(", ");
      board.ask();
    } else if (event.key === "Enter" || event.key === " ") pickRow(chart.at);
    else if (event.key === "Escape") { chart.at = null; board.ask(); }
    else return;
    event.preventDefault();
  });

  // Draws again only if the height is another one.
  chart.fit = () => {
    const high = app.mapHeight(host, wrap) ?? Math.min(640, Math.max(260, 116 + 15 * (store.map?.layers.length ?? 12)));
    if (high !== board.height) { board.height = high; board.ask(); }
  };
  chart.update = () => {
    const map = store.map, steps = store.mapSteps, live = model.get("map_step") < 0;
    pickRun.fill(store.runs.map((r) => r.label), map?.run ?? "", (v) => v);
    pickRun.element.hidden = store.runs.length < 2;
    pickTensor.fill(map?.tensors ?? [], map?.tensor ?? "", (v) => v);
    pickTensor.element.hidden = !(map?.tensors.length);
    time.max = String(Math.max(0, steps.length - 1));
    time.value = String(map ? nearest(steps, map.step) : 0);
    time.disabled = steps.length < 2;
    shownStep.textContent = map ? countText(map.step) : "–";
    press(newest, live);
    chart.fit();
    board.canvas.setAttribute("aria-label", map ? `Exponent map of ${map.run}, ${map.tensor}, step ${map.step}, ${map.layers.length} layers. Arrow keys choose a layer and a binade, Enter picks the layer.` : "Exponent map, empty");
    board.ask();
  };
  return Object.assign(chart, { board, ask: board.ask, stop: board.stop });
}

const shadeShare = (shade) => 10 ** (((shade - 1) / 254 - 1) * 6);

// RGBA for each byte of a cell, computed once a theme.
const shadeTables = new Map();
function shadesOf(theme) {
  if (!shadeTables.has(theme.name)) {
    shadeTables.set(theme.name, Array.from({ length: 256 }, (_, k) => [...heatColor(theme, (k - 1) / 254), 255]));
  }
  return shadeTables.get(theme.name);
}

// ---------------------------------------------------------------- small parts
function makeHead(host, title) {
  const heading = make("h3", {}, title), head = make("div", { class: "f16-head" }, heading);
  host.append(head);
  head.rename = (text) => { if (heading.textContent !== text) heading.textContent = text; };
  return head;
}

// A labelled choice that is only rebuilt when its options change, so that an open list stays open.
function makeSelect(label, chosen) {
  const select = make("select", { "aria-label": label }), element = make("label", { class: "f16-select" }, make("span", {}, label), select);
  let known = "";
  select.addEventListener("change", () => chosen(select.value));
  return { element, fill(values, current, text) {
    const key = JSON.stringify(values);
    if (key !== known) {
      known = key;
      select.replaceChildren(...values.map((value) => make("option", { value }, text(value))));
    }
    if (document.activeElement !== select || select.value !== current) select.value = current;
  } };
}

function makeToggle(text, title, pressed) {
  const button = make("button", { type: "button", class: "f16-toggle", title, "aria-pressed": "false" }, text);
  button.addEventListener("click", pressed);
  return button;
}
const press = (button, on) => button.setAttribute("aria-pressed", String(Boolean(on)));

// One button a run: line, name, current value, state; a click picks the run.
function fillLegend(app, legend, valueText) {
  const { store } = app;
  if (legend.children.length !== store.runs.length) {
    legend.replaceChildren(...store.runs.map((run, i) => {
      const button = make("button", { type: "button", class: "f16-run" }, make("span", { class: "f16-swatch" }), make("span", { class: "f16-name" }),
        make("span", { class: "f16-value" }), make("span", { class: "f16-state" }));
      button.addEventListener("click", () => app.pick({ kind: "run", run: store.runs[i].label, step: store.runs[i].step ?? -1, layer: "" }));
      return button;
    }));
  }
  store.runs.forEach((run, i) => {
    const [swatch, name, value, state] = legend.children[i].children, [sign, words] = STATES[run.state] ?? ["", run.state];
    swatch.innerHTML = `<svg width="26" height="8" aria-hidden="true"><line x1="1" x2="25" y1="4" y2="4" stroke="${colorOfRun(app.theme, i)}" stroke-width="2.4" stroke-dasharray="${dashOfRun(i).join(" ")}"/></svg>`;
    name.textContent = run.label;
    value.textContent = valueText(run, i);
    const steps = run.step === null ? "" : `step ${countText(run.step)}${run.steps ? ` of ${countText(run.steps)}` : ""}`;
    state.textContent = run.state === "waiting" ? words : `${sign} ${steps}${run.state === "running" ? "" : ` · ${words}`}`;
    state.dataset.state = run.state;
    legend.children[i].title = [words, run.message, run.problem].filter(Boolean).join(": ");
    press(legend.children[i], app.picked.run === run.label);
  });
}

// What ended a run badly, in a line each, below the legend.
function fillTroubles(app, place) {
  const bad = app.store.runs.filter((run) => ["failed", "died"].includes(run.state) || (run.problem && run.state !== "waiting"));
  place.hidden = !bad.length;
  place.replaceChildren(...bad.map((run) => make("p", {}, make("b", {}, run.label), ` ${(STATES[run.state] ?? ["", run.state])[1]}`
    + `${run.message ? `: ${run.message}` : ""}${run.problem ? `; ${run.problem}` : ""}`)));
}

// ---------------------------------------------------------------- the widget
const KINDS = { trajectories: makeTrajectories, loss_scale: makeScaleChart, exponents: makeMap };

function render({ model, el }) {
  const root = make("div", { class: "f16-charts" }), banner = make("div", { class: "f16-banner", role: "alert", hidden: "" });
  const troubles = make("div", { class: "f16-troubles", role: "status", hidden: "" });
  const grid = make("div", { class: "f16-grid" });
  root.append(banner, troubles, grid);
  el.append(root);

  const kinds = model.get("charts").filter((name) => KINDS[name]);
  grid.dataset.charts = kinds.length;
  const app = { model, store: makeStore(), picked: { run: "", layer: "" }, charts: [], solo: kinds.length === 1 };
  app.send = (content) => model.send(content);
  app.set = (name, value) => { model.set(name, value); model.save_changes(); refresh(); };
  app.faded = (run) => app.picked.run && app.picked.run !== run.label ? 0.25 : 1;
  app.pick = (pick) => {
    if (pick.kind === "run") app.picked.run = app.picked.run === pick.run ? "" : pick.run;
    if (pick.kind === "layer") app.picked.layer = pick.layer;
    app.send({ type: "pick", ...pick });
    refresh();
  };
  app.emptyText = (name, otherwise) => {
    const { runs } = app.store;
    if (!app.store.frames) return "connecting to the kernel …";
    if (!runs.length) return "no run yet";
    if (runs.every((run) => run.step === null)) return runs.every((r) => r.state === "waiting" || r.state === "running") ? "waiting for the first step" : "this run ended before its first step";
    return otherwise ?? `no values of ${name.toLowerCase()} yet`;
  };
  // Beside the other two charts the map is as high as they are together.
  app.mapHeight = (host, wrap) => {
    const others = [...grid.children].filter((chart) => chart !== host);
    if (others.length !== 2 || others[0].offsetLeft === host.offsetLeft) return null;
    return Math.max(300, others[0].offsetHeight + others[1].offsetHeight + 12 - (host.scrollHeight - wrap.offsetHeight) - 2);
  };
  const refresh = () => {
    fillTroubles(app, troubles);
    for (const chart of app.charts) chart.update();
    if (app.charts.length > 1 && !fitting) fitting = requestAnimationFrame(() => requestAnimationFrame(() => { fitting = 0; for (const chart of app.charts) chart.fit?.(); }));
  };
  let fitting = 0;
  app.theme = watchTheme(root, () => model.get("theme"), () => refresh());
  for (const name of kinds) {
    const host = make("section", { class: `f16-chart f16-${name}`, "aria-label": name.replace("_", " ") });
    grid.append(host);
    app.charts.push(KINDS[name](app, host));
  }

  const showProblem = () => { banner.textContent = model.get("problem"); banner.hidden = !model.get("problem"); };
  let asked = 0;
  const onMessage = (content, buffers) => {
    if (content?.type !== "frame") return;
    app.store.take(content, buffers ?? []);
    refresh();
    if (!asked) asked = requestAnimationFrame(() => { asked = 0; model.send({ type: "drawn", n: content.n }); });
  };
  const watched = ["scalar", "log", "smooth", "reference", "tensor", "map_run", "map_step"];
  const listeners = [["msg:custom", onMessage], ["change:problem", showProblem], ["change:theme", app.theme.refresh],
    ...watched.map((name) => [`change:${name}`, refresh])];
  for (const [name, fn] of listeners) model.on(name, fn);
  app.theme.refresh();
  showProblem();
  model.send({ type: "hello" });
  root.f16 = app;  // for tests: what is known and how long drawing took
  return () => {
    for (const [name, fn] of listeners) model.off(name, fn);
    for (const chart of app.charts) chart.stop();
    app.theme.stop();
    cancelAnimationFrame(asked);
    cancelAnimationFrame(fitting);
  };
}

export default { render };
