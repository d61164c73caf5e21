// The chat: streams answers of /v1/chat/completions, and shows where the time of each went.

import { ApiError, ask } from "./api.js";
import { byId, count, element, milliseconds } from "./dom.js";
import { events } from "./sse.js";

const PROGRESS_MS = 120; // between two looks at the progress of a prompt

export class Chat {
  // `progress(sentAt, maxTokens)` says how much of a prompt is read, or null: it is not known.
  constructor(progress) {
    this._progress = progress;
    this._messages = []; // {role, content}, as the API takes them
    this._running = null; // AbortController of the answer that is being written
    this.model = undefined;
    this._list = byId("messages");
    this._prompt = byId("prompt");
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this._send();
    });
    this._prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this._send();
      }
    });
    byId("stop").addEventListener("click", () => this._running?.abort());
    byId("retry").addEventListener("click", () => this._retry());
    byId("clear").addEventListener("click", () => this._clear());
  }

  _send() {
    const text = this._prompt.value.trim();
    if (!text || this._running !== null) return;
    this._prompt.value = "";
    this._list.querySelector(".empty")?.remove();
    this._messages.push({ role: "user", content: text });
    this._list.append(element("div", "message user", text));
    this._answer();
  }

  _retry() {
    if (this._running !== null) return;
    while (this._messages.at(-1)?.role === "assistant") this._messages.pop();
    if (this._messages.length === 0) return;
    this._list.querySelector(".message.assistant:last-child")?.remove();
    this._answer();
  }

  _clear() {
    this._running?.abort();
    this._messages = [];
    this._list.replaceChildren(element("p", "empty", "Write a message below."));
    byId("retry").disabled = true;
    this._prompt.focus();
  }

  _body() {
    const system = byId("system").value.trim();
    const body = {
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this._messages],
      stream: true,
      stream_options: { include_usage: true },
    };
    if (this.model !== undefined) body.model = this.model;
    for (const [id, name] of [["temperature", "temperature"], ["top-p", "top_p"], ["max-tokens", "max_tokens"]]) {
      const value = byId(id).value;
      if (value !== "" && Number.isFinite(Number(value))) body[name] = Number(value);
    }
    return body;
  }

  async _answer() {
    const conversation = this._messages;
    const body = this._body();
    const shown = new Answer(this._list);
    const running = (this._running = new AbortController());
    this._setBusy(true);
    const sent = performance.now();
    const timer = setInterval(() => shown.showWaiting(sent, this._progress(sent, body.max_tokens)), PROGRESS_MS);
    let text = "";
    try {
      const response = await ask("v1/chat/completions", { method: "POST", body, signal: running.signal });
      for await (const data of events(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(503, String(chunk.error.message), chunk.error.code);
        const delta = chunk.choices?.[0]?.delta ?? {};
        const thoughts = delta.reasoning_content ?? "";
        if (delta.content || thoughts) {
          clearInterval(timer);
          text += delta.content ?? "";
          shown.addText(delta.content ?? "", thoughts, sent);
        }
        if (chunk.choices?.[0]?.finish_reason) shown.reason = chunk.choices[0].finish_reason;
        if (chunk.metrics) shown.showMetrics(chunk.metrics, chunk.usage);
      }
      shown.finish("");
    } catch (error) {
      if (running.signal.aborted) shown.finish("stopped");
      else if (error instanceof ApiError) shown.fail(error.message);
      else shown.fail("The connection was lost. Retry when the server is back.");
    } finally {
      clearInterval(timer);
      if (this._running === running) this._running = null;
      if (this._messages === conversation) {
        if (text) conversation.push({ role: "assistant", content: text });
        this._setBusy(false);
      }
    }
  }

  _setBusy(busy) {
    byId("send").disabled = busy;
    byId("stop").disabled = !busy;
    byId("retry").disabled = busy || this._messages.length === 0;
    this._list.setAttribute("aria-busy", String(busy));
  }
}

