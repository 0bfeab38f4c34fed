// Curves on a canvas: lines with marked gaps, and a chart with steps along its width (cursor, read-out, zoom, keys).
// Joined behind chart_data.js.

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
  let open = false,
    before = 0,
    single = null;
  const dots = [];
  for (let i = 0; i < curve.steps.length; i += 1) {
    const value = curve.values[i];
    if (!Number.isFinite(value)) {
      if (single) dots.push(single);
      open = false;
      single = null;
      continue;
    }
    const px = x(curve.steps[i]),
      py = y(value);
    if (!open) {
      ctx.moveTo(px, py);
      single = [px, py];
    } else {
      if (hold) ctx.lineTo(px, before);
      ctx.lineTo(px, py);
      single = null;
    }
    open = true;
    before = py;
  }
  if (single) dots.push(single);
  ctx.stroke();
  ctx.fillStyle = color;
  for (const [px, py] of dots) {
    ctx.beginPath();
    ctx.arc(px, py, width + 0.8, 0, 7);
    ctx.fill();
  }
  ctx.restore();
}

// A mark where a curve ceases to be finite, at the height of the value before: ▲ +∞, ▼ −∞, ✕ NaN; and a line below
// the box as long as the gap.
function drawOdd(ctx, theme, curve, x, y, box, lane) {
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = theme.colors.alert;
  ctx.lineWidth = 1.8;
  const first = curve.values.find(Number.isFinite);
  let height = first === undefined ? (box.top + box.bottom) / 2 : y(first),
    open = false,
    kind = "";
  for (let i = 0; i < curve.steps.length; i += 1) {
    const value = curve.values[i];
    if (Number.isFinite(value)) {
      height = y(value);
      open = false;
      kind = "";
      continue;
    }
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

// How many points of a curve lie in a range of steps.
const countIn = ({ steps }, from, to) => lowerBound(steps, to + 1) - lowerBound(steps, from);

// [lo, hi] of finite values with steps in from … to; null without any. For a log axis only what is above 0 counts.
function rangeOf(curves, from, to, log) {
  let lo = Infinity,
    hi = -Infinity;
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
    let last = 0,
      first = Infinity;
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
    const a = Math.min(chart.drag.from, chart.drag.to),
      b = Math.max(chart.drag.from, chart.drag.to);
    ctx.fillStyle = app.theme.colors.accent;
    ctx.globalAlpha = 0.14;
    ctx.fillRect(a, chart.box.top, b - a, chart.box.bottom - chart.box.top);
    ctx.globalAlpha = 1;
  }

  function paintCursor(ctx) {
    const px = crisp(chart.x(chart.cursor));
    if (px < chart.box.left - 1 || px > chart.box.right + 1) {
      tip.hidden = true;
      return;
    }
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
      spoken.textContent = [`step ${countText(step)}`, ...rows(step, chart).map((r) => `${r.name} ${r.text}`)].join(
        ", ",
      );
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
  canvas.addEventListener("pointerleave", () => {
    if (!chart.drag) setCursor(null);
  });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !chart.box) return;
    const { x } = pointIn(canvas, event);
    const at = Math.min(Math.max(x, chart.box.left), chart.box.right);
    chart.drag = { from: at, to: at };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (!chart.drag) return;
    const { from, to } = chart.drag,
      point = pointIn(canvas, event);
    chart.drag = null;
    if (Math.abs(to - from) < 6) {
      const step = stepAt(point.x);
      clearTimeout(chart.clicking);
      chart.clicking = setTimeout(() => click(chart, step, point), 230); // a double click is no pick
      board.ask();
      return;
    }
    const [a, b] = [stepAt(Math.min(from, to)), stepAt(Math.max(from, to))];
    if (b - a >= 2) setZoom([a, b]);
    else board.ask();
  });
  canvas.addEventListener("pointercancel", () => {
    chart.drag = null;
    setCursor(null);
  });
  canvas.addEventListener("dblclick", () => {
    clearTimeout(chart.clicking);
    setZoom(null);
  });
  canvas.addEventListener("keydown", (event) => {
    const [from, to] = chart.range();
    const jump = event.shiftKey ? Math.max(1, Math.round((to - from) / 20)) : 1;
    const now = chart.cursor ?? Math.floor(to);
    const go = {
      ArrowLeft: now - jump,
      ArrowRight: now + jump,
      PageDown: now - Math.round((to - from) / 10),
      PageUp: now + Math.round((to - from) / 10),
      Home: Math.ceil(from),
      End: Math.floor(to),
    }[event.key];
    if (go !== undefined) setCursor(Math.min(Math.max(go, Math.ceil(from)), Math.floor(to)), true);
    else if (event.key === "Enter" || event.key === " ") click(chart, now, null);
    else if (event.key === "Escape" || event.key === "0") {
      setZoom(null);
      setCursor(null);
    } else if (event.key === "+" || event.key === "=") setZoom(closer(extent(), [from, to], now, 0.5));
    else if (event.key === "-") setZoom(closer(extent(), [from, to], now, 2));
    else return;
    event.preventDefault();
  });
  canvas.addEventListener("blur", () => setCursor(null));
  chart.update = () => {
    canvas.setAttribute(
      "aria-label",
      `${label}. ${summary()} Arrow keys move the cursor, plus and minus zoom, Escape resets.`,
    );
    board.ask();
  };
  const stop = () => {
    clearTimeout(chart.clicking);
    board.stop();
  };
  Object.assign(chart, { board, wrap, host, ask: board.ask, stop, setCursor });
  return chart;
}

// A range around `center`, `factor` times as long; null when it would be all there is.
function closer([first, last], [from, to], center, factor) {
  const length = Math.max(4, (to - from) * factor),
    share = (center - from) / Math.max(1, to - from);
  const a = Math.max(first, Math.round(center - share * length)),
    b = Math.min(last, Math.round(a + length));
  return a <= first && b >= last ? null : [a, b];
}

function fillTip(tip, head, rows, note) {
  const lines = rows.map((row) =>
    make(
      "div",
      { class: "f16-tip-row" },
      make("span", { class: "f16-tip-key", style: `background:${row.color}` }),
      make("span", { class: "f16-tip-name" }, row.name),
      make("span", { class: `f16-tip-value${row.odd ? " f16-odd" : ""}` }, row.text),
    ),
  );
  tip.replaceChildren(
    make("div", { class: "f16-tip-head" }, head),
    ...lines,
    ...(note ? [make("div", { class: "f16-tip-note" }, note)] : []),
  );
  tip.hidden = false;
}

function placeTip(tip, x, y, width) {
  const wide = tip.offsetWidth;
  tip.style.left = `${x + 14 + wide > width ? Math.max(0, x - 14 - wide) : x + 14}px`;
  tip.style.top = `${y}px`;
}
