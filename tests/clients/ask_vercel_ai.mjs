// Vercel's AI SDK, with its providers for OpenAI and for compatible servers.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, Output, streamText } from "ai";
import { caption, Count, look, picture, question, refusal, Scene, url } from "./asked.mjs";

const openai = createOpenAI({ baseURL: url, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "local", baseURL: url, supportsStructuredOutputs: true });

async function resultsOf(model, route) {
  function asked(text) {
    const content = [{ type: "text", text }, { type: "file", data: picture, mediaType: "image" }];
    return { model, maxRetries: 0, messages: [{ role: "user", content }] };
  }
  const object = async (schema) => (await generateObject({ ...asked(look), schema })).object;
  const output = Output.choice({ options: ["red", "yellow", "green"] });
  return {
    route,
    caption: (await generateText(asked(caption))).text,
    answer: (await generateText({ ...asked(question), output })).output,
    pieces: await Array.fromAsync(streamText(asked(caption)).textStream),
    structured: await object(Scene),
    numbers: await refusal(object(Count), APICallError),
    refused: {},
  };
}

const results = {
  "`openai(...)`": await resultsOf(openai("default"), "/v1/responses"),
  "`openai.chat(...)`": await resultsOf(openai.chat("default"), "/v1/chat/completions"),
  "`createOpenAICompatible`": await resultsOf(compatible("default"), "/v1/chat/completions"),
};
console.log(JSON.stringify(results));
