// openai for JavaScript.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { caption, Count, look, picture, question, refusal, Scene, url } from "./asked.mjs";

const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });

function chatRequest(text) {
  const content = [{ type: "text", text }, { type: "image_url", image_url: { url: picture } }];
  return { model: "default", messages: [{ role: "user", content }] };
}

function responseRequest(text) {
  const content = [{ type: "input_text", text }, { type: "input_image", image_url: picture, detail: "auto" }];
  return { model: "default", input: [{ role: "user", content }] };
}

async function chat(text) {
  return (await client.chat.completions.create(chatRequest(text))).choices[0].message.content;
}

async function respond(text) {
  return (await client.responses.create(responseRequest(text))).output_text;
}

async function parse(schema) {
  const response_format = zodResponseFormat(schema, "answer");
  const said = await client.chat.completions.parse({ ...chatRequest(look), response_format });
  return said.choices[0].message.parsed;
}

async function parseResponse(schema) {
  const text = { format: zodTextFormat(schema, "answer") };
  return (await client.responses.parse({ ...responseRequest(look), text })).output_parsed;
}

async function chatPieces() {
  const pieces = [];
  for await (const chunk of await client.chat.completions.create({ ...chatRequest(caption), stream: true })) {
    pieces.push(chunk.choices[0].delta.content);
  }
  return pieces;
}

async function responsePieces() {
  const pieces = [];
  for await (const event of client.responses.stream(responseRequest(caption))) {
    if (event.type === "response.output_text.delta") pieces.push(event.delta);
  }
  return pieces;
}

const results = {
  "`chat.completions`": {
    route: "/v1/chat/completions",
    caption: await chat(caption),
    answer: await chat(question),
    pieces: await chatPieces(),
    structured: await parse(Scene),
    numbers: await refusal(parse(Count), OpenAI.BadRequestError),
    refused: {},
  },
  "`responses`": {
    route: "/v1/responses",
    caption: await respond(caption),
    answer: await respond(question),
    pieces: await responsePieces(),
    structured: await parseResponse(Scene),
    numbers: await refusal(parseResponse(Count), OpenAI.BadRequestError),
    refused: {},
  },
};
console.log(JSON.stringify(results));
