// The live charts. This is the last of the files that make the module (LiveCharts names them in order): canvas.js,
// chart_data.js, chart_lines.js, chart_trajectories.js, chart_scale.js, chart_map.js, and this one.
//
// The kernel sends frames: { runs, scalars, curves: [[run, name, count, cut, whole], …], map, … } with buffers
// [steps int32, values float32, cells uint8, apart float32]. A frame holds what is new; `full` says that it holds all.
// The front end sends { type: "hello" } when it appears, "drawn" after it has drawn a frame, "range" when zoomed,
// "pick" when something is chosen. What a person has set lives in traits, so that it outlives a reload.

// ---------------------------------------------------------------- small parts
function makeHead(host, title) {
  const heading = make("h3", {}, title),
    head = make("div", { class: "f16-head" }, heading);
  host.append(head);
  head.rename = (text) => {
    if (heading.textContent !== text) heading.textContent = text;
  };
  return head;
}

// A labelled choice that is only rebuilt when its options change, so that an open list stays open.
function makeSelect(label, chosen) {
  const select = make("select", { "aria-label": label }),
    element = make("label", { class: "f16-select" }, make("span", {}, label), select);
  let known = "";
  select.addEventListener("change", () => chosen(select.value));
  return {
    element,
    fill(values, current, text) {
      const key = JSON.stringify(values);
      if (key !== known) {
        known = key;
        select.replaceChildren(...values.map((value) => make("option", { value }, text(value))));
      }
      if (document.activeElement !== select || select.value !== current) select.value = current;
    },
  };
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
    legend.replaceChildren(
      ...store.runs.map((run, i) => {
        const button = make(
          "button",
          { type: "button", class: "f16-run" },
          make("span", { class: "f16-swatch" }),
          make("span", { class: "f16-name" }),
          make("span", { class: "f16-value" }),
          make("span", { class: "f16-state" }),
        );
        button.addEventListener("click", () =>
          app.pick({ kind: "run", run: store.runs[i].label, step: store.runs[i].step ?? -1, layer: "" }),
        );
        return button;
      }),
    );
  }
  store.runs.forEach((run, i) => {
    const [swatch, name, value, state] = legend.children[i].children,
      [sign, words] = STATES[run.state] ?? ["", run.state];
    const stroke = `stroke="${colorOfRun(app.theme, i)}" stroke-width="2.4" stroke-dasharray="${dashOfRun(i).join(" ")}"`;
    swatch.innerHTML = `<svg width="26" height="8" aria-hidden="true"><line x1="1" x2="25" y1="4" y2="4" ${stroke}/></svg>`;
    name.textContent = run.label;
    value.textContent = valueText(run, i);
    const steps =
      run.step === null ? "" : `step ${countText(run.step)}${run.steps ? ` of ${countText(run.steps)}` : ""}`;
    state.textContent =
      run.state === "waiting" ? words : `${sign} ${steps}${run.state === "running" ? "" : ` · ${words}`}`;
    state.dataset.state = run.state;
    legend.children[i].title = [words, run.message, run.problem].filter(Boolean).join(": ");
    press(legend.children[i], app.picked.run === run.label);
  });
}

// What ended a run badly, in a line each, below the legend.
function fillTroubles(app, place) {
  const bad = app.store.runs.filter(
    (run) => ["failed", "died"].includes(run.state) || (run.problem && run.state !== "waiting"),
  );
  place.hidden = !bad.length;
  place.replaceChildren(
    ...bad.map((run) =>
      make(
        "p",
        {},
        make("b", {}, run.label),
        ` ${(STATES[run.state] ?? ["", run.state])[1]}` +
          `${run.message ? `: ${run.message}` : ""}${run.problem ? `; ${run.problem}` : ""}`,
      ),
    ),
  );
}

// ---------------------------------------------------------------- the widget
const KINDS = { trajectories: makeTrajectories, loss_scale: makeScaleChart, exponents: makeMap };

