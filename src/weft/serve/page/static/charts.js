// Charts of the last minutes, with the targets drawn in.

import { byId, colour, count, element, milliseconds, prepare } from "./dom.js";

const EVERY_MS = 1000;
const SECONDS = 300;

const percent = (share) => `${(share * 100).toFixed(0)}%`;
const seconds = (value) => milliseconds(value * 1000);

// name of the point's field, colour; a target is a function of the engine's info: [value, is it promised]
const CHARTS = [
  { title: "First token, slowest", lines: [["ttft", "prefill"]], format: seconds, dots: true,
    target: (info) => [info.ttftTarget, info.ttftPromised] },
  { title: "Gaps, p50 and p99", lines: [["p50", "decode"], ["p99", "prefill"]], format: seconds,
    target: (info) => [info.gapTarget, info.gapPromised] },
  { title: "Tokens written a second", lines: [["throughput", "decode"]], format: count },
  { title: "Prompt tokens read a second", lines: [["prefill", "prefill"]], format: count },
  { title: "KV cache in use", lines: [["kv", "decode"]], format: percent, most: 1 },
  { title: "Prefix cache hits", lines: [["hits", "decode"]], format: percent, most: 1, dots: true },
];

export class Charts {
  constructor(model) {
    this._model = model;
    this._isVisible = false;
    this._charts = CHARTS.map((chart) => {
      const box = element("div", "chart");
      const title = element("h3", "", chart.title);
      const value = element("span");
      const canvas = document.createElement("canvas");
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", chart.title);
      title.append(value);
      box.append(title, canvas);
      byId("chart-grid").append(box);
      return { ...chart, canvas, value };
    });
    new IntersectionObserver((entries) => {
      this._isVisible = entries.at(-1).isIntersecting;
      this.draw();
    }).observe(byId("charts"));
    setInterval(() => this.draw(), EVERY_MS);
  }

  draw() {
    const model = this._model;
    if (!this._isVisible || document.visibilityState !== "visible" || model.newest === -Infinity) return;
    const points = model.series(model.serverTime(performance.now() / 1000));
    for (const chart of this._charts) this._draw(chart, points, model.info);
  }

  _draw(chart, points, info) {
    const { context, width, height } = prepare(chart.canvas);
    const bottom = height - 14;
    const [target, promised] = (info && chart.target?.(info)) ?? [null, false];
    let most = chart.most ?? 0;
    if (!chart.most) {
      for (const point of points) for (const [name] of chart.lines) most = Math.max(most, point[name] ?? 0);
      most = Math.max(most, (target ?? 0) * 1.15) || 1;
    }
    const y = (value) => bottom - (value / most) * (bottom - 10);
    const x = (index) => (index / (points.length - 1)) * width;
    context.fillStyle = colour("grid");
    for (const share of [0, 0.5, 1]) context.fillRect(0, y(most * share), width, 1);
    for (const [name, paint] of chart.lines) {
      context.strokeStyle = context.fillStyle = colour(`${paint}-fill`);
      context.lineWidth = 1.5;
      context.beginPath();
      let isOpen = false;
      points.forEach((point, index) => {
        const value = point[name];
        if (value === null) {
          isOpen = false;
          return;
        }
        if (isOpen) context.lineTo(x(index), y(value));
        else context.moveTo(x(index), y(value));
        isOpen = true;
        if (chart.dots || points[index - 1]?.[name] === null) context.fillRect(x(index) - 1.5, y(value) - 1.5, 3, 3);
      });
      context.stroke();
    }
    let aim = "";
    if (target !== null) {
      context.strokeStyle = colour("stall");
      context.lineWidth = 1;
      context.setLineDash(promised ? [] : [5, 4]);
      context.beginPath();
      context.moveTo(0, y(target));
      context.lineTo(width, y(target));
      context.stroke();
      context.setLineDash([]);
      aim = `; ${promised ? "promised" : "aimed at"} ${chart.format(target)}`;
    }
    context.fillStyle = colour("soft");
    context.fillText(chart.format(most), 2, 6);
    context.fillText(`-${SECONDS / 60} min`, 2, height - 5);
    context.textAlign = "right";
    context.fillText("now", width - 2, height - 5);
    context.textAlign = "left";
    const values = chart.lines.map(([name]) => points.findLast((point) => point[name] !== null)?.[name]);
    const words = values.map((value) => (value === undefined ? "–" : chart.format(value))).join(" / ") + aim;
    if (chart.value.textContent !== words) {
      chart.value.textContent = words;
      chart.canvas.setAttribute("aria-label", `${chart.title}: now ${words}; at most ${chart.format(most)} on the scale`);
    }
  }
}
