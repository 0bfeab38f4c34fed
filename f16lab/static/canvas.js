// Shared drawing helpers of the widgets: theme, colours, scales, ticks, text, crisp canvases. No exports: a widget's
// module is this text followed by its own, so every name here is a name of that module.
//
//   const theme = watchTheme(root, () => model.get("theme"), redraw);   // theme.colors, theme.stop()
//   const board = makeBoard(parent, { label, height, draw });           // one canvas, redrawn once a frame at most
//   board.ask();                                                        // asks for a redraw
//   const x = linearScale(lo, hi, left, right); x(value), x.invert(pixel), x.ticks(count)

// ---------------------------------------------------------------- colours
// One colour a run, told apart by people with any colour vision (Okabe and Ito), with dashes as a second cue.
const RUN_COLORS = {
  light: ["#3b3b3b", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B07A00", "#56B4E9", "#8C564B"],
  dark: ["#D7DADF", "#4DA9EA", "#F58B4B", "#2CC79A", "#E6A3CB", "#F2BB4A", "#9AD5F8", "#CFA095"],
};
const RUN_DASHES = [[], [9, 3], [3, 3], [10, 3, 2, 3], [5, 2], [2, 2], [12, 4], [6, 2, 2, 2]];

// From few to many: light paper to deep blue, dark paper to pale blue. Lightness alone carries the meaning.
const HEAT = {
  light: [
    [232, 241, 250],
    [158, 202, 225],
    [66, 146, 198],
    [8, 81, 156],
    [8, 38, 84],
  ],
  dark: [
    [22, 38, 58],
    [24, 78, 130],
    [46, 132, 196],
    [128, 191, 234],
    [226, 243, 255],
  ],
};

const colorOfRun = (theme, i) => RUN_COLORS[theme.name][i % RUN_COLORS[theme.name].length];
const dashOfRun = (i) => RUN_DASHES[i % RUN_DASHES.length];

// [r, g, b] of a share in 0 … 1.
function heatColor(theme, share) {
  const stops = HEAT[theme.name];
  const at = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const i = Math.min(Math.floor(at), stops.length - 2);
  return stops[i].map((from, k) => Math.round(from + (stops[i + 1][k] - from) * (at - i)));
}

// ---------------------------------------------------------------- theme
// "light" or "dark": what the widget is set to, else what JupyterLab shows, else what the system prefers.
function themeName(wanted) {
  if (wanted === "light" || wanted === "dark") return wanted;
  const lab = document.body.dataset.jpThemeLight;
  if (lab !== undefined) return lab === "true" ? "light" : "dark";
  return window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

// Keeps root.dataset.theme right, and reads the colours of canvas drawing from the style sheet's variables.
function watchTheme(root, wanted, changed) {
  const theme = { name: "light", colors: {} };
  let waits = 300; // frames; a style sheet says nothing of an element that does not stand in the page yet
  const look = () => {
    if (!root.isConnected && waits-- > 0) requestAnimationFrame(look);
    theme.name = themeName(wanted());
    root.dataset.theme = theme.name;
    const style = getComputedStyle(root);
    for (const name of ["ink", "muted", "faint", "grid", "paper", "panel", "alert", "accent", "band"]) {
      theme.colors[name] = style.getPropertyValue(`--f16-${name}`).trim() || "#888";
    }
    changed();
  };
  const observer = new MutationObserver(look);
  observer.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  system.addEventListener("change", look);
  theme.refresh = look;
  theme.stop = () => {
    observer.disconnect();
    system.removeEventListener("change", look);
  };
  return theme;
}

// ---------------------------------------------------------------- elements
// make("button", { class: "x", title: "y" }, "text", child, …); undefined attributes are left out.
function make(name, attributes = {}, ...inside) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null) element.setAttribute(key, value);
  }
  element.append(...inside);
  return element;
}

