// The panel of blocks: large numbers, tables, bars. Comes after canvas.js and panel.js.

function render({ model, el }) {
  const { root, theme } = panelRoot(el, model);
  const send = (message) => model.send(message);
  const head = panelHead(model, send);
  const blocks = blockList(theme, send);
  const detail = blockList(theme, () => {});
  const job = jobBlock(model, theme, send);
  root.append(head.node, blocks.node, detail.node, job.node);

  const body = () => { blocks.node.hidden = Boolean(model.get("head").empty); blocks.update(model.get("body")); };
  const changes = { head: () => { head.update(); body(); }, problem: head.update, body, theme: theme.refresh,
    detail: () => detail.update(model.get("detail").blocks ?? []), job: job.update };
  for (const [name, change] of Object.entries(changes)) model.on(`change:${name}`, change);
  root.addEventListener("f16-theme", blocks.redraw);
  theme.refresh();
  for (const change of [changes.head, changes.detail, changes.job]) change();
  return () => {
    theme.stop();
    for (const [name, change] of Object.entries(changes)) model.off(`change:${name}`, change);
    root.remove();
  };
}

export default { render };
