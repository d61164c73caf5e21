// The model: what the frames say about requests, steps and late tokens. It draws nothing and knows no clock but theirs.

export const WINDOW_S = 10; // of the timeline
const KEPT_S = WINDOW_S + 3; // how long steps and ended requests are kept
const BUCKET_S = 2; // of the charts
const BUCKETS = 150;
const GAP_BUCKETS = 160; // of a histogram of gaps, logarithmic
const LEAST_GAP = 1e-4; // seconds; the lower end of the histogram
const DECADES = 6;
const FORGOTTEN_S = 600; // after that, a request without an end is one whose end was not recorded
const MOST_STALLS = 50;
const SAME_STALL_S = 1; // late tokens with one cause and less time between them are one entry

const WAITS = { seats: "a free place among the running requests", blocks: "room in the KV cache",
  budget: "its turn to be read", gap: "a step short enough for the promised gaps",
  tenant: "its tenant's share", grammar: "the mask of its grammar" };

export class Model {
  constructor() {
    this.clear();
  }

  clear() {
    this.engines = new Map();
    this.buckets = new Map(); // by number: time / BUCKET_S
    this.stalls = []; // the latest late tokens, the newest last
    this.newest = -Infinity; // time of the newest frame
    this.offset = -Infinity; // seconds from the browser's clock to the server's, at least
    this.version = 0; // grows when frames come
  }

  add(frames, receivedAt) {
    for (const frame of frames) {
      switch (frame[0]) {
        case 1: this._addEngine(frame); break;
        case 2: this._addPrompt(frame); break;
        case 3: this._addStep(frame); break;
        case 4: this._addEnd(frame); break;
        default: // an event loop lag, or a frame that this version does not know
      }
    }
    if (frames.length) this.version += 1;
    if (this.newest > -Infinity) this.offset = Math.max(this.offset, this.newest - receivedAt);
    this._forget();
  }

  // The server's time when the browser's clock says `seconds`.
  serverTime(seconds) {
    return seconds + this.offset;
  }

  // All requests that have a part in the window, in order of arrival: also one that has waited since before it.
  rows(from) {
    const found = [];
    for (const engine of this.engines.values()) {
      for (const request of engine.requests.values()) if (request.ended === null || request.last >= from) found.push(request);
    }
    return found.sort((one, other) => one.arrival - other.arrival || one.key - other.key);
  }

  // How much of a prompt is read: of the one request that arrived after `sent` (the server's time) with these most
  // tokens. Null if none or several fit, because frames name no request before its end.
  progress(sent, maxTokens) {
    let found = null;
    for (const engine of this.engines.values()) {
      for (const request of engine.requests.values()) {
        const fits = request.arrival >= sent - 0.5 && request.ended === null
          && (maxTokens === undefined || request.maxTokens === maxTokens);
        if (fits && found !== null) return null;
        if (fits) found = request;
      }
    }
    return found === null || !found.promptTokens ? null : { read: found.read, of: found.promptTokens };
  }

  get info() {
    for (const engine of this.engines.values()) if (engine.info) return engine.info;
    return null;
  }

  _engine(name) {
    let engine = this.engines.get(name);
    if (engine === undefined) {
      engine = { name, info: undefined, requests: new Map(), steps: [], baseline: null, running: 0, waiting: 0, freeBlocks: 0 };
      this.engines.set(name, engine);
    }
    return engine;
  }

  _addEngine(frame) {
    const engine = this._engine(frame[1]);
    if (engine.info?.time === frame[2]) return; // the server repeats it with every answer
    engine.requests.clear();
    engine.steps = [];
    engine.freeBlocks = frame[14];
    engine.info = { time: frame[2], model: frame[5], device: frame[6], policy: frame[7], gapTarget: frame[8],
      gapPromised: frame[9], ttftTarget: frame[10], ttftPerThousand: frame[11], ttftPromised: frame[12],
      numBlocks: frame[14], blockSize: frame[15] };
  }

  _request(engine, key, time) {
    let request = engine.requests.get(key);
    if (request === undefined) {
      request = { engine: engine.name, key, arrival: time, promptTokens: 0, maxTokens: 0, read: 0, slices: [], ticks: [],
        firstToken: null, lastToken: null, ended: null, reason: "", id: "", stalls: [], waits: "", preemptedAt: null,
        gapTarget: engine.info?.gapTarget ?? null, ttftTarget: null, cached: 0, last: time };
      engine.requests.set(key, request);
    }
    return request;
  }

  _addPrompt(frame) {
    const engine = this._engine(frame[1]);
    const request = this._request(engine, frame[2], frame[4]);
    request.arrival = frame[4];
    request.promptTokens = frame[5];
    request.maxTokens = frame[6];
    request.gapTarget = frame[7];
    request.ttftTarget = frame[9];
    request.constrained = frame[13];
    this._note(request, frame[3]);
  }

  _note(request, time) {
    if (time > request.last) request.last = time;
    if (time > this.newest) this.newest = time;
  }