// A canvas as wide as its parent, sharp on any screen. draw(ctx, width, height) is called at most once a frame.
function makeBoard(parent, { label, height, draw }) {
  const canvas = make("canvas", { class: "f16-board", tabindex: "0", role: "img", "aria-label": label });
  parent.append(canvas);
  const ctx = canvas.getContext("2d");
  const board = { canvas, ctx, width: 0, height, drawn: 0, spent: 0 };
  let frame = 0,
    later = 0,
    wait = 100;
  const paint = () => {
    frame = 0;
    const ratio = window.devicePixelRatio || 1;
    const wide = Math.floor(parent.clientWidth),
      high = Math.floor(board.height);
    if (wide < 20 || high < 20) {
      // Hidden, or between two layouts, as while JupyterLab changes its theme: then no change of size may ever be told.
      clearTimeout(later);
      if (wait < 5000) later = setTimeout(board.ask, wait);
      wait *= 2;
      return;
    }
    wait = 100;
    const began = performance.now();
    if (canvas.width !== Math.round(wide * ratio) || canvas.height !== Math.round(high * ratio)) {
      canvas.width = Math.round(wide * ratio);
      canvas.height = Math.round(high * ratio);
      canvas.style.height = `${high}px`;
    }
    board.width = wide;
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.clearRect(0, 0, wide, high);
    draw(ctx, wide, high);
    board.drawn += 1;
    board.spent += performance.now() - began;
  };
  board.ask = () => {
    if (!frame) frame = requestAnimationFrame(paint);
  };
  const observer = new ResizeObserver(board.ask);
  observer.observe(parent);
  board.stop = () => {
    observer.disconnect();
    clearTimeout(later);
    if (frame) cancelAnimationFrame(frame);
  };
  board.ask();
  return board;
}

// Where a pointer event is, in the canvas' own pixels.
function pointIn(canvas, event) {
  const box = canvas.getBoundingClientRect();
  return { x: event.clientX - box.left, y: event.clientY - box.top };
}

// ---------------------------------------------------------------- numbers as text
const RAISED = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
const raised = (n) =>
  String(n)
    .split("")
    .map((c) => RAISED[c] ?? c)
    .join("");
const plainMinus = (text) => text.replace("-", "−");

// A value for a read-out: five figures, powers of ten where it is long, words for what is not finite.
function numberText(x, figures = 5) {
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x > 0 ? "+∞" : "−∞";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e6 || size < 1e-4) {
    const [digits, power] = x.toExponential(Math.max(1, figures - 3)).split("e");
    const rounded = digits.replace(/\.?0+$/, "");
    const front = rounded === "1" ? "" : rounded === "-1" ? "−" : `${plainMinus(rounded)}·`;
    return `${front}10${raised(Number(power))}`;
  }
  if (Number.isInteger(x)) return plainMinus(x.toLocaleString("en-US"));
  if (size >= 1000) return plainMinus(Math.round(x).toLocaleString("en-US"));
  const text = x.toPrecision(figures),
    short = text.replace(/0+$/, ""); // 0.0010000 is 0.001, 2.1000 stays
  return plainMinus(short.replace(/^[-0.]+/, "").length <= 2 && size < 1 ? short : text);
}

// A whole number, digits in groups of three.
const countText = (n) => plainMinus(Math.round(n).toLocaleString("en-US"));

// A short text for a tick: 0.05, 1.2k, 3M, 10⁻⁶. The largest number of the axis, `top`, decides the unit of all.
function tickText(x, step, top = Math.abs(x)) {
  if (x === 0) return "0";
  if (top < 1e-3) return numberText(Number(x.toPrecision(4)), 3);
  for (const [unit, letter] of [
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ]) {
    if (top >= unit * (unit === 1e3 ? 10 : 1)) return plainMinus(`${Number((x / unit).toPrecision(6))}${letter}`);
  }
  const places = Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9)));
  return plainMinus(x.toFixed(places));
}

const percentText = (share) =>
  share === 0
    ? "0 %"
    : share < 1e-4
      ? `${numberText(share * 100, 3)} %`
      : `${(share * 100).toPrecision(share >= 0.9995 ? 4 : 3)} %`;

// ---------------------------------------------------------------- scales
// Each scale is a function value → pixel with invert, ticks(count) → [{ value, text, minor }], lo and hi.
function linearScale(lo, hi, from, to) {
  const scale = (v) => from + ((v - lo) / (hi - lo)) * (to - from);
  scale.invert = (pixel) => lo + ((pixel - from) / (to - from)) * (hi - lo);
  scale.ticks = (count) => niceTicks(lo, hi, count);
  return Object.assign(scale, { lo, hi });
}

function niceTicks(lo, hi, count) {
  const rough = (hi - lo) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(lo / step - 1e-9); i * step <= hi + step * 1e-9; i += 1) {
    ticks.push({
      value: i * step,
      text: tickText(i * step, step, Math.max(Math.abs(lo), Math.abs(hi))),
      minor: false,
    });
  }
  return ticks;
}

