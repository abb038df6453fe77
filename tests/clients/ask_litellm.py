"""litellm."""

import json
import os

from asked import CAPTION, LOOK, QUESTION, URL, Count, Scene, chat_messages, refusal, response_items

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise litellm downloads prices
import litellm

litellm.suppress_debug_info = True
target = {"model": "openai/default", "api_base": URL, "api_key": "none", "max_retries": 0}


def chat(text: str, **settings) -> str:
    return litellm.completion(messages=chat_messages(text), **target, **settings).choices[0].message.content


def respond(text: str, **settings) -> str:
    return litellm.responses(input=response_items(text), **target, **settings).output_text


results = {
    "`completion`": {
        "route": "/v1/chat/completions",
        "caption": chat(CAPTION),
        "answer": chat(QUESTION),
        "pieces": [
            chunk.choices[0].delta.content
            for chunk in litellm.completion(messages=chat_messages(CAPTION), stream=True, **target)
        ],
        "structured": json.loads(chat(LOOK, response_format=Scene)),
        "numbers": refusal(litellm.BadRequestError, chat, LOOK, response_format=Count),
        "refused": {},
    },
    "`responses`": {
        "route": "/v1/responses",
        "caption": respond(CAPTION),
        "answer": respond(QUESTION),
        "pieces": [
            event.delta
            for event in litellm.responses(input=response_items(CAPTION), stream=True, **target)
            if event.type == "response.output_text.delta"
        ],
        "structured": json.loads(respond(LOOK, text_format=Scene)),
        "numbers": refusal(litellm.BadRequestError, respond, LOOK, text_format=Count),
        "refused": {},
    },
}
print(json.dumps(results))