  _addStep(frame) {
    const engine = this._engine(frame[1]);
    const step = { number: frame[2], started: frame[3], finished: frame[4], slices: frame[7], waitsFor: frame[11],
      decodes: new Int32Array(frame[6].slice().buffer), prefillTokens: 0, running: frame[13], waiting: frame[14] };
    for (const slice of step.slices) step.prefillTokens += slice[2];
    engine.steps.push(step);
    engine.running = step.running;
    engine.waiting = step.waiting;
    engine.freeBlocks = frame[16];
    const seconds = step.finished - step.started;
    if (!step.slices.length) engine.baseline = engine.baseline === null ? seconds : 0.8 * engine.baseline + 0.2 * seconds;
    const bucket = this._bucket(step.finished);
    bucket.decodeTokens += step.decodes.length;
    bucket.prefillTokens += step.prefillTokens;
    bucket.cachedTokens += frame[17];
    const used = engine.info?.numBlocks ? 1 - engine.freeBlocks / engine.info.numBlocks : 0;
    bucket.kv = Math.max(bucket.kv, used);
    for (const key of frame[12]) {
      const request = this._request(engine, key, step.started);
      request.preemptedAt = step.started;
      request.read = 0;
    }
    for (const [key, first, tokens, isLast] of step.slices) {
      const request = this._request(engine, key, step.started);
      if (!request.slices.length && first > 0 && request.firstToken === null) request.cached = first;
      if (!request.slices.length) request.waits = mostFrequentWait(engine.steps, request.arrival);
      request.read = first + tokens;
      request.slices.push([step.started, step.finished, tokens]);
      if (isLast) this._addToken(engine, request, step, bucket);
      else this._note(request, step.finished);
    }
    for (const key of step.decodes) this._addToken(engine, this._request(engine, key, step.started), step, bucket);
  }

  _addToken(engine, request, step, bucket) {
    const time = step.finished;
    this._note(request, time);
    if (request.firstToken === null) {
      request.firstToken = time;
      if (request.promptTokens) {
        const seconds = time - request.arrival;
        bucket.ttft.push(seconds);
        if (request.ttftTarget !== null && seconds > request.ttftTarget) this._addLateFirst(request, step, seconds);
      }
    } else {
      const gap = time - request.lastToken;
      bucket.gaps[gapBucket(gap)] += 1;
      bucket.numGaps += 1;
      if (request.gapTarget !== null && gap > request.gapTarget) this._addLateGap(engine, request, step, gap);
    }
    request.lastToken = time;
    request.ticks.push(time);
  }

  _addLateFirst(request, step, seconds) {
    const began = request.slices[0]?.[0] ?? step.started;
    const isQueue = began - request.arrival > seconds / 2;
    const waits = WAITS[request.waits];
    const words = isQueue ? `it waited${waits ? ` for ${waits}` : " in the queue"}` : "its own prompt took that long to read";
    request.stalls.push([request.arrival, step.finished]);
    this._addStall(request, step, seconds, { kind: "first token", cause: isQueue ? "queue" : "own prefill", words });
  }

  // The cause of a late token is the largest part of the steps in its gap.
  _addLateGap(engine, request, step, gap) {
    const from = request.lastToken;
    const parts = new Map();
    const slices = new Map(); // tokens by key of another request
    const add = (cause, seconds) => parts.set(cause, (parts.get(cause) ?? 0) + Math.max(0, seconds));
    let covered = step.finished;
    for (let index = engine.steps.length - 1; index >= 0; index--) {
      const one = engine.steps[index];
      if (one.finished <= from) break;
      add("host", covered - one.finished);
      const begun = Math.max(one.started, from);
      covered = Math.min(covered, begun);
      const seconds = one.finished - begun;
      if (one.slices.some((slice) => slice[0] === request.key) || (request.preemptedAt ?? -Infinity) >= from) {
        add("preempted", seconds);
      } else if (one.slices.length) {
        const writing = Math.min(seconds, engine.baseline ?? 0);
        add("decodes", writing);
        add("prefill", seconds - writing);
        for (const [key, , tokens] of one.slices) slices.set(key, (slices.get(key) ?? 0) + tokens);
      } else if (one.decodes.indexOf(request.key) < 0) {
        add(request.constrained ? "grammar" : "not in the step", seconds);
      } else {
        add("decodes", seconds);
      }
    }
    add("host", covered - from);
    let cause = "host";
    for (const [name, seconds] of parts) if (seconds > (parts.get(cause) ?? 0)) cause = name;
    const words = { host: "the host was slow; the device waited", decodes: "the steps of the running requests took that long",
      preempted: "it was preempted and computed again", grammar: "the mask of its grammar was not ready",
      "not in the step": "it was left out of a step" }[cause];
    const blamed = cause === "prefill" ? [...slices].sort((one, other) => other[1] - one[1])[0][0] : null;
    request.stalls.push([from, step.finished]);
    this._addStall(request, step, gap, { kind: "gap", cause, words, blamed });
  }

