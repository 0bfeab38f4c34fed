// Trajectories: one scalar of several runs over each other, and their difference from one of them.
// Joined behind chart_lines.js.

function makeTrajectories(app, host) {
  const { model, store } = app;
  const head = makeHead(host, "Loss");
  const controls = make("div", { class: "f16-controls" });
  const pickScalar = makeSelect("quantity", (value) => app.set("scalar", value));
  const pickReference = makeSelect("difference from", (value) => app.set("reference", value));
  const logButton = makeToggle("log", "logarithmic axis", () => app.set("log", !model.get("log")));
  const smoothButton = makeToggle("smooth", "running mean over the curves", () =>
    app.set("smooth", !model.get("smooth")),
  );
  controls.append(pickScalar.element, logButton, smoothButton, pickReference.element);
  head.append(controls);
  const legend = make("div", { class: "f16-legend", role: "group", "aria-label": "runs" });
  host.append(legend);

  const scalar = () => model.get("scalar");
  const reference = () => store.runs.findIndex((run) => run.label === model.get("reference"));
  // The coarse curve, with the detail of the zoomed stretch in its place.
  const curveOf = (run) => {
    const coarse = store.curve(run, scalar()),
      fine = store.curve(run, "detail");
    if (!chart?.zoom || !fine.steps.length) return coarse;
    const first = fine.steps[0],
      last = fine.steps[fine.steps.length - 1];
    const a = lowerBound(coarse.steps, first),
      b = lowerBound(coarse.steps, last + 1);
    return {
      steps: [...coarse.steps.slice(0, a), ...fine.steps, ...coarse.steps.slice(b)],
      values: [...coarse.values.slice(0, a), ...fine.values, ...coarse.values.slice(b)],
    };
  };
  const visible = () => store.runs.map((run, i) => ({ run, i, curve: curveOf(i) }));
  const faded = (run) => (app.picked.run && app.picked.run !== run.label ? 0.25 : 1);
  let scaleY = null,
    scaleGap = null;

  function draw(ctx, chart, width, height) {
    const { theme } = app,
      { box } = chart,
      compare = reference() >= 0 && store.runs.length > 1;
    const [from, to] = chart.range();
    const main = { ...box, bottom: compare ? box.bottom - 96 : box.bottom };
    const strip = compare ? { ...box, top: main.bottom + 28 } : null;
    const shown = visible();
    const log = model.get("log");
    const found = rangeOf(
      shown.map((s) => s.curve),
      from,
      to,
      log,
    );
    const any = shown.some((s) => s.curve.steps.length);
    if (!any) {
      emptyWords(ctx, theme, app.emptyText(titleOf(scalar())), main);
      return;
    }
    const [lo, hi] = padded(...(found ?? (log ? [0.1, 1] : [0, 1])), log);
    scaleY = log ? logScale(lo, hi, main.bottom, main.top) : linearScale(lo, hi, main.bottom, main.top);
    yAxis(
      ctx,
      theme,
      scaleY,
      main,
      unitOf(scalar()) ? `${titleOf(scalar()).toLowerCase()}, ${unitOf(scalar())}` : titleOf(scalar()).toLowerCase(),
    );
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
      for (const [dx, dy] of [
        [0, -4.5],
        [4, 0],
        [0, 4.5],
        [-4, 0],
      ])
        ctx.lineTo(px + dx, main.top + dy);
      ctx.fill();
    }
  }

  // What is told of the steps under the cursor, within a few pixels.
  function note(step, chart) {
    const near = store.events.filter(
      ([run, at]) => run < store.runs.length && Math.abs(chart.x(at) - chart.x(step)) < 4,
    );
    return near
      .slice(-3)
      .map(
        ([run, at, kind, words]) =>
          `${store.runs[run].label}, step ${countText(at)}: ${kind === "overflow" ? "" : `${kind}: `}${words}`,
      )
      .join("\n");
  }

  // What the marks mean, where there are some.
  function drawKey(ctx, shown, main) {
    const { colors } = app.theme,
      skips = store.runs.some((_, i) => store.curve(i, "skipped").values.includes(1));
    const odd = shown.some(({ curve }) => curve.values.some((v) => !Number.isFinite(v)));
    const words = [
      ...(skips ? ["▲ at the foot: step skipped"] : []),
      ...(odd ? ["red: ✕ NaN, ▲ infinite"] : []),
      ...(steered().length ? ["◆ command or resume"] : []),
      ...(model.get("smooth") ? ["pale: every step"] : []),
    ];
    if (words.length)
      write(ctx, words.join("   "), main.right, main.top - 11, { color: colors.muted, align: "right", size: 10.5 });
  }

  function drawRuns(ctx, chart, shown, main, span) {
    const { theme } = app,
      calm = model.get("smooth");
    ctx.save();
    ctx.beginPath();
    ctx.rect(main.left - 1, main.top - 6, main.right - main.left + 2, main.bottom - main.top + 7);
    ctx.clip();
    for (const { run, i, curve } of shown) {
      // More points than pixels are a band: thin and pale, so that the runs below are seen.
      const dense = !calm && countIn(curve, ...chart.range()) > main.right - main.left;
      const style = {
        color: colorOfRun(theme, i),
        dash: dense ? [] : dashOfRun(i),
        alpha: faded(run) * (dense ? 0.55 : 1),
      };
      if (calm) drawCurve(ctx, curve, chart.x, scaleY, { ...style, dash: [], width: 1, alpha: 0.22 * style.alpha });
      drawCurve(ctx, calm ? smoothed(curve, span / 50) : curve, chart.x, scaleY, {
        ...style,
        width: calm ? 2.2 : dense ? 1 : 1.7,
      });
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
      const many = countIn({ steps }, ...chart.range()) > (main.right - main.left) / 14;
      ctx.fillStyle = colorOfRun(app.theme, i);
      ctx.globalAlpha = faded(run);
      for (let k = 0; k < steps.length; k += 1) {
        const px = chart.x(steps[k]);
        if (values[k] !== 1 || px < main.left || px > main.right) continue;
        if (many) ctx.fillRect(px - 0.5, main.bottom - 5 - 3 * i, 1, 3);
        else triangle(ctx, px, main.bottom - 2, 4, -1);
      }
      ctx.globalAlpha = 1;
    });
  }

  function drawGap(ctx, chart, strip) {
    const { theme } = app,
      [from, to] = chart.range(),
      base = reference();
    const shown = store.runs
      .map((run, i) => ({ run, i, curve: store.curve(i, "difference") }))
      .filter((s) => s.i !== base);
    const found = rangeOf(
      shown.map((s) => s.curve),
      from,
      to,
      true,
    );
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
      const positive = { steps: curve.steps, values: curve.values.map((v) => (v === 0 ? scaleGap.lo : v)) };
      const color = colorOfRun(theme, i);
      drawCurve(ctx, positive, chart.x, scaleGap, { color, width: 1, alpha: 0.3 * faded(run) });
      drawCurve(
        ctx,
        smoothed({ steps: positive.steps, values: positive.values.map(Math.log) }, (to - from) / 60),
        chart.x,
        (v) => scaleGap(Math.exp(v)),
        { color, dash: dashOfRun(i), width: 2, alpha: faded(run) },
      );
      drawOdd(ctx, theme, positive, chart.x, scaleGap, strip, i);
    }
  }

  // What the read-out says at a step.
  function rows(step, chart) {
    const out = [];
    for (const { run, i, curve } of visible()) {
      const found = valueAt(curve, step);
      if (!found || (run.step !== null && step > run.step)) continue;
      const base = reference(),
        gap = i !== base && base >= 0 ? valueAt(store.curve(i, "difference"), step) : null;
      const skip = store.curve(i, "skipped"),
        k = nearest(skip.steps, step);
      const parts = [numberText(found.value)];
      if (gap) parts.push(`|Δ| ${numberText(gap.value, 3)}`);
      if (k >= 0 && skip.steps[k] === step && skip.values[k] === 1) parts.push("skipped");
      if (found.step !== step) parts.push(`at ${countText(found.step)}`);
      out.push({
        name: run.label,
        text: parts.join("   "),
        color: colorOfRun(app.theme, i),
        odd: !Number.isFinite(found.value),
        y: scaleY && Number.isFinite(found.value) ? scaleY(found.value) : undefined,
      });
    }
    return out;
  }

  // A click near a skip mark picks that step of that run; elsewhere the step of the nearest curve.
  function click(chart, step, point) {
    let best = null;
    const consider = (run, at, distance) => {
      if (!best || distance < best.distance) best = { run, step: at, distance };
    };
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

  const summary = () =>
    visible()
      .map(({ run, curve }) => {
        const last = curve.values[curve.values.length - 1];
        const value = last === undefined ? "no value yet" : numberText(last);
        return `${run.label}: ${value} at step ${run.step ?? "none"}, ${run.state}.`;
      })
      .join(" ");

  const chart = makeStepChart(app, host, {
    label: "Trajectories",
    height: 330,
    draw,
    rows,
    note,
    summary,
    click,
    zoomed: (range) => {
      for (let i = 0; i < store.runs.length; i += 1) store.curve(i, "detail").clear();
      app.send({ type: "range", range });
    },
  });
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
