// The loss scale with its overflows, and the room above the largest gradient. Joined behind chart_lines.js.

function makeScaleChart(app, host) {
  const { model, store } = app;
  makeHead(host, "Loss scale");
  const legend = make("div", { class: "f16-legend", role: "group", "aria-label": "runs" });
  if (!model.get("charts").includes("trajectories")) host.append(legend); // else they are named there
  const words = make("div", { class: "f16-words" });
  const scaled = () =>
    store.runs
      .map((run, i) => ({ run, i, curve: store.curve(i, "loss_scale"), margin: store.curve(i, "margin") }))
      .filter((s) => s.curve.values.some((v) => v !== 1));
  let scaleY = null,
    scaleRoom = null;

  function draw(ctx, chart, width, height) {
    const { theme } = app,
      { box } = chart,
      shown = scaled(),
      [from, to] = chart.range();
    if (!shown.length) {
      const begun = store.runs.some((run) => run.step !== null);
      emptyWords(
        ctx,
        theme,
        begun ? "no run scales its loss (profile slot loss_scale)" : app.emptyText("Loss scale"),
        box,
      );
      scaleY = scaleRoom = null;
      return;
    }
    const roomy = shown.some((s) => s.margin.steps.length);
    const main = { ...box, bottom: roomy ? box.bottom - 80 : box.bottom };
    const [lo, hi] = rangeOf(
      shown.map((s) => s.curve),
      from,
      to,
      true,
    ) ?? [1, 2];
    scaleY = logScale(lo / 1.7, hi * 1.7, main.bottom, main.top, 2);
    yAxis(ctx, theme, scaleY, main, "factor on the loss", Math.floor((main.bottom - main.top) / 24));
    xAxis(ctx, theme, chart.x, main, roomy ? undefined : "step");
    for (const { run, i, curve } of shown) {
      drawCurve(ctx, curve, chart.x, scaleY, {
        color: colorOfRun(theme, i),
        dash: dashOfRun(i),
        width: 2,
        hold: true,
        alpha: app.faded(run),
      });
      drawOverflows(ctx, chart, i, curve, main);
    }
    if (roomy) drawRoom(ctx, chart, shown, { ...box, top: main.bottom + 28 });
  }

  // A cross on the curve for each step that was skipped.
  function drawOverflows(ctx, chart, i, curve, main) {
    const skip = store.curve(i, "skipped");
    ctx.strokeStyle = app.theme.colors.alert;
    const many = countIn(skip, ...chart.range()) > (main.right - main.left) / 14;
    ctx.lineWidth = many ? 1 : 1.8;
    skip.steps.forEach((step, k) => {
      const at = valueAt(curve, step),
        px = chart.x(step);
      if (skip.values[k] === 1 && at && px >= main.left && px <= main.right)
        cross(ctx, px, scaleY(at.value), many ? 1.5 : 4);
    });
  }

  // Binades between the largest gradient and overflow; below the line of 0 it overflowed.
  function drawRoom(ctx, chart, shown, strip) {
    const { theme } = app,
      [from, to] = chart.range();
    const found = rangeOf(
      shown.map((s) => s.margin),
      from,
      to,
      false,
    ) ?? [0, 1];
    const [lo, hi] = padded(Math.min(0, found[0]), Math.max(4, found[1]), false);
    scaleRoom = linearScale(lo, hi, strip.bottom, strip.top);
    yAxis(ctx, theme, scaleRoom, strip, "room above the largest gradient, binades", 3);
    xAxis(ctx, theme, chart.x, strip, "step");
    ctx.strokeStyle = theme.colors.alert;
    ctx.setLineDash([5, 3]);
    line(ctx, strip.left, crisp(scaleRoom(0)), strip.right, crisp(scaleRoom(0)));
    ctx.setLineDash([]);
    write(ctx, "overflow", strip.right - 2, scaleRoom(0) - 7, {
      color: theme.colors.alert,
      align: "right",
      size: 10,
    });
    for (const { run, i, margin } of shown) {
      drawCurve(ctx, margin, chart.x, scaleRoom, {
        color: colorOfRun(theme, i),
        dash: dashOfRun(i),
        alpha: app.faded(run),
      });
      drawOdd(ctx, theme, margin, chart.x, scaleRoom, strip, 0);
    }
  }

  function rows(step) {
    return scaled()
      .filter(({ run }) => run.step === null || step <= run.step)
      .map(({ run, i, curve, margin }) => {
        const at = valueAt(curve, step),
          room = valueAt(margin, step),
          skip = store.curve(i, "skipped");
        const k = nearest(skip.steps, step),
          parts = [at ? powerText(at.value) : "–"];
        if (room) parts.push(`${numberText(room.value, 3)} binades free`);
        if (k >= 0 && skip.steps[k] === step && skip.values[k] === 1) parts.push("overflow, skipped");
        return {
          name: run.label,
          text: parts.join("   "),
          color: colorOfRun(app.theme, i),
          y: at && scaleY ? scaleY(at.value) : undefined,
        };
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

  const summary = () =>
    scaled()
      .map(
        ({ run, curve }) =>
          `${run.label}: ${powerText(curve.values[curve.values.length - 1])}. ${store.words[run.label] ?? ""}`,
      )
      .join(" ");
  const chart = makeStepChart(app, host, { label: "Loss scale", height: 250, draw, rows, summary, click });
  host.append(words);
  const update = chart.update;
  chart.update = () => {
    fillLegend(app, legend, (run, i) => {
      const { values } = store.curve(i, "loss_scale");
      return values.length && values.some((v) => v !== 1) ? powerText(values[values.length - 1]) : "no scale";
    });
    const lines = scaled().filter(({ run }) => store.words[run.label]);
    words.replaceChildren(
      ...lines.map(({ run, i }) =>
        make(
          "p",
          {},
          make("span", { class: "f16-tip-key", style: `background:${colorOfRun(app.theme, i)}` }),
          make("b", {}, run.label),
          ` ${store.words[run.label]}`,
        ),
      ),
    );
    chart.board.height = (app.solo ? 170 : 134) + (scaled().some((s) => s.margin.steps.length) ? 80 : 0);
    update();
  };
  return chart;
}

const powerText = (x) => {
  const e = Math.log2(x);
  return Number.isInteger(e) ? `2${raised(e)} = ${numberText(x)}` : numberText(x);
};
