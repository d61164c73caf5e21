// What if: asks the server's simulation when a slider moves, and shows its answer.

import { ApiError, askJson } from "./api.js";
import { byId, count, element, milliseconds } from "./dom.js";

const QUIET_MS = 150; // after the last movement of a slider
const TRIES = 4; // where the question of another page came later

const LEAST_PROMPT = 64;
const GAP_RANGE = 60; // the largest gap target over the smallest
const USUAL_GAP = 2.5; // gap target at the beginning, in decode steps

export class WhatIf {
  // `show(answer, question)` gets each answer, for the animation.
  constructor(show) {
    this._show = show;
    this._profiles = new Map();
    this._timer = null;
    this._running = null; // AbortController of the question that is asked
    this._asked = 0;
    const form = byId("what-if-form");
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", (event) => {
      if (event.target === byId("w-profile")) this._chooseGap();
      this._label();
      clearTimeout(this._timer);
      this._timer = setTimeout(() => this.ask(), QUIET_MS);
    });
    new IntersectionObserver((entries, observer) => {
      if (!entries.at(-1).isIntersecting) return;
      observer.disconnect();
      this.begin();
    }, { threshold: 0.1 }).observe(byId("what-if"));
  }

  // Reads the profiles, and asks for the first time. The server starts its process of the simulation for that.
  async begin() {
    if (this._profiles.size) return;
    this._say("Starting the simulation.");
    try {
      const found = await this._retried(() => askJson("page/profiles", { method: "POST" }));
      for (const profile of found.profiles) this._profiles.set(profile.name, profile);
      byId("w-profile").replaceChildren(...found.profiles.map((profile) => {
        const option = element("option", "", profile.name);
        option.value = profile.name;
        return option;
      }));
      this._chooseGap();
      this._label();
      await this.ask();
    } catch (error) {
      this._say(error instanceof ApiError ? error.message : "The connection was lost.");
    }
  }

  _values() {
    const profile = this._profiles.get(byId("w-profile").value);
    const output = Number(byId("w-output").value);
    const most = Math.max(LEAST_PROMPT, (profile?.max_model_len ?? 4096) - output - 1);
    const share = Number(byId("w-prompt").value) / 100;
    // Both are logarithmic: small values are as easy to choose as large ones.
    const prompt = Math.round(LEAST_PROMPT * (most / LEAST_PROMPT) ** share);
    const gap = this._leastGap(profile) * GAP_RANGE ** (Number(byId("w-gap").value) / 100);
    return {
      prompt_tokens: Math.min(prompt, most),
      output_tokens: output,
      concurrency: Number(byId("w-chats").value),
      max_num_batched_tokens: 2 ** Number(byId("w-chunk").value),
      policy: byId("w-policy").value,
      gap_target_ms: Math.ceil(gap * 100) / 100,
      profile: byId("w-profile").value,
    };
  }

  _leastGap(profile) {
    return 1.05 * (profile?.smallest_step_ms ?? 1);
  }

  // Puts the gap target where it suits the device.
  _chooseGap() {
    const profile = this._profiles.get(byId("w-profile").value);
    const wish = (USUAL_GAP * profile.decode_step_ms) / this._leastGap(profile);
    byId("w-gap").value = String(Math.round((100 * Math.log(wish)) / Math.log(GAP_RANGE)));
  }

  _label() {
    const values = this._values();
    const words = [["prompt", `${count(values.prompt_tokens)} tokens`], ["output", `${count(values.output_tokens)} tokens`],
      ["chats", count(values.concurrency)], ["chunk", `${count(values.max_num_batched_tokens)} tokens`],
      ["gap", milliseconds(values.gap_target_ms)]];
    for (const [name, text] of words) {
      byId(`w-${name}-out`).textContent = text;
      byId(`w-${name}`).setAttribute("aria-valuetext", text);
    }
  }

  async ask() {
    if (!this._profiles.size) return this.begin();
    this._running?.abort();
    const running = (this._running = new AbortController());
    const question = this._values();
    this._say("Simulating.");
    try {
      const answer = await this._retried(
        () => askJson("page/what_if", { method: "POST", body: question, signal: running.signal }), running);
      if (running !== this._running) return;
      this._table(answer.predictions, question);
      this._asked += 1;
      this._say(`A prompt of ${count(question.prompt_tokens)} tokens beside ${count(question.concurrency)} chats on `
        + `${question.profile}, simulated by weft's scheduler.`);
      this._show(answer, question);
    } catch (error) {
      if (running.signal.aborted || running !== this._running) return;
      this._say(error instanceof ApiError ? `No answer: ${error.message}` : "The connection was lost.");
    }
  }

  async _retried(call, running = null) {
    for (let tries = 1; ; tries++) {
      try {
        return await call();
      } catch (error) {
        const superseded = error instanceof ApiError && error.code === "superseded";
        if (!superseded || tries === TRIES || running?.signal.aborted) throw error;
        await new Promise((resolve) => setTimeout(resolve, 300 * tries));
      }
    }
  }

  _table(predictions, question) {
    byId("w-table").querySelector("tbody").replaceChildren(...predictions.map((one) => {
      const row = element("tr", one.policy === question.policy ? "chosen" : "");
      const name = element("th", "", one.policy);
      name.scope = "row";
      row.append(name);
      const times = [one.ttft_ms, one.total_ms, one.gap_p50_ms, one.gap_p99_ms, one.gap_max_ms];
      times.forEach((time, index) => {
        const isLate = index > 1 && time > question.gap_target_ms * 1.01;
        const cell = element("td", isLate ? "late" : "", milliseconds(time));
        if (isLate) cell.title = `longer than the gap target of ${milliseconds(question.gap_target_ms)}`;
        row.append(cell);
      });
      return row;
    }));
  }

  _say(text) {
    byId("w-status").textContent = text;
  }
}
