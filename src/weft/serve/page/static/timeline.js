// The timeline: draws the last seconds of the model. Only rows in sight are drawn, on one canvas.

import { hasKey } from "./api.js";
import { byId, colour, count, element, milliseconds, prepare } from "./dom.js";
import { WINDOW_S } from "./model.js";

const ROW = 16; // pixels
const LAG_S = 0.4; // the right edge is that long ago, so that frames arrive before they are drawn
const WORDS_MS = 1000; // between two changes of the text below
const SHOWN_STALLS = 5;

export class Timeline {
  constructor(model) {
    this._model = model;
    this._steps = byId("steps-canvas");
    this._rows = byId("rows-canvas");
    this._box = byId("rows");
    this._height = byId("rows-height");
    this._isVisible = true;
    this._pausedAt = null; // the server's time at the right edge while paused
    this._scheduled = false;
    this._worded = 0;
    this.frames = 0; // drawn so far, for tests
    new IntersectionObserver((entries) => {
      this._isVisible = entries.at(-1).isIntersecting;
      this.schedule();
    }).observe(byId("timeline"));
    this._box.addEventListener("scroll", () => this.schedule());
    window.addEventListener("resize", () => this.schedule());
    byId("pause").addEventListener("click", () => this._togglePause());
  }

  // Draws soon, and then until nothing moves.
  schedule() {
    if (this._scheduled || !this._isVisible) return;
    this._scheduled = true;
    requestAnimationFrame(() => {
      this._scheduled = false;
      if (this.draw()) this.schedule();
    });
  }

  _togglePause() {
    this._pausedAt = this._pausedAt === null ? this._edge() : null;
    byId("pause").setAttribute("aria-pressed", String(this._pausedAt !== null));
    byId("pause").textContent = this._pausedAt === null ? "Pause" : "Go on";
    this.schedule();
  }

  _edge() {
    return this._pausedAt ?? this._model.serverTime(performance.now() / 1000) - LAG_S;
  }

  // Returns whether something will have moved by the next frame.
  draw() {
    const model = this._model;
    this.frames += 1;
    if (model.newest === -Infinity) {
      prepare(this._steps);
      prepare(this._rows);
      return false;
    }
    const to = this._edge();
    const from = to - WINDOW_S;
    const rows = model.rows(from);
    const height = `${rows.length * ROW + 4}px`;
    if (this._height.style.height !== height) this._height.style.height = height;
    this._drawSteps(from, to);
    this._drawRows(rows, from, to);
    const now = performance.now();
    if (now - this._worded > WORDS_MS) {
      this._worded = now;
      this._write(rows, to);
    }
    return this._pausedAt === null && rows.length > 0;
  }

  _scale(width, from, to) {
    const left = width < 520 ? 62 : 128;
    const perSecond = (width - left) / (to - from);
    return { left, x: (time) => left + (time - from) * perSecond };
  }

  _drawSteps(from, to) {
    const { context, width, height } = prepare(this._steps);
    const { left, x } = this._scale(width, from, to);
    const lane = height - 16;
    context.fillStyle = colour("soft");
    context.fillText("steps", 0, lane / 2);
    context.textAlign = "center";
    for (let second = 0; second <= WINDOW_S; second += 2) {
      const at = x(to - second);
      context.fillText(second ? `-${second} s` : "now", Math.min(at, width - 14), height - 6);
    }
    context.textAlign = "left";
    const fills = [[colour("decode-fill"), (step) => step.decodes.length], [colour("prefill-fill"), (step) => step.prefillTokens]];
    for (const engine of this._model.engines.values()) {
      fills.forEach(([fill, tokens], index) => {
        context.fillStyle = fill;
        for (const step of engine.steps) {
          if (step.finished < from || step.started > to) continue;
          const share = tokens(step) / (step.decodes.length + step.prefillTokens);
          if (!share) continue;
          const begin = Math.max(left, x(step.started));
          const size = index === 0 && share === 1 ? lane * 0.55 : lane * Math.max(0.2, share);
          context.fillRect(begin, index === 0 ? lane - size : 0, Math.max(1, x(step.finished) - begin - 0.5), size);
        }
      });
    }
  }

