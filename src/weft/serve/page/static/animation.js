// The animation: plays the steps of a what-if answer, with the KV cache that fills, and says in words what happens.

import { byId, colour, count, milliseconds, prepare } from "./dom.js";

const HUES = [172, 205, 262, 320, 96, 140, 232, 290, 60, 350, 188, 120, 250, 305, 78];
const LINGER_MS = 1200; // between the last step and the first, when it begins again

// How many chats get a token in a step. The long prompt has the last number.
function chatsIn(step, question) {
  return step.num_decodes - (step.decodes.includes(question.concurrency) ? 1 : 0);
}

export class Animation {
  constructor() {
    this._answer = null;
    this._states = []; // by step: what holds before it, by request
    this._at = 0;
    this._timer = null;
    byId("a-play").addEventListener("click", () => (this._timer === null ? this._play() : this._pause()));
    byId("a-next").addEventListener("click", () => this._move(1));
    byId("a-back").addEventListener("click", () => this._move(-1));
    byId("a-seek").addEventListener("input", (event) => {
      this._pause();
      this._show(Number(event.target.value));
    });
    window.addEventListener("resize", () => this.draw());
  }

  show(answer, question) {
    this._pause();
    this._answer = answer;
    this._question = question;
    this._states = [];
    let state = new Map(answer.requests.map((one) => [one.number, { read: one.read, written: one.written }]));
    for (const step of answer.steps) {
      this._states.push(state);
      state = new Map([...state].map(([number, one]) => [number, { ...one }]));
      for (const number of step.decodes) state.get(number).written += 1;
      for (const [number, first, tokens, isSampled] of step.slices) {
        const one = state.get(number);
        if (one === undefined) continue;
        one.read = first + tokens;
        if (isSampled) one.written += 1;
      }
    }
    this._states.push(state);
    this._lastOfChats = answer.steps.findLastIndex((step) => chatsIn(step, question) > 0); // the chats have ended behind it
    for (const id of ["a-play", "a-next", "a-back", "a-seek"]) byId(id).disabled = answer.steps.length === 0;
    byId("a-seek").max = String(Math.max(0, answer.steps.length - 1));
    this._show(0);
  }

  _play() {
    if (this._at >= this._answer.steps.length - 1) this._show(0);
    byId("a-play").textContent = "Pause";
    const tick = () => {
      const isLast = this._at >= this._answer.steps.length - 1;
      if (isLast) return this._pause();
      this._show(this._at + 1);
      this._timer = setTimeout(tick, this._at === this._answer.steps.length - 1 ? LINGER_MS : 1000 / byId("a-speed").value);
    };
    this._timer = setTimeout(tick, 1000 / byId("a-speed").value);
  }

  _pause() {
    clearTimeout(this._timer);
    this._timer = null;
    byId("a-play").textContent = "Play";
  }

  _move(by) {
    this._pause();
    this._show(Math.min(Math.max(0, this._at + by), this._answer.steps.length - 1));
  }

  _show(at) {
    this._at = at;
    byId("a-seek").value = String(at);
    byId("a-seek").setAttribute("aria-valuetext", `step ${at + 1} of ${this._answer.steps.length}`);
    byId("a-caption").textContent = this._answer.steps.length ? this._caption() : "The answer has no steps.";
    this.draw();
  }

  _caption() {
    const step = this._answer.steps[this._at];
    const long = this._answer.requests.find((one) => one.long);
    const before = this._states[this._at].get(long.number);
    const slice = step.slices.find(([number]) => number === long.number);
    const others = step.slices.filter(([number]) => number !== long.number);
    const words = [`Step ${this._at + 1} of ${this._answer.steps.length}, ${milliseconds(step.ms)}.`];
    const chats = chatsIn(step, this._question);
    const areThere = this._question.concurrency > 0 && this._at <= this._lastOfChats;
    if (slice) {
      const end = slice[1] + slice[2];
      words.push(end >= this._question.prompt_tokens
        ? `The device reads the last ${count(slice[2])} tokens of the long prompt, so its first token is written now.`
        : `The device reads ${count(slice[2])} tokens of the long prompt: ${count(end)} of `
          + `${count(this._question.prompt_tokens)} are read.`);
    } else if (before.read === 0) {
      words.push("The long prompt is not there yet, or it waits.");
    } else {
      words.push("The long prompt is read. Its request writes like the others.");
    }
    if (others.length) words.push(`It reads ${others.length} short prompts.`);
    if (chats) words.push(`${count(chats)} chats get one token each.`);
    else if (areThere) words.push("No chat gets a token: all of them stand still.");
    else if (this._question.concurrency) words.push("The chats have ended.");
    if (step.ms > this._question.gap_target_ms * 1.01 && areThere) {
      words.push(`The step is longer than the gap target of ${milliseconds(this._question.gap_target_ms)}: the chats stutter.`);
    }
    return words.join(" ");
  }