// One answer in the list, with its figures and its phase bar.
class Answer {
  constructor(list) {
    this._list = list;
    this.reason = "";
    this._tokens = 0;
    this._first = this._last = null; // when its first and its last chunk came
    this._box = element("div", "message assistant");
    this._thoughts = element("span", "thoughts");
    this._text = element("span", "text");
    this._figures = element("div", "figures");
    this._phases = element("div", "phases");
    this._phases.setAttribute("role", "img");
    this._progress = document.createElement("progress");
    this._progress.setAttribute("aria-label", "Share of the prompt that is read");
    this._progress.hidden = true;
    this._phases.hidden = true;
    this._figures.append(element("span", "", "sent"));
    this._box.append(this._thoughts, this._text, this._progress, this._figures, this._phases);
    list.append(this._box);
    this._scroll();
  }

  // Before the first token. `progress` is {read, of} in tokens, or null.
  showWaiting(sent, progress) {
    if (this._first !== null) return;
    const waited = milliseconds(performance.now() - sent);
    let words = `waiting for ${waited}`;
    if (progress !== null) {
      this._progress.hidden = false;
      this._progress.max = progress.of;
      this._progress.value = progress.read;
      words = progress.read ? `reading the prompt: ${count(progress.read)} of ${count(progress.of)} tokens, ${waited}`
        : `in the queue for ${waited}`;
    }
    this._figures.replaceChildren(element("span", "", words));
  }

  addText(text, thoughts, sent) {
    const now = performance.now();
    const stays = this._list.scrollHeight - this._list.scrollTop - this._list.clientHeight < 60;
    if (this._first === null) {
      this._first = now;
      this._ttft = now - sent;
      this._progress.hidden = true;
      this._rate = element("span");
      this._figures.replaceChildren(element("span", "ttft", `first token after ${milliseconds(this._ttft)}`), this._rate);
    }
    this._last = now;
    this._tokens += 1;
    if (thoughts) this._thoughts.append(thoughts);
    if (text) this._text.append(text);
    this._rate.textContent = this._speed(this._tokens);
    if (stays) this._scroll();
  }

  // The server's own account, in the last chunk.
  showMetrics(metrics, usage) {
    const tokens = usage?.completion_tokens ?? this._tokens;
    const parts = [["queue", metrics.queue_ms], ["prefill", metrics.prefill_ms], ["decode", metrics.decode_ms]];
    const words = [`first token after ${milliseconds(metrics.ttft_ms)}`, this._speed(tokens)];
    if (usage) {
      const cached = metrics.cached_tokens ? `, ${count(metrics.cached_tokens)} cached` : "";
      words.push(`prompt ${count(usage.prompt_tokens)} tokens${cached}`, `answer ${count(tokens)}`);
    }
    if (metrics.largest_gap_ms !== null) words.push(`longest gap ${milliseconds(metrics.largest_gap_ms)}`);
    if (metrics.preemptions) words.push(`preempted ${metrics.preemptions} times`);
    this._figures.replaceChildren(...words.filter(Boolean).map((one) => element("span", "", one)));
    this._phases.hidden = false;
    this._phases.replaceChildren();
    const about = [];
    for (const [name, time] of parts) {
      const part = element("span", name);
      part.style.flexGrow = String(Math.max(0, time ?? 0));
      part.title = `${name} ${milliseconds(time)}`;
      about.push(part.title);
      this._phases.append(part);
    }
    this._phases.setAttribute("aria-label", `Time of this answer: ${about.join(", ")}`);
    this._figures.append(element("span", "", about.join(" · ")));
    this._scroll();
  }

  finish(words) {
    this._progress.hidden = true;
    const said = words || (this.reason === "length" ? "ended by the most tokens" : "");
    if (said) this._figures.append(element("span", "", said));
  }

  fail(message) {
    this._progress.hidden = true;
    this._figures.replaceChildren(element("span", "error", message));
  }

  _speed(tokens) {
    const seconds = (this._last - this._first) / 1000;
    return tokens > 1 && seconds > 0 ? `${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
  }

  _scroll() {
    this._list.scrollTop = this._list.scrollHeight;
  }
}
