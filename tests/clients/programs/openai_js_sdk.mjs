// The openai package for JavaScript: chats, completions, responses, tools.
import OpenAI from "openai";
import { check, key, model, order, run, url, weather } from "./tried.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const messages = [{ role: "user", content: order }];
const tools = [{ type: "function", function: { name: "weather", description: "Now", parameters: weather } }];

async function chat() {
  const answer = await client.chat.completions.create({ model, messages, max_tokens: 20 });
  check(answer.choices[0].message.content, "no content");
}

async function chatStreamed() {
  const stream = await client.chat.completions.create({ model, messages, max_tokens: 20, stream: true });
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  check(text, "no text");
}

async function tool() {
  const answer = await client.chat.completions.create({ model, messages, tools, tool_choice: "required", max_tokens: 96 });
  check(answer.choices[0].message.tool_calls.length, "no call");
}

async function runTools() {
  const runner = client.chat.completions.runTools({
    model,
    messages,
    max_tokens: 64,
    tool_choice: { type: "function", function: { name: "weather" } },
    tools: [{ type: "function", function: { name: "weather", parameters: weather, parse: JSON.parse, function: () => "Sunny" } }],
  });
  await runner.done();
}

async function response() {
  const answer = await client.responses.create({ model, input: order, max_output_tokens: 20 });
  check(answer.output_text, "no text");
}

async function responseStreamed() {
  const stream = client.responses.stream({ model, input: order, max_output_tokens: 20 });
  check((await stream.finalResponse()).output.length, "no output");
}

await run(chat, chatStreamed, tool, runTools, response, responseStreamed);