  draw() {
    if (this._answer === null || !this._answer.steps.length) return;
    const { context, width, height } = prepare(byId("a-canvas"));
    const step = this._answer.steps[this._at];
    const after = this._states[this._at + 1];
    this._drawStrip(context, width, 4);
    this._drawRequests(context, step, after, width, 52, height - 52 - 96);
    this._drawCache(context, step, after, width, height - 88);
  }

  _paint(request) {
    if (request.long) return colour("prefill-fill");
    return `hsl(${HUES[request.number % HUES.length]} 45% 55%)`;
  }

  // All steps in order of time; the present one is framed.
  _drawStrip(context, width, top) {
    const { steps } = this._answer;
    const begun = steps[0].started_ms;
    const span = steps.at(-1).started_ms + steps.at(-1).ms - begun;
    context.fillStyle = colour("soft");
    context.fillText("steps in time: a wide one makes the chats wait", 0, top + 5);
    steps.forEach((step, index) => {
      const x = ((step.started_ms - begun) / span) * width;
      const size = Math.max(1, (step.ms / span) * width - 0.5);
      context.fillStyle = step.slices.length ? colour("prefill-fill") : colour("decode-fill");
      context.globalAlpha = index === this._at ? 1 : 0.55;
      context.fillRect(x, top + 14, size, 16);
      context.globalAlpha = 1;
      if (index === this._at) {
        context.strokeStyle = colour("text");
        context.lineWidth = 2;
        context.strokeRect(x - 1, top + 13, size + 2, 18);
      }
    });
  }

  _drawRequests(context, step, after, width, top, height) {
    const requests = this._answer.requests;
    const row = Math.min(18, height / requests.length);
    const left = 92;
    const barWidth = (width - left - 8) * 0.55;
    const longTokens = this._question.prompt_tokens;
    requests.forEach((request, index) => {
      const y = top + index * row;
      const state = after.get(request.number);
      const prompt = request.long ? longTokens : this._answer.chat_prompt_tokens;
      const slice = step.slices.find(([number]) => number === request.number);
      const isWriting = step.decodes.includes(request.number) || slice?.[3];
      context.fillStyle = colour("text");
      if (row >= 10) context.fillText(request.long ? "long prompt" : `chat ${request.number + 1}`, 0, y + row / 2);
      const size = request.long ? barWidth : Math.max(10, barWidth * 0.08);
      context.fillStyle = colour("grid");
      context.fillRect(left, y + 2, size, row - 4);
      context.fillStyle = this._paint(request);
      context.fillRect(left, y + 2, size * Math.min(1, state.read / prompt), row - 4);
      if (slice) {
        context.fillStyle = colour("stall");
        const begin = size * Math.min(1, slice[1] / prompt);
        context.fillRect(left + begin, y + 1, Math.max(3, size * Math.min(1, state.read / prompt) - begin), 2);
        context.fillRect(left + begin, y + row - 3, Math.max(3, size * Math.min(1, state.read / prompt) - begin), 2);
      }
      const words = left + barWidth + 10;
      const room = Math.max(4, Math.floor((width - words - 8) / 5));
      context.fillStyle = this._paint(request);
      for (let token = Math.max(0, state.written - room); token < state.written; token++) {
        const at = words + (token - Math.max(0, state.written - room)) * 5;
        const isNew = isWriting && token === state.written - 1;
        context.globalAlpha = isNew ? 1 : 0.45;
        context.fillRect(at, y + (isNew ? 1 : 3), 4, row - (isNew ? 2 : 6));
        context.globalAlpha = 1;
      }
    });
  }

  // Cells of the KV cache: filled in the colours of the requests that hold them.
  _drawCache(context, step, after, width, top) {
    const { num_blocks: total, block_size: blockSize, requests } = this._answer;
    context.fillStyle = colour("text");
    context.fillText(`KV cache: ${count(step.blocks)} of ${count(total)} blocks hold what was read and written`, 0, top + 6);
    const most = Math.max(...this._answer.steps.map((one) => one.blocks), 1);
    const cell = 11;
    const columns = Math.floor(width / cell);
    const cells = columns * 6;
    const perCell = Math.max(1, Math.ceil(most / (cells * 0.9)));
    let at = 0;
    const put = (blocks, paint) => {
      context.fillStyle = paint;
      for (let rest = Math.ceil(blocks / perCell); rest > 0 && at < cells; rest--, at++) {
        context.fillRect((at % columns) * cell, top + 16 + Math.floor(at / columns) * cell, cell - 2, cell - 2);
      }
    };
    let named = 0;
    for (const request of requests) {
      const state = after.get(request.number);
      const blocks = Math.ceil((state.read + state.written) / blockSize);
      if (state.read) {
        put(blocks, this._paint(request));
        named += blocks;
      }
    }
    put(Math.max(0, step.blocks - named), colour("queue"));
    while (at < cells) put(perCell, colour("grid"));
  }
}
