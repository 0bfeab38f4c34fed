// What the live charts know of runs, and the words for it: bounded curves, events, the newest exponent map.
// Joined behind canvas.js.

const SCALARS = {
  loss: ["Loss", "nats per target"],
  grad_norm: ["Gradient norm", ""],
  lr: ["Learning rate", ""],
  tokens_per_second: ["Speed", "targets per second"],
  seconds: ["Time of a step", "s"],
  seconds_average: ["Time of a step, running mean", "s"],
  loss_scale: ["Loss scale", ""],
  clip: ["Clip factor", "applied to the gradient"],
  tokens: ["Targets in a step", ""],
  mfu: ["FLOP utilisation", "share"],
  loss_z: ["Loss, deviation from its window", "σ"],
  norm_z: ["Gradient norm, deviation from its window", "σ"],
  margin: ["Room above the largest gradient", "binades"],
};
const titleOf = (name) => (SCALARS[name] ?? [name, ""])[0];
const unitOf = (name) => (SCALARS[name] ?? [name, ""])[1];

const STATES = {
  waiting: ["○", "waiting for the first step"],
  running: ["●", "running"],
  paused: ["❚❚", "paused"],
  finished: ["✓", "finished"],
  stopped: ["■", "stopped"],
  failed: ["✕", "failed"],
  closed: ["■", "ended without a word"],
  died: ["✕", "died: its process was killed"],
};
const MAX_POINTS = 2000;

// ---------------------------------------------------------------- the store
function makeStore() {
  const store = {
    runs: [],
    scalars: [],
    curves: new Map(),
    events: [],
    map: null,
    mapSteps: [],
    words: {},
    frames: 0,
  };
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
const typed = (Kind, buffer) =>
  buffer ? new Kind(buffer.buffer.slice(buffer.byteOffset, buffer.byteOffset + buffer.byteLength)) : new Kind(0);

function takeFrame(store, frame, buffers) {
  if (frame.full) store.forget();
  const steps = typed(Int32Array, buffers[0]),
    values = typed(Float32Array, buffers[1]);
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
  const again = frame.events_again;
  if (again) store.events = store.events.filter(([run]) => !again.includes(run));
  if (frame.events) addEvents(store, frame.events);
  if (frame.map_steps) store.mapSteps = frame.map_steps;
  if (frame.map_steps_new) addSteps(store.mapSteps, frame.map_steps_new);
  if (frame.map)
    store.map = { ...frame.map, cells: typed(Uint8Array, buffers[2]), apart: typed(Float32Array, buffers[3]) };
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
  const { steps, values } = curve,
    n = steps.length,
    sums = new Float64Array(n),
    weights = new Float64Array(n);
  const sweep = (from, to, by) => {
    let sum = 0,
      weight = 0,
      last = NaN;
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
  // A value's own weight was taken twice.
  const mean = (v, i) => (Number.isFinite(v) ? (sums[i] - v) / (weights[i] - 1) : NaN);
  return { steps, values: Array.from(values, mean) };
}
