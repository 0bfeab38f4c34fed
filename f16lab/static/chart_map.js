// The exponent map: layers × binades, with the formats' ladder. Joined behind chart_lines.js.

const KEYS = "Arrow keys choose a layer and a binade, Enter picks the layer.";

function makeMap(app, host) {
  const { model, store } = app;
  const head = makeHead(host, "Exponents, layer × binade");
  const controls = make("div", { class: "f16-controls" });
  const pickRun = makeSelect("run", (value) => app.set("map_run", value));
  const pickTensor = makeSelect("tensor", (value) => app.set("tensor", value));
  controls.append(pickRun.element, pickTensor.element);
  head.append(controls);
  const wrap = make("div", { class: "f16-plot" }),
    tip = make("div", { class: "f16-tip", hidden: "" });
  const spoken = make("div", { class: "f16-spoken", "aria-live": "polite" });
  host.append(wrap);
  const chart = { at: null, box: null };
  const board = makeBoard(wrap, { label: "Exponent map", height: 430, draw: (ctx, w, h) => paint(ctx, w, h) });
  wrap.append(tip, spoken);
  const time = make("input", {
    type: "range",
    min: "0",
    max: "0",
    step: "1",
    "aria-label": "step of the exponent map",
  });
  const newest = makeToggle("newest", "follow the newest step", () => app.set("map_step", -1));
  const shownStep = make("span", { class: "f16-step" });
  host.append(make("div", { class: "f16-time" }, make("span", {}, "step"), time, shownStep, newest));
  time.addEventListener("input", () => {
    const last = Number(time.value) === store.mapSteps.length - 1;
    app.set("map_step", last ? -1 : (store.mapSteps[Number(time.value)] ?? -1));
  });
  const image = document.createElement("canvas");

  // Places of everything: names of layers | 0 column | binades | ∞ column.
  function layout(ctx, width, height) {
    const map = store.map;
    ctx.font = `700 11px ${FONT}`; // the picked one is bold
    const names = Math.min(
      Math.max(60, ...map.layers.map(([name]) => ctx.measureText(name || "root").width)) + 12,
      width * 0.3,
      190,
    );
    const ladder = 4 * 13 + 8,
      cell = Math.min(26, (height - ladder - 46) / Math.max(1, map.layers.length));
    const box = {
      left: names + 26,
      right: width - 30,
      top: ladder + 8,
      bottom: ladder + 8 + cell * map.layers.length,
    };
    const columns = map.width,
      x = linearScale(map.first, map.first + columns, box.left, box.right);
    return { ...box, names, cell, x, columns };
  }

  function paint(ctx, width, height) {
    const map = store.map;
    if (!map || !map.layers.length) {
      emptyWords(
        ctx,
        app.theme,
        app.emptyText("Exponent map", "no exponents in this log: train with --probe-every 1"),
        { left: 0, right: width, top: 0, bottom: height },
      );
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
      const y = 2 + i * 13,
        clampX = (e) => Math.min(Math.max(box.x(e), box.left), box.right);
      const zero = clampX(rung.zero),
        normal = clampX(rung.normal),
        top = clampX(rung.top);
      ctx.fillStyle = i === 0 ? colors.accent : colors.muted;
      ctx.globalAlpha = 0.28;
      ctx.fillRect(zero, y + 2, normal - zero, 8);
      ctx.globalAlpha = i === 0 ? 0.95 : 0.6;
      ctx.fillRect(normal, y + 2, top - normal, 8);
      ctx.globalAlpha = 1;
      write(ctx, rung.name, box.left - 6, y + 6, {
        color: i === 0 ? colors.ink : colors.muted,
        align: "right",
        size: 10.5,
        weight: i === 0 ? 600 : 400,
      });
    });
  }

  function paintCells(ctx, box) {
    const { theme } = app,
      map = store.map,
      rows = map.layers.length;
    image.width = box.columns;
    image.height = rows;
    const pixels = new ImageData(box.columns, rows),
      shades = shadesOf(theme);
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
    const { theme } = app,
      { apart, layers } = store.map;
    layers.forEach((_, row) => {
      const y = box.top + row * box.cell,
        high = Math.max(1, box.cell - 1),
        [zeros, , odd] = apart.subarray(4 * row, 4 * row + 4);
      if (zeros > 0) {
        const [r, g, b] = heatColor(theme, 1 + Math.log10(Math.max(zeros, 1e-6)) / 6);
        ctx.fillStyle = `rgb(${r},${g},${b})`;
        ctx.fillRect(box.left - 19, y, 13, high);
      }
      if (odd > 0) {
        ctx.fillStyle = theme.colors.alert;
        ctx.fillRect(box.right + 6, y, 13, high);
      }
    });
  }

  // Where f16 ends, through the whole map.
  function paintEnds(ctx, box) {
    const f16 = (store.map.ladder ?? [])[0];
    if (!f16) return;
    ctx.save();
    ctx.lineWidth = 1.2;
    for (const [e, dash] of [
      [f16.zero, []],
      [f16.normal, [3, 3]],
      [f16.top, []],
    ]) {
      ctx.strokeStyle = app.theme.colors.alert;
      ctx.setLineDash(dash);
      const px = crisp(box.x(e));
      if (px > box.left && px < box.right) line(ctx, px, box.top - 3, px, box.bottom);
    }
    ctx.restore();
  }

  function paintNames(ctx, box) {
    const { colors } = app.theme,
      map = store.map,
      every = Math.max(1, Math.ceil(11 / box.cell));
    map.layers.forEach(([name], row) => {
      const picked = app.picked.layer === name && app.picked.layer !== "",
        under = chart.at?.row === row;
      const crowded = !under && chart.at && Math.abs(row - chart.at.row) < every;
      if (crowded || (row % every && !picked && !under)) return;
      const y = box.top + (row + 0.5) * box.cell;
      ctx.font = `${picked ? "700 " : ""}${Math.min(11, Math.max(9, box.cell))}px ${FONT}`;
      write(ctx, cutFront(ctx, name || "root", box.names - 8), box.names, y, {
        align: "right",
        size: Math.min(11, Math.max(9, box.cell)),
        color: picked || under ? colors.ink : colors.muted,
        weight: picked ? 700 : 400,
      });
      if (picked) {
        ctx.fillStyle = colors.accent;
        ctx.fillRect(0, y - box.cell / 2, 3, box.cell);
      }
    });
  }

  function paintAxis(ctx, box) {
    const { colors } = app.theme;
    for (let e = Math.ceil(store.map.first / 8) * 8; e < store.map.first + box.columns; e += 8) {
      write(ctx, `2${raised(e)}`, box.x(e + 0.5), box.bottom + 11, { color: colors.muted, align: "center" });
    }
    write(ctx, "0", box.left - 12, box.bottom + 11, { color: colors.muted, align: "center" });
    write(ctx, "∞", box.right + 12, box.bottom + 11, { color: colors.muted, align: "center" });
    write(ctx, "binade: magnitudes from 2ˣ up to twice that", box.right, box.bottom + 27, {
      color: colors.muted,
      align: "right",
    });
    paintKey(ctx, box);
  }

  // What the shades mean.
  function paintKey(ctx, box) {
    const { theme } = app,
      wide = 70,
      x = 4,
      y = box.bottom + 23;
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
    const { at } = chart,
      map = store.map;
    if (!at || at.row >= map.layers.length) {
      tip.hidden = true;
      return;
    }
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
    const map = store.map,
      [zeros, subnormals, odd, amax] = map.apart.subarray(4 * row, 4 * row + 4);
    const color = app.theme.colors.muted,
      rows = [];
    if (column !== null) {
      const shade = map.cells[row * map.width + column];
      rows.push({
        name: `2${raised(map.first + column)}`,
        text: shade ? percentText(shadeShare(shade)) : "none",
        color: app.theme.colors.accent,
      });
    }
    rows.push(
      { name: "largest", text: numberText(amax, 4), color },
      { name: "zeros", text: percentText(zeros), color },
      { name: "subnormal", text: percentText(subnormals), color },
      { name: "inf, NaN", text: percentText(odd), color, odd: odd > 0 },
    );
    return {
      head: `${name || "root"} · ${map.tensor} · ${precision}`,
      rows,
      note: map.tensor.includes("grad") ? "gradients as they are stored, loss scale included" : "",
    };
  }

  const place = (event) => {
    const box = chart.box;
    if (!box) return null;
    const { x, y } = pointIn(board.canvas, event),
      row = Math.floor((y - box.top) / box.cell);
    if (row < 0 || row >= store.map.layers.length) return null;
    const column = Math.floor(box.x.invert(x)) - store.map.first;
    return { row, column: x >= box.left && column >= 0 && column < box.columns ? column : null };
  };
  const pickRow = (at) => {
    if (!at) return;
    const { run, layers, step, tensor } = store.map;
    app.pick({ kind: "layer", run, layer: layers[at.row][0], step, tensor });
    // In the workbench its histogram stands below the map, at 800 pixels out of sight.
    const panel = board.canvas.closest(".f16lab-page")?.querySelector(".f16p-panel");
    panel?.scrollIntoView({ block: "nearest", behavior: "smooth" });
  };
  board.canvas.addEventListener("pointermove", (event) => {
    chart.at = place(event);
    board.ask();
  });
  board.canvas.addEventListener("pointerleave", () => {
    chart.at = null;
    board.ask();
  });
  board.canvas.addEventListener("click", (event) => pickRow(place(event)));
  board.canvas.addEventListener("blur", () => {
    chart.at = null;
    board.ask();
  });
  board.canvas.addEventListener("keydown", (event) => {
    if (!chart.box) return;
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (move) {
      const from = chart.at ?? { row: -1, column: null },
        { layers, width } = store.map;
      const column = move[1]
        ? Math.min(Math.max((from.column ?? Math.floor(width / 2)) + move[1], 0), width - 1)
        : from.column;
      chart.at = { row: Math.min(Math.max(from.row + move[0], 0), layers.length - 1), column };
      const said = wordsAt(chart.at, ...layers[chart.at.row]);
      spoken.textContent = [said.head, ...said.rows.map((r) => `${r.name} ${r.text}`)].join(", ");
      board.ask();
    } else if (event.key === "Enter" || event.key === " ") pickRow(chart.at);
    else if (event.key === "Escape") {
      chart.at = null;
      board.ask();
    } else return;
    event.preventDefault();
  });

  // Draws again only if the height is another one.
  chart.fit = () => {
    const high =
      app.mapHeight(host, wrap) ?? Math.min(640, Math.max(260, 116 + 15 * (store.map?.layers.length ?? 12)));
    if (high !== board.height) {
      board.height = high;
      board.ask();
    }
  };
  chart.update = () => {
    const map = store.map,
      steps = store.mapSteps,
      live = model.get("map_step") < 0;
    head.rename(
      map && store.runs.length === 1 ? `Exponents of ${map.run}, layer × binade` : "Exponents, layer × binade",
    );
    pickRun.fill(
      store.runs.map((r) => r.label),
      map?.run ?? "",
      (v) => v,
    );
    pickRun.element.hidden = store.runs.length < 2;
    pickTensor.fill(map?.tensors ?? [], map?.tensor ?? "", (v) => v);
    pickTensor.element.hidden = !map?.tensors.length;
    time.max = String(Math.max(0, steps.length - 1));
    time.value = String(map ? nearest(steps, map.step) : 0);
    time.disabled = steps.length < 2;
    shownStep.textContent = map ? countText(map.step) : "–";
    press(newest, live);
    chart.fit();
    board.canvas.setAttribute(
      "aria-label",
      map
        ? `Exponent map of ${map.run}, ${map.tensor}, step ${map.step}, ${map.layers.length} layers. ${KEYS}`
        : "Exponent map, empty",
    );
    board.ask();
  };
  return Object.assign(chart, { board, ask: board.ask, stop: board.stop });
}

const shadeShare = (shade) => 10 ** (((shade - 1) / 254 - 1) * 6);

// RGBA for each byte of a cell, computed once a theme.
const shadeTables = new Map();
function shadesOf(theme) {
  if (!shadeTables.has(theme.name)) {
    shadeTables.set(
      theme.name,
      Array.from({ length: 256 }, (_, k) => [...heatColor(theme, (k - 1) / 254), 255]),
    );
  }
  return shadeTables.get(theme.name);
}
