"""openai for Python."""

import json

import openai
from asked import CAPTION, LOOK, QUESTION, URL, Count, Scene, chat_messages, refusal, response_items

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)


def chat(text: str) -> str | None:
    return client.chat.completions.create(model="default", messages=chat_messages(text)).choices[0].message.content


def respond(text: str) -> str:
    return client.responses.create(model="default", input=response_items(text)).output_text


def parse(schema: type) -> dict:
    said = client.chat.completions.parse(model="default", messages=chat_messages(LOOK), response_format=schema)
    return said.choices[0].message.parsed.model_dump()


def parse_response(schema: type) -> dict:
    said = client.responses.parse(model="default", input=response_items(LOOK), text_format=schema)
    return said.output_parsed.model_dump()


def chat_pieces() -> list:
    stream = client.chat.completions.create(model="default", messages=chat_messages(CAPTION), stream=True)
    return [chunk.choices[0].delta.content for chunk in stream]


def response_pieces() -> list:
    with client.responses.stream(model="default", input=response_items(CAPTION)) as stream:
        return [event.delta for event in stream if event.type == "response.output_text.delta"]


results = {
    "`chat.completions`": {
        "route": "/v1/chat/completions",
        "caption": chat(CAPTION),
        "answer": chat(QUESTION),
        "pieces": chat_pieces(),
        "structured": parse(Scene),
        "numbers": refusal(openai.BadRequestError, parse, Count),
        "refused": {},
    },
    "`responses`": {
        "route": "/v1/responses",
        "caption": respond(CAPTION),
        "answer": respond(QUESTION),
        "pieces": response_pieces(),
        "structured": parse_response(Scene),
        "numbers": refusal(openai.BadRequestError, parse_response, Count),
        "refused": {},
    },
}
print(json.dumps(results))