// A logarithmic scale; what is not above `lo` is drawn at `lo`, so that zeros have a place.
function logScale(lo, hi, from, to, base = 10) {
  const log = (v) => Math.log(v) / Math.log(base);
  const inner = linearScale(log(lo), log(hi), from, to);
  const scale = (v) => inner(v > lo ? log(v) : log(lo));
  scale.invert = (pixel) => base ** inner.invert(pixel);
  scale.ticks = (count) => (base === 2 ? powerTicks(inner, count) : logTicks(lo, hi, count));
  return Object.assign(scale, { lo, hi });
}

function powerTicks(inner, count) {
  const step = Math.max(1, Math.ceil((inner.hi - inner.lo) / Math.max(1, count)));
  const ticks = [];
  for (let e = Math.ceil(inner.lo / step) * step; e <= inner.hi; e += step) {
    ticks.push({ value: 2 ** e, text: `2${raised(e)}`, minor: false });
  }
  return ticks;
}

// Powers of ten; where there are few also 3, or 2 and 5; in less than 0.6 of one plain ticks.
function logTicks(lo, hi, count) {
  const span = Math.log10(hi / lo);
  if (span < 0.6) return niceTicks(lo, hi, count).filter((t) => t.value > 0);
  const step = Math.max(1, Math.round(span / Math.max(1, count)));
  const ticks = [],
    powers = Math.floor(Math.log10(hi)) - Math.ceil(Math.log10(lo)) + 1;
  const between = powers >= 2 && (count < 4 || span >= 1.6) ? [1] : span < 1.6 && count >= 4 ? [1, 2, 5] : [1, 3];
  for (let e = Math.floor(Math.log10(lo)); e <= Math.ceil(Math.log10(hi)); e += 1) {
    for (const m of between) {
      const value = m * 10 ** e;
      if (value < lo * 0.999 || value > hi * 1.001 || e % step) continue;
      ticks.push({
        value,
        text:
          value >= 1e-3 && value < 1e4
            ? plainMinus(String(Number(value.toPrecision(3))))
            : `${m === 1 ? "" : `${m}·`}10${raised(e)}`,
        minor: m !== 1,
      });
    }
  }
  return ticks;
}

// [lo, hi] with room around; a single value gets room too.
function padded(lo, hi, log) {
  if (log) {
    const room = Math.max((hi / lo) ** 0.06, 1.02);
    return [lo / room, hi * room];
  }
  const room = (hi - lo) * 0.06 || Math.max(Math.abs(hi) * 0.05, 1e-12);
  return [lo - room, hi + room];
}

// ---------------------------------------------------------------- drawing
const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';

function write(ctx, text, x, y, { color, size = 11, align = "left", baseline = "middle", weight = 400 } = {}) {
  ctx.font = `${weight} ${size}px ${FONT}`;
  ctx.textAlign = align;
  ctx.textBaseline = baseline;
  if (color) ctx.fillStyle = color;
  ctx.fillText(text, x, y);
}

// A text cut to a width, with an ellipsis in front: the end of a layer's path tells most.
function cutFront(ctx, text, width) {
  if (ctx.measureText(text).width <= width) return text;
  let kept = text.length - 1;
  while (kept > 1 && ctx.measureText(`…${text.slice(-kept)}`).width > width) kept -= 1;
  return `…${text.slice(-kept)}`;
}

function line(ctx, x1, y1, x2, y2) {
  ctx.beginPath();
  ctx.moveTo(x1, y1);
  ctx.lineTo(x2, y2);
  ctx.stroke();
}

// Half a pixel off, so that a line of one pixel covers one.
const crisp = (v) => Math.round(v) + 0.5;

// Grid lines and tick texts of a vertical scale at the left of box { left, right, top, bottom }.
function yAxis(ctx, theme, scale, box, title, count) {
  ctx.lineWidth = 1;
  for (const tick of scale.ticks(count ?? Math.max(2, Math.floor((box.bottom - box.top) / 42)))) {
    const y = crisp(scale(tick.value));
    if (y < box.top - 1 || y > box.bottom + 1) continue;
    ctx.strokeStyle = theme.colors.grid;
    ctx.globalAlpha = tick.minor ? 0.55 : 1;
    line(ctx, box.left, y, box.right, y);
    ctx.globalAlpha = 1;
    write(ctx, tick.text, box.left - 7, y, { color: theme.colors.muted, align: "right" });
  }
  if (title) write(ctx, title, 2, box.top - 11, { color: theme.colors.muted });
}