  _drawRows(rows, from, to) {
    const { context, width, height } = prepare(this._rows);
    const { left, x } = this._scale(width, from, to);
    const first = Math.max(0, Math.floor(this._box.scrollTop / ROW));
    const last = Math.min(rows.length, first + Math.ceil(height / ROW) + 1);
    context.fillStyle = colour("grid");
    for (let second = 0; second <= WINDOW_S; second += 2) context.fillRect(x(to - second), 0, 1, height);
    for (let index = first; index < last; index++) {
      this._drawRow(context, rows[index], index * ROW - this._box.scrollTop, left, x, from, to);
    }
  }

  _drawRow(context, request, top, left, x, from, to) {
    const middle = top + ROW / 2;
    const clamp = (time) => Math.max(left, x(Math.min(Math.max(time, from), to)));
    const isForeign = request.ended !== null && !request.id && hasKey(); // of another key: load without a name
    context.fillStyle = colour(isForeign ? "soft" : "text");
    const size = left > 100 && request.promptTokens ? ` · ${count(request.promptTokens)} tok` : "";
    context.fillText(`${isForeign ? "other" : `#${request.key}`}${size}`, 0, middle);
    const started = request.slices[0]?.[0] ?? request.firstToken ?? request.ended ?? to;
    if (request.arrival < to && started > from && request.firstToken !== request.arrival) {
      context.fillStyle = colour("queue");
      const begin = clamp(request.arrival);
      context.fillRect(begin, middle - 2, Math.max(1, clamp(started) - begin), 4);
    }
    if (request.firstToken !== null && request.firstToken < to) {
      context.fillStyle = colour("decode-fill");
      context.globalAlpha = 0.28;
      const begin = clamp(request.firstToken);
      context.fillRect(begin, middle - 3, Math.max(1, clamp(request.lastToken) - begin), 6);
      context.globalAlpha = 1;
      let drawn = -Infinity; // ticks on one pixel are drawn once
      for (const time of request.ticks) {
        if (time < from || time > to) continue;
        const at = Math.round(x(time));
        if (at <= drawn + 1) continue;
        context.fillRect(at, middle - 5, 1, 10);
        drawn = at;
      }
    }
    context.fillStyle = colour("prefill-fill");
    for (const [begun, ended] of request.slices) {
      if (ended < from || begun > to) continue;
      const begin = clamp(begun);
      context.fillRect(begin, middle - 6, Math.max(1.5, clamp(ended) - begin - 0.5), 12);
    }
    context.fillStyle = colour("stall");
    for (const [begun, ended] of request.stalls) {
      if (ended < from || begun > to) continue;
      const begin = clamp(begun);
      const end = clamp(ended);
      context.fillRect(begin, middle + 5, Math.max(2, end - begin), 2.5);
      context.fillRect(end - 1, middle - 6, 2, 13);
    }
    if (request.ended !== null && request.ended >= from && request.ended <= to) {
      context.fillStyle = colour("soft");
      context.fillRect(x(request.ended), middle - 3, 2, 6);
    }
  }

  // The same in words, for screen readers and for everybody.
  _write(rows, to) {
    let waiting = 0;
    let reading = 0;
    let writing = 0;
    for (const request of rows) {
      if (request.ended !== null && request.ended <= to) continue;
      if (request.firstToken !== null) writing += 1;
      else if (request.slices.length) reading += 1;
      else waiting += 1;
    }
    setText(byId("timeline-text"), `${count(rows.length)} requests in the last ${WINDOW_S} seconds; now ${count(waiting)} wait, `
      + `${count(reading)} are read and ${count(writing)} write.`);
    const stalls = [...this._model.stalls].sort((one, other) => other.time - one.time).slice(0, SHOWN_STALLS);
    const list = byId("stalls");
    const lines = stalls.map((stall) => {
      const ago = Math.max(0, Math.round(to - stall.time));
      const time = milliseconds(stall.seconds * 1000);
      const subject = stall.keys.size > 1 ? `${count(stall.keys.size)} requests` : `request ${[...stall.keys][0]}`;
      const what = stall.kind === "first token" ? `first token of ${subject} after ${time}`
        : stall.tokens > 1 ? `${count(stall.tokens)} late tokens of ${subject}, at most ${time}` : `${subject} waited ${time} for a token`;
      return `${what}, ${ago} s ago: ${this._model.why(stall)}`;
    });
    const shown = lines.length ? lines : ["None."];
    if (list.children.length === shown.length && shown.every((line, index) => list.children[index].textContent === line)) return;
    list.replaceChildren(...shown.map((line) => element("li", lines.length ? "" : "empty", line)));
  }
}

function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}
