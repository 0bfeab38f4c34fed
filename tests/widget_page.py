"""A widget's ES module in a plain page, with a model that stands in for anywidget's: no kernel, no JupyterLab."""
import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

BROWSER: list = []  # the one that the fixture `chromium` has started: playwright runs once a process
ORIGIN = "http://widget.test"

PAGE = """<!doctype html><meta charset="utf-8"><title>widget</title><link rel="icon" href="data:,">
<style>body { margin: 0; padding: 12px } body[data-jp-theme-light="false"] { background: #0e1013 }
__CSS__</style><div id="place"></div>
<script>window.addEventListener("error", () => { window.failed = true; });</script>
<script type="module">
import * as module from "./widget.js";
const widget = module.default, state = __STATE__, sent = [], listeners = {};
const model = {
  get: (name) => state[name],
  set: (name, value) => { state[name] = value; model.fire(`change:${name}`); },
  save_changes: () => {},
  send: (content) => { sent.push(content); },
  on: (name, fn) => { (listeners[name] ??= []).push(fn); },
  off: (name, fn) => { listeners[name] = (listeners[name] ?? []).filter((one) => one !== fn); },
  fire: (name, ...more) => { for (const fn of [...(listeners[name] ?? [])]) fn(...more); },
};
const decoded = (text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
const place = document.getElementById("place");
for (const [name, value] of Object.entries(state)) if (value?.bytes64 !== undefined) state[name] = decoded(value.bytes64);
let close = widget.render({ model, el: place });
window.page = {
  module, model, state, sent, listeners,
  take: (content, buffers) => model.fire("msg:custom", content, buffers.map(decoded)),
  remount: () => { close(); place.replaceChildren(); sent.length = 0; close = widget.render({ model, el: place }); },
  close: () => { close(); place.replaceChildren(); },
  app: () => document.querySelector(".f16-charts")?.f16,
};
</script>"""


class WidgetPage:
    """A mounted widget: `page` is playwright's; `problems` are errors of the page and of the console."""

    def __init__(self, page: Any) -> None:
        self.page, self.problems = page, []
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda m: self.problems.append(m.text) if self.bad(m) else None)

    @staticmethod
    def bad(message: Any) -> bool:
        """Whether a line of the console is a complaint, but for one about the reading of pixels by `colors`."""
        return message.type in ("error", "warning") and "getImageData" not in message.text

    def send(self, content: Mapping[str, Any], buffers: Sequence[bytes] = ()) -> None:
        """A message from the kernel. It travels as strict JSON."""
        text = json.dumps(content, allow_nan=False)
        self.page.evaluate("([text, buffers]) => window.page.take(JSON.parse(text), buffers)",
                           [text, [base64.b64encode(b).decode() for b in buffers]])

    def set(self, name: str, value: Any) -> None:
        """A trait set by the kernel."""
        self.page.evaluate("([name, value]) => window.page.model.set(name, value)", [name, value])

    def state(self, name: str) -> Any:
        """The value of a trait as the page has it."""
        return self.page.evaluate("(name) => window.page.state[name]", name)

    def messages(self, kind: str) -> list[dict[str, Any]]:
        """What the widget sent so far."""
        return [m for m in self.page.evaluate("window.page.sent") if m["type"] == kind]

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        twice = "requestAnimationFrame(() => requestAnimationFrame(() => done()))"
        self.page.evaluate(f"() => new Promise((done) => {twice})")

    def move(self, selector: str, x: float, y: float) -> None:
        """The pointer to a place in an element, given as shares of its sides."""
        box = self.page.locator(selector).bounding_box()
        self.page.mouse.move(box["x"] + box["width"] * x, box["y"] + box["height"] * y)
        self.settle()

    def colors(self, selector: str, box: Sequence[float] = (0, 0, 1, 1)) -> dict[tuple[int, int, int], int]:
        """How many opaque pixels of a canvas have which colour, in a part of it given as shares of its sides."""
        pairs = self.page.evaluate("""([selector, [x0, y0, x1, y1]]) => {
            const c = document.querySelector(selector), w = c.width, h = c.height, seen = new Map();
            const data = c.getContext("2d").getImageData(x0 * w, y0 * h, (x1 - x0) * w, (y1 - y0) * h).data;
            for (let i = 0; i < data.length; i += 4) {
                if (data[i + 3] < 250) continue;
                const key = `${data[i]},${data[i + 1]},${data[i + 2]}`;
                seen.set(key, (seen.get(key) ?? 0) + 1);
            }
            return [...seen]; }""", [selector, list(box)])
        return {tuple(map(int, key.split(","))): count for key, count in pairs}


@contextmanager
def widget_page(esm: str, css: str, state: Mapping[str, Any], width: int = 1280, height: int = 800,
                scheme: str = "light") -> Iterator[WidgetPage]:
    """A page of Chromium with a widget in it, closed at the end."""
    html = PAGE.replace("__CSS__", css).replace("__STATE__", json.dumps(dict(state), allow_nan=False))
    files = {f"{ORIGIN}/": ("text/html", html), f"{ORIGIN}/widget.js": ("text/javascript", esm)}

    def answer(route: Any) -> None:
        kind, body = files.get(route.request.url, (None, None))
        route.abort() if body is None else route.fulfill(content_type=kind, body=body)

    with closing(BROWSER[-1].new_context(viewport=dict(width=width, height=height), color_scheme=scheme)) as context:
        page = context.new_page()
        mounted = WidgetPage(page)
        page.route("**/*", answer)
        page.goto(f"{ORIGIN}/")
        page.wait_for_function("window.page !== undefined || window.failed")
        assert not mounted.problems, mounted.problems
        yield mounted