function xAxis(ctx, theme, scale, box, title) {
  ctx.lineWidth = 1;
  ctx.strokeStyle = theme.colors.grid;
  for (const tick of scale.ticks(Math.max(2, Math.floor((box.right - box.left) / 90)))) {
    const x = crisp(scale(tick.value));
    if (x < box.left - 1 || x > box.right + 1 || tick.value % 1) continue;
    line(ctx, x, box.top, x, box.bottom);
    if (title !== undefined)
      write(ctx, tick.text, x, box.bottom + 12, { color: theme.colors.muted, align: "center" });
  }
  if (title) write(ctx, title, 2, box.bottom + 12, { color: theme.colors.muted });
}

// Words in the middle of an empty chart.
function emptyWords(ctx, theme, text, box) {
  write(ctx, text, (box.left + box.right) / 2, (box.top + box.bottom) / 2, {
    color: theme.colors.muted,
    size: 13,
    align: "center",
  });
}

function cross(ctx, x, y, r) {
  line(ctx, x - r, y - r, x + r, y + r);
  line(ctx, x - r, y + r, x + r, y - r);
}

// A filled triangle with its tip at (x, y), pointing up (way −1) or down (way 1).
function triangle(ctx, x, y, r, way) {
  ctx.beginPath();
  ctx.moveTo(x, y);
  ctx.lineTo(x - r, y - way * r * 1.6);
  ctx.lineTo(x + r, y - way * r * 1.6);
  ctx.closePath();
  ctx.fill();
}

// ---------------------------------------------------------------- curves
// Indices of the smallest, largest and first non-finite value of each stretch of `width` steps, and both ends.
function thin(steps, values, width) {
  const kept = new Set([0, steps.length - 1]);
  let low = -1,
    high = -1,
    odd = -1,
    group = NaN;
  const close = () => {
    for (const i of [low, high, odd]) if (i >= 0) kept.add(i);
  };
  for (let i = 0; i < steps.length; i += 1) {
    const now = Math.floor(steps[i] / width);
    if (now !== group) {
      close();
      low = high = odd = -1;
      group = now;
    }
    if (!Number.isFinite(values[i])) {
      if (odd < 0) odd = i;
      continue;
    }
    if (low < 0 || values[i] < values[low]) low = i;
    if (high < 0 || values[i] > values[high]) high = i;
  }
  close();
  return [...kept].sort((a, b) => a - b);
}

// A curve of bounded size, as in f16lab.viewing.Curve: stretches of steps keep their extremes.
function makeCurve(maxPoints = 2000) {
  const curve = { steps: [], values: [], width: 1 };
  curve.cut = (step) => {
    const n = lowerBound(curve.steps, step);
    curve.steps.length = n;
    curve.values.length = n;
  };
  curve.clear = () => {
    curve.steps = [];
    curve.values = [];
    curve.width = 1;
  };
  curve.extend = (steps, values) => {
    if (!steps.length) return;
    if (curve.steps.length && steps[0] <= curve.steps[curve.steps.length - 1]) curve.cut(steps[0]);
    for (let i = 0; i < steps.length; i += 1) {
      curve.steps.push(steps[i]);
      curve.values.push(values[i]);
    }
    if (curve.steps.length <= maxPoints) return;
    for (; ; curve.width *= 2) {
      const kept = thin(curve.steps, curve.values, curve.width);
      if (kept.length > 0.75 * maxPoints) continue;
      curve.steps = kept.map((i) => curve.steps[i]);
      curve.values = kept.map((i) => curve.values[i]);
      return;
    }
  };
  return curve;
}

// The first place in ascending `list` whose entry is ≥ value.
function lowerBound(list, value) {
  let lo = 0,
    hi = list.length;
  while (lo < hi) {
    const mid = (lo + hi) >> 1;
    if (list[mid] < value) lo = mid + 1;
    else hi = mid;
  }
  return lo;
}

// The place of the entry nearest to value; −1 in an empty list.
function nearest(list, value) {
  const i = lowerBound(list, value);
  if (i === 0) return list.length ? 0 : -1;
  return i < list.length && list[i] - value < value - list[i - 1] ? i : i - 1;
}
