// The Vercel AI SDK with its provider for OpenAI-compatible servers.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";
import { check, key, model, order, run, url } from "./tried.mjs";

const provider = createOpenAICompatible({
  name: "weft",
  baseURL: `${url}/v1`,
  apiKey: key,
  supportsStructuredOutputs: true,
});
const always = { model: provider(model), prompt: order, maxOutputTokens: 64, maxRetries: 0 };

async function text() {
  check((await generateText(always)).text, "no text");
}

async function streamed() {
  const result = streamText(always);
  let found = "";
  for await (const part of result.textStream) found += part;
  check(found, "no text");
}

async function object() {
  const { object } = await generateObject({ ...always, schema: z.object({ size: z.enum(["small", "large"]) }) });
  check(["small", "large"].includes(object.size), JSON.stringify(object));
}

async function withTool() {
  const weather = tool({
    description: "The weather in a city",
    inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
    execute: async ({ city }) => `Sunny in ${city}`,
  });
  const result = await generateText({ ...always, maxOutputTokens: 96, tools: { weather }, toolChoice: "required" });
  check(result.toolCalls.length, "no call");
}

await run(text, streamed, object, withTool);