  // Adds a late token to the entry with the same cause, or begins another one.
  _addStall(request, step, seconds, { kind, cause, words, blamed = null }) {
    const isSame = (one) => one.engine === request.engine && one.kind === kind && one.cause === cause
      && one.blamed === blamed && one.words === words && step.finished - one.time < SAME_STALL_S;
    let stall = this.stalls.findLast(isSame);
    if (stall === undefined) {
      stall = { engine: request.engine, kind, cause, words, blamed, seconds: 0, tokens: 0, keys: new Set(), time: 0 };
      this.stalls.push(stall);
      if (this.stalls.length > MOST_STALLS) this.stalls.shift();
    }
    stall.seconds = Math.max(stall.seconds, seconds);
    stall.tokens += 1;
    stall.keys.add(request.key);
    stall.time = step.finished;
  }

  // What caused late tokens, in words.
  why(stall) {
    if (stall.cause !== "prefill") return stall.words;
    const blamed = this.engines.get(stall.engine)?.requests.get(stall.blamed);
    const size = blamed?.promptTokens ? ` (${blamed.promptTokens.toLocaleString("en")} tokens)` : "";
    return `the prompt of request ${stall.blamed}${size} was read in the same steps`;
  }

  _addEnd(frame) {
    const engine = this._engine(frame[1]);
    const request = this._request(engine, frame[2], frame[6]);
    request.id = frame[3];
    request.arrival = Math.min(request.arrival, frame[6]);
    request.ended = frame[11];
    request.reason = frame[12];
    request.promptTokens ||= frame[13];
    this._note(request, frame[11]);
  }

  _bucket(time) {
    const number = Math.floor(time / BUCKET_S);
    let bucket = this.buckets.get(number);
    if (bucket === undefined) {
      bucket = { ttft: [], gaps: new Uint32Array(GAP_BUCKETS), numGaps: 0, decodeTokens: 0, prefillTokens: 0,
        cachedTokens: 0, kv: 0 };
      this.buckets.set(number, bucket);
    }
    return bucket;
  }

  // Points of the charts, one for each interval of BUCKET_S until `now`: null where nothing happened.
  series(now) {
    const last = Math.floor(now / BUCKET_S) - 1; // the present one is not complete
    const points = [];
    for (let number = last - BUCKETS + 1; number <= last; number++) {
      const bucket = this.buckets.get(number);
      if (bucket === undefined) {
        points.push({ ttft: null, p50: null, p99: null, throughput: 0, prefill: 0, kv: null, hits: null });
        continue;
      }
      const prompt = bucket.prefillTokens + bucket.cachedTokens;
      points.push({
        ttft: bucket.ttft.length ? Math.max(...bucket.ttft) : null,
        p50: quantile(bucket, 0.5),
        p99: quantile(bucket, 0.99),
        throughput: bucket.decodeTokens / BUCKET_S,
        prefill: bucket.prefillTokens / BUCKET_S,
        kv: bucket.kv,
        hits: prompt ? bucket.cachedTokens / prompt : null,
      });
    }
    return points;
  }

  _forget() {
    const from = this.newest - KEPT_S;
    for (const engine of this.engines.values()) {
      let old = 0;
      while (old < engine.steps.length && engine.steps[old].finished < from) old += 1;
      if (old) engine.steps.splice(0, old);
      const isIdle = engine.running === 0 && engine.waiting === 0;
      for (const [key, request] of engine.requests) {
        const isOver = request.ended !== null || isIdle || request.last < this.newest - FORGOTTEN_S;
        if (request.last < from && isOver) engine.requests.delete(key);
        else if (request.ticks.length && request.ticks[0] < from) trim(request, from);
      }
    }
    const oldest = Math.floor(this.newest / BUCKET_S) - BUCKETS;
    for (const number of this.buckets.keys()) if (number < oldest) this.buckets.delete(number);
  }
}

function trim(request, from) {
  let old = 0;
  while (old < request.ticks.length && request.ticks[old] < from) old += 1;
  if (old > 64 || old === request.ticks.length) request.ticks.splice(0, old);
  request.stalls = request.stalls.filter((stall) => stall[1] >= from);
  if (request.slices.length > 1 && request.slices[0][1] < from) request.slices = request.slices.filter((one) => one[1] >= from);
}

function mostFrequentWait(steps, since) {
  const counts = new Map();
  let best = "";
  for (let index = steps.length - 2; index >= 0 && steps[index].finished > since; index--) {
    const name = steps[index].waitsFor;
    if (!name) continue;
    counts.set(name, (counts.get(name) ?? 0) + 1);
    if (counts.get(name) > (counts.get(best) ?? 0)) best = name;
  }
  return best;
}

function gapBucket(seconds) {
  const at = Math.floor((Math.log10(Math.max(seconds, LEAST_GAP) / LEAST_GAP) / DECADES) * GAP_BUCKETS);
  return Math.min(GAP_BUCKETS - 1, at);
}

function quantile(bucket, share) {
  if (!bucket.numGaps) return null;
  let rest = share * bucket.numGaps;
  for (let index = 0; index < GAP_BUCKETS; index++) {
    rest -= bucket.gaps[index];
    if (rest <= 0) return LEAST_GAP * 10 ** (((index + 0.5) / GAP_BUCKETS) * DECADES);
  }
  return null;
}