function render({ model, el }) {
  const root = make("div", { class: "f16-charts" }),
    banner = make("div", { class: "f16-banner", role: "alert", hidden: "" });
  const troubles = make("div", { class: "f16-troubles", role: "status", hidden: "" });
  const grid = make("div", { class: "f16-grid" });
  root.append(banner, troubles, grid);
  el.append(root);

  const kinds = model.get("charts").filter((name) => KINDS[name]);
  grid.dataset.charts = kinds.length;
  const app = { model, store: makeStore(), picked: { run: "", layer: "" }, charts: [], solo: kinds.length === 1 };
  app.send = (content) => {
    try {
      model.send(content);
    } catch (error) {
      console.debug("a kernel that is being restarted takes no messages:", error);
    }
  };
  app.set = (name, value) => {
    model.set(name, value);
    model.save_changes();
    refresh();
  };
  app.faded = (run) => (app.picked.run && app.picked.run !== run.label ? 0.25 : 1);
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
    if (runs.every((run) => run.step === null))
      return runs.every((r) => r.state === "waiting" || r.state === "running")
        ? "waiting for the first step"
        : "this run ended before its first step";
    return otherwise ?? `no values of ${name.toLowerCase()} yet`;
  };
  // Beside the other two charts the map is as high as they are together.
  app.mapHeight = (host, wrap) => {
    const others = [...grid.children].filter((chart) => chart !== host);
    if (others.length !== 2 || others[0].offsetLeft === host.offsetLeft) return null;
    return Math.max(
      300,
      others[0].offsetHeight + others[1].offsetHeight + 12 - (host.scrollHeight - wrap.offsetHeight) - 2,
    );
  };
  const refresh = () => {
    fillTroubles(app, troubles);
    for (const chart of app.charts) chart.update();
    if (app.charts.length > 1 && !fitting)
      fitting = requestAnimationFrame(() =>
        requestAnimationFrame(() => {
          fitting = 0;
          for (const chart of app.charts) chart.fit?.();
        }),
      );
  };
  let fitting = 0;
  app.theme = watchTheme(
    root,
    () => model.get("theme"),
    () => refresh(),
  );
  for (const name of kinds) {
    const host = make("section", { class: `f16-chart f16-${name}`, "aria-label": name.replace("_", " ") });
    grid.append(host);
    app.charts.push(KINDS[name](app, host));
  }

  const showProblem = () => {
    banner.textContent = model.get("problem");
    banner.hidden = !model.get("problem");
  };
  let asked = 0;
  const onMessage = (content, buffers) => {
    if (content?.type !== "frame") return;
    if (content.full) clearTimeout(greeting);
    app.store.take(content, buffers ?? []);
    refresh();
    if (!asked)
      asked = requestAnimationFrame(() => {
        asked = 0;
        app.send({ type: "drawn", n: content.n });
      });
  };
  // Says hello until everything has come: a message may be lost while JupyterLab loads a page again.
  let greeting = 0,
    wait = 1000;
  const greet = () => {
    app.send({ type: "hello" });
    greeting = setTimeout(greet, wait);
    wait = Math.min(2 * wait, 30_000);
  };
  const watched = ["scalar", "log", "smooth", "reference", "tensor", "map_run", "map_step"];
  const listeners = [
    ["msg:custom", onMessage],
    ["change:problem", showProblem],
    ["change:theme", app.theme.refresh],
    ...watched.map((name) => [`change:${name}`, refresh]),
  ];
  for (const [name, fn] of listeners) model.on(name, fn);
  app.theme.refresh();
  showProblem();
  greet();
  root.f16 = app; // for tests: what is known and how long drawing took
  return () => {
    for (const [name, fn] of listeners) model.off(name, fn);
    for (const chart of app.charts) chart.stop();
    app.theme.stop();
    clearTimeout(greeting);
    cancelAnimationFrame(asked);
    cancelAnimationFrame(fitting);
  };
}

export default { render };
